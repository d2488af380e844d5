# SPDX-License-Identifier: Apache-2.0
"""Words of a command line, and the options that they make."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from cudagraphs.settings import Branch, Fact, Source, Unknown, join

Side = tuple[Branch, bool]
OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
OVERRIDE = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w-]*(?:\.[\w-]+)+)(=|$)")


@dataclass(frozen=True)
class Word:
    """One word. `text` is None where it is not known, with the reason in `reason`; `guards` are the sides it stands
    under.

    `span` is where exactly this text stands in the file; `reference` is the word of the file that brings it, where that
    word brings nothing else (a variable). Both count characters, and are None where there is no such place.
    """

    text: str | None
    source: Source | None = None
    guards: tuple[Side, ...] = ()
    reason: str = ""
    span: tuple[int, int] | None = None
    reference: tuple[int, int] | None = None
    # whether an unknown word may be several words, or none
    several: bool = False


@dataclass
class Option:
    """An option with the words behind it. `inline` is the value after `=` in the option's own word, None where there is
    none.

    `name` is without dashes. An override (`model.x=1`) is an option too, with its dotted path as the name.
    """

    name: str
    word: Word
    values: list[Word] = field(default_factory=list)
    inline: str | None = None
    override: str | None = None

    @property
    def guards(self) -> tuple[Side, ...]:
        return self.word.guards

    @property
    def last(self) -> Word:
        return self.values[-1] if self.values else self.word


def group(words: Iterable[Word], overrides: bool = False) -> list[Option]:
    """Options in order. Words in front of the first option are left out.

    With `overrides`, `a.b=c` is one of its own.
    """
    options: list[Option] = []
    for word in words:
        text = word.text
        if text is not None:
            dotted = OVERRIDE.match(text) if overrides else None
            if dotted and (dotted.group(3) == "=" or dotted.group(1) == "~"):
                options.append(Option(dotted.group(2), word, [], text[dotted.end() :], dotted.group(1) or ""))
                continue
            match = OPTION.match(text)
            if match and (match.end() == len(text) or text[match.end()] == "="):
                inline = text[match.end() + 1 :] if match.end() < len(text) else None
                options.append(Option(match.group().lstrip("-"), word, [], inline))
                continue
        if options and options[-1].override is None:
            options[-1].values.append(word)
    return options


def fold(entries: Iterable[tuple[tuple[Side, ...], Fact]], start: Fact) -> Fact:
    """The fact after entries in order, each in effect under its sides only; `start` holds before them."""
    fact = start
    for guards, new in entries:
        result = new
        for branch, side in reversed(guards):
            result = join(branch, result, fact) if side else join(branch, fact, result)
        fact = result
    return fact


def by_world(words: list[Word], convert: Callable[[list[str]], Any], source: Source | None) -> Fact:
    """The fact that the words make: one value, or a choice where they depend on branches. `convert` takes the texts."""
    from cudagraphs.settings import Known

    branches = list(dict.fromkeys(branch for word in words for branch, _ in word.guards))

    def at(world: dict[Branch, bool]) -> Fact:
        present = [word for word in words if all(world[branch] == side for branch, side in word.guards)]
        unknown = next((word for word in present if word.text is None), None)
        if unknown is not None:
            return Unknown(unknown.reason, unknown.source)
        if not present:
            return Unknown("it has no value here", source)
        return Known(convert([word.text or "" for word in present]), source)

    def decide(rest: list[Branch], world: dict[Branch, bool]) -> Fact:
        if not rest:
            return at(world)
        return join(rest[0], decide(rest[1:], {**world, rest[0]: True}), decide(rest[1:], {**world, rest[0]: False}))

    if len(branches) > 4:
        return Unknown("it depends on too many conditions", source)
    return decide(branches, {})


__all__ = ["OVERRIDE", "Option", "Side", "Word", "by_world", "fold", "group", "product"]
