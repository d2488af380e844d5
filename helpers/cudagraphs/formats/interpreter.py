# SPDX-License-Identifier: Apache-2.0
"""Follows a recipe function statically: what its configuration holds at the end, and which statement gave each value.

Nothing of the recipe runs. The interpreter walks the syntax tree in execution order with abstract values; it follows
calls into functions whose source it finds, takes both sides of a condition that only run time decides, and calls
unknown what it cannot follow. What it does not model (generators, exceptions as control flow, metaclasses) makes the
values behind it unknown.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from cudagraphs.formats.calls import Calls
from cudagraphs.formats.expressions import Expressions
from cudagraphs.formats.modules import Modules
from cudagraphs.formats.state import Budget, Classes, Consumed, Entry, Frame, Heap
from cudagraphs.formats.statements import Statements
from cudagraphs.formats.values import FunctionValue, MISSING, ChoiceValue, ListValue, Module, Object, Slot, UnknownValue, choose
from cudagraphs.settings import Branch, Source


class Interpreter(Statements, Expressions, Calls):
    """Interprets one entry function. `intrinsics` maps dotted names (or their last part) to handlers that model what
    upstream code does: `handler(interpreter, arguments, keywords, node) -> value`."""

    def __init__(
        self,
        modules: Modules,
        intrinsics: dict[str, Callable[..., Any]],
        classes: Classes,
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

    # -- entry points --------------------------------------------------------------------------------------------------

    def run_function(self, module: Module, node: ast.FunctionDef) -> Entry:
        """Interpret a top-level function called without arguments; a parameter's default is only its default."""
        frame = self._frame(module, node, {})
        parameters = node.args
        positional = [*parameters.posonlyargs, *parameters.args]
        defaults = dict(
            zip([p.arg for p in positional][len(positional) - len(parameters.defaults) :], parameters.defaults)
        )
        defaults.update({p.arg: d for p, d in zip(parameters.kwonlyargs, parameters.kw_defaults) if d is not None})
        self.frames.append(frame)
        for parameter in [*positional, *parameters.kwonlyargs]:
            default = defaults.get(parameter.arg)
            known = MISSING if default is None else self.evaluate(default, frame)
            if isinstance(known, (UnknownValue, ChoiceValue)):
                known = MISSING
            frame.locals[parameter.arg] = UnknownValue(f"it comes from the argument `{parameter.arg}`", known)
        if parameters.vararg:
            frame.locals[parameters.vararg.arg] = UnknownValue(
                f"it comes from the arguments `*{parameters.vararg.arg}`"
            )
        if parameters.kwarg:
            frame.locals[parameters.kwarg.arg] = UnknownValue(f"it comes from the arguments `**{parameters.kwarg.arg}`")
        entry = self._guarded(frame, node.body)
        decorator = self._unfollowed_decorator(FunctionValue(node, module))
        if decorator:
            self.forget(entry.value, f"the decorator `{decorator}` may change it")
        return entry

    def run_script(self, module: Module) -> Entry:
        """Interpret a file's own statements, as `python file.py` would, up to the call that takes the configuration to
        training."""
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
            return Entry(
                UnknownValue("the recipe takes too many steps to follow"), frame, failure="too many steps to follow"
            )
        except RecursionError:
            return Entry(
                UnknownValue("the recipe nests too deeply to follow"), frame, failure="nested too deeply to follow"
            )

    def _frame(self, module: Module, node: ast.AST, variables: dict[str, Any], closure: Frame | None = None) -> Frame:
        frame = Frame(self.next_frame, module, node, variables, closure)
        self.next_frame += 1
        return frame

    # -- heap ----------------------------------------------------------------------------------------------------------

    def new_object(
        self, class_name: str, kind: str = "instance", class_value: Any = None, open_reason: str = ""
    ) -> Object:
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
                    obj.slots[name] = Slot(choose(branch, *values), site, (a or b).earlier)
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
                name: choose(
                    branch,
                    left.get(name, UnknownValue("it may be unset")),
                    right.get(name, UnknownValue("it may be unset")),
                )
                for name in {**left, **right}
            }
