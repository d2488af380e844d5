# SPDX-License-Identifier: Apache-2.0
"""Capture: all recorded signatures of all entries, in the order of their first calls, as one transaction.

Forward graphs are captured in the order of the calls, backward graphs in the reverse order, in one memory pool. Where the
recording saw an entry consume the output of another, the consumer's static input is the producer's output memory, and the
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

from cudagraphs.partial.body import Analysis, Body, warm_up
from cudagraphs.partial.errors import CaptureError, Unsupported
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


def capture_all(entries: Iterable[Any], backend: Any, max_slots: int) -> list[Planned]:
    """Capture every signature that can be captured; mark the others with a refusal.

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
            backend.synchronize()
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
                        analysis = warm_up(body, signature, backend.forbid_sync)
                    except Unsupported as refusal:
                        signature.refuse(str(refusal))
                        continue
                    planned.append(Planned(entry, signature, analysis,
                                           Variant(signature, body, analysis, backend.stream)))
                gc.collect()
                backend.synchronize()
                pool = backend.pool()
                variants = {id(item.signature): item.variant for item in planned}
                depth = max((min(item.signature.depth, max_slots) for item in planned), default=0)
                for replica in range(depth):
                    for item in planned:
                        if replica < min(item.signature.depth, max_slots):
                            current = item.entry.name
                            _capture_forward(item, replica, variants, backend, pool)
                for replica in reversed(range(depth)):
                    for item in reversed(planned):
                        if item.analysis.trainable and replica < len(item.variant.slots):
                            current = item.entry.name
                            item.variant.slots[replica].capture_backward(
                                backend, pool, _gradient_sinks(item, replica, planned))
            backend.synchronize()
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
        item.variant.finish(home)
        item.signature.statics = []  # the slots own what is still needed
    gc.collect()
    slots = [slot for item in planned for slot in item.variant.slots]
    returned = {gradient.untyped_storage()._cdata for slot in slots for gradient in slot.grad_inputs
                if gradient is not None}
    for slot in slots:
        slot.settle(returned)


def release(variants: Iterable[Variant]) -> None:
    """Free graphs after a failure; a failing reset is logged, so that the first error stays the one that is raised."""
    for variant in variants:
        for slot in variant.slots:
            try:
                slot.reset()
            except Exception:
                logger.exception("could not free a graph of %s after a failed capture", slot.name)


def _capture_forward(item: Planned, replica: int, variants: dict[int, Variant], backend: Any, pool: Any) -> None:
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
    slot = Slot(item.entry.name, signature, item.analysis, item.variant.body, statics, borrowed)
    item.variant.slots.append(slot)  # before the capture, so that a failure frees it
    slot.capture_forward(backend, pool)


def _gradient_sinks(item: Planned, replica: int, planned: list[Planned]) -> list[torch.Tensor]:
    """Where the incoming gradients of a slot are read from, one a trainable output."""
    slot = item.variant.slots[replica]
    sinks = []
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
        sinks.append(sink)
    return sinks


def _handed_back(consumer: Slot, position: int) -> torch.Tensor | None:
    """The gradient that `consumer` returns for its argument at `position`, once its backward is captured."""
    if not consumer.grad_inputs or not consumer.inputs[position].requires_grad:
        return None
    wanted = [index for index, static in enumerate(consumer.inputs) if static.requires_grad]
    return consumer.grad_inputs[wanted.index(position)]
