# SPDX-License-Identifier: Apache-2.0
"""Abstract values of the recipe interpreter: plain Python constants, objects with recorded assignments, and what is not
known."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cudagraphs.settings import Branch, Source

MISSING = object()


@dataclass(frozen=True)
class UnknownValue:
    """A value that reading cannot establish. `default` is what it is when the recipe is called without arguments."""

    reason: str
    default: Any = MISSING

    @property
    def has_default(self) -> bool:
        return self.default is not MISSING


@dataclass(frozen=True)
class ChoiceValue:
    """A value that depends on a branch; each side is any value."""

    branch: Branch
    if_true: Any
    if_false: Any


@dataclass(frozen=True)
class External:
    """A name whose source is not followed, for example `torch.bfloat16` or `CudaGraphScope.attn`."""

    name: str

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Site:
    """Where an assignment stands: enough to report it and, if `editable`, to replace its value in place.

    `value` is the expression that gives the value, `frame` the identity of the function call that ran it, `conditional`
    whether it ran inside a branch or a loop. `call` is the constructor call whose keyword this is, else None.
    """

    module: Module
    node: ast.AST
    value: ast.expr | None
    frame: int
    conditional: bool
    call: ast.Call | None = None

    @property
    def source(self) -> Source:
        line = self.node.lineno
        return Source(self.module.label, line, self.node.col_offset + 1, self.module.file.line(line).strip())


@dataclass
class Slot:
    """An attribute's or key's value with the assignment that gave it. `earlier` holds what it replaced, oldest
    first."""

    value: Any
    site: Site | None = None
    earlier: tuple[Slot, ...] = ()


class Object:
    """An instance or a mapping. `slots` holds attributes (or keys, for a mapping) in the order of first assignment.

    `open_reason` says why attributes that are not in `slots` are unknown; empty if they hold the class's defaults.
    """

    __slots__ = ("call", "class_name", "class_value", "frame", "kind", "module", "open_reason", "slots")

    def __init__(self, class_name: str, kind: str = "instance", class_value: Any = None, open_reason: str = ""):
        self.kind = kind
        self.class_name = class_name
        self.class_value = class_value
        self.slots: dict[Any, Slot] = {}
        self.open_reason = open_reason
        # the constructor call or dictionary display that made it, in `module`, run in the function call `frame`
        self.call: ast.expr | None = None
        self.module: Module | None = None
        self.frame = -1


class ListValue:
    """A list; mutable, so it has an identity."""

    __slots__ = ("items",)

    def __init__(self, items: list[Any]):
        self.items = items


@dataclass(frozen=True)
class FunctionValue:
    node: ast.FunctionDef | ast.Lambda | ast.AsyncFunctionDef
    module: Module
    closure: Any = None
    bound: Any = MISSING


@dataclass(frozen=True)
class ClassValue:
    node: ast.ClassDef
    module: Module


@dataclass(frozen=True)
class ModuleValue:
    module: Module


@dataclass(frozen=True)
class BoundMethod:
    owner: Any
    name: str


@dataclass(frozen=True)
class Partial:
    function: Any
    arguments: tuple
    keywords: tuple


@dataclass(eq=False)
class Module:
    """A parsed source file. `label` is the path as reports show it; `definitions` maps global names to their last
    definition."""

    name: str
    label: str
    file: Any
    tree: ast.Module
    package: str
    definitions: dict[str, ast.AST] = field(default_factory=dict)


def lift(function: Callable[..., Any], *values: Any, depth: int = 6) -> Any:
    """Apply `function` to values, once for each side of every choice among them; defaults of unknown arguments carry
    through.

    `function` sees neither ChoiceValue nor UnknownValue. A function that raises gives an unknown.
    """
    for index, value in enumerate(values):
        if isinstance(value, ChoiceValue):
            if depth == 0:
                return UnknownValue(f"it depends on `{value.branch.text}`")
            sides = (
                lift(function, *values[:index], side, *values[index + 1 :], depth=depth - 1)
                for side in (value.if_true, value.if_false)
            )
            return choose(value.branch, *sides)
    unknown = next((value for value in values if isinstance(value, UnknownValue)), None)
    if unknown is not None:
        defaults = [value.default if isinstance(value, UnknownValue) else value for value in values]
        if any(default is MISSING for default in defaults):
            return UnknownValue(unknown.reason)
        result = lift(function, *defaults, depth=depth)
        if isinstance(result, (UnknownValue, ChoiceValue)):
            return UnknownValue(unknown.reason)
        return UnknownValue(unknown.reason, result)
    try:
        return function(*values)
    except Exception as error:  # the recipe's own arithmetic failed on known values: say so, do not stop reading
        return UnknownValue(f"evaluating it raises {type(error).__name__}")


def choose(branch: Branch, if_true: Any, if_false: Any) -> Any:
    """The value after a branch: the common value where both sides agree, else a choice."""
    if_true, if_false = decided(if_true, branch, True), decided(if_false, branch, False)
    if same(if_true, if_false):
        return if_true
    return ChoiceValue(branch, if_true, if_false)


def decided(value: Any, branch: Branch, side: bool) -> Any:
    """The value where `branch` is known to go to `side`."""
    if not isinstance(value, ChoiceValue):
        return value
    if value.branch == branch:
        return decided(value.if_true if side else value.if_false, branch, side)
    if_true, if_false = decided(value.if_true, branch, side), decided(value.if_false, branch, side)
    return if_true if same(if_true, if_false) else ChoiceValue(value.branch, if_true, if_false)


def same(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if isinstance(left, (Object, ListValue)) or isinstance(right, (Object, ListValue)):
        return False
    return type(left) is type(right) and left == right


def truth(value: Any) -> Any:
    """True, False, or an UnknownValue / ChoiceValue of booleans."""

    def known(item: Any) -> bool:
        if isinstance(item, Object):
            return bool(item.slots) if item.kind == "mapping" else True
        if isinstance(item, ListValue):
            return bool(item.items)
        if isinstance(item, (External, FunctionValue, ClassValue, ModuleValue, BoundMethod, Partial)):
            return True
        return bool(item)

    return lift(known, value)
