# SPDX-License-Identifier: Apache-2.0
"""Follows a recipe function statically: what its configuration holds at the end, and which statement gave each value.

Nothing of the recipe runs. The interpreter walks the syntax tree in execution order with abstract values; it follows calls into
functions whose source it finds, takes both sides of a condition that only run time decides, and calls unknown what it cannot
follow. What it does not model (generators, exceptions as control flow, metaclasses) makes the values behind it unknown.
"""

from __future__ import annotations

import ast
import builtins
import functools
import operator
import sys
from dataclasses import dataclass, field
from typing import Any, Callable

from cudagraphs.formats.modules import NOT_FOLLOWED, Modules
from cudagraphs.formats.values import (
    MISSING,
    BoundMethod,
    ChoiceValue,
    ClassValue,
    External,
    FunctionValue,
    ListValue,
    Module,
    ModuleValue,
    Object,
    Partial,
    Site,
    Slot,
    UnknownValue,
    choose,
    decided,
    lift,
    truth,
)
from cudagraphs.settings import Branch, Source

MAX_STEPS = 200_000
MAX_DEPTH = 40

NORMAL, RETURN, RAISE, LEAVE_LOOP = "normal", "return", "raise", "leave loop"

BINARY = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_, ast.BitXor: operator.xor, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
}  # fmt: skip
UNARY = {ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert}
COMPARE = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
    ast.Is: lambda a, b: a is b or a == b, ast.IsNot: lambda a, b: not (a is b or a == b),
}  # fmt: skip
# Builtins that compute a value from plain values and change nothing.
PURE_BUILTINS = frozenset(
    "abs all any bool chr dict divmod enumerate float frozenset hash int len list max min ord pow range repr reversed round set "
    "sorted str sum tuple zip".split()
)
STRING_METHODS = frozenset(
    "lower upper strip lstrip rstrip split rsplit startswith endswith replace join format title removeprefix removesuffix "
    "partition rpartition find count isdigit".split()
)


class Budget(Exception):
    """The recipe takes more steps than a configuration should."""


@dataclass
class Frame:
    """One function call. `path` holds the undecided branch sides taken so far, `pending` the returns taken on some of them."""

    number: int
    module: Module
    node: ast.AST
    locals: dict[str, Any]
    closure: "Frame | None" = None
    nesting: int = 0
    statement: ast.stmt | None = None
    path: list[tuple[Branch, bool]] = field(default_factory=list)
    pending: list[tuple[list[tuple[Branch, bool]], "Heap", Any]] = field(default_factory=list)


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

    def default(self, interpreter: "Interpreter", obj: Object, name: str) -> Any:
        """The value of an attribute that the recipe does not set; an UnknownValue where it cannot be told."""
        return UnknownValue(obj.open_reason or f"the default of `{obj.class_name}.{name}` is not known")

    def has(self, interpreter: "Interpreter", obj: Object, name: str) -> bool | None:
        """Whether instances have the attribute; None where it cannot be told."""
        return None


