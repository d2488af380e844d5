# SPDX-License-Identifier: Apache-2.0
"""Guards: what a call must look like for a captured graph to stand for it, compiled into one flat function.

A captured graph replays the addresses, shapes and Python decisions of one call. `GuardBuilder` collects one list of
checks over a sample call, over the state of the module and over the ambient switches of torch, and compiles it twice:
`match` for the hot path (returns the tensors, or None) and `explain` for the cold one (returns the first check that
fails). Both come from the same list, so they cannot disagree.
"""

from __future__ import annotations

import enum
import math
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from cudagraphs.partial.errors import Unsupported

# Compared by type and value. Everything else is compared by identity plus a shallow look at its attributes.
PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), type(...), enum.Enum, torch.dtype, torch.device,
               torch.layout, torch.memory_format, torch.Size, slice, range)
TENSOR_TYPES = (torch.Tensor, nn.Parameter)
HOOK_DICTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = tuple(getattr(nn_module, name) for name in (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks"))
# Attributes of nn.Module that guards of their own watch, or that no forward pass reads.
MODULE_INTERNALS = frozenset(vars(nn.Module())) | {"forward"}


@dataclass(frozen=True)
class Mismatch:
    """The first check that a call failed: its place in the list, the reason's short name, and where it was."""

    position: int
    reason: str
    where: str


@dataclass(frozen=True)
class Guard:
    """A compiled guard.

    `match(args, kwargs)` returns the distinct tensors of the call in order of first use, or None. `explain(args,
    kwargs)` returns a `Mismatch`, or None where `match` would succeed. `source` is the text that was compiled.
    """

    match: Callable[[tuple, dict], tuple[torch.Tensor, ...] | None]
    explain: Callable[[tuple, dict], Mismatch | None]
    source: str


@dataclass
class GuardBuilder:
    """Collects checks and bindings in order, then compiles them. Copy it (`copy()`) to extend a finished list."""

    steps: list[tuple[str, str, str, str]] = field(default_factory=list)  # (kind, name or reason, where, expression)
    constants: list[Any] = field(default_factory=list)
    tensors: list[str] = field(default_factory=list)  # variable name of each distinct tensor

    def copy(self) -> GuardBuilder:
        return GuardBuilder(list(self.steps), list(self.constants), list(self.tensors))

    def without(self, reasons: frozenset[str]) -> GuardBuilder:
        """The same without the checks for `reasons`, where the caller knows the tensors by identity."""
        kept = [step for step in self.steps if step[0] == "bind" or step[1] not in reasons]
        return GuardBuilder(kept, list(self.constants), list(self.tensors))

    def constant(self, value: Any) -> str:
        self.constants.append(value)
        return f"c{len(self.constants) - 1}"

    def bind(self, expression: str) -> str:
        name = f"v{len(self.steps)}"
        self.steps.append(("bind", name, "", expression))
        return name

    def check(self, reason: str, where: str, expression: str) -> None:
        self.steps.append(("check", reason, where, expression))

    def build(self) -> Guard:
        parameters = ", ".join(f"c{i}" for i in range(len(self.constants)))
        result = f"({', '.join(self.tensors)}{',' if self.tensors else ''})"
        fast, slow, pending = [], [], []
        for position, (kind, name, where, expression) in enumerate(self.steps):
            if kind == "check":
                pending.append(expression)
                slow += ["try:", f"    if not ({expression}): return Mismatch({position}, {name!r}, {where!r})",
                         f"except KeyError: return Mismatch({position}, {name!r}, {where!r})"]
                continue
            if pending:
                fast.append(f"if not ({' and '.join(pending)}): return None")
                pending = []
            fast.append(f"{name} = {expression}")
            slow.append(f"{name} = {expression}")
        if pending:
            fast.append(f"if not ({' and '.join(pending)}): return None")
        body = "\n        ".join
        fast = [f"    {line}" for line in fast]  # a deleted attribute raises KeyError, which costs nothing until then
        source = (f"def make({parameters}):\n"
                  f"    def match(args, kwargs):\n        try:\n        "
                  f"{body([*fast, f'    return {result}', 'except KeyError: return None'])}\n"
                  f"    def explain(args, kwargs):\n        {body([*slow, 'return None'])}\n"
                  f"    return match, explain\n")
        scope: dict[str, Any] = {"Mismatch": Mismatch, "copysign": math.copysign, "same_object": same_object,
                                 "grad_enabled": torch.is_grad_enabled, "inference": torch.is_inference_mode_enabled,
                                 "autocast": torch.is_autocast_enabled, "autocast_dtype": torch.get_autocast_dtype,
                                 "dispatch_modes": torch._C._len_torch_dispatch_stack,
                                 "transforms": torch._C._are_functorch_transforms_active}
        exec(compile(source, "<partial graph guard>", "exec"), scope)  # noqa: S102 - our own text
        match, explain = scope["make"](*self.constants)
        return Guard(match, explain, source)


def same_object(value: Any, expected: Any, attributes: dict[str, Any] | None) -> bool:
    """Whether `value` is `expected` and none of its attributes was rebound since the sample call."""
    if value is not expected:
        return False
    if attributes is None:
        return True
    now = vars(value)
    return len(now) == len(attributes) and all(now.get(key, attributes) is item for key, item in attributes.items())


def is_pybind_enum(value: Any) -> bool:
    """Transformer Engine returns a fresh wrapper object for an equal enum value: compare those by number."""
    members = getattr(type(value), "__members__", None)
    return isinstance(members, dict) and hasattr(type(value), "__int__") and getattr(value, "name", None) in members


def has_base_layout(tensor: torch.Tensor) -> bool:
    """Whether every element has an address of its own once dimensions of stride 0 are cut to length 1."""
    pairs = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride()) if size > 1 and stride != 0)
    reach = 0
    for stride, size in pairs:
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


