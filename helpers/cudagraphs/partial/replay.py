# SPDX-License-Identifier: Apache-2.0
"""Replay: one `Slot` is one replica of a signature's forward and backward graphs with their static buffers; a `Variant`
is a signature with its slots.

A slot may be replayed only while it is free: the backward of its last forward has run (or its autograd graph is gone),
and nothing outside refers to the memory that a replay would overwrite. So an output kept by the caller, a second
microbatch in flight or a repeated call of a shared module each take another slot, or run eagerly when there is none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import nn

from cudagraphs.partial.body import Analysis
from cudagraphs.partial.copy_nodes import can_feed, feed, is_dense
from cudagraphs.partial.errors import StaleGraphError
from cudagraphs.partial.gradients import Accumulators, make_backward, storage_counts, use_count
from cudagraphs.partial.guards import Guard, GuardBuilder, add_hook_checks, add_state_checks
from cudagraphs.partial.pools import SharedPool
from cudagraphs.partial.recording import Signature, broadcast_index, static_copy
from cudagraphs.partial.saved import keeping_graphs

LARGE = 1 << 20  # bytes; a copy of that size is no longer a matter of launching it


class Slot:
    """One replica of a signature's graphs.

    Args:
        name: of the entry, for messages.
        inputs: static inputs; those in `borrowed` (argument index to producing slot) are another slot's output memory.
        accumulators: memory for parameter gradients that the graphs add to; None leaves that to autograd.
        shared: the pool, with other slots in it; None makes one of this slot's own.
    """

    def __init__(self, name: str, signature: Signature, analysis: Analysis, body: Any, inputs: list[torch.Tensor],
                 borrowed: dict[int, Slot], accumulators: Accumulators | None = None,
                 shared: SharedPool | None = None):
        self.name, self.signature, self.analysis, self.body = name, signature, analysis, body
        self.inputs, self.borrowed, self.accumulators = inputs, borrowed, accumulators
        self.outputs: list[torch.Tensor] = []
        self.grad_outputs: list[torch.Tensor] = []  # one a trainable output
        # One a differentiable input, then, unless the graphs accumulate, one a trainable parameter.
        self.grad_inputs: list[torch.Tensor | None] = []
        self._shared = shared
        self._pool: Any = None if shared is None else shared.handle
        self._place = 0  # of the forward graph in a shared pool
        self._gradients: Gradients = Gradients(self)
        self.forward_graph: Any = None
        self.write_graph: Any = None  # backward of the outputs at the positions `lean`
        self.add_graph: Any = None  # the same, adding to the accumulators
        self.full_graph: Any = None  # backward of all outputs, where `lean` is not all of them
        self.lean: list[int] = []
        self._copy_nodes = False
        self._fed_inputs: list[int] = []  # filled by copy nodes of the forward graph
        self.fed_sinks: list[int] = []  # positions filled by copy nodes of the graphs for `lean`
        self.extra_arguments = 0  # of the autograd node, after the inputs: parameters, or an anchor
        self.pending: weakref.ref | None = None  # the autograd node of the last forward, until its backward has run
        self.ticket = 0  # changes whenever the static buffers no longer belong to an earlier forward
        # (storage, references of our own): above that, somebody else looks at our memory. All that is handed out are
        # aliases, so whoever keeps one, or a view of it, shows up on its storage.
        self.watched: list[tuple[int, int]] = []
        self.parameters_exposed = False  # static gradients of parameters were handed out as they are
        self.sink_watch: list[list[tuple[int, int]]] = []
        self._gradient_watch: list[tuple[int, int]] = []
        self._parameter_watch: list[tuple[int, int]] = []
        self._storages: dict[int, Any] = {}
        self._lenders = [(index, inputs[index].data_ptr(), producer) for index, producer in borrowed.items()]
        # Inputs to outputs: a sequence of tensors, or the bare tensor where there is one only.
        self.launch: Callable[[tuple[torch.Tensor, ...]], Any] = _unfinished

    # Capture

    def capture_forward(self, backend: Any) -> None:
        """Capture the forward pass, in a memory pool of this slot's own unless it was given a shared one.

        Results of a later capture may lie where an earlier graph of the pool keeps temporaries: replaying the earlier
        one while somebody still needs the later results would destroy them. Within a slot that cannot happen, since it
        is replayed only while all of its results are let go; across slots `SharedPool` sees to it.
        """
        def run() -> list[torch.Tensor]:
            return self.body.run(self.signature, self.inputs)[0]

        self._copy_nodes = getattr(backend, "copy_nodes", False)
        if self._copy_nodes:
            self._fed_inputs = [index for index, static in enumerate(self.inputs)
                                if index not in self.borrowed and can_feed(static)]
        if self._shared is None:
            self._pool = backend.pool()
        else:
            self._place = self._shared.place(self)
        self.forward_graph = backend.capture(run, self._pool, **self._copies(self.inputs, self._fed_inputs))
        self.outputs = self.forward_graph.outputs
        if self._shared is not None:
            self.forward_graph.replay = self._shared.noted(self.forward_graph.replay, self._place)

    def capture_backward(self, backend: Any, grad_outputs: list[torch.Tensor], shared: Set[int]) -> None:
        """Capture the backward pass. `retain_graph` keeps what it reads out of the pool's free list, so that it can be
        replayed again, and by another graph of this slot.

        Args:
            grad_outputs: where the incoming gradients are read from, one a trainable output.
            shared: positions of those that are gradients which another slot hands out.
        """
        pool = self._pool
        self.grad_outputs = grad_outputs
        trainable = self.analysis.trainable
        self.lean = self.analysis.lean if self.analysis.lean is not None else list(range(len(trainable)))
        if self._copy_nodes:
            self.fed_sinks = [position for position in self.lean
                              if position not in shared and can_feed(grad_outputs[position])]
        feeds = self._copies(grad_outputs, self.fed_sinks)
        differentiable = self.body.differentiable(self.inputs)
        split = self._split()
        buffers = self.accumulators.buffers if self.accumulators is not None else []
        receiving = [at for at, reached in enumerate(self.analysis.reaches) if at >= split and reached]

        def gradients(outputs: list[torch.Tensor], positions: list[int]) -> list[torch.Tensor | None]:
            reached = [outputs[trainable[position]] for position in positions]
            with keeping_graphs(reached):
                return list(torch.autograd.grad(reached, differentiable,
                                                [grad_outputs[position] for position in positions], retain_graph=True,
                                                allow_unused=True))

        def stored(outputs: list[torch.Tensor], positions: list[int], put: Callable[..., Any],
                   put_all: Callable[..., Any]) -> list[torch.Tensor | None]:
            """The gradients of the inputs; those of the parameters go to the accumulators. Large ones go as soon as
            they are there, which frees their memory for the rest of the pass, the small ones together at its end."""
            hooks = []
            for at, buffer in zip(receiving, buffers):
                if buffer.nbytes >= LARGE:
                    hooks.append(differentiable[at].register_hook(_put_away(buffer, put)))
            try:
                found = gradients(outputs, positions)
            finally:
                for hook in hooks:
                    hook.remove()
            left = [(buffer, found[at]) for at, buffer in zip(receiving, buffers)
                    if found[at] is not None and found[at].data_ptr() != buffer.data_ptr()]
            if left:
                put_all(*map(list, zip(*left)))
            return found[:split]

        def write(outputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
            if not buffers:
                found = gradients(outputs, self.lean)
            else:
                found = stored(outputs, self.lean, torch.Tensor.copy_, torch._foreach_copy_)
            return _own_memory(found, grad_outputs)

        def overwrite(positions: list[int], put: Callable[..., Any],
                      put_all: Callable[..., Any]) -> Callable[..., list]:
            """A further graph whose gradients go where those of `write` went."""
            def run(outputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
                found = stored(outputs, positions, put, put_all) if buffers else gradients(outputs, positions)
                targets = [static for static in self.grad_inputs if static is not None]
                values = [gradient for gradient, static in zip(found, self.grad_inputs) if static is not None]
                if targets:
                    torch._foreach_copy_(targets, values)
                return []
            return run

        place = 0 if self._shared is None else self._shared.place(self._gradients)
        drains = self._drains()
        self.write_graph = backend.capture(write, pool, self.forward_graph, **feeds,
                                           **({"drains": drains} if drains else {}))
        self.grad_inputs = self.write_graph.outputs
        if buffers:
            adding = overwrite(self.lean, torch.Tensor.add_, torch._foreach_add_)
            self.add_graph = backend.capture(adding, pool, self.forward_graph, **feeds)
        if len(self.lean) < len(trainable):
            everything = overwrite(list(range(len(trainable))), torch.Tensor.copy_, torch._foreach_copy_)
            self.full_graph = backend.capture(everything, pool, self.forward_graph)
        if self._shared is not None:
            for graph in (self.write_graph, self.add_graph, self.full_graph):
                if graph is not None:
                    graph.replay = self._shared.guarded(graph.replay, place)

    @staticmethod
    def _copies(statics: list[torch.Tensor], places: list[int]) -> dict[str, Any]:
        """The argument `feeds` of a capture, where there is something to feed."""
        return {"feeds": [statics[place] for place in places]} if places else {}

    def received(self) -> list[int]:
        """Which trainable parameters, by their place among those, the outputs depend on."""
        reaches = self.analysis.reaches[self._split():]
        return [place for place, reached in enumerate(reaches) if reached]

    def _drains(self) -> dict[int, int]:
        """The gradients of parameters that copy nodes bring to fresh memory: place among `grad_inputs` to bytes."""
        if not self._copy_nodes or self.accumulators is not None:
            return {}
        parameters = [alias for alias in self.body.aliases if alias.requires_grad]
        receivers = {self._split() + place: parameters[place] for place in self.received()}
        if any(parameter.is_complex() or not parameter.numel() for parameter in receivers.values()):
            return {}
        return {place: parameter.nbytes for place, parameter in receivers.items()}

    def finish(self) -> None:
        """Build the replay functions. `settle` must follow once every slot of the manager is finished."""
        returned = [gradient for gradient in self.grad_inputs if gradient is not None]
        storages = [tensor.untyped_storage() for tensor in (*self.outputs, *returned, *self.grad_outputs)]
        self._storages = {storage._cdata: storage for storage in storages}
        self.launch = self._trainable_launch() if self.analysis.trainable else self._plain_launch()

    def settle(self, returned: set[int]) -> None:
        """Take the reference counts that mean "nobody else looks at this memory".

        Args:
            returned: the storages of the gradients that any slot hands out; some of them are the memory of our sinks.
        """
        split = self._split()
        self._gradient_watch = storage_counts(self.grad_inputs[:split])
        self.watched = storage_counts([*self.outputs, *self.grad_inputs[:split]])
        self._parameter_watch = storage_counts(self.grad_inputs[split:])
        self.sink_watch = [storage_counts([sink]) if sink.untyped_storage()._cdata in returned else []
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
        return not self.parameters_exposed or self._parameters_idle()

    def _parameters_idle(self) -> bool:
        for handle, own in self._parameter_watch:
            if use_count(handle) > own:
                return False
        self.parameters_exposed = False
        return True

    def gradients_idle(self) -> bool:
        """Whether nobody looks at the gradients that the last backward handed out."""
        for handle, own in self._gradient_watch:
            if use_count(handle) > own:
                return False
        return not self.parameters_exposed or self._parameters_idle()

    def free(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """`idle`, and the memory borrowed from another slot either holds these very inputs or is idle there."""
        if not self.idle() or (self._shared is not None and not self._shared.free_after(self._place)):
            return False
        for index, pointer, producer in self._lenders:
            if tensors[index].data_ptr() != pointer and not producer.idle():
                return False
        return True

    def _plain_launch(self) -> Callable[[tuple[torch.Tensor, ...]], Any]:
        """Replay without autograd: copy in, replay, hand out aliases of the static outputs."""
        load, replay, outputs = self._loader(), self.forward_graph.replay, self.outputs
        recorded = self.signature.ambient.grad and any(static.requires_grad for static in self.inputs)
        only = outputs[0] if len(outputs) == 1 else None

        def launch(tensors: tuple[torch.Tensor, ...]) -> Any:
            if recorded:  # or the copies would become part of the caller's autograd graph
                with torch.no_grad():
                    load(tensors)
            else:
                load(tensors)
            replay()
            if only is not None:
                return only.detach()
            return [output.detach() for output in outputs]

        return launch

    def _trainable_launch(self) -> Callable[[tuple[torch.Tensor, ...]], Any]:
        """Replay through an autograd node that connects to the inputs and, unless the graphs accumulate, to the
        trainable parameters."""
        body = self.body
        trainable = [position for position, alias in enumerate(body.aliases) if alias.requires_grad]
        trainable = [trainable[place] for place in self.received()]
        if body.copied:
            self.extra_arguments = len(trainable)
            apply = self._node()

            def launch(tensors: tuple[torch.Tensor, ...]) -> Any:
                live = body.live_parameters()
                return apply(*tensors, *[live[position] for position in trainable])

            return launch
        if self.accumulators is None:
            arguments = tuple(body.parameters[position] for position in trainable)
        elif any(static.requires_grad for static in self.inputs):
            arguments = ()
        else:  # something must ask autograd for a node
            arguments = (torch.zeros((), device=self.outputs[0].device, requires_grad=True),)
        self.extra_arguments = len(arguments)
        apply = self._node()
        return lambda tensors: apply(*tensors, *arguments)

    def _loader(self) -> Callable[[tuple[torch.Tensor, ...]], None]:
        """A function that brings the arguments into the static inputs: it aims the copy nodes, and copies the others,
        except those that are there already, in one fused call."""
        statics = [static.detach() for static in self.inputs]
        fed = [(index, node, statics[index]) for index, node in zip(self._fed_inputs, self.forward_graph.feeds)]
        copies = [alias.detach() for alias in self.body.aliases] if self.body.copied else []
        others = [index for index in range(len(statics)) if index not in self._fed_inputs]
        copy_others = self._copier(statics, others, copies)
        if len(fed) == 1 and not others and not copies:
            (_, node, static), = fed

            def load_one(tensors: tuple[torch.Tensor, ...]) -> None:
                tensor = tensors[0]
                if tensor.data_ptr() != node.address and not feed((node,), tensor, static):
                    static.copy_(tensor)

            return load_one
        if not fed:
            return copy_others

        def load(tensors: tuple[torch.Tensor, ...]) -> None:
            for index, node, static in fed:
                tensor = tensors[index]
                if tensor.data_ptr() != node.address and not feed((node,), tensor, static):
                    static.copy_(tensor)
            copy_others(tensors)

        return load

    def _copier(self, statics: list[torch.Tensor], places: list[int],
                copies: list[torch.Tensor]) -> Callable[[tuple[torch.Tensor, ...]], None]:
        """A function that copies the arguments at `places` into their statics, and live parameters into `copies`."""
        cuts = [broadcast_index(statics[index]) for index in places]
        targets = [(index, static if cut is None else static[cut], static.data_ptr(), cut)
                   for index, cut in zip(places, cuts) for static in (statics[index],)]
        if len(targets) == 1 and cuts[0] is None and not copies:
            (place, target, pointer, _), = targets

            def copy_one(tensors: tuple[torch.Tensor, ...]) -> None:
                tensor = tensors[place]
                if tensor.data_ptr() != pointer:
                    target.copy_(tensor)

            return copy_one

        def copy(tensors: tuple[torch.Tensor, ...]) -> None:
            into, values = [], []
            for index, target, pointer, cut in targets:
                tensor = tensors[index]
                if tensor.data_ptr() != pointer:
                    into.append(target)
                    values.append(tensor if cut is None else tensor[cut])
            if copies:
                into += copies
                values += self.body.live_parameters()
            if len(into) == 1:
                into[0].copy_(values[0])
            elif into:
                torch._foreach_copy_(into, values)

        return copy

    def _node(self) -> Callable[..., Any]:
        """Apply the autograd node of this slot. It saves nothing: what backward needs is in the static buffers."""
        slot, load, backward = self, self._loader(), make_backward(self)
        replay, outputs, reference = self.forward_graph.replay, self.outputs, weakref.ref
        plain = [index for index in range(len(outputs)) if index not in self.analysis.trainable]
        watched = [outputs[index] for index in self.analysis.saved_outputs]
        borrowed = [(index, pointer, self.inputs[index]) for index, pointer, _ in self._lenders]
        read = [at for at, (index, _, _) in enumerate(borrowed) if index in self.analysis.saved_inputs]
        wanted = [index for index, static in enumerate(self.inputs) if static.requires_grad]
        only = outputs[0] if len(outputs) == 1 else None

        class Replay(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...] | torch.Tensor:
                load(tensors)
                replay()
                ctx.materialize_grads = False
                slot.pending = reference(ctx)
                slot.ticket = ctx.ticket = slot.ticket + 1
                # A leaf adopts its gradient as .grad, and would keep the slot taken with it.
                ctx.leaves = None
                for index in wanted:
                    if tensors[index].is_leaf:
                        ctx.leaves = [index, *(ctx.leaves or ())]
                if borrowed:
                    # The producer of this memory stays taken while our backward may read it.
                    ctx.held = held = []
                    for index, pointer, static in borrowed:
                        tensor = tensors[index]
                        held.append(tensor if tensor.data_ptr() == pointer else static.detach())
                    if read:
                        ctx.held_versions = [held[at]._version for at in read]
                # Outputs leave as tensors of their own over the static memory; `detach` shares the version, which tells
                # of changes in place, `data` is cheaper.
                if watched:
                    ctx.versions = [output._version for output in watched]
                    results = tuple([output.detach() for output in outputs])
                elif only is not None:
                    return only.data
                else:
                    results = tuple([output.data for output in outputs])
                if only is not None:
                    return results[0]
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
                if read and ctx.held_versions != [ctx.held[at]._version for at in read]:
                    raise StaleGraphError(f"{slot.name}: an input that backward needs was changed in place")
                result = backward(gradients, ctx.leaves)
                if borrowed and slot.pending is None:
                    ctx.held = ()
                return result

        # Straight to the C++ sides: Python's `apply` of both classes only looks for transforms of torch.func, which the
        # guards exclude, and for other ways to define a node.
        Replay._backward_cls.apply = Replay.backward
        return super(torch.autograd.Function, Replay).apply

    def reset(self) -> None:
        """Free the graphs. Safe to call again; the slot must not be replayed afterwards."""
        self.launch = _unfinished
        for graph in (self.full_graph, self.add_graph, self.write_graph, self.forward_graph):
            if graph is not None:
                graph.reset()
        self.ticket += 1
        self.outputs, self.grad_outputs, self.grad_inputs, self.inputs = [], [], [], []
        self.watched, self._gradient_watch, self._parameter_watch, self.sink_watch = [], [], [], []
        self._storages = {}
        self.borrowed, self._lenders, self.accumulators, self.pending = {}, [], None, None


class Gradients:
    """The gradients of a slot as `pools.Results`."""

    def __init__(self, slot: Slot):
        self._slot = slot

    def idle(self) -> bool:
        return self._slot.gradients_idle()

    def tensors(self) -> list[torch.Tensor]:
        return [gradient for gradient in self._slot.grad_inputs if gradient is not None]


def _own_memory(gradients: list[torch.Tensor | None], sinks: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Every gradient in memory that no other one and no incoming one has a part of, each element at its own address.

    Autograd returns one tensor for both terms of a sum, passes an incoming gradient on, or returns an expanded one; a
    further graph, a copy node or whoever keeps one of them needs it for itself.
    """
    taken = {sink.untyped_storage()._cdata for sink in sinks}
    result: list[torch.Tensor | None] = []
    for gradient in gradients:
        if gradient is not None:
            gradient = gradient.resolve_neg().resolve_conj()
            if not is_dense(gradient) or gradient.untyped_storage()._cdata in taken:
                gradient = gradient.clone(memory_format=torch.contiguous_format if not is_dense(gradient)
                                          else torch.preserve_format)
            taken.add(gradient.untyped_storage()._cdata)
        result.append(gradient)
    return result