class Interpreter:
    """Interprets one entry function. `intrinsics` maps dotted names (or their last part) to handlers that model what upstream
    code does: `handler(interpreter, arguments, keywords, node) -> value`."""

    def __init__(
        self,
        modules: Modules,
        intrinsics: dict[str, Callable[..., Any]],
        classes: "Classes",
        consumers: frozenset[str] = frozenset(),
    ):
        self.modules = modules
        self.intrinsics = intrinsics
        self.classes = classes
        self.consumers = consumers
        self.objects: list[Object] = []
        self.lists: list[ListValue] = []
        self.frames: list[Frame] = []
        self.globals: dict[tuple[str, str], Any] = {}
        self.steps = 0
        self.next_frame = 0
        self.not_followed: dict[str, Source] = {}

    # -- entry points ---------------------------------------------------------------------------------------------------------

    def run_function(self, module: Module, node: ast.FunctionDef) -> Entry:
        """Interpret a top-level function called without arguments; a parameter's default is only its default."""
        frame = self._frame(module, node, {})
        parameters = node.args
        positional = [*parameters.posonlyargs, *parameters.args]
        defaults = dict(zip([p.arg for p in positional][len(positional) - len(parameters.defaults) :], parameters.defaults))
        defaults.update({p.arg: d for p, d in zip(parameters.kwonlyargs, parameters.kw_defaults) if d is not None})
        self.frames.append(frame)
        for parameter in [*positional, *parameters.kwonlyargs]:
            default = defaults.get(parameter.arg)
            known = MISSING if default is None else self.evaluate(default, frame)
            if isinstance(known, (UnknownValue, ChoiceValue)):
                known = MISSING
            frame.locals[parameter.arg] = UnknownValue(f"it comes from the argument `{parameter.arg}`", known)
        if parameters.vararg:
            frame.locals[parameters.vararg.arg] = UnknownValue(f"it comes from the arguments `*{parameters.vararg.arg}`")
        if parameters.kwarg:
            frame.locals[parameters.kwarg.arg] = UnknownValue(f"it comes from the arguments `**{parameters.kwarg.arg}`")
        return self._guarded(frame, node.body)

    def run_script(self, module: Module) -> Entry:
        """Interpret a file's own statements, as `python file.py` would, up to the call that takes the configuration to training."""
        frame = self._frame(module, module.tree, {})
        self.frames.append(frame)
        return self._guarded(frame, module.tree.body)

    def _guarded(self, frame: Frame, body: list[ast.stmt]) -> Entry:
        try:
            _, value = self._finish(frame, *self.block(body, frame))
            return Entry(value, frame)
        except Consumed as consumed:
            return Entry(consumed.value, frame, consumed.statement)
        except Budget:
            return Entry(UnknownValue("the recipe takes too many steps to follow"), frame, failure="too many steps to follow")
        except RecursionError:
            return Entry(UnknownValue("the recipe nests too deeply to follow"), frame, failure="nested too deeply to follow")

    def _frame(self, module: Module, node: ast.AST, variables: dict[str, Any], closure: Frame | None = None) -> Frame:
        frame = Frame(self.next_frame, module, node, variables, closure)
        self.next_frame += 1
        return frame

    # -- heap -----------------------------------------------------------------------------------------------------------------

    def new_object(self, class_name: str, kind: str = "instance", class_value: Any = None, open_reason: str = "") -> Object:
        obj = Object(class_name, kind, class_value, open_reason)
        self.objects.append(obj)
        return obj

    def new_list(self, items: list[Any]) -> ListValue:
        value = ListValue(items)
        self.lists.append(value)
        return value

    def snapshot(self) -> Heap:
        return Heap(self.objects, self.lists, self.frames)

    def merge(self, branch: Branch, if_true: Heap, if_false: Heap) -> None:
        """Make the live state the join of two heaps that parted at `branch`."""
        for key in {**if_true.objects, **if_false.objects}:
            one, other = if_true.objects.get(key), if_false.objects.get(key)
            if one is None or other is None:
                obj, slots, reason = one or other
                obj.slots, obj.open_reason = dict(slots), reason
                continue
            obj, left, reason = one
            _, right, other_reason = other
            obj.open_reason = reason or other_reason
            obj.slots = {}
            for name in {**left, **right}:
                a, b = left.get(name), right.get(name)
                if a is b:
                    obj.slots[name] = a
                else:
                    values = [s.value if s else self.classes.default(self, obj, name) for s in (a, b)]
                    site = (b or a).site if a is None or b is None else (a.site if a.site == b.site else None)
                    obj.slots[name] = Slot(choose(branch, *values), site)
        for key in {**if_true.lists, **if_false.lists}:
            one, other = if_true.lists.get(key), if_false.lists.get(key)
            if one is None or other is None:
                value, items = one or other
            else:
                value, items = one
                if items != other[1]:
                    width = max(len(items), len(other[1]))
                    if len(items) == len(other[1]):
                        items = [choose(branch, a, b) for a, b in zip(items, other[1])]
                    else:
                        items = [UnknownValue(f"it depends on `{branch.text}`")] * width
            value.items = list(items)
        for number in {**if_true.frames, **if_false.frames}:
            one, other = if_true.frames.get(number), if_false.frames.get(number)
            frame = (one or other)[0]
            left, right = (one or other)[1], (other or one)[1]
            frame.locals = {
                name: choose(branch, left.get(name, UnknownValue("it may be unset")), right.get(name, UnknownValue("it may be unset")))
                for name in {**left, **right}
            }

    # -- statements -----------------------------------------------------------------------------------------------------------

    def block(self, body: list[ast.stmt], frame: Frame) -> tuple[str, Any]:
        for statement in body:
            self.steps += 1
            if self.steps > MAX_STEPS:
                raise Budget
            frame.statement = statement
            status, value = self.statement(statement, frame)
            if status != NORMAL:
                return status, value
        return NORMAL, None

    def statement(self, node: ast.stmt, frame: Frame) -> tuple[str, Any]:
        handler = getattr(self, f"_do_{type(node).__name__}", None)
        if handler is None:
            return NORMAL, None
        return handler(node, frame) or (NORMAL, None)

    def _do_Expr(self, node: ast.Expr, frame: Frame) -> None:
        self.evaluate(node.value, frame)

    def _do_Assign(self, node: ast.Assign, frame: Frame) -> None:
        value = self.evaluate(node.value, frame)
        for target in node.targets:
            self.assign(target, value, frame, node, node.value if len(node.targets) == 1 else None)

    def _do_AnnAssign(self, node: ast.AnnAssign, frame: Frame) -> None:
        if node.value is not None:
            self.assign(node.target, self.evaluate(node.value, frame), frame, node, node.value)

    def _do_AugAssign(self, node: ast.AugAssign, frame: Frame) -> None:
        load = ast.copy_location(ast.parse(ast.unparse(node.target), mode="eval").body, node.target)
        for child in ast.walk(load):
            ast.copy_location(child, node.target)
        left, right = self.evaluate(load, frame), self.evaluate(node.value, frame)
        self.assign(node.target, self._binary(type(node.op), left, right), frame, node, None)

    def _do_Return(self, node: ast.Return, frame: Frame) -> tuple[str, Any]:
        return RETURN, None if node.value is None else self.evaluate(node.value, frame)

    def _do_Raise(self, node: ast.Raise, frame: Frame) -> tuple[str, Any]:
        return RAISE, None

    def _do_Break(self, node: ast.Break, frame: Frame) -> tuple[str, Any]:
        return LEAVE_LOOP, None

    _do_Continue = _do_Break

    def _do_Delete(self, node: ast.Delete, frame: Frame) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                frame.locals.pop(target.id, None)
            elif isinstance(target, (ast.Attribute, ast.Subscript)):
                owner = self.evaluate(target.value, frame)
                key = target.attr if isinstance(target, ast.Attribute) else self.evaluate(target.slice, frame)
                if isinstance(owner, Object) and isinstance(key, (str, int)):
                    owner.slots.pop(key, None)

    def _do_FunctionDef(self, node: ast.FunctionDef, frame: Frame) -> None:
        frame.locals[node.name] = FunctionValue(node, frame.module, frame)

    def _do_ClassDef(self, node: ast.ClassDef, frame: Frame) -> None:
        frame.locals[node.name] = ClassValue(node, frame.module)

    def _do_Import(self, node: ast.Import, frame: Frame) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            frame.locals[name] = self._imported_module(alias.name if alias.asname else name)

    def _do_ImportFrom(self, node: ast.ImportFrom, frame: Frame) -> None:
        for alias in node.names:
            frame.locals[alias.asname or alias.name] = self._imported_name(node, alias.name, frame.module)

    def _do_If(self, node: ast.If, frame: Frame) -> tuple[str, Any]:
        if frame.module.name != "__main__" and _is_main_guard(node.test):
            return self._nested(node.body, frame)
        return self.branch(truth(self.evaluate(node.test, frame)), node.test, frame,
                           lambda: self._nested(node.body, frame), lambda: self._nested(node.orelse, frame))  # fmt: skip

    def _nested(self, body: list[ast.stmt], frame: Frame) -> tuple[str, Any]:
        frame.nesting += 1
        try:
            return self.block(body, frame)
        finally:
            frame.nesting -= 1

    def branch(self, condition: Any, test: ast.AST, frame: Frame, if_true: Callable, if_false: Callable) -> tuple[str, Any]:
        """Run the side that `condition` decides, or both sides and join them where it is not decided."""
        if not isinstance(condition, (UnknownValue, ChoiceValue)):
            return if_true() if condition else if_false()
        if isinstance(condition, ChoiceValue):
            branch, sides = condition.branch, (condition.if_true, condition.if_false)
        else:
            branch, sides = self._branch(condition, test, frame), (True, False)
        before = self.snapshot()
        results = []
        for side, decided in zip((True, False), sides):
            before.restore()
            frame.path.append((branch, side))
            result = self.branch(decided, test, frame, if_true, if_false)
            frame.path.pop()
            results.append((result, self.snapshot()))
        ((status_t, value_t), heap_t), ((status_f, value_f), heap_f) = results
        if status_t == RAISE or status_f == RAISE:
            # the side that raises never reaches training, so the other side is what happens
            (status, value), heap = results[0] if status_f == RAISE else results[1]
            heap.restore()
            return status, value
        if status_t == status_f:
            self.merge(branch, heap_t, heap_f)
            return status_t, choose(branch, value_t, value_f) if status_t == RETURN else None
        if RETURN in (status_t, status_f):
            returned_side = status_t == RETURN
            heap, value = (heap_t, value_t) if returned_side else (heap_f, value_f)
            frame.pending.append(([*frame.path, (branch, returned_side)], heap, value))
            (heap_f if returned_side else heap_t).restore()
            return (status_f if returned_side else status_t), None
        self.merge(branch, heap_t, heap_f)
        return NORMAL, None

    def _branch(self, condition: UnknownValue, test: ast.AST, frame: Frame) -> Branch:
        source = Source(frame.module.label, test.lineno, test.col_offset + 1, frame.module.file.line(test.lineno).strip())
        default = bool(condition.default) if condition.has_default else None
        return Branch(ast.unparse(test), source, default)

    def _finish(self, frame: Frame, status: str, value: Any) -> tuple[str, Any]:
        """Join the returns that were taken on undecided branches into the function's final state."""
        for path, heap, returned in reversed(frame.pending):
            now = self.snapshot()
            for index in range(len(path) - 1, -1, -1):
                branch, side = path[index]
                if status == RAISE:
                    heap.restore()
                    value, status = returned, NORMAL
                    break
                pair = (heap, now) if side else (now, heap)
                values = (returned, value) if side else (value, returned)
                self.merge(branch, *pair)
                returned = choose(branch, *values)
                heap = self.snapshot()
            else:
                value = returned
        frame.pending.clear()
        return status, value

    def _do_For(self, node: ast.For, frame: Frame) -> tuple[str, Any] | None:
        items = self._items(self.evaluate(node.iter, frame))
        if items is None:
            def body() -> tuple[str, Any]:
                self.assign(node.target, UnknownValue("it is a loop variable"), frame, node, None)
                return self._nested(node.body, frame)

            unknown = UnknownValue("the loop's range is not known")
            return self.branch(unknown, node.iter, frame, body, lambda: (NORMAL, None))
        for item in items:
            self.assign(node.target, item, frame, node, None)
            status, value = self._nested(node.body, frame)
            if status in (RETURN, RAISE):
                return status, value
        return None

    def _do_While(self, node: ast.While, frame: Frame) -> tuple[str, Any]:
        for _ in range(100):
            condition = truth(self.evaluate(node.test, frame))
            if condition is False:
                return NORMAL, None
            if condition is not True:
                break
            status, value = self._nested(node.body, frame)
            if status != NORMAL:
                return (NORMAL, None) if status == LEAVE_LOOP else (status, value)
        unknown = UnknownValue("the loop's length is not known")
        return self.branch(unknown, node.test, frame, lambda: self._nested(node.body, frame), lambda: (NORMAL, None))

    def _do_With(self, node: ast.With, frame: Frame) -> tuple[str, Any]:
        for item in node.items:
            value = self.evaluate(item.context_expr, frame)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value, frame, node, None)
        return self._nested(node.body, frame)

    def _do_Try(self, node: ast.Try, frame: Frame) -> tuple[str, Any]:
        status, value = self._nested(node.body, frame)
        if status == RAISE and node.handlers:
            status, value = self._nested(node.handlers[0].body, frame)
        elif status == NORMAL:
            status, value = self._nested(node.orelse, frame)
        if node.finalbody:
            ended, final = self._nested(node.finalbody, frame)
            if ended != NORMAL:
                return ended, final
        return status, value

    _do_TryStar = _do_Try

    def _do_Match(self, node: ast.AST, frame: Frame) -> tuple[str, Any]:
        subject = self.evaluate(node.subject, frame)

        def case(index: int) -> tuple[str, Any]:
            if index == len(node.cases):
                return NORMAL, None
            clause = node.cases[index]
            pattern = clause.pattern
            if isinstance(pattern, ast.MatchValue) and clause.guard is None:
                wanted = self.evaluate(pattern.value, frame)
                condition = self._compare(ast.Eq, subject, wanted)
            elif isinstance(pattern, ast.MatchAs) and pattern.pattern is None and clause.guard is None:
                if pattern.name:
                    frame.locals[pattern.name] = subject
                condition = True
            else:
                condition = UnknownValue("the pattern is not followed")
            return self.branch(condition, pattern, frame, lambda: self._nested(clause.body, frame), lambda: case(index + 1))

        return case(0)

    # -- assignment -----------------------------------------------------------------------------------------------------------

    def assign(self, target: ast.expr, value: Any, frame: Frame, node: ast.AST, value_node: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            frame.locals[target.id] = value
            if frame.node is frame.module.tree:
                self.globals[(frame.module.name, target.id)] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            items = self._items(value)
            for index, element in enumerate(target.elts):
                if isinstance(element, ast.Starred) or items is None or index >= len(items):
                    self.assign(getattr(element, "value", element) if isinstance(element, ast.Starred) else element,
                                UnknownValue("it is unpacked from a value that is not known"), frame, node, None)  # fmt: skip
                else:
                    self.assign(element, items[index], frame, node, None)
        elif isinstance(target, ast.Attribute):
            site = Site(frame.module, node, value_node, frame.number, frame.nesting > 0)
            self.set_attribute(self._assigned_to(target.value, "instance", frame), target.attr, value, site)
        elif isinstance(target, ast.Subscript):
            site = Site(frame.module, node, value_node, frame.number, frame.nesting > 0)
            self.set_item(self._assigned_to(target.value, "mapping", frame), self.evaluate(target.slice, frame), value, site)

    def _assigned_to(self, node: ast.expr, kind: str, frame: Frame) -> Any:
        """The object that `node` names, for an assignment into it: a value that is not known becomes an object of which
        nothing is known yet."""
        if isinstance(node, ast.Attribute):
            owner = self._assigned_to(node.value, "instance", frame)
            value = self.attribute(owner, node.attr)
            opened = self._opened(value, kind)
            if opened is not value and isinstance(owner, Object) and owner.kind == "instance":
                owner.slots[node.attr] = Slot(opened)
                return opened
            return value
        value = self.evaluate(node, frame)
        if isinstance(node, ast.Name) and node.id in frame.locals:
            value = frame.locals[node.id] = self._opened(value, kind)
        return value

    def _opened(self, value: Any, kind: str) -> Any:
        """The value with an object of which nothing is known in place of each side that is not known."""
        if isinstance(value, UnknownValue):
            return self.new_object("", kind, open_reason=value.reason)
        if isinstance(value, ChoiceValue):
            if_true, if_false = self._opened(value.if_true, kind), self._opened(value.if_false, kind)
            if if_true is not value.if_true or if_false is not value.if_false:
                return ChoiceValue(value.branch, if_true, if_false)
        return value

    def set_attribute(self, owner: Any, name: str, value: Any, site: Site | None) -> None:
        if isinstance(owner, Object):
            owner.slots[name] = Slot(value, site)
        elif isinstance(owner, ChoiceValue):
            for side, leaf in ((True, owner.if_true), (False, owner.if_false)):
                old = self.attribute(leaf, name) if isinstance(leaf, Object) else None
                pair = (value, old) if side else (old, value)
                self.set_attribute(leaf, name, ChoiceValue(owner.branch, *pair), site)

    def set_item(self, owner: Any, key: Any, value: Any, site: Site | None) -> None:
        if isinstance(owner, Object):
            if isinstance(key, (str, int, float, bool, tuple)):
                owner.slots[key] = Slot(value, site)
            else:
                self.forget(owner, "a key that is not known is assigned")
        elif isinstance(owner, ListValue):
            if isinstance(key, int) and -len(owner.items) <= key < len(owner.items):
                owner.items[key] = value
            else:
                owner.items = [UnknownValue("the list is changed at a place that is not known")] * len(owner.items)

    def forget(self, value: Any, reason: str, seen: set[int] | None = None) -> None:
        """Everything reachable from `value` may have changed: its slots become unknown for that reason."""
        seen = set() if seen is None else seen
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Object):
            for name, slot in list(value.slots.items()):
                if isinstance(slot.value, (Object, ListValue, ChoiceValue)):
                    self.forget(slot.value, reason, seen)
                    if isinstance(slot.value, Object):
                        continue
                value.slots[name] = Slot(UnknownValue(reason), None)
            value.open_reason = value.open_reason or reason
        elif isinstance(value, ListValue):
            value.items = [UnknownValue(reason)] * len(value.items)
        elif isinstance(value, ChoiceValue):
            self.forget(value.if_true, reason, seen)
            self.forget(value.if_false, reason, seen)

    # -- expressions ----------------------------------------------------------------------------------------------------------

    def evaluate(self, node: ast.expr, frame: Frame) -> Any:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise Budget
        handler = getattr(self, f"_eval_{type(node).__name__}", None)
        if handler is None:
            return UnknownValue(f"`{_short(node)}` is not followed")
        return handler(node, frame)

    def _eval_Constant(self, node: ast.Constant, frame: Frame) -> Any:
        return node.value

    def _eval_Name(self, node: ast.Name, frame: Frame) -> Any:
        scope: Frame | None = frame
        while scope is not None:
            if node.id in scope.locals:
                return scope.locals[node.id]
            scope = scope.closure
        return self.global_name(frame.module, node.id)

    def global_name(self, module: Module, name: str) -> Any:
        key = (module.name, name)
        if key in self.globals:
            return self.globals[key]
        self.globals[key] = UnknownValue(f"`{name}` is defined through itself")
        self.globals[key] = value = self._define(module, name)
        return value

    def _define(self, module: Module, name: str) -> Any:
        node = module.definitions.get(name)
        if node is None:
            if hasattr(builtins, name):
                return External(f"builtins.{name}")
            return UnknownValue(f"the name `{name}` is not defined in {module.label}")
        frame = self._frame(module, module.tree, {})
        frame.number = -1
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return FunctionValue(node, module)
        if isinstance(node, ast.ClassDef):
            return ClassValue(node, module)
        if isinstance(node, ast.Import):
            for alias in node.names:
                if (alias.asname or alias.name.partition(".")[0]) == name:
                    return self._imported_module(alias.name if alias.asname else name)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return self._imported_name(node, alias.name, module)
        value = self.evaluate(node.value, frame)
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Name) and target.id == name:
                return value
            if isinstance(target, ast.Tuple):
                items = self._items(value)
                for index, element in enumerate(target.elts):
                    if isinstance(element, ast.Name) and element.id == name and items is not None and index < len(items):
                        return items[index]
        return UnknownValue(f"`{name}` is not followed")

    def _imported_module(self, name: str) -> Any:
        module = self.modules.find(name)
        return ModuleValue(module) if module is not None else External(name)

    def _imported_name(self, node: ast.ImportFrom, name: str, module: Module) -> Any:
        base = node.module or ""
        if node.level:
            parts = module.package.split(".") if module.package else []
            parts = parts[: len(parts) - (node.level - 1)]
            base = ".".join([*parts, base] if base else parts)
        return self.imported(base, name, module)

    def imported(self, base: str, name: str, module: Module) -> Any:
        """What `from base import name` gives in `module`."""
        dotted = f"{base}.{name}" if base else name
        if self._intrinsic(dotted) is not None or (name in self.classes.opaque and dotted.startswith("megatron.")):
            return External(dotted)
        source = self.modules.find(base) if base else None
        if source is not None:
            if name in source.definitions:
                return self.global_name(source, name)
            nested = self.modules.find(dotted)
            if nested is not None:
                return ModuleValue(nested)
            star = self._through_stars(source, name)
            if star is not MISSING:
                return star
        nested = self.modules.find(dotted) if base else None
        return ModuleValue(nested) if nested is not None else External(dotted)

    def _through_stars(self, module: Module, name: str) -> Any:
        for statement in module.tree.body:
            if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                base = statement.module or ""
                if statement.level:
                    parts = module.package.split(".")[: len(module.package.split(".")) - (statement.level - 1)]
                    base = ".".join([*parts, base] if base else parts)
                source = self.modules.find(base)
                if source is not None and name in source.definitions:
                    return self.global_name(source, name)
        return MISSING

    def _intrinsic(self, dotted: str) -> Callable[..., Any] | None:
        return self.intrinsics.get(dotted) or self.intrinsics.get(dotted.rpartition(".")[2])

    def _eval_Attribute(self, node: ast.Attribute, frame: Frame) -> Any:
        return self.attribute(self.evaluate(node.value, frame), node.attr)

    def attribute(self, owner: Any, name: str) -> Any:
        if isinstance(owner, ChoiceValue):
            return choose(owner.branch, self.attribute(owner.if_true, name), self.attribute(owner.if_false, name))
        if isinstance(owner, UnknownValue):
            return UnknownValue(owner.reason)
        if isinstance(owner, Object):
            if owner.kind == "instance":
                if name in owner.slots:
                    return owner.slots[name].value
                method = self._method(owner, name)
                if method is not None:
                    return method
                value = self.classes.default(self, owner, name)
                if isinstance(value, (Object, ListValue)):
                    owner.slots[name] = Slot(value, None)
                return value
            return BoundMethod(owner, name)
        if isinstance(owner, (ListValue, str)):
            return BoundMethod(owner, name)
        if isinstance(owner, ModuleValue):
            value = self.global_name(owner.module, name) if name in owner.module.definitions else None
            if value is not None:
                return value
            return self._imported_module(f"{owner.module.name}.{name}")
        if isinstance(owner, External):
            return External(f"{owner.name}.{name}")
        if isinstance(owner, ClassValue):
            for statement in owner.node.body:
                if isinstance(statement, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in statement.targets):
                    if any("Enum" in ast.unparse(base) for base in owner.node.bases):
                        return External(f"{owner.node.name}.{name}")
                    return self.evaluate(statement.value, self._frame(owner.module, owner.node, {}))
                if isinstance(statement, (ast.FunctionDef,)) and statement.name == name:
                    return FunctionValue(statement, owner.module)
            return UnknownValue(f"`{owner.node.name}.{name}` is not followed")
        return UnknownValue(f"the attribute `{name}` of {type(owner).__name__} is not followed")

    def _method(self, owner: Object, name: str) -> FunctionValue | None:
        value = owner.class_value
        if isinstance(value, ClassValue):
            for statement in value.node.body:
                if isinstance(statement, ast.FunctionDef) and statement.name == name:
                    if any(getattr(d, "id", "") == "property" for d in statement.decorator_list):
                        return None
                    return FunctionValue(statement, value.module, None, owner)
        intrinsic = self.intrinsics.get(f"{owner.class_name}.{name}")
        return Partial(External(f"{owner.class_name}.{name}"), (owner,), ()) if intrinsic is not None else None

    def _eval_Subscript(self, node: ast.Subscript, frame: Frame) -> Any:
        return self.item(self.evaluate(node.value, frame), self.evaluate(node.slice, frame))

    def item(self, owner: Any, key: Any) -> Any:
        if isinstance(owner, ChoiceValue):
            return choose(owner.branch, self.item(owner.if_true, key), self.item(owner.if_false, key))
        if isinstance(key, ChoiceValue):
            return choose(key.branch, self.item(owner, key.if_true), self.item(owner, key.if_false))
        if isinstance(owner, External) and isinstance(key, str):
            return External(f"{owner.name}.{key}")
        if isinstance(key, UnknownValue):
            if key.has_default:
                value = self.item(owner, key.default)
                if not isinstance(value, (UnknownValue, ChoiceValue)):
                    return UnknownValue(key.reason, value)
            return UnknownValue(key.reason)
        if isinstance(owner, Object):
            if key in owner.slots:
                return owner.slots[key].value
            return UnknownValue(owner.open_reason or f"the key {key!r} is not set")
        if isinstance(owner, ListValue):
            return lift(lambda k: owner.items[k], key)
        return lift(lambda o, k: o[k], owner, key)

    def _eval_Slice(self, node: ast.Slice, frame: Frame) -> Any:
        parts = [None if p is None else self.evaluate(p, frame) for p in (node.lower, node.upper, node.step)]
        return lift(lambda *p: slice(*p), *parts)

    def _eval_List(self, node: ast.List, frame: Frame) -> Any:
        items: list[Any] = []
        for element in node.elts:
            if isinstance(element, ast.Starred):
                inner = self._items(self.evaluate(element.value, frame))
                if inner is None:
                    return UnknownValue(f"`{_short(element)}` is not known")
                items += inner
            else:
                items.append(self.evaluate(element, frame))
        return self.new_list(items)

    def _eval_Tuple(self, node: ast.Tuple, frame: Frame) -> Any:
        return tuple(self.evaluate(element, frame) for element in node.elts)

    def _eval_Set(self, node: ast.Set, frame: Frame) -> Any:
        return lift(lambda *items: frozenset(items), *(self.evaluate(element, frame) for element in node.elts))

    def _eval_Dict(self, node: ast.Dict, frame: Frame) -> Any:
        mapping = self.new_object("dict", kind="mapping")
        mapping.call, mapping.module, mapping.frame = node, frame.module, frame.number
        for key_node, value_node in zip(node.keys, node.values):
            value = self.evaluate(value_node, frame)
            if key_node is None:
                self._update(mapping, value)
                continue
            key = self.evaluate(key_node, frame)
            if isinstance(key, (UnknownValue, ChoiceValue, Object, ListValue)):
                mapping.open_reason = "a key that is not known is set"
                continue
            mapping.slots[key] = Slot(value, Site(frame.module, key_node, value_node, frame.number, frame.nesting > 0))
        return mapping

    def _update(self, mapping: Object, other: Any) -> None:
        if isinstance(other, Object):
            mapping.slots.update(other.slots)
            mapping.open_reason = mapping.open_reason or other.open_reason
        elif isinstance(other, ChoiceValue):
            self.forget(mapping, f"it is updated depending on `{other.branch.text}`")
        elif isinstance(other, UnknownValue):
            mapping.open_reason = mapping.open_reason or other.reason

    def _eval_JoinedStr(self, node: ast.JoinedStr, frame: Frame) -> Any:
        parts = []
        for value in node.values:
            if isinstance(value, ast.FormattedValue):
                if value.format_spec is not None or value.conversion != -1:
                    return UnknownValue("a formatted string is not followed")
                parts.append(self.evaluate(value.value, frame))
            else:
                parts.append(self.evaluate(value, frame))
        if any(isinstance(part, (Object, ListValue, External, FunctionValue)) for part in parts):
            return UnknownValue("a formatted string is not followed")
        return lift(lambda *items: "".join(str(item) for item in items), *parts)

    def _eval_BinOp(self, node: ast.BinOp, frame: Frame) -> Any:
        return self._binary(type(node.op), self.evaluate(node.left, frame), self.evaluate(node.right, frame))

    def _binary(self, kind: type, left: Any, right: Any) -> Any:
        if isinstance(left, ListValue) and isinstance(right, ListValue) and kind is ast.Add:
            return self.new_list([*left.items, *right.items])
        if isinstance(left, ListValue) and isinstance(right, int) and kind is ast.Mult:
            return self.new_list(left.items * right)
        if isinstance(left, Object) and isinstance(right, Object) and kind is ast.BitOr and left.kind == right.kind == "mapping":
            merged = self.new_object("dict", kind="mapping")
            self._update(merged, left)
            self._update(merged, right)
            return merged
        for side in (left, right):
            if isinstance(side, (Object, ListValue, External, FunctionValue)):
                return UnknownValue("the operation is not followed")
        return lift(BINARY[kind], left, right) if kind in BINARY else UnknownValue("the operation is not followed")

    def _eval_UnaryOp(self, node: ast.UnaryOp, frame: Frame) -> Any:
        value = self.evaluate(node.operand, frame)
        if isinstance(node.op, ast.Not):
            return lift(operator.not_, truth(value))
        return lift(UNARY[type(node.op)], value)

    def _eval_BoolOp(self, node: ast.BoolOp, frame: Frame) -> Any:
        stops_on = isinstance(node.op, ast.Or)
        result = self.evaluate(node.values[0], frame)
        for operand in node.values[1:]:
            verdict = truth(result)
            if verdict is stops_on:
                return result
            following = self.evaluate(operand, frame)
            if isinstance(following, bool) and following is stops_on and not isinstance(verdict, ChoiceValue):
                result = following
            else:
                result = self._either(verdict, stops_on, result, following)
        return result

    def _either(self, verdict: Any, stops_on: bool, left: Any, right: Any) -> Any:
        """`left or right` (stops_on True) or `left and right`, where `verdict` is the truth of `left`."""
        if isinstance(verdict, ChoiceValue):
            branch = verdict.branch
            sides = (
                self._either(verdict.if_true if side else verdict.if_false, stops_on,
                             decided(left, branch, side), decided(right, branch, side))
                for side in (True, False)
            )  # fmt: skip
            return choose(branch, *sides)
        if not isinstance(verdict, UnknownValue):
            return left if bool(verdict) is stops_on else right
        taken = left if verdict.has_default and bool(verdict.default) is stops_on else right
        taken = taken.default if isinstance(taken, UnknownValue) else taken
        if not verdict.has_default or taken is MISSING or isinstance(taken, ChoiceValue):
            return UnknownValue(verdict.reason)
        return UnknownValue(verdict.reason, taken)

    def _eval_Compare(self, node: ast.Compare, frame: Frame) -> Any:
        left = self.evaluate(node.left, frame)
        verdict: Any = True
        for op, comparator in zip(node.ops, node.comparators):
            right = self.evaluate(comparator, frame)
            verdict = lift(lambda a, b: a and b, verdict, self._compare(type(op), left, right))
            left = right
        return verdict

    def _compare(self, kind: type, left: Any, right: Any) -> Any:
        if isinstance(left, ChoiceValue):
            return choose(left.branch, self._compare(kind, left.if_true, right), self._compare(kind, left.if_false, right))
        if isinstance(right, ChoiceValue):
            return choose(right.branch, self._compare(kind, left, right.if_true), self._compare(kind, left, right.if_false))
        if kind in (ast.In, ast.NotIn) and isinstance(right, (Object, ListValue)):
            keys = list(right.slots) if isinstance(right, Object) else right.items
            if any(isinstance(k, (UnknownValue, ChoiceValue)) for k in keys) or (isinstance(right, Object) and right.open_reason):
                return UnknownValue("the container is not fully known")
            return lift(lambda value: (value in keys) == (kind is ast.In), left)
        concrete = (Object, ListValue, FunctionValue, ClassValue, ModuleValue, BoundMethod, Partial)
        if isinstance(left, concrete) or isinstance(right, concrete):
            if left is None or right is None or kind in (ast.Is, ast.IsNot):
                return (left is right) == (kind in (ast.Is, ast.Eq))
            if isinstance(left, ListValue) and isinstance(right, ListValue) and kind in (ast.Eq, ast.NotEq):
                return lift(lambda *_: (left.items == right.items) == (kind is ast.Eq), *left.items, *right.items)
            plain = (str, int, float, tuple)
            if kind in (ast.Eq, ast.NotEq) and ListValue in (type(left), type(right)) and isinstance(left, plain) != isinstance(right, plain):
                return kind is ast.NotEq
            return UnknownValue("the comparison is not followed")
        if isinstance(left, External) and isinstance(right, External):
            return (left.last == right.last) == (kind in (ast.Is, ast.Eq)) if kind in (ast.Is, ast.Eq, ast.IsNot, ast.NotEq) else (
                UnknownValue("the comparison is not followed"))  # fmt: skip
        if isinstance(left, External) or isinstance(right, External):
            if left is None or right is None:
                return kind in (ast.IsNot, ast.NotEq)
            return UnknownValue("the comparison is not followed")
        return lift(COMPARE[kind], left, right)

    def _eval_IfExp(self, node: ast.IfExp, frame: Frame) -> Any:
        def side(expression: ast.expr) -> tuple[str, Any]:
            return RETURN, self.evaluate(expression, frame)

        pending = len(frame.pending)
        _, value = self.branch(truth(self.evaluate(node.test, frame)), node.test, frame,
                               lambda: side(node.body), lambda: side(node.orelse))  # fmt: skip
        del frame.pending[pending:]
        return value

    def _eval_NamedExpr(self, node: ast.NamedExpr, frame: Frame) -> Any:
        value = self.evaluate(node.value, frame)
        self.assign(node.target, value, frame, node, None)
        return value

    def _eval_Lambda(self, node: ast.Lambda, frame: Frame) -> Any:
        return FunctionValue(node, frame.module, frame)

    def _eval_Starred(self, node: ast.Starred, frame: Frame) -> Any:
        return self.evaluate(node.value, frame)

    def _comprehension(self, generators: list[ast.comprehension], frame: Frame, emit: Callable[[Frame], None]) -> bool:
        """Run `emit` once an iteration in a frame of its own; False if something on the way is not known."""
        inner = Frame(frame.number, frame.module, frame.node, {}, frame, frame.nesting)

        def loop(index: int) -> bool:
            if index == len(generators):
                emit(inner)
                return True
            items = self._items(self.evaluate(generators[index].iter, inner))
            if items is None:
                return False
            for item in items:
                self.assign(generators[index].target, item, inner, generators[index].target, None)
                wanted = [truth(self.evaluate(test, inner)) for test in generators[index].ifs]
                if any(not isinstance(verdict, bool) for verdict in wanted):
                    return False
                if all(wanted) and not loop(index + 1):
                    return False
            return True

        return loop(0)

    def _eval_ListComp(self, node: ast.ListComp, frame: Frame) -> Any:
        items: list[Any] = []
        complete = self._comprehension(node.generators, frame, lambda inner: items.append(self.evaluate(node.elt, inner)))
        return self.new_list(items) if complete else UnknownValue(f"`{_short(node)}` is not known")

    _eval_GeneratorExp = _eval_ListComp

    def _eval_SetComp(self, node: ast.SetComp, frame: Frame) -> Any:
        value = self._eval_ListComp(node, frame)
        return lift(lambda *items: frozenset(items), *value.items) if isinstance(value, ListValue) else value

    def _eval_DictComp(self, node: ast.DictComp, frame: Frame) -> Any:
        mapping = self.new_object("dict", kind="mapping")

        def emit(inner: Frame) -> None:
            self.set_item(mapping, self.evaluate(node.key, inner), self.evaluate(node.value, inner), None)

        return mapping if self._comprehension(node.generators, frame, emit) else UnknownValue(f"`{_short(node)}` is not known")

    def _items(self, value: Any) -> list[Any] | None:
        """The elements of a known iterable, or None."""
        if isinstance(value, ListValue):
            return list(value.items)
        if isinstance(value, Object) and value.kind == "mapping" and not value.open_reason:
            return list(value.slots)
        if isinstance(value, (tuple, str, range, frozenset)):
            return list(value) if len(value) <= 10_000 else None
        return None

    # -- calls ----------------------------------------------------------------------------------------------------------------

    def _eval_Call(self, node: ast.Call, frame: Frame) -> Any:
        function = self.evaluate(node.func, frame)
        arguments: list[Any] = []
        keywords: dict[str, Any] = {}
        unknown_keywords = ""
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                items = self._items(self.evaluate(argument.value, frame))
                if items is None:
                    unknown_keywords = f"`*{_short(argument.value)}` is not known"
                else:
                    arguments += items
            else:
                arguments.append(self.evaluate(argument, frame))
        sites: dict[str, Site] = {}
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, frame)
            if keyword.arg is not None:
                keywords[keyword.arg] = value
                sites[keyword.arg] = Site(frame.module, keyword.value, keyword.value, frame.number, frame.nesting > 0, node)
            elif isinstance(value, Object) and not value.open_reason:
                for name, slot in value.slots.items():
                    keywords[str(name)] = slot.value
                    if slot.site is not None:
                        sites[str(name)] = slot.site
            else:
                unknown_keywords = f"`**{_short(keyword.value)}` is not fully known"
                if isinstance(value, Object):
                    keywords.update({str(name): slot.value for name, slot in value.slots.items()})
        if frame.number == 0 and called_name(node) in self.consumers:
            for value in [*arguments, *keywords.values()]:
                if self.classes.is_config(value):
                    raise Consumed(frame.statement, value)
        call = Call(node, frame, sites, unknown_keywords)
        return self.call(function, arguments, keywords, call)

    def call(self, function: Any, arguments: list[Any], keywords: dict[str, Any], call: "Call") -> Any:
        if isinstance(function, ChoiceValue):
            return UnknownValue(f"which function is called depends on `{function.branch.text}`")
        if isinstance(function, Partial):
            merged = {**dict(function.keywords), **keywords}
            return self.call(function.function, [*function.arguments, *arguments], merged, call)
        if isinstance(function, FunctionValue):
            intrinsic = self.intrinsics.get(getattr(function.node, "name", ""))
            if intrinsic is not None:
                return intrinsic(self, arguments, keywords, call)
            return self._call_function(function, arguments, keywords, call)
        if isinstance(function, ClassValue):
            return self._construct(function.node.name, function, arguments, keywords, call)
        if isinstance(function, BoundMethod):
            return self._call_method(function, arguments, keywords, call)
        if isinstance(function, External):
            return self._call_external(function, arguments, keywords, call)
        self._escape(arguments, keywords, call)
        return UnknownValue(f"the call `{_short(call.node.func)}(...)` is not followed")

    def _call_external(self, function: External, arguments: list[Any], keywords: dict[str, Any], call: "Call") -> Any:
        intrinsic = self._intrinsic(function.name)
        if intrinsic is not None:
            return intrinsic(self, arguments, keywords, call)
        top, _, rest = function.name.partition(".")
        if top == "builtins":
            return self._call_builtin(rest, arguments, keywords, call)
        if function.name == "copy.deepcopy" or function.name == "copy.copy":
            return self.copy(arguments[0]) if arguments else UnknownValue("copied from nothing")
        if function.name == "dataclasses.replace" and arguments and isinstance(arguments[0], Object):
            copied = self.copy(arguments[0])
            for name, value in keywords.items():
                copied.slots[name] = Slot(value, call.sites.get(name))
            return copied
        if function.name == "functools.partial" and arguments:
            return Partial(arguments[0], tuple(arguments[1:]), tuple(keywords.items()))
        last = function.last
        if last[:1].isupper() and top not in ("torch", "os", "typing"):
            return self._construct(last, function, arguments, keywords, call)
        if top not in NOT_FOLLOWED and top not in sys.stdlib_module_names:
            self._escape(arguments, keywords, call)
            reason = f"the source of `{function.name}` was not found"
            return self.new_object("", open_reason=reason)
        return UnknownValue(f"`{_short(call.node)}` is only known when it runs")

    def _construct(self, name: str, cls: Any, arguments: list[Any], keywords: dict[str, Any], call: "Call") -> Object:
        obj = self.new_object(name, class_value=cls, open_reason=call.unknown_keywords)
        obj.call, obj.module, obj.frame = call.node, call.frame.module, call.frame.number
        if arguments:
            obj.slots["__args__"] = Slot(tuple(arguments))
        for key, value in keywords.items():
            obj.slots[key] = Slot(value, call.sites.get(key))
        return obj

    def copy(self, value: Any) -> Any:
        if isinstance(value, Object):
            copied = self.new_object(value.class_name, value.kind, value.class_value, value.open_reason)
            copied.slots = {name: Slot(self.copy(slot.value), slot.site) for name, slot in value.slots.items()}
            return copied
        if isinstance(value, ListValue):
            return self.new_list([self.copy(item) for item in value.items])
        return value

    def _escape(self, arguments: list[Any], keywords: dict[str, Any], call: "Call") -> None:
        """A function that is not followed got these values: what is mutable among them may have changed."""
        source = Source(call.frame.module.label, call.node.lineno, call.node.col_offset + 1)
        name = _short(call.node.func)
        self.not_followed.setdefault(name, source)
        for value in [*arguments, *keywords.values()]:
            if isinstance(value, (Object, ListValue, ChoiceValue)):
                self.forget(value, f"`{name}(...)` at {source} may change it and cannot be followed")

    def _call_function(self, function: FunctionValue, arguments: list[Any], keywords: dict[str, Any], call: "Call") -> Any:
        if len(self.frames) >= MAX_DEPTH or sum(f.node is function.node for f in self.frames) > 2:
            self._escape(arguments, keywords, call)
            return UnknownValue("the calls nest too deeply to follow")
        if function.bound is not MISSING:
            arguments = [function.bound, *arguments]
        frame = self._frame(function.module, function.node, {}, function.closure)
        frame.nesting = 0
        parameters = function.node.args
        positional = [p.arg for p in [*parameters.posonlyargs, *parameters.args]]
        bound = dict(zip(positional, arguments))
        if parameters.vararg:
            bound[parameters.vararg.arg] = tuple(arguments[len(positional) :])
        rest = {}
        for name, value in keywords.items():
            if name in positional or name in [p.arg for p in parameters.kwonlyargs]:
                bound[name] = value
            else:
                rest[name] = value
        if parameters.kwarg:
            extra = self.new_object("dict", kind="mapping", open_reason=call.unknown_keywords)
            extra.slots = {name: Slot(value, call.sites.get(name)) for name, value in rest.items()}
            bound[parameters.kwarg.arg] = extra
        defaults = dict(zip(positional[len(positional) - len(parameters.defaults) :], parameters.defaults))
        defaults.update({p.arg: d for p, d in zip(parameters.kwonlyargs, parameters.kw_defaults) if d is not None})
        home = Frame(-1, function.module, function.module.tree, {}, function.closure)
        for name in [*positional, *(p.arg for p in parameters.kwonlyargs)]:
            if name not in bound:
                if call.unknown_keywords:
                    bound[name] = UnknownValue(call.unknown_keywords)
                elif name in defaults:
                    bound[name] = self.evaluate(defaults[name], home)
                else:
                    bound[name] = UnknownValue(f"the argument `{name}` is not given")
        frame.locals = bound
        if isinstance(function.node, ast.Lambda):
            return self.evaluate(function.node.body, frame)
        if _is_generator(function.node):
            self._escape(arguments, keywords, call)
            return UnknownValue("generators are not followed")
        self.frames.append(frame)
        try:
            status, value = self._finish(frame, *self.block(function.node.body, frame))
        finally:
            self.frames.pop()
        return value

    def _call_method(self, method: BoundMethod, arguments: list[Any], keywords: dict[str, Any], call: "Call") -> Any:
        owner, name = method.owner, method.name
        if isinstance(owner, str):
            plain = [tuple(a.items) if isinstance(a, ListValue) else a for a in arguments]
            if name in STRING_METHODS:
                result = lift(lambda *a: getattr(owner, name)(*a), *plain)
                return self.new_list(result) if isinstance(result, list) else result
            return UnknownValue(f"`str.{name}` is not followed")
        if isinstance(owner, ListValue):
            if name == "append" and len(arguments) == 1:
                owner.items.append(arguments[0])
            elif name == "extend" and len(arguments) == 1 and self._items(arguments[0]) is not None:
                owner.items += self._items(arguments[0])
            elif name == "remove" and len(arguments) == 1 and arguments[0] in owner.items:
                owner.items.remove(arguments[0])
            elif name == "copy":
                return self.new_list(list(owner.items))
            elif name in ("append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse"):
                self.forget(owner, f"`.{name}` on the list is not followed")
                return UnknownValue(f"`.{name}` on a list is not followed")
            return None
        if isinstance(owner, Object) and owner.kind == "mapping":
            return self._call_mapping(owner, name, arguments, keywords, call)
        self._escape([owner, *arguments], keywords, call)
        return UnknownValue(f"the call `{_short(call.node.func)}(...)` is not followed")

    def _call_mapping(self, owner: Object, name: str, arguments: list[Any], keywords: dict[str, Any], call: "Call") -> Any:
        if name == "update":
            for argument in arguments:
                self._update(owner, argument)
            for key, value in keywords.items():
                owner.slots[key] = Slot(value, call.sites.get(key))
            return None
        if name in ("get", "setdefault", "pop") and arguments and isinstance(arguments[0], (str, int)):
            key, fallback = arguments[0], arguments[1] if len(arguments) > 1 else None
            if key in owner.slots:
                return (owner.slots.pop(key) if name == "pop" else owner.slots[key]).value
            if owner.open_reason:
                return UnknownValue(owner.open_reason)
            if name == "setdefault":
                owner.slots[key] = Slot(fallback, None)
            return fallback
        if name == "copy":
            return self.copy(owner)
        if not owner.open_reason:
            if name == "keys":
                return self.new_list(list(owner.slots))
            if name == "values":
                return self.new_list([slot.value for slot in owner.slots.values()])
            if name == "items":
                return self.new_list([(key, slot.value) for key, slot in owner.slots.items()])
        if name in ("pop", "clear", "popitem", "setdefault"):
            self.forget(owner, f"`.{name}` on the mapping is not followed")
        return UnknownValue(f"`.{name}` on a mapping is not followed")

    def _call_builtin(self, name: str, arguments: list[Any], keywords: dict[str, Any], call: "Call") -> Any:
        if name == "setattr" and len(arguments) == 3 and isinstance(arguments[1], str):
            node = call.node
            site = Site(call.frame.module, node, node.args[2] if len(node.args) == 3 else None, call.frame.number,
                        call.frame.nesting > 0)  # fmt: skip
            self.set_attribute(arguments[0], arguments[1], arguments[2], site)
            return None
        if name == "setattr" and arguments:
            self.forget(arguments[0], "an attribute whose name is not known is set on it")
            return None
        if name == "delattr" and len(arguments) == 2 and isinstance(arguments[0], Object):
            arguments[0].slots.pop(arguments[1], None)
            return None
        if name in ("getattr", "hasattr") and len(arguments) >= 2:
            return self._getattr(name, arguments)
        if name == "isinstance" and len(arguments) == 2:
            return self._isinstance(*arguments)
        if name in ("print", "id", "type", "super", "callable", "vars", "dir", "iter", "next", "open", "input"):
            return UnknownValue(f"`{name}()` is not followed")
        if name == "dict":
            mapping = self.new_object("dict", kind="mapping", open_reason=call.unknown_keywords)
            mapping.call, mapping.module, mapping.frame = call.node, call.frame.module, call.frame.number
            for argument in arguments:
                self._update(mapping, argument)
            for key, value in keywords.items():
                mapping.slots[key] = Slot(value, call.sites.get(key))
            return mapping
        if name == "len" and arguments and isinstance(arguments[0], Object):
            return UnknownValue("its length is not known") if arguments[0].open_reason else len(arguments[0].slots)
        if name == "bool" and arguments:
            return truth(arguments[0])
        if name in PURE_BUILTINS:
            plain = []
            for argument in arguments:
                items = self._items(argument) if isinstance(argument, (ListValue, Object)) else None
                if isinstance(argument, (Object, External, FunctionValue, ClassValue)) and items is None:
                    return UnknownValue(f"`{name}()` of it is not followed")
                if items is not None and any(isinstance(i, (UnknownValue, ChoiceValue)) for i in items) and name != "list":
                    if name != "len":
                        return UnknownValue(f"`{name}()` of it is not fully known")
                plain.append(argument if items is None else items)
            if name == "list" and plain and isinstance(plain[0], list):
                return self.new_list(list(plain[0]))
            result = lift(lambda *a: getattr(builtins, name)(*a), *plain)
            if isinstance(result, (zip, enumerate, reversed, list)):
                return self.new_list(list(result))
            return frozenset(result) if isinstance(result, set) else result
        return UnknownValue(f"`{name}()` is not followed")

    def _getattr(self, name: str, arguments: list[Any]) -> Any:
        owner, attribute = arguments[0], arguments[1]
        fallback = arguments[2] if len(arguments) > 2 else MISSING
        if isinstance(owner, ChoiceValue):
            sides = (self._getattr(name, [side, *arguments[1:]]) for side in (owner.if_true, owner.if_false))
            return choose(owner.branch, *sides)
        if isinstance(owner, UnknownValue) or not isinstance(attribute, str):
            return UnknownValue("the attribute is only known when it runs")
        if isinstance(owner, Object) and owner.kind == "instance":
            if attribute in owner.slots:
                return True if name == "hasattr" else owner.slots[attribute].value
            has = self.classes.has(self, owner, attribute)
            if name == "hasattr":
                return UnknownValue("whether it has the attribute is only known when it runs") if has is None else has
            if has is False and fallback is not MISSING:
                return fallback
            return self.attribute(owner, attribute)
        if name == "hasattr":
            return UnknownValue("whether it has the attribute is only known when it runs")
        if fallback is not MISSING and not isinstance(owner, (External, ModuleValue, ClassValue)):
            return fallback
        return self.attribute(owner, attribute)

    def _isinstance(self, value: Any, kind: Any) -> Any:
        if isinstance(value, ChoiceValue):
            return choose(value.branch, self._isinstance(value.if_true, kind), self._isinstance(value.if_false, kind))
        kinds = kind if isinstance(kind, tuple) else (kind,)
        verdicts = []
        for one in kinds:
            name = one.name.removeprefix("builtins.") if isinstance(one, External) else getattr(getattr(one, "node", None), "name", "")
            if isinstance(value, UnknownValue):
                verdicts.append(None)
            elif name in ("str", "int", "float", "bool", "list", "dict", "tuple"):
                actual = "list" if isinstance(value, ListValue) else "dict" if isinstance(value, Object) and value.kind == "mapping" else type(value).__name__
                verdicts.append(actual == name or (actual, name) == ("bool", "int"))
            elif isinstance(value, Object):
                verdicts.append(True if value.class_name == name.rpartition(".")[2] else None)
            elif isinstance(value, (str, int, float, tuple, ListValue)) or value is None:
                verdicts.append(False)
            else:
                verdicts.append(None)
        if True in verdicts:
            return True
        return UnknownValue("its type is only known when it runs") if None in verdicts else False


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


@functools.lru_cache(maxsize=4096)
def _is_generator(node: ast.AST) -> bool:
    return any(isinstance(inner, (ast.Yield, ast.YieldFrom)) for inner in ast.walk(node))


def _is_main_guard(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"


def called_name(node: ast.Call) -> str:
    """The last part of the called name: `f` for `f(...)` and `module.f(...)`."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _short(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 60 else text[:57] + "..."
