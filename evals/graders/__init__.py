# SPDX-License-Identifier: Apache-2.0
"""Graders: plain functions that judge what an agent left behind, with evidence for every point.

    grade(workspace, transcript, *, case, upstream) -> Grade

One module a kind of result, its function named `grade`; `case.grader(upstream)` binds the last two, so that callers
hold a plain `grade(workspace, transcript)`. Configurations are judged by released upstream code (evals/upstream.py)
and by the scopes that the case expects, scripts by running them, answers by their values. None of them asks another
model, and none trusts the skill's own validator.
"""

from __future__ import annotations

import filecmp
import fnmatch
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

# What agents and tools leave in a workspace that is no edit of it.
IGNORED = (".agents/*", ".claude/*", "*__pycache__*", "*.pyc", "*.bak", "*.orig", ".git/*")


@dataclass(frozen=True)
class Check:
    """One point: what was looked for, whether it is there, and what was seen."""

    text: str
    passed: bool
    evidence: str


@dataclass
class Grade:
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    def add(self, text: str, passed: bool, evidence: object = "") -> bool:
        self.checks.append(Check(text, bool(passed), str(evidence)[:500]))
        return bool(passed)

    def as_json(self) -> dict:
        """The form that other tools read as grading.json."""
        passed = sum(check.passed for check in self.checks)
        total = len(self.checks)
        return {
            "assertion_results": [asdict(check) for check in self.checks],
            "summary": {
                "passed": passed,
                "failed": total - passed,
                "total": total,
                "pass_rate": passed / total if total else 0.0,
            },
            "passed": self.passed,
        }


@dataclass
class Transcript:
    """What an agent did. actions: [{"tool", "input", "output"}] in order; tokens is None where unknown."""

    actions: list[dict] = field(default_factory=list)
    final_message: str = ""
    seconds: float = 0.0
    tokens: int | None = None
    stopped: str = ""

    def uses(self, text: str) -> list[str]:
        """The inputs of actions that name `text`."""
        return [str(action.get("input", "")) for action in self.actions if text in str(action.get("input", ""))]


def files_of(folder: Path) -> set[str]:
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in IGNORED)}


def changed_files(original: Path, workspace: Path) -> set[str]:
    """Files of the case that were edited or removed, and files that were added."""
    before, after = files_of(original), files_of(workspace)
    edited = {name for name in before & after if not filecmp.cmp(original / name, workspace / name, shallow=False)}
    return edited | (before ^ after)


def only_changed(grade: Grade, original: Path, workspace: Path, allowed: Iterable[str]) -> None:
    """The case's own files outside `allowed` (globs) are as they were; new files are the agent's business."""
    touched = changed_files(original, workspace) & files_of(original)
    extra = sorted(name for name in touched if not any(fnmatch.fnmatch(name, pattern) for pattern in allowed))
    grade.add("no other file was changed", not extra, ", ".join(extra) or "none was")
