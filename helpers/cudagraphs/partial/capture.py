# SPDX-License-Identifier: Apache-2.0
"""Capture: all recorded signatures of all entries, in the order of their first calls, as one transaction.

Forward graphs are captured in the order of the calls, backward graphs in the reverse order. Where the recording saw an
entry consume the output of another, the consumer's static input is the producer's output memory, and the
producer's incoming gradient is the consumer's outgoing one: nothing is copied between them.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from cudagraphs.partial.body import Analysis, Body, OutputPlan, warm_up
from cudagraphs.partial.chain import ChainBody, Member, chain_analysis, find_chains
from cudagraphs.partial.errors import CaptureError, Unsupported
from cudagraphs.partial.gradients import Accumulator, Accumulators
from cudagraphs.partial.pools import SharedPool
from cudagraphs.partial.recording import Signature, static_copy
from cudagraphs.partial.replay import Slot, Variant, new_statics

logger = logging.getLogger("partial_graphs")


@dataclass
class Planned:
    """One signature on its way to a variant."""

    entry: Any
    signature: Signature
    analysis: Analysis | None  # None where the backend captured by itself
    variant: Variant
    plan: OutputPlan | None = None  # how the entry's own result is rebuilt
    output_count: int = 0
    chain: list[Member] | None = None  # on the first member: all of them, itself included
    follows: bool = False  # a later member: its graphs are the first one's


def capture_all(entries: Iterable[Any], backend: Any, max_slots: int, merge: bool = False,
                accumulate: bool = False, share_pool: bool = False) -> list[Planned]:
    """Capture every signature that can be captured; mark the others with a refusal.

    Args:
        merge: make one graph of neighbours with nothing between them.
        accumulate: let graphs add to the gradients of parameters, where no hook or process group wants to see them.
        share_pool: one memory pool a replica, in capture order, and not one a slot.

    Returns the captured ones with unfinished variants (`finish_all` ends the work).

    Raises:
        CaptureError: naming the entry, after every graph captured so far was freed.
    """
    entries = list(entries)
    planned: list[Planned] = []
    current = "the manager"
    try:
        with ExitStack() as stack:
            for entry in entries:
                current = entry.name
                stack.enter_context(entry.materialized())
            rng = backend.rng_state()
            stack.callback(backend.set_rng_state, rng)
            bodies: dict[int, Body] = {}
            backend.settle()
            with backend.side_stream():
                ordered = sorted(((signature, entry) for entry in entries for signature in entry.signatures
                                  if signature.refusal is None), key=lambda pair: pair[0].order)
                for signature, entry in ordered:
                    current = entry.name
                    try:
                        if id(entry) not in bodies:
                            bodies[id(entry)] = body = entry.body()
                            stack.enter_context(body.buffers_restored())
                        body = bodies[id(entry)]
                        analysis = warm_up(body, signature, backend)
                    except Unsupported as refusal:
                        signature.refuse(str(refusal))
                        continue
                    variant = Variant(signature, body, analysis, backend.stream)
                    planned.append(Planned(entry, signature, analysis, variant, analysis.plan, analysis.output_count))
                if merge:
                    current = "a chain of neighbours"
                    _merge(planned, backend)
                if accumulate:
                    _give_accumulators(planned)
                gc.collect()
                backend.settle()
                captured = [item for item in planned if not item.follows]
                variants = {id(item.signature): item.variant for item in captured}
                depth = max((min(item.signature.depth, max_slots) for item in captured), default=0)
                for replica in range(depth):
                    shared = SharedPool(backend.pool()) if share_pool else None
                    for item in captured:
                        if replica < min(item.signature.depth, max_slots):
                            current = item.entry.name
                            # Eager where its recomputation is a replay, or the other way round, is an error of
                            # torch's; in a pool of its own a slot is free whenever it was while recording. And a
                            # backward that frees what the forward left makes room for others where they must not be.
                            # While results are kept, nothing captured before them may be replayed in their pool.
                            alone = (item.signature.recomputed or item.signature.kept
                                     or not item.analysis.repeatable)
                            pool = None if alone else shared
                            _capture_forward(item, replica, variants, backend, pool)
                for replica in reversed(range(depth)):
                    for item in reversed(captured):
                        if item.analysis.trainable and replica < len(item.variant.slots):
                            current = item.entry.name
                            item.variant.slots[replica].capture_backward(
                                backend, *_gradient_sinks(item, replica, captured))
            backend.settle()
    except BaseException as error:
        release(item.variant for item in planned)
        if not isinstance(error, Exception):
            raise
        raise CaptureError(f"Partial CUDA graph capture failed for {current}: {error}") from error
    return planned


def capture_through(entries: Iterable[Any], backend: Any, max_slots: int) -> list[Planned]:
    """The same for a backend that captures whole calls by itself (Transformer Engine's): one call after the other."""
    planned: list[Planned] = []
    current = "the manager"
    try:
        ordered = sorted(((signature, entry) for entry in entries for signature in entry.signatures
                          if signature.refusal is None), key=lambda pair: pair[0].order)
        for signature, entry in ordered:
            current = entry.name
            if signature.call.modules:
                signature.refuse(f"{signature.call.modules[0][0]} is a module, which this backend cannot look into")
                continue
            variant = Variant(signature, SimpleNamespace(target=entry.target, copied=False), None, backend.stream)
            variant.add_checks = backend.add_checks
            planned.append(Planned(entry, signature, None, variant))
            try:
                for replica in range(min(signature.depth, max_slots)):
                    variant.slots.append(backend.slot(entry.name, signature, entry.target,
                                                      new_statics(signature, replica)))
            except Unsupported as refusal:
                signature.refuse(str(refusal))
                planned.pop()
    except BaseException as error:
        release(item.variant for item in planned)
        if not isinstance(error, Exception):
            raise
        raise CaptureError(f"Partial CUDA graph capture failed for {current}: {error}") from error
    return planned


def finish_all(planned: list[Planned], home: Any) -> None:
    """Compile guards and replay functions, then take the reference counts of memory that nobody else refers to yet."""
    for item in planned:
        if not item.follows:
            item.variant.finish(home)
        item.signature.statics = []  # the slots own what is still needed
    gc.collect()
    slots = [slot for item in planned for slot in item.variant.slots]
    returned = {gradient.untyped_storage()._cdata for slot in slots for gradient in slot.grad_inputs
                if gradient is not None}
    for slot in slots:
        slot.settle(returned)


def _merge(planned: list[Planned], backend: Any) -> None:
    """Turn the first member of every chain into the chain; the others follow it."""
    for members in find_chains(planned):
        first = members[0].planned
        body = ChainBody(members)
        analysis = chain_analysis(members, warm_up(body, first.signature, backend))
        first.analysis, first.chain = analysis, members
        first.variant.body, first.variant.analysis = body, analysis
        for member in members[1:]:
            member.planned.follows = True


def _give_accumulators(planned: list[Planned]) -> None:
    """Accumulators for the signatures whose parameters take one gradient a backward: where one takes several (a module
    called twice, a parameter of two entries), autograd sums those before it adds them to `.grad`, in that order."""
    known: dict[int, Accumulator] = {}
    owners: dict[int, set[int]] = {}
    for item in planned:
        body = item.variant.body
        for parameter in body.parameters:
            owners.setdefault(id(parameter), set()).add(id(body))
    for item in planned:
        body = item.variant.body
        if (item.follows or body.copied or not item.analysis.trainable or not item.analysis.repeatable
                or item.signature.depth > 1 or item.signature.beside):
            continue
        trainable = [parameter for parameter, alias in zip(body.parameters, body.aliases) if alias.requires_grad]
        reached = item.analysis.reaches[len(item.analysis.reaches) - len(trainable):]
        receivers = [parameter for parameter, outputs in zip(trainable, reached) if outputs]
        if not receivers:
            continue
        members = item.chain or ()
        inside = {id(body), *(id(member.planned.variant.body) for member in members)}
        if len({id(parameter) for parameter in receivers}) < len(receivers) or any(
                owners[id(parameter)] - inside for parameter in receivers):
            continue
        if any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in receivers):
            continue
        for parameter in receivers:
            if id(parameter) not in known:
                known[id(parameter)] = Accumulator(parameter)
        item.variant.accumulators = Accumulators([known[id(parameter)] for parameter in receivers])


