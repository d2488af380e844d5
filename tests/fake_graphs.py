# SPDX-License-Identifier: Apache-2.0
"""A graph backend for the CPU that keeps what makes CUDA graphs dangerous: static buffers that every replay overwrites.

A replay runs the captured work again on the static inputs, then writes the results into the tensors of the capture and
leaves their version counters alone, as a graph launch does. So a wrong reuse of a buffer shows up as a wrong number.
"""

from __future__ import annotations

import contextlib
import ctypes

import pytest
import torch
from cudagraphs.partial.recording import base_view
from partial_graphs import PartialCudaGraphManager


@pytest.fixture(autouse=True, params=["copy nodes", "copies", "shared pool"])
def every_way(request, monkeypatch):
    """Imported by a test module: each of its tests runs with copy nodes in the graphs, without, and with one pool."""
    monkeypatch.setattr(FakeBackend, "copy_nodes", request.param != "copies")
    monkeypatch.setitem(PartialCudaGraphManager.__init__.__kwdefaults__, "share_pool", request.param == "shared pool")
    return request.param


def _keep(tensor):
    return tensor if tensor.is_leaf else tensor.detach()


def _hooks_active():
    """Whether the caller's saved-tensor hooks (checkpointing) would reach into the replay; real graphs have none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class FakeNode:
    """Reads or writes bare addresses, as the real one does: an address that went stale shows up as a wrong number."""

    def __init__(self, inner, into):
        self._inner, self._into = inner.detach(), into
        self.address, self.usable = None, True

    def aim(self, address):
        self.address = address

    def switch_off(self):
        self.address = None

    def run(self):
        if self.address is not None:
            ends = (self._inner.data_ptr(), self.address)
            ctypes.memmove(*(ends if self._into else ends[::-1]), self._inner.nbytes)


class FakeGraph:
    def __init__(self, backend, run, pool, source, feeds, drains):
        self._backend, self._run, self._source = backend, run, source
        self._pool, self._number = pool, len(backend.graphs)
        self.alive = True  # until a replay of an earlier graph in the pool writes over its results
        self.outputs = run(*(() if source is None else (source.latest,)))
        self.feeds = [FakeNode(feed, True) for feed in feeds]
        self.drains = [FakeNode(self.outputs[place], False) for place in drains]
        for place, size in drains.items():
            assert self.outputs[place].nbytes == size
        inner = [tensor.data_ptr() for tensor in (*feeds, *(self.outputs[place] for place in drains))]
        assert len(set(inner)) == len(inner), "copy nodes are found again by the memory of the graph"
        self.latest = self.outputs
        self.replays = 0
        self.resets = 0

    def replay(self):
        if self.resets:
            raise AssertionError("replay of a graph that was freed")
        self.replays += 1
        self._backend.replays += 1
        if self._source is not None and not self._source.alive:
            raise AssertionError("the activations that this backward reads were overwritten")
        self.alive = True
        for later in self._backend.graphs[self._number + 1:]:
            if later._pool == self._pool and not later.resets:
                later.overwrite()
        for node in self.feeds:
            node.run()
        with torch.autograd.graph.saved_tensors_hooks(_keep, _keep) if _hooks_active() else contextlib.nullcontext():
            self.latest = self._run(*(() if self._source is None else (self._source.latest,)))
        for static, value in zip(self.outputs, self.latest):
            if static is not None and static.data_ptr() != value.data_ptr():
                base_view(static.data).copy_(base_view(value.detach()))
        for node in self.drains:
            node.run()

    def overwrite(self):
        """As if all of it lay where an earlier graph keeps temporaries."""
        self.alive = False
        for static in self.outputs:
            if static is not None:
                base_view(static.data).fill_(float("nan") if static.is_floating_point() or static.is_complex() else 0)

    def reset(self):
        if self._backend.fail_resets > 0:
            self._backend.fail_resets -= 1
            raise RuntimeError("reset failed")
        self.resets += 1
        self.outputs, self.latest = [], []


class FakeBackend:
    """`fail_at`: the number of the capture (from 0) that raises; `fail_resets`: how many resets raise."""

    device_type = "cpu"
    copy_nodes = True

    def __init__(self, fail_at=None):
        self.fail_at = fail_at
        self.fail_resets = 0
        self.graphs = []
        self.replays = 0
        self.current_stream = 0
        self.sync_forbidden = False
        self.pools = 0

    def stream(self):
        return self.current_stream

    def pool(self):
        self.pools += 1
        return self.pools

    @contextlib.contextmanager
    def side_stream(self):
        yield

    def capture(self, run, pool, source=None, feeds=(), drains=None):
        assert self.copy_nodes or not (feeds or drains)
        if self.fail_at == len(self.graphs):
            raise RuntimeError("operation not permitted when stream is capturing")
        self.graphs.append(FakeGraph(self, run, pool, source, feeds, drains or {}))
        return self.graphs[-1]

    @contextlib.contextmanager
    def forbid_sync(self):
        self.sync_forbidden = True
        try:
            yield
        finally:
            self.sync_forbidden = False

    def host_sync(self):
        """What a module under test calls where a real one would wait for the device."""
        if self.sync_forbidden:
            raise RuntimeError("called a synchronizing CUDA operation")

    def rng_state(self):
        return torch.get_rng_state()

    def set_rng_state(self, state):
        torch.set_rng_state(state)

    def settle(self):
        pass
