# SPDX-License-Identifier: Apache-2.0
"""Recording: what the eager calls of one or more iterations look like, in which order, and how many live at once.

The number of graph replicas of a signature is the largest number of its calls that were alive together: a call is alive
until its backward pass begins, and while anything still refers to the memory of its outputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from cudagraphs.partial.errors import Unsupported
from cudagraphs.partial.guards import Ambient, CallGuard, Guard, add_training_checks, holds_tensor, training_flags


class Signature:
    """One way in which an entry was called: the sample, its guard, and how the calls followed each other.

    Attributes:
        order: position of the first such call among all first calls of the recording.
        statics: copies of the distinct tensor arguments, the static inputs of the first graph replica.
        sources: for each tensor argument, the (signature, output index) that produced it, or None.
        untouched: for each tensor argument, whether it has a source and was not changed in place since.
        previous: the signature of the recorded call right before the first of these.
        carried: tensor arguments that are arguments of that call too: our index to its index.
        depth: largest number of calls alive at once, at least 1.
        refusal: why no graph can stand for this call, or None.
        calls: recorded calls.
        beside: whether a call of another signature of the entry was alive with one of these.
        kept: whether the caller still held results of such a call when the recording ended.
        recomputed: whether one of them ran under hooks on saved tensors, as in activation checkpointing, where a
            replay and its recomputation have to be of the same kind.
    """

    def __init__(self, call: CallGuard, target: nn.Module, ambient: Ambient, order: int):
        self.call = call
        self.ambient = ambient
        given = [module for _, module in call.modules]
        self.training = training_flags((target, *given))
        self.order = order
        self.statics = [static_copy(tensor) for tensor in call.tensors]
        self.requires_grad = [tensor.requires_grad for tensor in call.tensors]
        self.sources: list[tuple[Signature, int] | None] = [None] * len(call.tensors)
        self.untouched = [False] * len(call.tensors)
        self.previous: Signature | None = None
        self.carried: dict[int, int] = {}
        self.depth = 1
        self.refusal: str | None = None
        self.calls = 0
        self.beside = False
        self.kept = False
        self.recomputed = False
        call.tensors.clear()  # the copies stand for them from here on
        builder = call.builder.copy()
        ambient.add_checks(builder, call.device_type)
        for module in (target, *given):
            add_training_checks(builder, module)
        self.builder = builder
        self.guard: Guard = builder.build()
        self.live: list[LiveCall] = []

    def refuse(self, reason: str) -> None:
        self.refusal = self.refusal or reason

    def count_kept(self) -> None:
        """At the end of the recording: what is alive now, such as an output in a variable of the training loop, will be
        when the next step begins, and a call then needs another slot."""
        alive = sum(call.alive() for call in self.live)
        self.kept = alive > 0
        self.depth = max(self.depth, alive + 1)


def static_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A detached copy with the same shape, strides, dtype and requires_grad, in memory of its own."""
    with torch.no_grad():
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        base_view(copy).copy_(base_view(tensor.detach()))
    return copy.requires_grad_(tensor.requires_grad)


