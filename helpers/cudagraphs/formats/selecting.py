# SPDX-License-Identifier: Apache-2.0
"""Which runs of a file are meant, and whether a setting is in effect: what every format but Python recipes shares."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

from cudagraphs.formats.source import SourceError
from cudagraphs.rules import defaults
from cudagraphs.settings import Choice, Fact, Known, Settings

# values of a scope field that all mean the whole layer
WHOLE_LAYER = (None, "full", [], ())


def pick(path: Path, candidates: list[str], patterns: list[str], everything: bool, what: str) -> list[str]:
    """The candidates that names or globs pick, all of them, or the only one.

    Raises SourceError where that is not decided.
    """
    if not candidates:
        raise SourceError(f"{path}: holds no {what}")
    if patterns:
        for pattern in patterns:
            if not fnmatch.filter(candidates, pattern):
                raise SourceError(
                    f"{path}: no {what} matches --function {pattern!r}; there are: {', '.join(candidates)}"
                )
        return [name for name in candidates if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    if len(candidates) > 1 and not everything:
        listed = "\n".join(f"  {name}" for name in candidates)
        raise SourceError(
            f"{path}: {len(candidates)} times {what}; pick with --function NAME (repeatable, globs allowed) or "
            f"--all:\n{listed}"
        )
    return candidates


def in_effect(settings: Settings, name: str, value: Any) -> bool:
    """Whether a run is known to hold the value, whichever way its branches go."""
    fact = settings.facts.get(name)
    if fact is None and settings.complete:
        try:
            fact = Known(defaults.default(name, settings.versions.minor))
        except KeyError:
            return value is None
    return _holds(name, fact, value)


def _holds(name: str, fact: Fact | None, value: Any) -> bool:
    if isinstance(fact, Choice):
        return _holds(name, fact.if_true, value) and _holds(name, fact.if_false, value)
    if not isinstance(fact, Known):
        return False
    have = list(fact.value) if isinstance(fact.value, (list, tuple)) else fact.value
    want = list(value) if isinstance(value, (list, tuple)) else value
    if name == "cuda_graph_modules" and have in WHOLE_LAYER and want in WHOLE_LAYER:
        return True
    if isinstance(have, bool) != isinstance(want, bool):
        return False
    if name.startswith("env."):
        return str(have) == str(want) if want is not None else have is None
    return have == want
