# SPDX-License-Identifier: Apache-2.0
"""The part of the interpreter that follows calls: functions whose source is found, methods, builtins, constructors."""

from __future__ import annotations

import ast
import builtins
import functools
import sys
from typing import Any

from cudagraphs.formats.modules import NOT_FOLLOWED
from cudagraphs.formats.state import MAX_DEPTH, Call, Consumed, Frame, called_name, short
from cudagraphs.formats.values import (
    MISSING,
    BoundMethod,
    ChoiceValue,
    ClassValue,
    External,
    FunctionValue,
    ListValue,
    ModuleValue,
    Object,
    Partial,
    Site,
    Slot,
    UnknownValue,
    choose,
    lift,
    truth,
)
from cudagraphs.settings import Source

# Builtins that compute a value from plain values and change nothing.
PURE_BUILTINS = frozenset(
    [
        "abs",
        "all",
        "any",
        "bool",
        "chr",
        "dict",
        "divmod",
        "enumerate",
        "float",
        "frozenset",
        "hash",
        "int",
        "len",
        "list",
        "max",
        "min",
        "ord",
        "pow",
        "range",
        "repr",
        "reversed",
        "round",
        "set",
        "sorted",
        "str",
        "sum",
        "tuple",
        "zip",
    ]
)
STRING_METHODS = frozenset(
    [
        "lower",
        "upper",
        "strip",
        "lstrip",
        "rstrip",
        "split",
        "rsplit",
        "startswith",
        "endswith",
        "replace",
        "join",
        "format",
        "title",
        "removeprefix",
        "removesuffix",
        "partition",
        "rpartition",
        "find",
        "count",
        "isdigit",
    ]
)


# Decorators that hand on what the function gives.
HARMLESS_DECORATORS = frozenset(
    ["wraps", "lru_cache", "cache", "staticmethod", "classmethod", "property", "overload", "override", "no_type_check", "final"]
)


