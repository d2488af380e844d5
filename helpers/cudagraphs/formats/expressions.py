# SPDX-License-Identifier: Apache-2.0
"""The part of the interpreter that evaluates expressions to abstract values, and finds what names stand for."""

from __future__ import annotations

import ast
import builtins
import operator
from collections.abc import Callable
from typing import Any

from cudagraphs.formats.state import MAX_STEPS, RETURN, Budget, Frame, short
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


class Expressions:
    """Expressions, names and imports; mixed into `Interpreter`."""

    def evaluate(self, node: ast.expr, frame: Frame) -> Any:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise Budget
        handler = getattr(self, f"_eval_{type(node).__name__}", None)
        if handler is None:
            return UnknownValue(f"`{short(node)}` is not followed")
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
                    if (
                        isinstance(element, ast.Name)
                        and element.id == name
                        and items is not None
                        and index < len(items)
                    ):
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
            if owner.kind == "instance" and name.startswith("__"):
                # __dict__, __setattr__ and the like reach the attributes behind the reader's back
                self.forget(owner, f"`.{name}` on it is not followed")
                return UnknownValue(f"`.{name}` is not followed")
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
                if isinstance(statement, ast.Assign) and any(
                    isinstance(t, ast.Name) and t.id == name for t in statement.targets
                ):
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
                    return UnknownValue(f"`{short(element)}` is not known")
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
        if (
            isinstance(left, Object)
            and isinstance(right, Object)
            and kind is ast.BitOr
            and left.kind == right.kind == "mapping"
        ):
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
            return choose(
                left.branch, self._compare(kind, left.if_true, right), self._compare(kind, left.if_false, right)
            )
        if isinstance(right, ChoiceValue):
            return choose(
                right.branch, self._compare(kind, left, right.if_true), self._compare(kind, left, right.if_false)
            )
        if kind in (ast.In, ast.NotIn) and isinstance(right, (Object, ListValue)):
            keys = list(right.slots) if isinstance(right, Object) else right.items
            if any(isinstance(k, (UnknownValue, ChoiceValue)) for k in keys) or (
                isinstance(right, Object) and right.open_reason
            ):
                return UnknownValue("the container is not fully known")
            return lift(lambda value: (value in keys) == (kind is ast.In), left)
        concrete = (Object, ListValue, FunctionValue, ClassValue, ModuleValue, BoundMethod, Partial)
        if isinstance(left, concrete) or isinstance(right, concrete):
            if left is None or right is None or kind in (ast.Is, ast.IsNot):
                return (left is right) == (kind in (ast.Is, ast.Eq))
            if isinstance(left, ListValue) and isinstance(right, ListValue) and kind in (ast.Eq, ast.NotEq):
                return lift(lambda *_: (left.items == right.items) == (kind is ast.Eq), *left.items, *right.items)
            plain = (str, int, float, tuple)
            if (
                kind in (ast.Eq, ast.NotEq)
                and ListValue in (type(left), type(right))
                and isinstance(left, plain) != isinstance(right, plain)
            ):
                return kind is ast.NotEq
            return UnknownValue("the comparison is not followed")
        if isinstance(left, External) and isinstance(right, External):
            if kind not in (ast.Is, ast.Eq, ast.IsNot, ast.NotEq):
                return UnknownValue("the comparison is not followed")
            return (left.last == right.last) == (kind in (ast.Is, ast.Eq))
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
        complete = self._comprehension(
            node.generators, frame, lambda inner: items.append(self.evaluate(node.elt, inner))
        )
        return self.new_list(items) if complete else UnknownValue(f"`{short(node)}` is not known")

    _eval_GeneratorExp = _eval_ListComp

    def _eval_SetComp(self, node: ast.SetComp, frame: Frame) -> Any:
        value = self._eval_ListComp(node, frame)
        return lift(lambda *items: frozenset(items), *value.items) if isinstance(value, ListValue) else value

    def _eval_DictComp(self, node: ast.DictComp, frame: Frame) -> Any:
        mapping = self.new_object("dict", kind="mapping")

        def emit(inner: Frame) -> None:
            self.set_item(mapping, self.evaluate(node.key, inner), self.evaluate(node.value, inner), None)

        return (
            mapping
            if self._comprehension(node.generators, frame, emit)
            else UnknownValue(f"`{short(node)}` is not known")
        )

    def _items(self, value: Any) -> list[Any] | None:
        """The elements of a known iterable, or None."""
        if isinstance(value, ListValue):
            return list(value.items)
        if isinstance(value, Object) and value.kind == "mapping" and not value.open_reason:
            return list(value.slots)
        if isinstance(value, (tuple, str, range, frozenset)):
            return list(value) if len(value) <= 10_000 else None
        return None
