# SPDX-License-Identifier: Apache-2.0
"""Graphs of the fake PyTorch; what else of torch.cuda is called does nothing."""

from torch.cuda import graphs
from torch.cuda.graphs import CUDAGraph, graph, make_graphed_callables  # noqa: F401


def is_available():
    return True


def is_initialized():
    return True


def memory_reserved(*_):
    return 2**30 * (1 + graphs.live())


memory_allocated = memory_reserved


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *args, **options: None
