# SPDX-License-Identifier: Apache-2.0
"""Backends: how work is captured and replayed. `CudaBackend` uses torch's own CUDA graphs.

A backend has these members; the tests bring one of their own that runs on the CPU:

`device_type`             where tensors must live ("cuda")
`stream()`                an identity of the current stream; replays must run on the stream of the recording
`pool()`                  a fresh memory pool handle
`side_stream()`           context for warmup and capture
`capture(run, pool, source, feeds, drains)`  run once, recording; returns a graph with `outputs`, `replay()`, `reset()`
                          and the copy nodes `feeds` and `drains`. `run` gets the outputs of the graph `source`, or
                          nothing where that is None. Replays first fill the tensors `feeds`, and at the end copy out
                          the outputs at the positions `drains`, which maps them to their sizes in bytes
`copy_nodes`              whether `capture` takes `feeds` and `drains`; False where it is left out
`forbid_sync()`           context in which a host synchronisation raises
`rng_state()`, `set_rng_state(state)`   the generator that captured random ops advance
`settle()`                wait for the device and give cached memory back, so that the pool can have it
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from cudagraphs.partial import copy_nodes
from cudagraphs.partial.copy_nodes import CopyNode

_side_streams: dict[int, torch.cuda.Stream] = {}


@contextlib.contextmanager
def _transformer_engine_knows() -> Iterator[None]:
    """Tell Transformer Engine that a capture is under way, as its own `make_graphed_callables` does (pytorch/graph.py,
    2.20): it keeps away from kernels that go wrong in a graph, such as cuDNN's attention backward before 9.15.1 with a
    sequence length that is no multiple of 128, which computed nonsense or read outside of its memory."""
    graph = sys.modules.get("transformer_engine.pytorch.graph")
    if graph is None or graph.is_graph_capturing():
        yield
        return
    graph.set_capture_start()
    try:
        yield
    finally:
        graph.set_capture_end()


class CudaGraph:
    """One captured graph and the tensors that its run returned; they stay at the addresses that replays write."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: list[torch.Tensor | None],
                 feeds: Sequence[CopyNode] = (), drains: Sequence[CopyNode] = ()):
        self.outputs, self.feeds, self.drains = outputs, feeds, drains
        self.replay = graph.replay
        self._graph: torch.cuda.CUDAGraph | None = graph

    def reset(self) -> None:
        """Free the graph. Safe to call again."""
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.reset()
        self.outputs, self.feeds, self.drains = [], (), ()


class CudaBackend:
    """torch.cuda.CUDAGraph on the current device."""

    device_type = "cuda"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("Partial CUDA graphs need a CUDA device: torch.cuda.is_available() is False")
        self._device = torch.cuda.current_device()
        # One for the process: cuBLAS keeps a workspace of 32 MiB and more for every stream it has ever worked on.
        if self._device not in _side_streams:
            _side_streams[self._device] = torch.cuda.Stream(self._device)
        self._side = _side_streams[self._device]
        self.stream = partial(torch._C._cuda_getCurrentRawStream, self._device)
        self.copy_nodes = copy_nodes.supported()

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side), _transformer_engine_knows():
            yield
        torch.cuda.current_stream(self._device).wait_stream(self._side)

    def capture(self, run: Callable[..., list[torch.Tensor | None]], pool: Any, source: CudaGraph | None = None,
                feeds: Sequence[torch.Tensor] = (), drains: Mapping[int, int] | None = None) -> CudaGraph:
        drains = drains or {}
        copies = bool(feeds or drains)
        graph = torch.cuda.CUDAGraph(keep_graph=True) if copies else torch.cuda.CUDAGraph()
        arguments = () if source is None else (source.outputs,)
        # What the copy nodes touch while nobody has aimed them, outside the graph's pool.
        largest = max([*(feed.nbytes for feed in feeds), *drains.values()], default=0)
        scratch = torch.empty(largest, dtype=torch.uint8, device=self._device) if copies else None
        # thread_local: other threads of the process, such as NCCL's watchdog or a loader that pins memory, may go on.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            for feed in feeds:
                copy_nodes.record(feed, scratch, True, self.stream())
            outputs = run(*arguments)
            leaving = [outputs[position] for position in drains]
            for output in leaving:
                copy_nodes.record(output, scratch, False, self.stream())
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the stream left the capture already; the first error counts
                graph.capture_end()
            raise
        graph.capture_end()
        if not copies:
            return CudaGraph(graph, outputs)
        try:
            graph.instantiate()
            return CudaGraph(graph, outputs, *copy_nodes.find(graph, scratch, feeds, leaving))
        except BaseException:
            graph.reset()
            raise

    @contextlib.contextmanager
    def forbid_sync(self) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def rng_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self._device)

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, self._device)

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
