# SPDX-License-Identifier: Apache-2.0
"""The backward half of a slot: incoming gradients into the static ones, one replay, gradients out.

Gradients of parameters leave in one of two ways. Through autograd (the default): the node returns them, AccumulateGrad
adopts or adds them, and hooks see them. Inside the graph (`accumulate_in_graph`): a `write` graph stores them and an
`add` graph adds them to memory that is the parameters' `.grad`; autograd never sees the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import nn

from cudagraphs.partial.copy_nodes import aim, feed
from cudagraphs.partial.errors import StaleGraphError

use_count = torch._C._storage_Use_Count
grad_enabled = torch.is_grad_enabled
foreach_clone = getattr(torch, "_foreach_clone", None)  # newer torch allocates and copies in one call
# Allocation as compiled code does it, without the parsing of arguments, on the current device.
raw_empty = {kind: getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}") for kind in ("cpu", "cuda")
             if hasattr(torch._C._dynamo.guards, f"_empty_strided_{kind}")}
strided = torch.strided
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


def storage_counts(tensors: list[torch.Tensor | None]) -> list[tuple[int, int]]:
    """(storage handle, references now) of the distinct storages behind `tensors`."""
    handles = {tensor.untyped_storage()._cdata for tensor in tensors if tensor is not None}
    return [(handle, use_count(handle)) for handle in sorted(handles)]


def make_allocator(tensors: list[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """A function that allocates memory for clones of `tensors`."""
    copies = [torch.empty_like(tensor) for tensor in tensors]  # their layout is that of a clone
    layouts = [(tuple(copy.shape), copy.stride(), copy.dtype) for copy in copies]
    empty = raw_empty.get(tensors[0].device.type)
    if empty is not None:
        return lambda: [empty(size, stride, dtype) for size, stride, dtype in layouts]
    empty_strided, device = torch.empty_strided, tensors[0].device
    return lambda: [empty_strided(size, stride, dtype=dtype, device=device) for size, stride, dtype in layouts]


def make_cloner(tensors: list[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """A function that copies all `tensors` to fresh memory, by one kernel where torch can fuse them.

    Fresh from the allocator every time, and not a buffer that is written again: whoever reads the copy on another
    stream and calls `record_stream` counts on the allocator to wait for that stream.
    """
    if len(tensors) == 1:
        clone = tensors[0].clone
        return lambda: [clone()]
    if foreach_clone is not None:
        return partial(foreach_clone, tensors)
    foreach_copy_, allocate = torch._foreach_copy_, make_allocator(tensors)

    def clone_all() -> list[torch.Tensor]:
        fresh = allocate()
        foreach_copy_(fresh, tensors)
        return fresh

    return clone_all


def is_there(gradient: torch.Tensor, pointer: int | None, stride: tuple[int, ...]) -> bool:
    """Whether the bytes of `gradient` are those at `pointer` as they are."""
    return (gradient.data_ptr() == pointer and gradient.stride() == stride and not gradient.is_neg()
            and not gradient.is_conj())


def make_fresh_writer(graph: Any, tensors: list[torch.Tensor]) -> Callable[[], list[torch.Tensor] | None]:
    """A function that replays `graph` with its drains aimed at fresh memory, and returns that: copies of `tensors`.
    Where the runtime refuses an address the drains are off, and it returns None."""
    drains, replay, allocate = graph.drains, graph.replay, make_allocator(tensors)

    def write_fresh() -> list[torch.Tensor] | None:
        fresh: list[torch.Tensor] | None = allocate()
        for node, tensor in zip(drains, fresh):
            if node.address != tensor.data_ptr():
                if not aim(drains, [tensor.data_ptr() for tensor in fresh]):
                    fresh = None
                break
        replay()
        return fresh

    return write_fresh


def make_static_writer(graph: Any) -> Callable[[], None]:
    """A function that replays `graph` with its drains off: where they pointed to is somebody else's by now."""
    drains, replay = graph.drains, graph.replay
    if not drains:
        return replay

    def write() -> None:
        for node in drains:
            if node.address is not None:
                node.switch_off()
        replay()

    return write