class CallGuard:
    """The argument part of a guard: built from one sample call, it can match, explain and rebuild calls like it.

    Args:
        args, kwargs: the call, with tensors (strided, plain `torch.Tensor` or `nn.Parameter`, on `device_type`) in any
            nesting of tuples, named tuples, lists and dicts beside plain values.

    Attributes:
        tensors: the distinct tensors of the sample, in order of first use.
        paths: where each of them was first seen, such as `args[0]`.
        modules: the modules among the arguments, with where they were seen.

    Raises:
        Unsupported: where an argument cannot be guarded or copied faithfully.
    """

    def __init__(self, args: tuple, kwargs: dict[str, Any], device_type: str):
        self.device_type = device_type
        self.builder = GuardBuilder()
        self.tensors: list[torch.Tensor] = []
        self.paths: list[str] = []
        self.modules: list[tuple[str, nn.Module]] = []
        self._rebuild_constants: list[Any] = []
        self.builder.check("structure", "args", f"len(args) == {len(args)}")
        self.builder.check("structure", "kwargs", f"len(kwargs) == {len(kwargs)}")
        positional = [self._walk(value, f"args[{i}]", f"args[{i}]") for i, value in enumerate(args)]
        keywords = []
        for key, value in kwargs.items():
            self.builder.check("structure", f"kwargs[{key!r}]", f"{key!r} in kwargs")
            keywords.append(f"{key!r}: {self._walk(value, f'kwargs[{key!r}]', f'kwargs[{key!r}]')}")
        self.rebuild = compile_expression(
            f"([{', '.join(positional)}], {{{', '.join(keywords)}}})", self._rebuild_constants, ("t",))

    def _constant(self, value: Any) -> str:
        self._rebuild_constants.append(value)
        return f"c{len(self._rebuild_constants) - 1}"

    def _walk(self, value: Any, expression: str, where: str) -> str:
        """Add the checks for `value`; return the expression that rebuilds it from the tensors `t`."""
        if isinstance(value, torch.Tensor):
            return self._walk_tensor(value, expression, where)
        build = self.builder
        kind = type(value)
        if kind in (tuple, list) or (isinstance(value, tuple) and hasattr(kind, "_fields")):
            name = build.bind(expression)
            build.check("structure", where, f"type({name}) is {build.constant(kind)}")
            build.check("structure", where, f"len({name}) == {len(value)}")
            items = [self._walk(item, f"{name}[{i}]", f"{where}[{i}]") for i, item in enumerate(value)]
            if kind is tuple:
                return f"({', '.join(items)}{',' if items else ''})"
            return f"[{', '.join(items)}]" if kind is list else f"{self._constant(kind)}({', '.join(items)})"
        if kind is dict:
            if not all(isinstance(key, (str, int, bool)) for key in value):
                raise Unsupported(f"{where} is a dict whose keys are not strings or integers")
            name = build.bind(expression)
            build.check("structure", where, f"type({name}) is dict")
            build.check("structure", where, f"len({name}) == {len(value)}")
            items = []
            for key, item in value.items():
                build.check("structure", f"{where}[{key!r}]", f"{key!r} in {name}")
                items.append(f"{key!r}: {self._walk(item, f'{name}[{key!r}]', f'{where}[{key!r}]')}")
            return f"{{{', '.join(items)}}}"
        self._check_plain(value, expression, where)
        return self._constant(value)

    def _check_plain(self, value: Any, expression: str, where: str) -> None:
        build = self.builder
        if value is None or isinstance(value, bool) or value is ...:
            build.check("argument", where, f"{expression} is {build.constant(value)}")
        elif isinstance(value, PLAIN_TYPES):
            name = build.bind(expression)
            build.check("argument", where, f"type({name}) is {build.constant(type(value))}")
            if isinstance(value, float) and value != value:
                build.check("argument", where, f"{name} != {name}")
                return
            build.check("argument", where, f"{name} == {build.constant(value)}")
            if isinstance(value, float) and value == 0.0:
                build.check("argument", where, f"copysign(1.0, {name}) == {math.copysign(1.0, value)}")
        elif is_pybind_enum(value):
            name = build.bind(expression)
            build.check("argument", where, f"type({name}) is {build.constant(type(value))}")
            build.check("argument", where, f"int({name}) == {int(value)}")
        else:
            self._check_opaque(value, expression, where)

    def _check_opaque(self, value: Any, expression: str, where: str) -> None:
        if isinstance(value, nn.Module):  # what it holds is watched by `add_state_checks`, once it is captured
            self.builder.check("argument", where, f"{expression} is {self.builder.constant(value)}")
            self.modules.append((where, value))
            return
        if isinstance(value, (types.GeneratorType, set, bytearray)) or hasattr(value, "__next__"):
            raise Unsupported(f"{where} is a {type(value).__name__}; its content cannot be guarded")
        attributes = None
        if not isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
            attributes = dict(vars(value)) if hasattr(value, "__dict__") else None
            held = [key for key, item in (attributes or {}).items() if holds_tensor(item)]
            if held:
                raise Unsupported(f"{where} is a {type(value).__name__} that holds tensors ({', '.join(held[:3])}) "
                                  "out of the guards' sight, such as a key-value cache")
        build = self.builder
        build.check("argument", where, f"same_object({expression}, {build.constant(value)}, "
                                       f"{build.constant(attributes)})")

    def _walk_tensor(self, tensor: torch.Tensor, expression: str, where: str) -> str:
        build = self.builder
        for index, known in enumerate(self.tensors):
            if known is tensor:
                build.check("aliasing", where, f"{expression} is {build.tensors[index]}")
                return f"t[{index}]"
        if type(tensor) not in TENSOR_TYPES:
            raise Unsupported(f"{where} is a tensor subclass, {type(tensor).__name__}")
        if tensor.device.type != self.device_type:
            raise Unsupported(f"{where} is on {tensor.device}; a graph would keep the values it has at capture")
        if tensor.layout is not torch.strided:
            raise Unsupported(f"{where} has the layout {tensor.layout}")
        if tensor.is_neg() or tensor.is_conj():
            raise Unsupported(f"{where} is a view whose values are negated or conjugated when they are read")
        if not has_base_layout(tensor):
            raise Unsupported(f"{where} has elements that share memory (shape {tuple(tensor.shape)}, stride "
                              f"{tensor.stride()})")
        name = build.bind(expression)
        for reason, check in (
            ("structure", f"type({name}) is {build.constant(type(tensor))}"),
            ("shape", f"{name}.shape == {build.constant(tensor.shape)}"),
            ("dtype", f"{name}.dtype is {build.constant(tensor.dtype)}"),
            ("device", f"{name}.device == {build.constant(tensor.device)}"),
            ("layout", f"{name}.layout is {build.constant(tensor.layout)}"),
            ("strides", f"{name}.stride() == {build.constant(tuple(tensor.stride()))}"),
            ("requires_grad", f"{name}.requires_grad is {tensor.requires_grad}"),
            ("lazy values", f"not {name}.is_neg()"),
        ):
            build.check(reason, where, check)
        if tensor.is_complex():
            build.check("lazy values", where, f"not {name}.is_conj()")
        for other in build.tensors:
            build.check("aliasing", where, f"{name} is not {other}")
        build.tensors.append(name)
        self.tensors.append(tensor)
        self.paths.append(where)
        return f"t[{len(self.tensors) - 1}]"


