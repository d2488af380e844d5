# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for packages that released upstream code imports but that are not needed to build a configuration.

`install(roots)` puts a finder at the end of `sys.meta_path`: a module under one of the named roots that Python cannot
find otherwise is made up on the spot. Every attribute of such a module is a class that can be subclassed, called,
indexed, iterated (as empty) and used as a decorator. A package that is really installed is never replaced.
"""

from __future__ import annotations

import abc
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import typing
from collections.abc import Iterable, Mapping


class _StandinType(abc.ABCMeta):
    """Metaclass: any attribute of a stand-in class is another stand-in class."""

    def __new__(metacls, name, bases, namespace, **keywords):
        return super().__new__(metacls, name, bases, namespace)

    def __init__(cls, name, bases, namespace, **keywords):
        super().__init__(name, bases, namespace)

    def __getattr__(cls, name: str):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        made = make_class(name)
        setattr(cls, name, made)
        return made

    def register(cls, *args, **kwargs):  # registries of the replaced package, not ABCMeta's
        return Standin()

    def __getitem__(cls, item):
        return cls

    def __iter__(cls):
        return iter(())

    def __or__(cls, other):
        return cls

    def __ror__(cls, other):
        return cls


class Standin(metaclass=_StandinType):
    """An object that accepts whatever is done with it."""

    def __init_subclass__(cls, **keywords):
        pass  # `class Typed(Base, total=False)` and the like

    def __new__(cls, *args, **kwargs):
        # A bare decorator (`@jit`) gets the decorated object back, unchanged.
        if len(args) == 1 and not kwargs and isinstance(args[0], (types.FunctionType, type)):
            return args[0]
        return super().__new__(cls)

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return Standin(*args, **kwargs)

    def __getattr__(self, name: str):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Standin()

    def __getitem__(self, item):
        return Standin()

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        return False


def make_class(name: str) -> type:
    return _StandinType(name, (Standin,), {})


class StandinModule(types.ModuleType):
    def __getattr__(self, name: str):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        made = make_class(name)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: Iterable[str], attributes: Mapping[str, Mapping[str, object]]):
        self.roots = frozenset(roots)
        self.attributes = attributes

    def find_spec(self, fullname, path=None, target=None):
        parent = fullname.rpartition(".")[0]
        # A part that a really installed package lacks is not made up, unless it is named itself.
        if fullname in self.roots or isinstance(sys.modules.get(parent), StandinModule):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = StandinModule(spec.name)
        module.__path__ = []
        module.__file__ = f"<stand-in {spec.name}>"
        return module

    def exec_module(self, module):
        module.__dict__.update(self.attributes.get(module.__name__, {}))


def install(roots: Iterable[str], attributes: Mapping[str, Mapping[str, object]] | None = None) -> None:
    """Let imports of the named packages succeed where they are not installed.

    Args:
        roots: names of packages, top-level or (such as "megatron.energon") inside a package that is there.
        attributes: module name -> attributes that must hold real values, such as `__version__`.
    """
    # torch decides at import whether triton is there; let it look before a stand-in of that name exists.
    importlib.import_module("torch._inductor.runtime.triton_compat")
    sys.meta_path.append(_Finder(roots, attributes or {}))


def complete_environment() -> None:
    """Supply the real things that upstream expects and that a lean environment or an older Python lacks.

    `packaging` (upstream compares versions with it) comes from pip's own copy, `typing.override` (Python 3.12) from
    typing_extensions, which torch depends on.
    """
    try:
        import packaging.version  # noqa: F401
    except ModuleNotFoundError:
        for name in ("packaging", "packaging.version", "packaging.specifiers"):
            sys.modules[name] = importlib.import_module(f"pip._vendor.{name}")
    if not hasattr(typing, "override"):
        import typing_extensions

        typing.override = typing_extensions.override