def _put_away(buffer: torch.Tensor, put: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[..., torch.Tensor]:
    """A tensor hook that copies or adds a gradient to `buffer` and goes on with that."""
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        put(buffer, gradient)
        return buffer

    return hook


def _unfinished(*_: Any) -> Any:
    raise StaleGraphError("this graph was closed or never finished")


class Variant:
    """A captured signature: its guard and its slots, in the order in which they are tried."""

    def __init__(self, signature: Signature, body: Any, analysis: Analysis | None, stream: Callable[[], Any]):
        self.signature, self.body, self.analysis = signature, body, analysis
        self.add_checks: Callable[[GuardBuilder, Signature], None] | None = None
        self.accumulators: Accumulators | None = None
        self.slots: list[Slot] = []
        self._stream = stream
        self.guard: Guard | None = None

    def build_guard(self, home: Any) -> GuardBuilder:
        """All checks of the signature, its module and the ambient state. `home` is the stream replays must run on."""
        builder = self.signature.builder.copy()
        add_state_checks(builder, self.body.target, copied_parameters=self.body.copied)
        for _, module in self.signature.call.modules:
            add_state_checks(builder, module, copied_parameters=True)
        if self.accumulators is not None:
            add_hook_checks(builder, self.accumulators.parameters)
        builder.check("stream", "current stream", f"{builder.constant(self._stream)}() == {builder.constant(home)}")
        if self.add_checks is not None:
            self.add_checks(builder, self.signature)
        if self.body.copied:
            builder.check("parameter storage", "parameters", f"{builder.constant(self._parameters_fit)}()")
        return builder

    def finish(self, home: Any) -> None:
        """Compile the guard and the replay functions."""
        self.guard = self.build_guard(home).build()
        for slot in self.slots:
            slot.finish()
        if len(self.slots) == 1:  # nothing to choose
            only = self.slots[0]
            self.take = lambda tensors: only if only.free(tensors) else None
        self.by_pointer = {slot.inputs[index].data_ptr(): slot for slot in self.slots for index in slot.borrowed}
        self.borrowed = sorted({index for slot in self.slots for index in slot.borrowed})

    def runner(self) -> Callable[[Any, tuple[torch.Tensor, ...]], Any]:
        """`(slot, tensors) -> result of the module`."""
        plan = self.analysis.plan if self.analysis is not None else None
        if plan is None:
            return lambda slot, tensors: slot.launch(tensors)
        if plan.expression == "o[0]":
            return lambda slot, tensors: slot.launch(tensors)
        rebuild = plan.rebuild
        if self.analysis.output_count == 1:
            return lambda slot, tensors: rebuild((slot.launch(tensors),), tensors)
        return lambda slot, tensors: rebuild(slot.launch(tensors), tensors)

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