def release(variants: Iterable[Variant]) -> None:
    """Free graphs after a failure; a failing reset is logged, so that the first error stays the one that is raised."""
    for variant in variants:
        for slot in variant.slots:
            try:
                slot.reset()
            except Exception:
                logger.exception("could not free a graph of %s after a failed capture", slot.name)


def _capture_forward(item: Planned, replica: int, variants: dict[int, Variant], backend: Any,
                     shared: SharedPool | None) -> None:
    signature = item.signature
    statics = new_statics(signature, replica)
    borrowed: dict[int, Slot] = {}
    for index, source in enumerate(signature.sources):
        producer = variants.get(id(source[0])) if source is not None else None
        if producer is None or replica >= len(producer.slots):
            continue
        slot, static = producer.slots[replica], statics[index]
        output = slot.outputs[source[1]] if source[1] < len(slot.outputs) else None
        if output is not None and (output.shape, output.dtype, output.stride()) == (
                static.shape, static.dtype, static.stride()):
            statics[index] = output.detach().requires_grad_(static.requires_grad)
            borrowed[index] = slot
    slot = Slot(item.entry.name, signature, item.analysis, item.variant.body, statics, borrowed,
                item.variant.accumulators, shared)
    item.variant.slots.append(slot)  # before the capture, so that a failure frees it
    slot.capture_forward(backend)


def _gradient_sinks(item: Planned, replica: int, planned: list[Planned]) -> tuple[list[torch.Tensor], set[int]]:
    """Where the incoming gradients of a slot are read from, one a trainable output, and the positions of those that
    are gradients which another slot hands out."""
    slot = item.variant.slots[replica]
    sinks, shared = [], set()
    for index in item.analysis.trainable:
        output = slot.outputs[index]
        consumers = [(other.variant.slots[replica], position) for other in planned
                     if replica < len(other.variant.slots)
                     for position, source in enumerate(other.signature.sources)
                     if source is not None and source[0] is item.signature and source[1] == index
                     and position in other.variant.slots[replica].borrowed]
        sink = _handed_back(*consumers[0]) if len(consumers) == 1 else None
        if sink is None or (sink.shape, sink.dtype, sink.stride()) != (output.shape, output.dtype, output.stride()):
            sink = static_copy(torch.zeros_like(output.detach()))
        else:
            shared.add(len(sinks))
        sinks.append(sink)
    return sinks, shared


def _handed_back(consumer: Slot, position: int) -> torch.Tensor | None:
    """The gradient that `consumer` returns for its argument at `position`, once its backward is captured."""
    if not consumer.grad_inputs or not consumer.inputs[position].requires_grad:
        return None
    wanted = [index for index, static in enumerate(consumer.inputs) if static.requires_grad]
    return consumer.grad_inputs[wanted.index(position)]
