# SPDX-License-Identifier: Apache-2.0
"""Copy nodes: the copies at the edge of a captured graph, part of its launch.

A copy in front of a replay is a launch of its own, which costs the host more than the replay does. Recorded into the
graph it costs nothing while its outer end stays where it was, as allocations of a training step mostly do, and one call
of the CUDA runtime (`cudaGraphExecMemcpyNodeSetParams1D`) where that moved. Launches already in flight keep the address
they were launched with.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from cudagraphs.partial.guards import TENSOR_TYPES, has_base_layout
from cudagraphs.partial.recording import broadcast_index

try:  # a requirement of torch's own since 2.11
    from cuda.bindings import runtime
except ImportError:
    runtime = None

logger = logging.getLogger("partial_graphs")


class CopyNode:
    """One memcpy node between `inner`, memory of the graph, and an outer address.

    It begins switched off.

    Attributes:
        address: of the outer end; None while the node is switched off.
        usable: False once the runtime has refused an address, such as memory of another kind.
    """

    __slots__ = ("_enabled", "_executable", "_inner", "_into", "_node", "_size", "address", "usable")

    def __init__(self, executable: Any, node: Any, inner: torch.Tensor, into: bool):
        self._executable, self._node, self._into = executable, node, into
        self._inner, self._size = inner.data_ptr(), inner.nbytes
        self._enabled = self.usable = True
        self.switch_off()

    def aim(self, address: int) -> None:
        """Let the next launches read from, or write to, `inner.nbytes` bytes at `address` on the same device.

        Raises:
            RuntimeError: where the CUDA runtime refuses.
        """
        ends = (self._inner, address) if self._into else (address, self._inner)
        _check(runtime.cudaGraphExecMemcpyNodeSetParams1D(self._executable, self._node, *ends, self._size,
                                                          runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice))
        if not self._enabled:
            self._switch(True)
        self.address = address

    def switch_off(self) -> None:
        """Let the next launches leave this copy out.

        Raises:
            RuntimeError: where the CUDA runtime refuses.
        """
        if self._enabled:
            self._switch(False)
        self.address: int | None = None

    def _switch(self, on: bool) -> None:
        _check(runtime.cudaGraphNodeSetEnabled(self._executable, self._node, int(on)))
        self._enabled = on


def supported() -> bool:
    """Whether this torch shows the graphs that it captures and the CUDA bindings are of the same major version."""
    if runtime is None or not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec") or not torch.version.cuda:
        return False
    status, version = runtime.cudaRuntimeGetVersion()
    return int(status) == 0 and version // 1000 == int(torch.version.cuda.partition(".")[0])


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill one piece of memory, each with an address of its own."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.numel() == 0 or (span == tensor.numel() and broadcast_index(tensor) is None
                                   and has_base_layout(tensor))


def can_feed(tensor: torch.Tensor) -> bool:
    """Whether a plain copy of bytes fills `tensor`: dense, real, not empty."""
    return tensor.numel() > 0 and is_dense(tensor) and not tensor.is_complex() and not tensor.is_neg()


def feed(nodes: Sequence[Any], tensor: torch.Tensor | None, like: torch.Tensor) -> bool:
    """Aim `nodes`, which fill memory laid out as `like`, at `tensor`.

    Returns:
        False where a plain copy of its bytes would not do, or the runtime refuses memory of that kind; the nodes are
        off then, and the caller has to copy.
    """
    if tensor is not None and same_bytes(tensor, like):
        return aim(nodes, [tensor.data_ptr()] * len(nodes))
    for node in nodes:
        node.switch_off()
    return False


def aim(nodes: Sequence[Any], addresses: Sequence[int]) -> bool:
    """Aim each node; False, and all of them off, where the runtime refuses, now or at an earlier call."""
    try:
        for node, address in zip(nodes, addresses):
            if node.address != address:
                if not node.usable or not address:
                    break
                node.aim(address)
        else:
            return True
    except RuntimeError as refusal:
        logger.warning("Partial CUDA graphs copy outside of a graph from now on: %s", refusal)
        node.usable = False
    for node in nodes:
        node.switch_off()
    return False


def same_bytes(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether the bytes of `tensor` are those of a copy laid out as `like`. Strides of dimensions of size 1 say
    nothing."""
    return (type(tensor) in TENSOR_TYPES and tensor.layout is torch.strided and tensor.shape == like.shape
            and tensor.dtype is like.dtype and not tensor.is_neg() and not tensor.is_conj()
            and all(own == other or size == 1
                    for size, own, other in zip(tensor.shape, tensor.stride(), like.stride())))


def record(inner: torch.Tensor, scratch: torch.Tensor, into: bool, stream: int) -> None:
    """While `stream` captures: copy from `scratch` into `inner`, or the other way round."""
    ends = (inner.data_ptr(), scratch.data_ptr()) if into else (scratch.data_ptr(), inner.data_ptr())
    _check(runtime.cudaMemcpyAsync(*ends, inner.nbytes, runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice,
                                   runtime.cudaStream_t(stream)))


def find(graph: torch.cuda.CUDAGraph, scratch: torch.Tensor, feeds: Sequence[torch.Tensor],
         drains: Sequence[torch.Tensor]) -> tuple[list[CopyNode], list[CopyNode]]:
    """The nodes that `record` left in an instantiated graph, in the order of `feeds` and of `drains`."""
    raw = runtime.cudaGraph_t(graph.raw_cuda_graph())
    executable = runtime.cudaGraphExec_t(graph.raw_cuda_graph_exec())
    _, count = _check(runtime.cudaGraphGetNodes(raw))
    nodes, _ = _check(runtime.cudaGraphGetNodes(raw, count))
    outer, into, out_of, recorded = scratch.data_ptr(), {}, {}, 0
    for node in nodes:
        kind, = _check(runtime.cudaGraphNodeGetType(node))
        if kind != runtime.cudaGraphNodeType.cudaGraphNodeTypeMemcpy:
            continue
        parameters, = _check(runtime.cudaGraphMemcpyNodeGetParams(node))
        source, target = int(parameters.srcPtr.ptr), int(parameters.dstPtr.ptr)
        recorded += outer in (source, target)
        if source == outer:
            into[target] = node
        elif target == outer:
            out_of[source] = node
    if not recorded == len(into) + len(out_of) == len(feeds) + len(drains):
        raise RuntimeError(f"{recorded} copy nodes for {len(feeds)} tensors to fill and {len(drains)} to copy out")
    return ([CopyNode(executable, into[tensor.data_ptr()], tensor, True) for tensor in feeds],
            [CopyNode(executable, out_of[tensor.data_ptr()], tensor, False) for tensor in drains])


def _check(result: tuple) -> tuple:
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"the CUDA runtime refused a copy node: {status!r}")
    return tuple(values)
