# SPDX-License-Identifier: Apache-2.0
"""The body of a graph: one module's forward, run on static inputs and on aliases of its parameters.

The aliases share the storage of the real parameters but are leaves of their own. Capture then never meets the
AccumulateGrad nodes of the real parameters, which live on another stream and carry hooks (DDP, FSDP), and an optimizer
step in place is seen by every later replay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from cudagraphs.partial.errors import Unsupported
from cudagraphs.partial.guards import PLAIN_TYPES, TENSOR_TYPES, attribute_snapshot, compile_expression
from cudagraphs.partial.recording import Signature, version_of
from cudagraphs.partial.saved import donors, keeping_graphs, runs_once

METADATA = frozenset(getattr(torch.Tensor, name) for name in (
    "device", "dtype", "is_cuda", "layout", "ndim", "requires_grad", "shape"))
WARMUPS = 3  # eager runs before capture: lazy initialisation, autotuning, then one that is analysed


class Body:
    """The parameters of `target` and how to run its forward on aliases of them.

    Args:
        target: the module. Its own hooks are not run, `forward` is its forward before anything was installed.
        copied: give the graph parameter storage of its own, refreshed at every call (FSDP moves the originals).
    """

    def __init__(self, target: nn.Module, forward: Callable[..., Any], copied: bool):
        self.target, self.forward, self.copied = target, forward, copied
        self.parameters: list[nn.Parameter] = []
        self.aliases: list[nn.Parameter] = []
        self._places: list[tuple[dict[str, Any], str, int]] = []  # every (module._parameters, name) and its alias
        self._buffers = list(target.buffers())
        positions: dict[int, int] = {}
        for module_name, module in target.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in positions:
                    positions[id(parameter)] = len(self.parameters)
                    self.parameters.append(parameter)
                    self.aliases.append(self._alias(f"{module_name}.{name}".lstrip("."), parameter))
                self._places.append((module._parameters, name, positions[id(parameter)]))

    def _alias(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if type(parameter) is not nn.Parameter:
            raise Unsupported(f"parameter {name!r} is a {type(parameter).__name__}, not a plain nn.Parameter")
        if getattr(parameter, "main_grad", None) is not None:
            raise Unsupported(f"parameter {name!r} has a main_grad, which its owner fills outside autograd")
        if parameter.numel() and (parameter.device.type == "meta" or parameter.data_ptr() == 0):
            raise Unsupported(f"parameter {name!r} has no storage of its own here; it is sharded, offloaded or on meta")
        data = parameter.detach()
        alias = nn.Parameter(data.clone() if self.copied else data, requires_grad=parameter.requires_grad)
        alias.__dict__.update(parameter.__dict__)
        return alias

    def live_parameters(self) -> list[nn.Parameter]:
        """The parameters that the module holds now, in the order of `aliases`."""
        live: list[Any] = [None] * len(self.aliases)
        for holder, name, position in self._places:
            live[position] = holder.get(name)
        return live

    @contextlib.contextmanager
    def prepared(self, signature: Signature) -> Iterator[None]:
        """Aliases in place of parameters, and the modes of the recorded call."""
        originals = [(holder, name, holder[name]) for holder, name, _ in self._places]
        training = [(module, module.training) for module, _ in signature.training]
        ambient = signature.ambient
        try:
            for holder, name, position in self._places:
                holder[name] = self.aliases[position]
            for module, flag in signature.training:
                module.training = flag
            with torch.autocast(signature.call.device_type, dtype=ambient.autocast_dtype, enabled=ambient.autocast,
                                cache_enabled=False), torch.set_grad_enabled(ambient.grad and not ambient.inference):
                yield
        finally:
            for module, flag in training:
                module.training = flag
            for holder, name, parameter in originals:
                holder[name] = parameter

    def run(self, signature: Signature, statics: list[torch.Tensor]) -> tuple[list[torch.Tensor], OutputPlan]:
        """Run the forward on static inputs; return its distinct new tensors and how to rebuild the result."""
        with self.prepared(signature):
            args, kwargs = signature.call.rebuild(statics)
            result = self.forward(*args, **kwargs)
        plan = OutputPlan(statics)
        plan.finish(result)
        return plan.outputs, plan

    def differentiable(self, statics: list[torch.Tensor]) -> list[torch.Tensor]:
        """What gradients are taken for: the trainable inputs, then the trainable parameters."""
        return [tensor for tensor in (*statics, *self.aliases) if tensor.requires_grad]

    def foreign_storages(self, statics: list[torch.Tensor]) -> dict[int, str]:
        """Storages that a result must not share memory with, and what they are."""
        kinds = [("an input", statics), ("a parameter", self.aliases), ("a buffer", self._buffers)]
        return {tensor.untyped_storage()._cdata: kind for kind, tensors in kinds for tensor in tensors}

    def buffer_versions(self) -> list[int]:
        return [version_of(buffer) for buffer in self._buffers]

    @contextlib.contextmanager
    def buffers_restored(self) -> Iterator[None]:
        """Put buffers back as they were: warmup and capture must not count as training steps."""
        saved = [buffer.detach().clone() for buffer in self._buffers]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(self._buffers, saved):
                    buffer.copy_(value)


class OutputPlan:
    """How the result of a forward is rebuilt: nesting, constants, and which input is handed through unchanged.

    Attributes:
        outputs: the distinct tensors of the result that are not inputs.
        rebuild: `(outputs, inputs) -> result`, set by `finish`.
    """

    def __init__(self, statics: list[torch.Tensor]):
        self._statics = statics
        self.outputs: list[torch.Tensor] = []
        self._constants: list[Any] = []
        self.expression = ""
        self.rebuild: Callable[[Any, Any], Any] = lambda outputs, inputs: None

    def finish(self, result: Any) -> None:
        self.expression = self._walk(result)
        self.rebuild = compile_expression(self.expression, self._constants, ("o", "x"))

    def _walk(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            if type(value) not in TENSOR_TYPES:
                raise Unsupported(f"forward returns a tensor subclass, {type(value).__name__}")
            for index, static in enumerate(self._statics):
                if static is value:
                    return f"x[{index}]"
            for index, output in enumerate(self.outputs):
                if output is value:
                    return f"o[{index}]"
            self.outputs.append(value)
            return f"o[{len(self.outputs) - 1}]"
        kind = type(value)
        if kind is tuple:
            items = [self._walk(item) for item in value]
            return f"({', '.join(items)}{',' if items else ''})"
        if kind is list:
            return f"[{', '.join(self._walk(item) for item in value)}]"
        if kind is dict and all(isinstance(key, (str, int, bool)) for key in value):
            return f"{{{', '.join(f'{key!r}: {self._walk(item)}' for key, item in value.items())}}}"
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return f"{self._constant(kind)}({', '.join(self._walk(item) for item in value)})"
        if isinstance(value, tuple) and hasattr(kind, "n_sequence_fields"):  # torch.return_types.topk and its like
            return f"{self._constant(kind)}([{', '.join(self._walk(item) for item in value)}])"
        if value is None or isinstance(value, PLAIN_TYPES):
            return self._constant(value)
        raise Unsupported(f"forward returns a {kind.__name__}, which a replay could not build anew")

    def _constant(self, value: Any) -> str:
        self._constants.append(value)
        return f"c{len(self._constants) - 1}"


@dataclass
class Analysis:
    """What the last warmup run showed about a signature.

    Attributes:
        plan: how the result is rebuilt.
        output_count: number of new tensors in it.
        trainable: indices of the outputs that require a gradient.
        saved_outputs, saved_inputs: indices whose memory the backward pass reads.
        reaches: for each differentiable input, the outputs (as positions in `trainable`) it depends on.
        lean: positions in `trainable` that the usual backward covers; None for all of them.
        stateful: the forward drew random numbers or changed a buffer.
        consuming: a replay of the backward takes apart what the forward left for it: another one cannot follow.
        repeatable: several backwards can be captured from one forward.
    """

    plan: OutputPlan
    output_count: int = 0
    trainable: list[int] = field(default_factory=list)
    saved_outputs: list[int] = field(default_factory=list)
    saved_inputs: list[int] = field(default_factory=list)
    reaches: list[frozenset[int]] = field(default_factory=list)
    lean: list[int] | None = None
    stateful: bool = False
    consuming: bool = False
    repeatable: bool = True


def warm_up(body: Any, signature: Signature, backend: Any) -> Analysis:
    """Run forward and backward eagerly until lazy work is done, then once more to see whether a graph can stand for it.

    Raises:
        Unsupported: for host synchronisation, results that alias inputs or module state, changed inputs, rebound
            attributes, and trainable tensors that are neither inputs nor parameters.
    """
    statics, given = signature.statics, signature.call.modules
    if given:
        _check_given(body, signature)
    for _ in range(WARMUPS - 1):
        outputs, _ = body.run(signature, statics)
        donating = bool(donors(outputs))  # not under the hooks below: what they see, torch.compile compiles another time
        _gradients(outputs, body.differentiable(statics))
    del outputs
    saved: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.add(tensor.untyped_storage()._cdata)
        return tensor.detach()

    attributes = attribute_snapshot(body.target, given)
    versions = [version_of(static) for static in statics]
    buffers, random_state = body.buffer_versions(), backend.rng_state()
    try:
        with backend.forbid_sync(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            outputs, plan = body.run(signature, statics)
    except RuntimeError as error:
        if "synchronizing" in str(error).lower():
            raise Unsupported(f"forward waits for the device on the host ({error})") from error
        raise
    _check_side_effects(body, signature, attributes, versions)
    foreign = body.foreign_storages(statics)
    for output in outputs:
        shared = foreign.get(output.untyped_storage()._cdata)
        if shared:
            raise Unsupported(f"forward returns a view of {shared}; a graph would hand out its own copy")
        if output.device.type != signature.call.device_type:
            raise Unsupported(f"forward returns a tensor on {output.device}")
    inputs = body.differentiable(statics)
    _check_leaves(outputs, inputs)
    trainable = [index for index, output in enumerate(outputs) if output.requires_grad]
    analysis = Analysis(plan, len(outputs), trainable)
    analysis.stateful = buffers != body.buffer_versions() or not torch.equal(random_state, backend.rng_state())
    analysis.repeatable = not runs_once(outputs)
    analysis.consuming = donating or not analysis.repeatable
    analysis.saved_outputs = [i for i, output in enumerate(outputs) if output.untyped_storage()._cdata in saved]
    analysis.saved_inputs = [i for i, static in enumerate(statics) if static.untyped_storage()._cdata in saved]
    reached = []
    try:
        with backend.forbid_sync():
            for index in trainable:
                if reached:  # a backward may take its graph apart
                    outputs = body.run(signature, statics)[0]
                reached.append([gradient is not None for gradient in _gradients([outputs[index]], inputs)])
            if trainable and analysis.repeatable and not _runs_again(outputs[trainable[-1]], inputs):
                analysis.repeatable, analysis.consuming = False, True
    except RuntimeError as error:
        if "synchronizing" in str(error).lower():
            raise Unsupported(f"backward waits for the device on the host ({error})") from error
        raise
    analysis.reaches = [frozenset(position for position, found in enumerate(reached) if found[i])
                        for i in range(len(inputs))]
    plan.outputs = []  # the plan outlives this run; its tensors must not
    return analysis


def _gradients(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    trainable = [output for output in outputs if output.requires_grad]
    if not trainable or not inputs:
        return [None] * len(inputs)
    with keeping_graphs(trainable):
        return list(torch.autograd.grad(trainable, inputs, [torch.zeros_like(output) for output in trainable],
                                        retain_graph=True, allow_unused=True))


def _runs_again(output: torch.Tensor, inputs: list[torch.Tensor]) -> bool:
    try:
        _gradients([output], inputs)
    except Exception:  # whatever an autograd function says that has let go of what it saved
        return False
    return True


def _check_side_effects(body: Body, signature: Signature, attributes: dict[str, Any], versions: list[int]) -> None:
    for path, static, version in zip(signature.call.paths, signature.statics, versions):
        if version_of(static) != version:
            raise Unsupported(f"forward changes {path} in place, which a graph would do to its own copy only")
    now = attribute_snapshot(body.target, signature.call.modules)
    for name in attributes.keys() | now.keys():
        if name not in now or name not in attributes:
            raise Unsupported(f"forward adds or removes the attribute {name!r}")
        old, new = attributes[name], now[name]
        if old is not new and not (isinstance(new, PLAIN_TYPES) and type(old) is type(new) and old == new):
            raise Unsupported(f"forward rebinds the attribute {name!r}, which a replay would leave as it is")


def _check_given(body: Any, signature: Signature) -> None:
    """Run once on modules that come as arguments: it must not read their parameters, which are not the graph's and may
    move (FSDP), nor change their buffers."""
    given = signature.call.modules
    own = {id(parameter) for parameter in (*body.parameters, *body.aliases)}
    parameters = {id(parameter): f"{where}.{name}" for where, module in given
                  for name, parameter in module.named_parameters(remove_duplicate=False) if id(parameter) not in own}
    buffers = [(f"{where}.{name}", buffer, version_of(buffer), buffer.detach().clone())
               for where, module in given for name, buffer in module.named_buffers()]
    try:
        with _Readers(parameters):
            body.run(signature, signature.statics)
    finally:
        changed = [name for name, buffer, version, _ in buffers if version_of(buffer) != version]
        with torch.no_grad():
            for _, buffer, version, value in buffers:
                if version_of(buffer) != version:
                    buffer.copy_(value)
    if changed:
        raise Unsupported(f"forward changes {changed[0]}, a buffer of a module that it is called with")


class _Readers(TorchFunctionMode):
    """Refuses what reads one of `parameters` (id to name); to ask one for its shape and the like is no reading."""

    def __init__(self, parameters: dict[int, str]):
        super().__init__()
        self._parameters = parameters

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None):
        if not (getattr(function, "__name__", "") == "__get__" and getattr(function, "__self__", None) in METADATA):
            for value in tree_leaves((args, kwargs)):
                name = self._parameters.get(id(value))
                if name is not None:
                    raise Unsupported(f"forward reads {name}, a parameter of a module that it is called with")
        return function(*args, **(kwargs or {}))


def _check_leaves(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
    """Every trainable leaf behind the outputs must be one whose gradient the graph will return."""
    known = {id(tensor) for tensor in inputs}
    nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            raise Unsupported(f"forward uses a trainable tensor of shape {tuple(variable.shape)} that is neither an "
                              "argument nor a registered parameter of the module")
        nodes.extend(next_node for next_node, _ in node.next_functions if next_node is not None)