def make_filler(slot: Any, positions: list[int],
                nodes: dict[int, list[Any]]) -> Callable[[tuple], Sequence[tuple[torch.Tensor, torch.Tensor]]]:
    """A function that brings the incoming gradients of some trainable outputs into the static ones. It returns what has
    to be put back after the replay: memory that is also a gradient another slot handed out, and that somebody kept.

    Args:
        nodes: for some positions, the copy nodes that do it, of every graph that may be replayed next.
    """
    sinks = []
    for position in positions:
        sink = slot.grad_outputs[position]
        sinks.append((slot.analysis.trainable[position], sink, sink.data_ptr(), sink.stride(), position,
                      nodes.get(position)))

    def fill(gradients: tuple[torch.Tensor | None, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        into, values, kept = [], [], []
        for index, sink, pointer, stride, position, feeds in sinks:
            gradient = gradients[index]
            if feeds is not None:
                if feed(feeds, gradient, sink):
                    continue
            elif gradient is not None and gradient.layout is strided and is_there(gradient, pointer, stride):
                continue
            for handle, own in slot.sink_watch[position]:
                if use_count(handle) > own:
                    kept.append((sink, sink.clone()))
            if gradient is None:
                sink.zero_()
            else:
                into.append(sink)
                values.append(gradient if gradient.layout is strided else gradient.to_dense())
        if len(into) == 1:
            into[0].copy_(values[0])
        elif into:
            torch._foreach_copy_(into, values)
        return kept

    if len(sinks) > 1:
        return fill
    (index, sink, pointer, stride, position, feeds), = sinks
    copy, nothing = sink.copy_, ()
    if feeds is not None and len(feeds) == 1:
        node, = feeds

        def fill_fed(gradients: tuple[torch.Tensor | None, ...]) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
            gradient = gradients[index]
            if gradient is not None and gradient.layout is strided and is_there(gradient, node.address, stride):
                return nothing
            return fill(gradients)

        return fill_fed
    if feeds is not None:
        return fill

    def fill_one(gradients: tuple[torch.Tensor | None, ...]) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        gradient = gradients[index]
        if gradient is None or gradient.layout is not strided:
            return fill(gradients)
        if is_there(gradient, pointer, stride):
            return nothing
        if slot.sink_watch[position]:
            return fill(gradients)
        copy(gradient)
        return nothing

    return fill_one


class Accumulator:
    """Memory for the gradient of one parameter that graphs write to and that is handed out as its `.grad`."""

    def __init__(self, parameter: nn.Parameter):
        self.parameter = parameter
        self.buffer = torch.zeros_like(parameter, requires_grad=False)
        self.pointer = self.buffer.data_ptr()
        self._storage = self.buffer.untyped_storage()
        self.handle = self._storage._cdata
        self.own = use_count(self.handle)  # with more references than these, somebody looks at this memory


class Accumulators:
    """The accumulators of the parameters that one signature gives gradients to."""

    def __init__(self, each: list[Accumulator]):
        self.each = each
        self.parameters = [one.parameter for one in each]
        self.buffers = [one.buffer for one in each]
        self._watch = [(one.parameter, one.pointer, one.handle, one.own) for one in each]

    def accumulate(self, write: Callable[[], None], add: Callable[[], None] | None, unreached: Set[int]) -> None:
        """Replay `write` or `add` so that every `.grad` holds what AccumulateGrad would have left there.

        Args:
            add: None where only `write` covers this pattern of incoming gradients.
            unreached: positions of parameters that no gradient flows to this time.
        """
        # The two usual cases: every `.grad` is this memory, or none exists and nobody looks at this memory.
        attached, absent = not unreached and add is not None, not unreached
        for parameter, pointer, handle, own in self._watch:
            gradient = parameter.grad
            if gradient is None:
                attached = False
                absent = absent and use_count(handle) <= own
            else:
                absent = False
                attached = attached and gradient.data_ptr() == pointer
            if not (attached or absent):
                self._accumulate_each(write, unreached)
                return
        if attached:
            add()
            return
        write()
        for parameter, buffer in zip(self.parameters, self.buffers):
            parameter.grad = buffer.data

    def _accumulate_each(self, write: Callable[[], None], unreached: Set[int]) -> None:
        gradients = [parameter.grad for parameter in self.parameters]
        attached = [gradient is not None and gradient.data_ptr() == one.pointer
                    for gradient, one in zip(gradients, self.each)]
        # Memory that is .grad, or that somebody kept when it stopped being .grad, must outlive the write.
        kept = [one.buffer.clone() if is_gradient or use_count(one.handle) > one.own else None
                for one, is_gradient in zip(self.each, attached)]
        write()
        for position, (one, gradient, is_gradient, value) in enumerate(zip(self.each, gradients, attached, kept)):
            if is_gradient and position not in unreached:
                one.buffer.add_(value)
                continue
            if position in unreached:
                pass
            elif gradient is not None:
                gradient.add_(one.buffer)
            else:
                one.parameter.grad = one.buffer.detach() if value is None else one.buffer.clone()
            if value is not None:
                one.buffer.copy_(value)


def make_backward(slot: Any) -> Callable[[tuple, list[int] | None], tuple]:
    """The backward replay of a slot: `(incoming gradients, leaf arguments) -> gradients of the node's arguments`.

    Static gradients leave as `.data`: a tensor of its own over the same storage, whose references tell that somebody
    holds it.
    """
    analysis, inputs, grad_inputs = slot.analysis, slot.inputs, slot.grad_inputs
    trainable, reaches = analysis.trainable, analysis.reaches
    wanted = [index for index, static in enumerate(inputs) if static.requires_grad]
    count = len(inputs)
    accumulators = slot.accumulators
    received = slot.received() if accumulators is None else []  # the others never pass through autograd
    template: list[torch.Tensor | None] = [None] * count + [grad_inputs[len(wanted) + place] for place in received]
    places = wanted + list(range(count, len(template)))  # of each gradient among the node's arguments
    place_reaches = [*reaches[:len(wanted)], *(reaches[len(wanted) + place] for place in received)]
    for place, gradient in zip(wanted, grad_inputs):
        template[place] = gradient
    to_inputs = [(place, template[place]) for place in wanted if template[place] is not None]
    to_parameters = [(place, template[place]) for place in places[len(wanted):] if template[place] is not None]
    trainable_parameters = [p for p, alias in zip(slot.body.parameters, slot.body.aliases) if alias.requires_grad]
    receivers = [trainable_parameters[received[place - count]] for place, _ in to_parameters]
    clone_parameters = make_cloner([gradient for _, gradient in to_parameters]) if to_parameters else None
    # Where every parameter gets a gradient, they are the end of the list.
    consecutive = bool(to_parameters) and len(to_parameters) == len(template) - count
    receiver_reaches = [reached for reached in reaches[len(wanted):] if reached]

    lean = slot.lean  # positions of the outputs that the cheap backward graph covers
    fed_by = {position: [graph.feeds[at] for graph in (slot.write_graph, slot.add_graph) if graph is not None]
              for at, position in enumerate(slot.fed_sinks)}
    fill_lean, fill_all = make_filler(slot, lean, fed_by), make_filler(slot, list(range(len(trainable))), {})
    beyond = [trainable[position] for position in range(len(trainable)) if position not in lean]
    write = make_static_writer(slot.write_graph)
    drained = bool(slot.write_graph.drains)
    write_fresh = make_fresh_writer(slot.write_graph, [gradient for _, gradient in to_parameters]) if drained else None
    add = slot.add_graph.replay if slot.add_graph is not None else None
    write_all = slot.full_graph.replay if slot.full_graph is not None else write
    blank: list[torch.Tensor | None] = [None] * (count + slot.extra_arguments)
    missing: dict[tuple[bool, ...], tuple[frozenset[int], list[int]]] = {}

    def without_gradient(gradients: tuple[torch.Tensor | None, ...]) -> tuple[frozenset[int], list[int]]:
        """What nothing flows to this time: positions among the receivers, and places among the node's arguments."""
        arrived = tuple([gradients[index] is not None for index in trainable])
        known = missing.get(arrived)
        if known is None:
            defined = {position for position, here in enumerate(arrived) if here}
            known = missing[arrived] = (
                frozenset(at for at, reached in enumerate(receiver_reaches) if not reached & defined),
                [place for place, reached in zip(places, place_reaches) if not reached & defined])
        return known

    def backward(gradients: tuple[torch.Tensor | None, ...], leaves: Any) -> tuple[torch.Tensor | None, ...]:
        if grad_enabled():
            raise StaleGraphError(f"{slot.name}: create_graph=True needs a second derivative, which a captured "
                                  "backward does not have; close the manager or leave this module out")
        again = keeps_graph()
        if again and analysis.consuming:
            raise StaleGraphError(f"{slot.name}: retain_graph=True needs a backward that leaves what it reads as it is; "
                                  "this one does not, as it is Transformer Engine's or torch.compile's (donated buffers, "
                                  "off with torch._functorch.config.donated_buffer = False before the first step)")
        full = False
        for index in beyond:
            if gradients[index] is not None:
                full = True
        kept = fill_all(gradients) if full else fill_lean(gradients)
        fresh = None
        if accumulators is not None:
            accumulators.accumulate(write_all if full else write, None if full else add, without_gradient(gradients)[0])
        elif full:
            write_all()
        elif drained and not (kept or again) and receivers[0].grad is None:
            fresh = write_fresh()
        else:
            write()
        result = blank.copy()
        if kept or again:  # the same memory may be written again before these gradients are read
            for place, gradient in (*to_inputs, *to_parameters):
                result[place] = gradient.clone()
        else:
            for place, gradient in to_inputs:
                result[place] = gradient.clone() if leaves and place in leaves else gradient.data
            if clone_parameters is None:
                pass
            elif receivers[0].grad is not None:  # where it exists, AccumulateGrad adds in place and lets go
                slot.parameters_exposed = True
                for (place, gradient), receiver in zip(to_parameters, receivers):
                    result[place] = gradient.clone() if receiver.grad is None else gradient.data
            else:  # it adopts a copy as .grad; usually all are absent when the first one is
                if fresh is None:
                    fresh = clone_parameters()
                if consecutive:
                    result[count:] = fresh
                else:
                    for (place, _), gradient in zip(to_parameters, fresh):
                        result[place] = gradient
        if not again:
            slot.ticket += 1
            slot.pending = None
        if kept:
            for sink, value in kept:
                sink.copy_(value)
        for index in trainable:
            if gradients[index] is None:
                for place in without_gradient(gradients)[1]:
                    result[place] = None
                break
        return tuple(result)

    return backward