def holds_tensor(value: Any) -> bool:
    """Whether `value` is a tensor or a builtin container with one inside (one level of nesting each)."""
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, dict):
        return any(holds_tensor(item) for item in value.values())
    return isinstance(value, (list, tuple, set)) and any(holds_tensor(item) for item in value)


def compile_expression(expression: str, constants: Sequence[Any], arguments: Sequence[str]) -> Callable[..., Any]:
    """Compile `expression` over `arguments` and the constants c0, c1, ..."""
    parameters = ", ".join(f"c{i}" for i in range(len(constants)))
    scope: dict[str, Any] = {}
    exec(f"def make({parameters}):\n    return lambda {', '.join(arguments)}: {expression}\n", scope)  # noqa: S102
    return scope["make"](*constants)


@dataclass(frozen=True)
class Ambient:
    """The switches of torch that change what a forward pass computes or records."""

    grad: bool
    inference: bool
    autocast: bool
    autocast_dtype: torch.dtype

    @classmethod
    def now(cls, device_type: str) -> Ambient:
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled(device_type),
                   torch.get_autocast_dtype(device_type))

    def add_checks(self, build: GuardBuilder, device_type: str) -> None:
        build.check("grad mode", "torch.is_grad_enabled()", f"grad_enabled() is {self.grad}")
        build.check("grad mode", "torch.is_inference_mode_enabled()", f"inference() is {self.inference}")
        build.check("autocast", f"torch.is_autocast_enabled({device_type!r})",
                    f"autocast({device_type!r}) is {self.autocast}")
        if self.autocast:
            build.check("autocast", f"torch.get_autocast_dtype({device_type!r})",
                        f"autocast_dtype({device_type!r}) is {build.constant(self.autocast_dtype)}")
        build.check("dispatch mode", "torch dispatch mode", "dispatch_modes() == 0")
        build.check("transform", "torch.func transform", "transforms() is False")


