# SPDX-License-Identifier: Apache-2.0
"""Unified diffs of recipes, block by block: matching thousands of alike lines as a whole would take longer than all the
rest."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

CONTEXT = 2

Change = tuple[int, int, int, int]


def unified_diff(old: str, new: str, path: str) -> str:
    """The difference of two texts in unified format with two lines of context, "" if there is none.

    Line ends are shown as plain newlines.
    """
    before, after = _lines(old), _lines(new)
    changes = list(_changes(before, after))
    if not changes:
        return ""
    shown = [f"--- a/{path}", f"+++ b/{path}"]
    for group in _groups(changes):
        first, last = group[0], group[-1]
        lead, tail = min(CONTEXT, first[0]), min(CONTEXT, len(before) - last[1])
        top, bottom = first[0] - lead, last[1] + tail
        shown.append(f"@@ -{_range(top, bottom)} +{_range(first[2] - lead, last[3] + tail)} @@")
        for start, end, other_start, other_end in group:
            shown += [f" {line}" for line in before[top:start]]
            shown += [f"-{line}" for line in before[start:end]]
            shown += [f"+{line}" for line in after[other_start:other_end]]
            top = end
        shown += [f" {line}" for line in before[top:bottom]]
    return "\n".join(shown)


def _lines(text: str) -> list[str]:
    return text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n") if text else []


def _changes(before: list[str], after: list[str]) -> Iterator[Change]:
    """What is replaced: lines start:end of the old text by lines start:end of the new one."""
    cuts, other_cuts = _block_starts(before), _block_starts(after)
    if [before[cut] for cut in cuts[1:-1]] != [after[cut] for cut in other_cuts[1:-1]]:
        cuts, other_cuts = [0, len(before)], [0, len(after)]
    for (start, end), (other_start, other_end) in zip(pairwise(cuts), pairwise(other_cuts)):
        left, right = before[start:end], after[other_start:other_end]
        if left == right:
            continue
        from difflib import SequenceMatcher

        for tag, a, b, c, d in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
            if tag != "equal":
                yield start + a, start + b, other_start + c, other_start + d


def _block_starts(lines: list[str]) -> list[int]:
    """Where functions and classes start, with the first and the last line's bounds."""
    return [
        0,
        *(number for number, line in enumerate(lines) if number and line.startswith(("def ", "class "))),
        len(lines),
    ]


def _groups(changes: list[Change]) -> Iterator[list[Change]]:
    """Changes whose context touches, together."""
    group = changes[:1]
    for change in changes[1:]:
        if change[0] - group[-1][1] > 2 * CONTEXT:
            yield group
            group = []
        group.append(change)
    yield group


def _range(start: int, end: int) -> str:
    """`start:end` as a hunk header has it: the first line counted from 1, or the line before an empty range."""
    length = end - start
    return f"{start + 1 if length else start},{length}" if length != 1 else f"{start + 1}"