class Calls:
    """Calls; mixed into `Interpreter`."""

    def _eval_Call(self, node: ast.Call, frame: Frame) -> Any:
        function = self.evaluate(node.func, frame)
        arguments: list[Any] = []
        keywords: dict[str, Any] = {}
        unknown_keywords = ""
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                items = self._items(self.evaluate(argument.value, frame))
                if items is None:
                    unknown_keywords = f"`*{short(argument.value)}` is not known"
                else:
                    arguments += items
            else:
                arguments.append(self.evaluate(argument, frame))
        sites: dict[str, Site] = {}
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, frame)
            if keyword.arg is not None:
                keywords[keyword.arg] = value
                sites[keyword.arg] = Site(
                    frame.module, keyword.value, keyword.value, frame.number, frame.nesting > 0, node
                )
            elif isinstance(value, Object) and not value.open_reason:
                for name, slot in value.slots.items():
                    keywords[str(name)] = slot.value
                    if slot.site is not None:
                        sites[str(name)] = slot.site
            else:
                unknown_keywords = f"`**{short(keyword.value)}` is not fully known"
                if isinstance(value, Object):
                    keywords.update({str(name): slot.value for name, slot in value.slots.items()})
        if frame.number == 0 and called_name(node) in self.consumers:
            for value in [*arguments, *keywords.values()]:
                if self.classes.is_config(value):
                    raise Consumed(frame.statement, value)
        call = Call(node, frame, sites, unknown_keywords)
        return self.call(function, arguments, keywords, call)

    def call(self, function: Any, arguments: list[Any], keywords: dict[str, Any], call: Call) -> Any:
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
            if any(isinstance(n, ast.FunctionDef) and n.name in ("__init__", "__new__", "__post_init__") for n in function.node.body):
                self._escape(arguments, keywords, call)
            return self._construct(function.node.name, function, arguments, keywords, call)
        if isinstance(function, BoundMethod):
            return self._call_method(function, arguments, keywords, call)
        if isinstance(function, External):
            return self._call_external(function, arguments, keywords, call)
        self._escape(arguments, keywords, call)
        return UnknownValue(f"the call `{short(call.node.func)}(...)` is not followed")

    def _call_external(self, function: External, arguments: list[Any], keywords: dict[str, Any], call: Call) -> Any:
        intrinsic = self._intrinsic(function.name)
        if intrinsic is not None:
            return intrinsic(self, arguments, keywords, call)
        top, _, rest = function.name.partition(".")
        if (top == "builtins" or top in sys.stdlib_module_names) and function.name != "functools.partial":
            self._callbacks(function.name, [*arguments, *keywords.values()], call)
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
        return UnknownValue(f"`{short(call.node)}` is only known when it runs")

    def _callbacks(self, name: str, values: list[Any], call: Call) -> None:
        """A function handed to Python's own library may be called there, and may change whatever it can reach."""
        for value in values:
            node = value.node if isinstance(value, FunctionValue) else None
            quiet = isinstance(node, ast.Lambda) and not any(isinstance(n, ast.Call) for n in ast.walk(node.body))
            if (node is not None and not quiet) or isinstance(value, Partial):
                self.forget_all(f"`{short(call.node)}` may call a function that changes it")
                return

    def _unfollowed_decorator(self, function: FunctionValue) -> str:
        """A decorator that may change what the function gives; "" where each is known to hand the function on."""
        for decorator in getattr(function.node, "decorator_list", []):
            target = decorator.func if isinstance(decorator, ast.Call) else decorator
            name = ast.unparse(target)
            if name.rpartition(".")[2] in HARMLESS_DECORATORS:
                continue
            value = self.evaluate(target, Frame(-1, function.module, function.module.tree, {}, function.closure))
            if isinstance(value, External) and value.name.partition(".")[0] in NOT_FOLLOWED:
                continue
            if isinstance(value, FunctionValue) and _returns_its_argument(value.node):
                continue
            return name
        return ""

    def _construct(self, name: str, cls: Any, arguments: list[Any], keywords: dict[str, Any], call: Call) -> Object:
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
            copied.slots = {
                name: Slot(self.copy(slot.value), slot.site, slot.earlier) for name, slot in value.slots.items()
            }
            return copied
        if isinstance(value, ListValue):
            return self.new_list([self.copy(item) for item in value.items])
        return value

    def _escape(self, arguments: list[Any], keywords: dict[str, Any], call: Call) -> None:
        """A function that is not followed got these values: what is mutable among them may have changed."""
        source = Source(call.frame.module.label, call.node.lineno, call.node.col_offset + 1)
        name = short(call.node.func)
        self.not_followed.setdefault(name, source)
        for value in [*arguments, *keywords.values()]:
            if isinstance(value, (Object, ListValue, ChoiceValue)):
                self.forget(value, f"`{name}(...)` at {source} may change it and cannot be followed")

    def _call_function(
        self, function: FunctionValue, arguments: list[Any], keywords: dict[str, Any], call: Call
    ) -> Any:
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
            self.forget_all(f"the generator `{function.node.name}` may change it")
            return UnknownValue("generators are not followed")
        self.frames.append(frame)
        try:
            _, value = self._finish(frame, *self.block(function.node.body, frame))
        finally:
            self.frames.pop()
        decorator = self._unfollowed_decorator(function)
        if decorator:
            reason = f"the decorator `{decorator}` of `{function.node.name}` may change it"
            for reached in [value, *bound.values()]:
                self.forget(reached, reason)
            if not isinstance(value, (Object, ListValue, ChoiceValue)):
                return UnknownValue(reason)
        return value

    def _call_method(self, method: BoundMethod, arguments: list[Any], keywords: dict[str, Any], call: Call) -> Any:
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
        return UnknownValue(f"the call `{short(call.node.func)}(...)` is not followed")

    def _call_mapping(
        self, owner: Object, name: str, arguments: list[Any], keywords: dict[str, Any], call: Call
    ) -> Any:
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

    def _call_builtin(self, name: str, arguments: list[Any], keywords: dict[str, Any], call: Call) -> Any:
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
        if name in ("exec", "eval", "globals", "locals", "__import__"):
            self.forget_all(f"`{name}()` may change it")
            return UnknownValue(f"`{name}()` is not followed")
        if name == "vars" or "." in name:  # vars(x), object.__setattr__(x, ...), list.append(x, ...)
            self._escape(arguments, keywords, call)
            return UnknownValue(f"`{name}()` is not followed")
        if name in ("print", "id", "type", "super", "callable", "dir", "iter", "next", "open", "input"):
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
                if (
                    items is not None
                    and any(isinstance(i, (UnknownValue, ChoiceValue)) for i in items)
                    and name != "list"
                ):
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
            name = (
                one.name.removeprefix("builtins.")
                if isinstance(one, External)
                else getattr(getattr(one, "node", None), "name", "")
            )
            if isinstance(value, UnknownValue):
                verdicts.append(None)
            elif name in ("str", "int", "float", "bool", "list", "dict", "tuple"):
                actual = (
                    "list"
                    if isinstance(value, ListValue)
                    else "dict"
                    if isinstance(value, Object) and value.kind == "mapping"
                    else type(value).__name__
                )
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


@functools.lru_cache(maxsize=4096)
def _is_generator(node: ast.AST) -> bool:
    return any(isinstance(inner, (ast.Yield, ast.YieldFrom)) for inner in ast.walk(node))


@functools.lru_cache(maxsize=4096)
def _returns_its_argument(node: ast.AST) -> bool:
    """Whether a decorator gives back the function that it got, as one that only registers it does."""
    if not isinstance(node, ast.FunctionDef) or not node.args.args:
        return False
    returns = [inner for inner in ast.walk(node) if isinstance(inner, ast.Return)]
    return bool(returns) and all(isinstance(r.value, ast.Name) and r.value.id == node.args.args[0].arg for r in returns)
