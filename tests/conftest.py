# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: GPU tests run only where there is a GPU."""

import importlib.util

import pytest


def pytest_collection_modifyitems(items):
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU here"))
