# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: GPU tests run only where there is a GPU."""

import gc
import importlib.util
import os

import pytest

# Two workers whose torch has a thread for every core wait for each other: the tests would take three times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")


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


def pytest_collection_finish():
    """Every capture collects garbage twice, and most of the heap is torch's and pytest's own: that needs no look."""
    gc.freeze()
