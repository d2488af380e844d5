# SPDX-License-Identifier: Apache-2.0
"""What a backward does to the tensors that its forward saved for it. Several backwards are captured from one forward,
and each of them may be replayed after any replay of that forward, so it matters which of them leaves those as they were.

Functions that torch.compile has compiled, such as Transformer Engine's fused operations, may write over intermediates
("donated buffers", torch 2.6 and newer), so eager torch refuses to run their backward with `retain_graph=True`
(torch/_functorch/_aot_autograd/runtime_wrappers.py, `CompiledFunction._backward_impl`). To capture it several times is
right all the same, since every replay follows one of the forward, which writes the intermediates anew.

Transformer Engine's own functions let go of what they saved, the memory included, and can run once only
(transformer_engine/pytorch/quantized_tensor.py, `restore_from_func_ctx`, 2.20).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch


def function_classes(outputs: Sequence[torch.Tensor]) -> list[type]:
    """The `torch.autograd.Function` classes, compiled ones included, behind `outputs`."""
    nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen, found = set(), []
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(type(node), "_forward_cls"):
            found.append(type(node)._forward_cls)
        nodes.extend(following for following, _ in node.next_functions if following is not None)
    return found


def donors(outputs: Sequence[torch.Tensor]) -> list[Any]:
    """The metadata of every compiled function behind `outputs` whose backward writes over intermediates."""
    metadata = [getattr(function, "metadata", None) for function in function_classes(outputs)]
    return [one for one in metadata if getattr(one, "bw_donated_idxs", None)]


def runs_once(outputs: Sequence[torch.Tensor]) -> bool:
    """Whether a function of Transformer Engine's is behind `outputs`."""
    return any(function.__module__.partition(".")[0] == "transformer_engine" for function in function_classes(outputs))


@contextlib.contextmanager
def keeping_graphs(outputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let backward passes from `outputs` keep the graph, whatever they write over.

    The mark is lifted where it is, not by `torch._functorch.config`, which since torch 2.13 holds for one thread: the
    backward of CUDA tensors runs in another.
    """
    lifted = [(metadata, metadata.bw_donated_idxs, []) for metadata in donors(outputs)]
    for metadata, _, none in lifted:
        metadata.bw_donated_idxs = none
    try:
        yield
    finally:
        for metadata, indices, none in reversed(lifted):
            if metadata.bw_donated_idxs is none:  # or its backward was compiled meanwhile, for graphs that are kept
                metadata.bw_donated_idxs = indices