def base_view(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with every broadcast dimension (stride 0) cut to length 1, so that it can be written to."""
    index = broadcast_index(tensor)
    return tensor if index is None else tensor[index]


def broadcast_index(tensor: torch.Tensor) -> tuple[slice, ...] | None:
    if not any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride())):
        return None
    return tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())


class LiveCall:
    """One recorded call, alive until its backward pass begins and its outputs are let go."""

    def __init__(self, outputs: list[torch.Tensor]):
        self.storages = [StorageWeakRef(output.untyped_storage()) for output in outputs]
        self.finished = True
        self.token: weakref.ref | None = None
        trainable = [output for output in outputs if output.requires_grad]
        if trainable:
            self.finished = False
            token = _Token(self)
            self.token = weakref.ref(token)
            for output in trainable:
                output.register_hook(token.gradient_arrived)

    def alive(self) -> bool:
        awaits_backward = not self.finished and self.token is not None and self.token() is not None
        return awaits_backward or any(not storage.expired() for storage in self.storages)


class _Token:
    """Owned by the hooks on the outputs, so that it dies with their autograd graph where no backward ever comes."""

    def __init__(self, call: LiveCall):
        self.call = weakref.ref(call)

    def gradient_arrived(self, gradient: torch.Tensor) -> None:
        call = self.call()
        if call is not None:
            call.finished = True


def output_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a result, in order, looking into tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in output_tensors(item)]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in output_tensors(item)]
    return []


class Recorder:
    """Shared by all entries of a manager while they record."""

    def __init__(self, device_type: str):
        self.device_type = device_type
        self.order = 0
        self.producers: dict[int, tuple[weakref.ref, Signature, int, int]] = {}
        self.last: tuple[Signature, list[tuple[weakref.ref, int]]] | None = None

    def call(self, target: nn.Module, signatures: list[Signature], limit: int, forward: Callable[..., Any],
             args: tuple, kwargs: dict[str, Any], seen: tuple[tuple, dict[str, Any]]) -> Any:
        """Run `forward(*args, **kwargs)` eagerly and record the call; `seen` is the call as the guards see it.

        A new signature is added to `signatures` while there are fewer than `limit`. Returns the eager result.
        """
        signature = next((known for known in signatures if known.guard.explain(*seen) is None), None)
        tensors = signature.guard.match(*seen) if signature is not None else None
        if signature is None and len(signatures) < limit:
            try:
                call = CallGuard(*seen, self.device_type)
                tensors = tuple(call.tensors)
                signature = Signature(call, target, Ambient.now(self.device_type), self.order)
                self._trace(signature, tensors)
            except Unsupported as refused:
                signature = RefusedSignature(str(refused), self.order)
                tensors = None
                if any(known.refusal == signature.refusal for known in signatures):
                    return forward(*args, **kwargs)
            signatures.append(signature)
            self.order += 1
        if signature is None or tensors is None:
            return forward(*args, **kwargs)

        signature.calls += 1
        signature.recomputed |= torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        signature.live = [call for call in signature.live if call.alive()]
        signature.depth = max(signature.depth, len(signature.live) + 1)
        for other in signatures:
            if other is not signature and any(call.alive() for call in other.live):
                signature.beside = other.beside = True
        versions = [version_of(tensor) for tensor in tensors]
        result = forward(*args, **kwargs)
        for path, tensor, version in zip(signature.call.paths, tensors, versions):
            if version_of(tensor) != version:
                signature.refuse(f"forward changes {path} in place, which a graph would do to its own copy only")
        if signature.guard.explain(*seen) is not None:
            signature.refuse("forward changes the lists or dicts it is called with")
        outputs = output_tensors(result)
        if not outputs and holds_tensor(getattr(result, "__dict__", None)):
            signature.refuse(f"forward returns a {type(result).__name__}, whose tensors the guards cannot see")
        fresh = [output for output in outputs if not any(output is tensor for tensor in tensors)]
        signature.live.append(LiveCall(fresh))
        for index, output in enumerate(distinct(fresh)):
            self.producers[id(output)] = (weakref.ref(output), signature, index, version_of(output))
        self.last = (signature, [(weakref.ref(tensor), version_of(tensor)) for tensor in tensors])
        return result

    def _trace(self, signature: Signature, tensors: tuple[torch.Tensor, ...]) -> None:
        """Where the arguments of a first call come from."""
        if self.last is not None:
            signature.previous = self.last[0]
        for index, tensor in enumerate(tensors):
            known = self.producers.get(id(tensor))
            if known is not None and known[0]() is tensor:
                signature.sources[index] = (known[1], known[2])
                signature.untouched[index] = known[3] == version_of(tensor)
            for place, (reference, version) in enumerate(self.last[1] if self.last is not None else ()):
                if reference() is tensor and version_of(tensor) == version:
                    signature.carried[index] = place


class RefusedSignature(Signature):
    """A call that cannot even be guarded: it matches nothing and stands for its refusal."""

    def __init__(self, refusal: str, order: int):
        self.refusal = refusal
        self.order = order
        self.calls = 1
        self.depth = 1
        self.live = []
        self.statics = []
        self.guard = Guard(lambda args, kwargs: None, lambda args, kwargs: _REFUSED, "")


class _Refused:
    position, reason, where = -1, "refused", ""


_REFUSED = _Refused()


def distinct(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    seen: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        seen.setdefault(id(tensor), tensor)
    return list(seen.values())


def version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
