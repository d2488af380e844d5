# SPDX-License-Identifier: Apache-2.0
"""The part of the interpreter that follows statements: both sides of undecided branches, loops, assignments."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from typing import Any

from cudagraphs.formats.state import (
    BREAK,
    CONTINUE,
    MAX_STEPS,
    MAX_TURNS,
    NORMAL,
    RAISE,
    RETURN,
    Budget,
    Frame,
    Heap,
    called_name,
    short,
)
from cudagraphs.formats.values import (
    MISSING,
    ChoiceValue,
    ClassValue,
    FunctionValue,
    ListValue,
    ModuleValue,
    Object,
    Site,
    Slot,
    UnknownValue,
    choose,
    same,
    truth,
)
from cudagraphs.settings import Branch, Source


# What every training container has, although it may be missing where the recipe is read.
IN_TRAINING = frozenset(["torch", "transformer_engine", "numpy"])


class Statements:
    """Statements and assignments; mixed into `Interpreter`. A statement gives a status and, for a return, the value."""

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
        if isinstance(left, ListValue) and isinstance(node.op, ast.Add) and self._items(right) is not None:
            left.items += self._items(right)  # in place: every other name of the list sees it
            return
        self.assign(node.target, self._binary(type(node.op), left, right), frame, node, None)

    def _do_Return(self, node: ast.Return, frame: Frame) -> tuple[str, Any]:
        return RETURN, None if node.value is None else self.evaluate(node.value, frame)

    def _do_Raise(self, node: ast.Raise, frame: Frame) -> tuple[str, Any]:
        return RAISE, None

    def _do_Break(self, node: ast.Break, frame: Frame) -> tuple[str, Any]:
        return BREAK, None

    def _do_Continue(self, node: ast.Continue, frame: Frame) -> tuple[str, Any]:
        return CONTINUE, None

    def _do_Delete(self, node: ast.Delete, frame: Frame) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                frame.locals.pop(target.id, None)
            elif isinstance(target, (ast.Attribute, ast.Subscript)):
                owner = self.evaluate(target.value, frame)
                key = target.attr if isinstance(target, ast.Attribute) else self.evaluate(target.slice, frame)
                if isinstance(owner, Object) and isinstance(key, (str, int)):
                    owner.slots.pop(key, None)
                elif isinstance(owner, (Object, ListValue)):
                    self.forget(owner, "an element is deleted from it")

    def _do_Global(self, node: ast.Global, frame: Frame) -> None:
        frame.shared.update({name: None for name in node.names})

    def _do_Nonlocal(self, node: ast.Nonlocal, frame: Frame) -> None:
        for name in node.names:
            scope = frame.closure
            while scope is not None and name not in scope.locals:
                scope = scope.closure
            frame.shared[name] = scope

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
        condition = truth(self.evaluate(node.test, frame))
        sides = (lambda: self._nested(node.body, frame)), (lambda: self._nested(node.orelse, frame))
        return self.branch(condition, node.test, frame, *sides)

    def _nested(self, body: list[ast.stmt], frame: Frame) -> tuple[str, Any]:
        frame.nesting += 1
        try:
            return self.block(body, frame)
        finally:
            frame.nesting -= 1

    def branch(
        self, condition: Any, test: ast.AST, frame: Frame, if_true: Callable, if_false: Callable
    ) -> tuple[str, Any]:
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
        # a loop is left, or its turn ended, on one side
        frame.leaves_unsure = True
        self.merge(branch, heap_t, heap_f)
        return NORMAL, None

    def _branch(self, condition: UnknownValue, test: ast.AST, frame: Frame) -> Branch:
        source = Source(
            frame.module.label, test.lineno, test.col_offset + 1, frame.module.file.line(test.lineno).strip()
        )
        default = bool(condition.default) if condition.has_default else None
        return Branch(ast.unparse(test), source, default, condition.reason)

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

    def _do_For(self, node: ast.For, frame: Frame) -> tuple[str, Any]:
        items = self._items(self.evaluate(node.iter, frame))
        before, unsure, frame.leaves_unsure = self.snapshot(), frame.leaves_unsure, False
        status, value = NORMAL, None
        if items is None:
            self.assign(node.target, UnknownValue("it is a loop variable"), frame, node, None)
            return self._unknown_loop(node, before, "it is set in a loop whose range is not known", frame, unsure)
        for item in items:
            self.assign(node.target, item, frame, node, None)
            status, value = self._nested(node.body, frame)
            if status not in (NORMAL, CONTINUE):
                break
        if frame.leaves_unsure:
            self._forget_since(before, "it is set in a loop that may end early")
        frame.leaves_unsure = unsure
        return self._after_loop(node, status, value, frame)

    def _do_While(self, node: ast.While, frame: Frame) -> tuple[str, Any]:
        before, unsure, frame.leaves_unsure = self.snapshot(), frame.leaves_unsure, False
        for _ in range(MAX_TURNS):
            condition = truth(self.evaluate(node.test, frame))
            if not isinstance(condition, bool):
                break
            status, value = self._nested(node.body, frame) if condition else (NORMAL, None)
            if not condition or status not in (NORMAL, CONTINUE):
                if frame.leaves_unsure:
                    self._forget_since(before, "it is set in a loop that may end early")
                frame.leaves_unsure = unsure
                return self._after_loop(node, status, value, frame)
        return self._unknown_loop(node, before, "it is set in a loop whose length is not known", frame, unsure)

    def _after_loop(self, node: ast.For | ast.While, status: str, value: Any, frame: Frame) -> tuple[str, Any]:
        if status == BREAK:
            return NORMAL, None
        if status in (RETURN, RAISE):
            return status, value
        return self._nested(node.orelse, frame)

    def _unknown_loop(
        self, node: ast.For | ast.While, before: Heap, reason: str, frame: Frame, unsure: bool
    ) -> tuple[str, Any]:
        """Run the body once: whatever it sets is unknown, since it may run any number of times."""
        self._nested(node.body, frame)
        frame.leaves_unsure = unsure
        self._forget_since(before, reason)
        return NORMAL, None

    def _forget_since(self, before: Heap, reason: str) -> None:
        """Everything that has changed since `before` becomes unknown."""
        now = self.snapshot()
        for key, (obj, slots, _) in now.objects.items():
            old = before.objects[key][1] if key in before.objects else slots
            for name in {**old, **slots}:
                was, now_is = old.get(name), slots.get(name)
                if was is None or now_is is None or not same(was.value, now_is.value):
                    obj.slots[name] = Slot(UnknownValue(reason), (now_is or was).site)
        for key, (held, items) in now.lists.items():
            if key in before.lists and items != before.lists[key][1]:
                held.items = [UnknownValue(reason)] * len(items)
        for number, (frame, variables) in now.frames.items():
            old = before.frames[number][1] if number in before.frames else variables
            for name in {**old, **variables}:
                if not same(old.get(name, MISSING), variables.get(name, MISSING)):
                    frame.locals[name] = UnknownValue(reason)

    def _do_With(self, node: ast.With, frame: Frame) -> tuple[str, Any]:
        unknown_exit = suppresses = False
        for item in node.items:
            value = self.evaluate(item.context_expr, frame)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value, frame, node, None)
            expression = item.context_expr
            suppresses |= isinstance(expression, ast.Call) and called_name(expression) == "suppress"
            unknown_exit |= isinstance(value, Object) and isinstance(value.class_value, ClassValue)
        if suppresses:
            raises = UnknownValue("whether it raises is only known when it runs", True)
            test = ast.copy_location(ast.Name("nothing is raised in the with block"), node)
            return self.branch(raises, test, frame, lambda: self._nested(node.body, frame), lambda: (NORMAL, None))
        result = self._nested(node.body, frame)
        if unknown_exit:
            self.forget_all(f"the context manager at {frame.module.label}:{node.lineno} may change it")
        return result

    def _do_Try(self, node: ast.Try, frame: Frame) -> tuple[str, Any]:
        """The body, or, where it may raise, also the side on which it did not run and a handler did."""

        def body() -> tuple[str, Any]:
            status, value = self._nested(node.body, frame)
            if status == RAISE and node.handlers:
                return handlers(0)
            return self._nested(node.orelse, frame) if status == NORMAL else (status, value)

        def handlers(index: int) -> tuple[str, Any]:
            handler = node.handlers[index]
            if index + 1 == len(node.handlers):
                return self._nested(handler.body, frame)
            which = UnknownValue("which exception is raised is only known when it runs")
            name = ast.copy_location(ast.Name(f"the exception is {short(handler.type)}"), handler)
            return self.branch(which, name, frame, lambda: self._nested(handler.body, frame), lambda: handlers(index + 1))

        if node.handlers and not self._cannot_raise(node.body):
            raises = UnknownValue("whether it raises is only known when it runs", True)
            test = ast.copy_location(ast.Name("nothing is raised in the try block"), node)
            status, value = self.branch(raises, test, frame, body, lambda: handlers(0))
        else:
            status, value = body()
        if node.finalbody:
            ended, final = self._nested(node.finalbody, frame)
            if ended != NORMAL:
                return ended, final
        return status, value

    def _cannot_raise(self, body: list[ast.stmt]) -> bool:
        """Whether a try block is only imports of modules that are there, and assignments of plain literals."""
        names = []
        for statement in body:
            if isinstance(statement, ast.Import):
                names += [alias.name for alias in statement.names]
            elif isinstance(statement, ast.ImportFrom) and not statement.level:
                names.append(statement.module or "")
            elif not isinstance(statement, ast.Pass) and not (
                isinstance(statement, (ast.Assign, ast.Return)) and isinstance(statement.value, (ast.Constant, ast.List, ast.Tuple))
                and not any(isinstance(inner, (ast.Call, ast.Subscript, ast.BinOp)) for inner in ast.walk(statement))
            ):  # fmt: skip
                return False
        tops = [name.partition(".")[0] for name in names]
        return all(top in sys.stdlib_module_names or top in IN_TRAINING or self.modules.find(name) is not None
                   for top, name in zip(tops, names))  # fmt: skip

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
            return self.branch(
                condition, pattern, frame, lambda: self._nested(clause.body, frame), lambda: case(index + 1)
            )

        return case(0)

    # -- assignment ----------------------------------------------------------------------------------------------------

    def assign(self, target: ast.expr, value: Any, frame: Frame, node: ast.AST, value_node: ast.expr | None) -> None:
        if isinstance(target, ast.Name) and target.id in frame.shared:
            scope = frame.shared[target.id]
            if scope is None:
                self.globals[(frame.module.name, target.id)] = value
            else:
                scope.locals[target.id] = value
        elif isinstance(target, ast.Name):
            frame.locals[target.id] = value
            if frame.node is frame.module.tree:
                self.globals[(frame.module.name, target.id)] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            items = self._items(value)
            for index, element in enumerate(target.elts):
                if isinstance(element, ast.Starred) or items is None or index >= len(items):
                    unknown = UnknownValue("it is unpacked from a value that is not known")
                    self.assign(
                        element.value if isinstance(element, ast.Starred) else element, unknown, frame, node, None
                    )
                else:
                    self.assign(element, items[index], frame, node, None)
        elif isinstance(target, ast.Attribute):
            site = Site(frame.module, node, value_node, frame.number, frame.nesting > 0)
            self.set_attribute(self._assigned_to(target.value, "instance", frame), target.attr, value, site)
        elif isinstance(target, ast.Subscript):
            site = Site(frame.module, node, value_node, frame.number, frame.nesting > 0)
            self.set_item(
                self._assigned_to(target.value, "mapping", frame), self.evaluate(target.slice, frame), value, site
            )

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
            old = owner.slots.get(name)
            owner.slots[name] = Slot(value, site, () if old is None else (*old.earlier, old))
        elif isinstance(owner, ModuleValue):
            self.globals[(owner.module.name, name)] = value
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

    def forget_all(self, reason: str) -> None:
        """Anything may have changed: what is called can reach every object through closures and globals."""
        for value in [*self.objects, *self.lists]:
            self.forget(value, reason)

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


def _is_main_guard(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"
