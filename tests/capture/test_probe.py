# SPDX-License-Identifier: Apache-2.0
"""What a probe says of a GPU, with a stand-in for torch: versions in one form."""

import sys
from types import SimpleNamespace

import pytest

from cudagraphs.capture import forkserver

MISMATCH = "cuDNN version incompatibility: PyTorch was compiled against (9, 19, 0) but found runtime version (9, 14, 0)."


def refuse():
    raise RuntimeError(MISMATCH)


@pytest.mark.parametrize(
    ("version", "shown"),
    [(lambda: 91900, "9.19.0"), (lambda: 8907, "8.9.7"), (refuse, "9.14.0 (torch was built with 9.19.0)")],
)
def test_cudnn_is_written_in_one_form(monkeypatch, version, shown):
    properties = SimpleNamespace(name="GPU", major=9, minor=0, uuid="u", multi_processor_count=132)
    cuda = SimpleNamespace(
        is_available=lambda: True, init=lambda: None, get_device_properties=lambda _: properties,
        mem_get_info=lambda _: (1, 2), device_count=lambda: 1, nccl=SimpleNamespace(version=lambda: (2, 28, 9)),
    )  # fmt: skip
    torch = SimpleNamespace(
        __version__="2.11.0", version=SimpleNamespace(cuda="13.0"), cuda=cuda,
        backends=SimpleNamespace(cudnn=SimpleNamespace(version=version)),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", torch)
    found = forkserver.probe()
    assert found["cudnn"] == shown and found["nccl"] == "2.28.9"
