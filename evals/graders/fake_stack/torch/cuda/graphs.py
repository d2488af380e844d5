# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs that are captured, replayed, reset; the set of the live ones."""

import os
import weakref

from torch import event

_LIVE = weakref.WeakSet()
_REPLAYS = 0


def live():
    return len(_LIVE)


class CUDAGraph:
    def __init__(self, *args, **options):
        self.captured = False

    def capture_begin(self, *args, **options):
        pass

    def capture_end(self):
        self.captured = True
        _LIVE.add(self)
        event("capture")

    def pool(self):
        if not self.captured:
            raise RuntimeError("pool() of a graph without a capture")
        return (0, 1)

    def replay(self):
        global _REPLAYS
        if not self.captured:
            raise RuntimeError("replay of a graph that was reset")
        _REPLAYS += 1
        event("replay")
        if _REPLAYS == int(os.environ.get("TEARDOWN_FAIL_AT", "0")):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def reset(self):
        if self.captured:
            event("reset")
        self.captured = False
        _LIVE.discard(self)


class graph:  # noqa: N801  the name of torch
    def __init__(self, cuda_graph, *args, **options):
        self.cuda_graph = cuda_graph

    def __enter__(self):
        self.cuda_graph.capture_begin()

    def __exit__(self, kind, *rest):
        if kind is None:
            self.cuda_graph.capture_end()


def make_graphed_callables(callables, sample_args, *args, **options):
    def graphed(callable_):
        fwd_graph = CUDAGraph()
        with graph(fwd_graph):
            pass

        def functionalized(*inputs):
            fwd_graph.replay()
            return callable_(*inputs)

        return functionalized

    if isinstance(callables, tuple):
        return tuple(graphed(item) for item in callables)
    return graphed(callables)
