# SPDX-License-Identifier: Apache-2.0
"""Shared by the eval tests: upstream releases to ask, and the skill as it is installed."""

import pytest
import run_evals
import upstream as upstream_module
import wheels


@pytest.fixture(scope="session")
def upstream():
    """The releases that the cases ask; skips where their wheels may be missing."""
    pytest.importorskip("torch")
    for bridge, mcore in upstream_module.PINNED_MCORE.items():
        wheels.fetch_or_skip("megatron-bridge", bridge)
        wheels.fetch_or_skip("megatron-core", mcore)
    wheels.fetch_or_skip("nemo-automodel", "0.7.0")
    with upstream_module.Upstream() as client:
        yield client


@pytest.fixture(scope="session")
def skill(tmp_path_factory):
    return run_evals.package(tmp_path_factory.mktemp("skill"))
