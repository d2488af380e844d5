# SPDX-License-Identifier: Apache-2.0
"""Replay: one `Slot` is one pair of forward and backward graphs with its static buffers; a `Variant` is a signature
with its ring of slots.

A slot may be replayed only while it is free: the backward of its last forward has run (or its autograd graph is gone),
and nothing outside refers to the memory that a replay would overwrite. So an output kept by the caller, a second
microbatch in flight or a repeated call of a shared module each take another slot, and eager execution when there is none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cudagraphs.partial.body import Analysis, Body
from cudagraphs.partial.errors import StaleGraphError
from cudagraphs.partial.guards import Guard, GuardBuilder, add_state_checks
from cudagraphs.partial.recording import Signature, broadcast_index, static_copy

use_count = torch._C._storage_Use_Count
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


class Slot:
    """One replica of a signature's graphs.

    Args:
        name: of the entry, for messages.
        inputs: static inputs; those in `borrowed` (argument index to producing slot) are another slot's output memory.
        parameters: what the autograd node connects to besides the inputs: the trainable parameters of the module.
    """

    def __init__(self, name: str, signature: Signature, analysis: Analysis, body: Body, inputs: list[torch.Tensor],
                 borrowed: dict[int, Slot]):
        self.name, self.signature, self.analysis, self.body = name, signature, analysis, body
        self.inputs, self.borrowed = inputs, borrowed
        self.outputs: list[torch.Tensor] = []
        self.grad_outputs: list[torch.Tensor] = []  # one a trainable output
        self.grad_inputs: list[torch.Tensor | None] = []  # one a differentiable input, then one a trainable parameter
        self.forward_graph: Any = None
        self.backward_graph: Any = None
        self.pending: weakref.ref | None = None  # the autograd node of the last forward, until its backward has run
        self.ticket = 0  # changes whenever the static buffers no longer belong to an earlier forward
        # (storage, references of our own): above that, somebody else looks at our memory. All that is handed out are
        # aliases, so whoever keeps one, or a view of it, shows up on its storage.
        self.watched: list[tuple[int, int]] = []
        self.parameters_exposed = False  # static gradients of parameters were handed out as they are
        self._parameter_watch: list[tuple[int, int]] = []
        self._sink_watch: list[list[tuple[int, int]]] = []
        self._storages: dict[int, Any] = {}
        self.run: Callable[..., Any] = _unfinished

    # Capture

    def capture_forward(self, backend: Any, pool: Any) -> None:
        def run() -> list[torch.Tensor]:
            return self.body.run(self.signature, self.inputs)[0]

        self.forward_graph = backend.capture(run, pool)
        self.outputs = self.forward_graph.outputs

    def capture_backward(self, backend: Any, pool: Any, grad_outputs: list[torch.Tensor]) -> None:
        """Capture the backward pass for all trainable outputs; `retain_graph` keeps what it reads out of the pool's
        free list, so no other graph of the pool can be given that memory, in whatever order graphs are replayed."""
        self.grad_outputs = grad_outputs
        differentiable = self.body.differentiable(self.inputs)
        trainable = self.analysis.trainable

        def run(outputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
            return list(torch.autograd.grad([outputs[index] for index in trainable], differentiable, grad_outputs,
                                            retain_graph=True, allow_unused=True))

        self.backward_graph = backend.capture(run, pool, self.forward_graph)
        self.grad_inputs = self.backward_graph.outputs

    def finish(self) -> None:
        """Build the replay functions. `settle` must follow once every slot of the manager is finished."""
        returned = [gradient for gradient in self.grad_inputs if gradient is not None]
        storages = [tensor.untyped_storage() for tensor in (*self.outputs, *returned, *self.grad_outputs)]
        self._storages = {storage._cdata: storage for storage in storages}
        self.run = self._trainable_run() if self.analysis.trainable else self._plain_run()

    def settle(self, returned: set[int]) -> None:
        """Take the reference counts that mean "nobody else looks at this memory".

        Args:
            returned: the storages of the gradients that any slot hands out; some of them are the memory of our sinks.
        """
        split = self._split()
        own = self.outputs + [gradient for gradient in self.grad_inputs[:split] if gradient is not None]
        self.watched = _storage_counts(own)
        self._parameter_watch = _storage_counts(self.grad_inputs[split:])
        self._sink_watch = [_storage_counts([sink]) if sink.untyped_storage()._cdata in returned else []
                            for sink in self.grad_outputs]

    def _split(self) -> int:
        """How many of `grad_inputs` belong to arguments; the rest belong to parameters."""
        return sum(static.requires_grad for static in self.inputs)

    # Replay

    def idle(self) -> bool:
        """Whether a replay would overwrite nothing that is still needed."""
        pending = self.pending
        if pending is not None:
            if pending() is not None:
                return False
            self.pending = None
        for handle, own in self.watched:
            if use_count(handle) > own:
                return False
        if self.parameters_exposed:
            for handle, own in self._parameter_watch:
                if use_count(handle) > own:
                    return False
            self.parameters_exposed = False
        return True

    def free(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """`idle`, and the memory borrowed from another slot either holds these very inputs or is idle there."""
        if not self.idle():
            return False
        for index, producer in self.borrowed.items():
            if tensors[index].data_ptr() != self.inputs[index].data_ptr() and not producer.idle():
                return False
        return True

    def _plain_run(self) -> Callable[..., Any]:
        """Replay without autograd: copy in, replay, hand out aliases of the static outputs."""
        load, replay, outputs = self._loader(), self.forward_graph.replay, self.outputs
        rebuild = self.analysis.plan.rebuild
        recorded = self.signature.ambient.grad and any(static.requires_grad for static in self.inputs)

        def run(tensors: tuple[torch.Tensor, ...]) -> Any:
            if recorded:  # or the copies would become part of the caller's autograd graph
                with torch.no_grad():
                    load(tensors)
            else:
                load(tensors)
            replay()
            return rebuild([output.detach() for output in outputs], tensors)

        return run

    def _trainable_run(self) -> Callable[..., Any]:
        function = self._autograd_function()
        apply, rebuild = function.apply, self.analysis.plan.rebuild
        if self.body.copied:
            trainable = [position for position, alias in enumerate(self.body.aliases) if alias.requires_grad]

            def parameters() -> list[nn.Parameter]:
                live = self.body.live_parameters()
                return [live[position] for position in trainable]
        else:
            fixed = [p for p, alias in zip(self.body.parameters, self.body.aliases) if alias.requires_grad]

            def parameters() -> list[nn.Parameter]:
                return fixed

        if self.analysis.plan.expression == "o[0]":
            return lambda tensors: apply(*tensors, *parameters())[0]
        return lambda tensors: rebuild(apply(*tensors, *parameters()), tensors)

    def _loader(self) -> Callable[[tuple[torch.Tensor, ...]], None]:
        """A function that copies the arguments into the static inputs, all in one fused call, except those that are
        there already."""
        targets = [static.detach() for static in self.inputs]
        pointers = [static.data_ptr() for static in targets]
        cuts = [broadcast_index(static) for static in targets]
        if any(cut is not None for cut in cuts):
            targets = [static if cut is None else static[cut] for static, cut in zip(targets, cuts)]

            def cut_down(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
                return [tensor if cut is None else tensor[cut] for tensor, cut in zip(tensors, cuts)]
        else:
            cut_down = None
        if self.body.copied:
            copies = [alias.detach() for alias in self.body.aliases]
        else:
            copies = None

        def load(tensors: tuple[torch.Tensor, ...]) -> None:
            into, values = [], []
            for tensor, target, pointer in zip(cut_down(tensors) if cut_down else tensors, targets, pointers):
                if tensor.data_ptr() != pointer:
                    into.append(target)
                    values.append(tensor)
            if copies:
                into += copies
                values += self.body.live_parameters()
            if len(into) == 1:
                into[0].copy_(values[0])
            elif into:
                torch._foreach_copy_(into, values)

        return load

    def _autograd_function(self) -> type[torch.autograd.Function]:
        """The autograd node of this slot. It saves nothing: what backward needs is in the static buffers."""
        slot, load, backward = self, self._loader(), self._backward()
        replay, outputs = self.forward_graph.replay, self.outputs
        plain = [index for index in range(len(outputs)) if index not in self.analysis.trainable]
        watched = [outputs[index] for index in self.analysis.saved_outputs]
        borrowed = [(index, self.inputs[index].data_ptr(), index in self.analysis.saved_inputs)
                    for index in self.borrowed]

        wanted = [index for index, static in enumerate(self.inputs) if static.requires_grad]

        class Replay(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
                load(tensors)
                replay()
                ctx.set_materialize_grads(False)
                slot.pending = weakref.ref(ctx)
                slot.ticket += 1
                ctx.ticket = slot.ticket
                # A leaf adopts its gradient as .grad, and would keep the slot taken with it.
                ctx.leaves = [index for index in wanted if tensors[index].is_leaf]
                if borrowed:
                    # The producer of this memory stays taken while our backward may read it.
                    ctx.held = [tensors[index] if tensors[index].data_ptr() == pointer else slot.inputs[index].detach()
                                for index, pointer, _ in borrowed]
                    ctx.held_versions = [held._version for held, (_, _, saved) in zip(ctx.held, borrowed) if saved]
                if watched:
                    ctx.versions = [output._version for output in watched]
                results = tuple([output.detach() for output in outputs])
                if plain:
                    ctx.mark_non_differentiable(*[results[index] for index in plain])
                return results

            @staticmethod
            def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
                if ctx.ticket != slot.ticket:
                    raise StaleGraphError(f"{slot.name}: backward ran a second time through a replayed graph, or after "
                                          "its buffers were reused; pass retain_graph=True to the first backward")
                if watched and ctx.versions != [output._version for output in watched]:
                    raise StaleGraphError(f"{slot.name}: an output that backward needs was changed in place")
                if borrowed and ctx.held_versions != [
                        held._version for held, (_, _, saved) in zip(ctx.held, borrowed) if saved]:
                    raise StaleGraphError(f"{slot.name}: an input that backward needs was changed in place")
                result = backward(gradients, ctx.leaves)
                if borrowed and slot.pending is None:
                    ctx.held = ()
                return result

        return Replay

    def _filler(self) -> Callable[[tuple], list[tuple[torch.Tensor, torch.Tensor]]]:
        """A function that brings the incoming gradients into the static ones. It returns what has to be put back after
        the replay: memory that is also the gradient another slot handed out, and that somebody kept."""
        slot = self
        sinks = [(index, sink, sink.data_ptr(), sink.stride(), position) for position, (index, sink)
                 in enumerate(zip(self.analysis.trainable, self.grad_outputs))]

        def fill(gradients: tuple[torch.Tensor | None, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
            into, values, kept = [], [], []
            for index, sink, pointer, stride, position in sinks:
                gradient = gradients[index]
                if gradient is not None and gradient.data_ptr() == pointer and gradient.stride() == stride:
                    continue
                if any([use_count(handle) > own for handle, own in slot._sink_watch[position]]):
                    kept.append((sink, sink.clone()))
                if gradient is None:
                    sink.zero_()
                else:
                    into.append(sink)
                    values.append(gradient)
            if len(into) == 1:
                into[0].copy_(values[0])
            elif into:
                torch._foreach_copy_(into, values)
            return kept

        return fill

    def _backward(self) -> Callable[..., tuple[torch.Tensor | None, ...]]:
        """Build the backward replay: gradients in, one replay, gradients out."""
        slot, fill, replay = self, self._filler(), self.backward_graph.replay
        trainable, reaches = self.analysis.trainable, self.analysis.reaches
        wanted = [index for index, static in enumerate(self.inputs) if static.requires_grad]
        count = len(self.inputs)
        template: list[torch.Tensor | None] = [None] * count + self.grad_inputs[len(wanted):]
        places = wanted + list(range(count, len(template)))  # of each differentiable input in the node's arguments
        for place, gradient in zip(wanted, self.grad_inputs):
            template[place] = gradient
        to_inputs = [(place, template[place]) for place in wanted if template[place] is not None]
        to_parameters = [(place, template[place]) for place in places[len(wanted):] if template[place] is not None]
        statics = [gradient for _, gradient in to_parameters]
        trainable_parameters = [p for p, alias in zip(self.body.parameters, self.body.aliases) if alias.requires_grad]
        receivers = [trainable_parameters[place - count] for place, _ in to_parameters]

        def backward(gradients: tuple[torch.Tensor | None, ...], leaves: list[int]) -> tuple[torch.Tensor | None, ...]:
            if torch.is_grad_enabled():
                raise StaleGraphError(f"{slot.name}: create_graph=True needs a second derivative, which a captured "
                                      "backward does not have; close the manager or leave this module out")
            kept = fill(gradients)
            replay()
            result: Any = [None] * len(template)
            if kept or keeps_graph():  # the same memory may be written again before these gradients are read
                result = [None if gradient is None else gradient.clone() for gradient in template]
            else:
                for place, gradient in to_inputs:
                    result[place] = gradient.clone() if place in leaves else gradient.detach()
                absent = [parameter.grad is None for parameter in receivers]
                if all(absent):
                    # AccumulateGrad adopts these copies as .grad: one kernel for all parameters.
                    for (place, _), gradient in zip(to_parameters, clone_all(statics)):
                        result[place] = gradient
                else:  # it adds those in place
                    slot.parameters_exposed = True
                    for (place, gradient), missing in zip(to_parameters, absent):
                        result[place] = gradient.clone() if missing else gradient.detach()
            if not keeps_graph():
                slot.ticket += 1
                slot.pending = None
            for sink, value in kept:
                sink.copy_(value)
            defined = {position for position, index in enumerate(trainable) if gradients[index] is not None}
            if len(defined) < len(trainable):
                for place, reached in zip(places, reaches):
                    if not reached & defined:
                        result[place] = None
            return tuple(result)

        return backward

    def reset(self) -> None:
        """Free the graphs. Safe to call again; the slot must not be replayed afterwards."""
        self.run = _unfinished
        for graph in (self.backward_graph, self.forward_graph):
            if graph is not None:
                graph.reset()
        self.ticket += 1
        self.outputs, self.grad_outputs, self.grad_inputs, self.inputs = [], [], [], []
        self.watched, self._parameter_watch, self._sink_watch, self._storages = [], [], [], {}
        self.borrowed = {}
        self.pending = None


def clone_all(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of all tensors, by one kernel where torch can fuse them."""
    if len(tensors) < 2:
        return [tensor.clone() for tensor in tensors]
    copies = [torch.empty_like(tensor) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


def _storage_counts(tensors: list[torch.Tensor | None]) -> list[tuple[int, int]]:
    handles = {tensor.untyped_storage()._cdata for tensor in tensors if tensor is not None}
    return [(handle, use_count(handle)) for handle in sorted(handles)]


def _unfinished(*_: Any) -> Any:
    raise StaleGraphError("this graph was closed or never finished")


class Variant:
    """A captured signature: its guard and its slots, in the order in which they are tried."""

    def __init__(self, signature: Signature, body: Any, analysis: Analysis | None, stream: Callable[[], Any]):
        self.signature, self.body, self.analysis = signature, body, analysis
        self.add_checks: Callable[[GuardBuilder, Signature], None] | None = None
        self.slots: list[Slot] = []
        self._stream = stream
        self.guard: Guard | None = None

    def finish(self, home: Any) -> None:
        """Compile the full guard. `home` is the stream that replays must run on."""
        builder = self.signature.builder.copy()
        add_state_checks(builder, self.body.target, copied_parameters=self.body.copied)
        builder.check("stream", "current stream", f"{builder.constant(self._stream)}() == {builder.constant(home)}")
        if self.add_checks is not None:
            self.add_checks(builder, self.signature)
        if self.body.copied:
            builder.check("parameter storage", "parameters", f"{builder.constant(self._parameters_fit)}()")
        self.guard = builder.build()
        for slot in self.slots:
            slot.finish()
        self.by_pointer = {slot.inputs[index].data_ptr(): slot for slot in self.slots for index in slot.borrowed}
        self.borrowed = sorted({index for slot in self.slots for index in slot.borrowed})

    def _parameters_fit(self) -> bool:
        """Copied parameters: the live ones have storage and the captured shape, dtype and requires_grad."""
        for live, alias in zip(self.body.live_parameters(), self.body.aliases):
            if (type(live) is not nn.Parameter or live.shape != alias.shape or live.dtype != alias.dtype
                    or live.device != alias.device or live.requires_grad != alias.requires_grad
                    or (live.numel() and live.data_ptr() == 0)):
                return False
        return True

    def take(self, tensors: tuple[torch.Tensor, ...]) -> Slot | None:
        """A free slot, best the one whose static input this call's argument already is."""
        for index in self.borrowed:
            slot = self.by_pointer.get(tensors[index].data_ptr())
            if slot is not None and slot.free(tensors):
                return slot
        for slot in self.slots:
            if slot.free(tensors):
                return slot
        return None

    def reset(self) -> None:
        for slot in self.slots:
            slot.reset()


def new_statics(signature: Signature, slot_index: int) -> list[torch.Tensor]:
    """Static inputs of a replica: the recorded copies for the first, further copies for the others."""
    return list(signature.statics) if slot_index == 0 else [static_copy(static) for static in signature.statics]