def training_flags(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, bool]]:
    """Each of the modules, and of those inside them, with its mode."""
    return [(module, module.training) for one in modules for module in one.modules()]


def add_training_checks(build: GuardBuilder, target: nn.Module) -> None:
    for name, module in target.named_modules():
        state = f"{build.constant(vars(module))}['training']"
        if "training" not in vars(module):  # torch.compile's wrapper looks at the module inside
            state = f"{build.constant(module)}.training"
        build.check("training mode", name or "module", f"{state} is {module.training}")


def add_state_checks(build: GuardBuilder, target: nn.Module, *, copied_parameters: bool) -> None:
    """Watch all that a graph of `target` bakes in: storage of parameters, buffers and tensor attributes, plain
    attributes, submodules, and hooks on submodules (hooks on the target itself run eagerly around the graph).

    With `copied_parameters` the parameters are copied into the graph at every call, or not read by it, so their address
    may change.
    """
    build.check("hooks", "global module hooks", "not (" + " or ".join(build.constant(h) for h in GLOBAL_HOOKS) + ")")
    for name, module in target.named_modules():
        label = name or "module"
        state = build.constant(vars(module))
        if module is not target:
            hooks = " or ".join(build.constant(getattr(module, name)) for name in HOOK_DICTS)
            build.check("hooks", label, f"not ({hooks})")
        children = build.constant(module._modules)
        build.check("submodules", label, f"len({children}) == {len(module._modules)}")
        for key, child in module._modules.items():
            build.check("submodules", f"{label}.{key}", f"{children}[{key!r}] is {build.constant(child)}")
        parameters = build.constant(module._parameters)
        build.check("parameter storage", label, f"len({parameters}) == {len(module._parameters)}")
        for key, parameter in module._parameters.items():
            if parameter is None or not copied_parameters:
                _check_storage(build, "parameter storage", f"{label}.{key}", f"{parameters}[{key!r}]", parameter)
        buffers = build.constant(module._buffers)
        build.check("buffer storage", label, f"len({buffers}) == {len(module._buffers)}")
        for key, buffer in module._buffers.items():
            _check_storage(build, "buffer storage", f"{label}.{key}", f"{buffers}[{key!r}]", buffer)
        for key, value in vars(module).items():
            if key in MODULE_INTERNALS:
                continue
            if isinstance(value, torch.Tensor) and not keeps_call_state(module):
                _check_storage(build, "tensor attribute", f"{label}.{key}", f"{state}[{key!r}]", value)
            elif isinstance(value, PLAIN_TYPES) and not keeps_call_state(module):
                constant, now = build.constant(value), f"{state}[{key!r}]"
                build.check("attribute", f"{label}.{key}", f"({now} is {constant} or {now} == {constant})")


