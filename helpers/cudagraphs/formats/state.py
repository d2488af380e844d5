# SPDX-License-Identifier: Apache-2.0
"""What the interpreter keeps while it follows a recipe: frames, copies of the heap, calls; and what it is told about
classes."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cudagraphs.formats.values import ListValue, Module, Object, Site, UnknownValue
from cudagraphs.settings import Branch

if TYPE_CHECKING:
    from cudagraphs.formats.interpreter import Interpreter

MAX_STEPS = 200_000
MAX_DEPTH = 40
# turns of a `while` loop
MAX_TURNS = 100

NORMAL, RETURN, RAISE, BREAK, CONTINUE = "normal", "return", "raise", "break", "continue"


class Budget(Exception):
    """The recipe takes more steps than a configuration should."""


@dataclass
class Frame:
    """One function call. `path` holds the undecided branch sides taken so far, `pending` the returns taken on some of
    them."""

    number: int
    module: Module
    node: ast.AST
    locals: dict[str, Any]
    closure: Frame | None = None
    nesting: int = 0
    # a `break` or `continue` stands on one side of a branch that is not decided
    leaves_unsure: bool = False
    # names declared global (None) or nonlocal (the frame that holds them)
    shared: dict[str, Frame | None] = field(default_factory=dict)
    statement: ast.stmt | None = None
    path: list[tuple[Branch, bool]] = field(default_factory=list)
    pending: list[tuple[list[tuple[Branch, bool]], Heap, Any]] = field(default_factory=list)


class Heap:
    """A copy of every mutable value and of every live frame's variables at one moment."""

    def __init__(self, objects: list[Object], lists: list[ListValue], frames: list[Frame]):
        self.objects = {id(o): (o, dict(o.slots), o.open_reason) for o in objects}
        self.lists = {id(v): (v, list(v.items)) for v in lists}
        self.frames = {f.number: (f, dict(f.locals)) for f in frames}

    def restore(self) -> None:
        for obj, slots, reason in self.objects.values():
            obj.slots, obj.open_reason = dict(slots), reason
        for value, items in self.lists.values():
            value.items = list(items)
        for frame, variables in self.frames.values():
            frame.locals = dict(variables)


@dataclass
class Entry:
    """What interpreting one function, or a whole script, gave: the value it returns (or hands to the training loop)."""

    value: Any
    frame: Frame
    consumed_by: ast.stmt | None = None
    failure: str = ""


class Classes:
    """What is known of upstream's classes without their source; `formats.bridge` has the real one."""

    opaque: frozenset[str] = frozenset()

    def is_config(self, value: Any) -> bool:
        """Whether a value is a configuration that a training loop or a model takes."""
        return isinstance(value, Object) and value.kind == "instance"

    def default(self, interpreter: Interpreter, obj: Object, name: str) -> Any:
        """The value of an attribute that the recipe does not set; an UnknownValue where it cannot be told."""
        return UnknownValue(obj.open_reason or f"the default of `{obj.class_name}.{name}` is not known")

    def has(self, interpreter: Interpreter, obj: Object, name: str) -> bool | None:
        """Whether instances have the attribute; None where it cannot be told."""
        return None


@dataclass(frozen=True)
class Call:
    """One call: its expression, the frame it runs in, where each keyword's value stands."""

    node: ast.Call
    frame: Frame
    sites: dict[str, Site]
    unknown_keywords: str = ""


class Consumed(Exception):
    """A script handed its configuration to training: what follows no longer matters."""

    def __init__(self, statement: ast.stmt, value: Any):
        self.statement, self.value = statement, value


def called_name(node: ast.Call) -> str:
    """The last part of the called name: `f` for `f(...)` and `module.f(...)`."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def short(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 60 else text[:57] + "..."
