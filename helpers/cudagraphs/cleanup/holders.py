# SPDX-License-Identifier: Apache-2.0
"""Which object keeps a graph alive, in words: `entry 'training' of trainer.graphs`, `local 'graph' of train()`."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

_OWN_FOLDER = str(Path(__file__).parent)
_MAX_STEPS = 6  # each step asks the garbage collector once, which looks at the whole heap


def held_by(obj: Any, besides: Any = None) -> str:
    """The chain of objects that leads to obj, outermost last, up to a module, a class or a frame.

    besides: a container of the caller's own that also holds obj and does not count.
    """
    steps, current, seen = [], obj, {id(obj), id(besides)}
    for _ in range(_MAX_STEPS):
        local = _local_variable(current)
        if local is not None:
            steps.append(local)
            break
        referrer = next((r for r in gc.get_referrers(current) if id(r) not in seen and not _ours(r)), None)
        if referrer is None:
            steps.append("an object that Python cannot see (C++ or a frame that has ended)" if not steps else "…")
            break
        seen.add(id(referrer))
        word, end = _describe(referrer, current)
        if word:
            steps.append(word)
        if end:
            break
        current = referrer
    return " of ".join(steps)


def _ours(referrer: Any) -> bool:
    """Frames of this package, and the heap it found the object with."""
    if isinstance(referrer, FrameType):
        return referrer.f_code.co_filename.startswith(_OWN_FOLDER)
    return type(referrer).__module__.startswith("cudagraphs.cleanup")


def _local_variable(obj: Any) -> str | None:
    for frame in sys._current_frames().values():
        while frame is not None:
            code = frame.f_code
            if not code.co_filename.startswith(_OWN_FOLDER) and code.co_name != "<module>":
                name = next((n for n, v in frame.f_locals.items() if v is obj), None)
                if name is not None:
                    return f"local {name!r} of {code.co_name}() in {Path(code.co_filename).name}:{frame.f_lineno}"
            frame = frame.f_back
    return None


def _describe(referrer: Any, obj: Any) -> tuple[str, bool]:
    """A word for one step, and whether the chain may end here."""
    if isinstance(referrer, dict):
        key = next((k for k, v in referrer.items() if v is obj), None)
        if "__name__" in referrer and isinstance(owner := sys.modules.get(str(referrer["__name__"])), ModuleType):
            if vars(owner) is referrer:
                return f"{referrer['__name__']}.{key}", True
        return f"entry {key!r}", False
    if isinstance(referrer, type):
        key = next((k for k, v in vars(referrer).items() if v is obj), "?")
        return f"{referrer.__module__}.{referrer.__qualname__}.{key}", True
    if isinstance(referrer, FrameType):
        name = next((n for n, v in referrer.f_locals.items() if v is obj), "?")
        code = referrer.f_code
        return f"local {name!r} of {code.co_name}() in {Path(code.co_filename).name}:{referrer.f_lineno}", True
    if isinstance(referrer, FunctionType):
        return f"function {referrer.__module__}.{referrer.__qualname__}", True
    if type(referrer).__name__ in ("list", "tuple", "set", "cell"):
        return f"a {type(referrer).__name__}", False
    attribute = next((k for k, v in getattr(referrer, "__dict__", {}).items() if v is obj), None)
    return f"{attribute or 'a reference'} in {type(referrer).__module__}.{type(referrer).__qualname__}", False