def add_hook_checks(build: GuardBuilder, parameters: Sequence[nn.Parameter]) -> None:
    """Gradients that graphs accumulate by themselves pass by the hooks on parameters: there must be none."""
    for index, parameter in enumerate(parameters):
        constant = build.constant(parameter)
        build.check("hooks", f"parameter {index}",
                    f"not ({constant}._backward_hooks or {constant}._post_accumulate_grad_hooks)")


def _check_storage(build: GuardBuilder, reason: str, where: str, expression: str, value: torch.Tensor | None) -> None:
    constant = build.constant(value)
    build.check(reason, where, f"{expression} is {constant}")
    if value is not None:
        build.check(reason, where, f"{constant}.data_ptr() == {value.data_ptr()}")
        if isinstance(value, nn.Parameter):
            build.check("requires_grad", where, f"{constant}.requires_grad is {value.requires_grad}")


def attribute_snapshot(target: nn.Module, given: Sequence[tuple[str, nn.Module]] = ()) -> dict[str, Any]:
    """Every attribute of `target`, of the modules it is given as arguments and of their submodules that a forward pass
    could rebind, keyed by dotted name; containers also with their length, since a forward pass may grow them without
    rebinding anything."""
    snapshot: dict[str, Any] = {}
    for where, owner in (("", target), *given):
        for name, module in owner.named_modules():
            if keeps_call_state(module):
                continue
            for key, value in vars(module).items():
                if key in MODULE_INTERNALS:
                    continue
                label = ".".join(part for part in (where, name, key) if part)
                snapshot[label] = value
                if isinstance(value, (list, dict, set)):
                    snapshot[f"len({label})"] = len(value)
    return snapshot


def keeps_call_state(module: nn.Module) -> bool:
    """Transformer Engine modules write bookkeeping of their own into plain attributes at every call."""
    return type(module).__module__.partition(".")[0] == "transformer_engine"
