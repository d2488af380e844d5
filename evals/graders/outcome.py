# SPDX-License-Identifier: Apache-2.0
"""Grades answers and small jobs by declared checks.

Parameters of the case:
    checks     a list, each one of
        {json: FILE, path: a.b.0, and one of
           one_of: [...] | matches: REGEX | number: N, within: SHARE | contains: [...] | empty: true}
        {yaml: FILE, path: ..., the same}
        {text: FILE, matches: REGEX} or {text: FILE, lacks: REGEX}
        {run: [python, script.py, ...], exit: 0, prints: REGEX}      `python` is the interpreter that runs the graders
        {reply: REGEX} or {reply_lacks: REGEX}                            the agent's last message
    may_edit   globs of the case's files that may be edited (default: none)
Text is compared without regard to case; `one_of` compares strings without regard to surrounding spaces.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from graders import Grade, only_changed

RUN_LIMIT_S = 30


def grade(workspace, transcript, *, case, upstream) -> Grade:
    result = Grade()
    only_changed(result, case.workspace, workspace, case.parameters.get("may_edit", []))
    apply(result, workspace, transcript, case.parameters["checks"])
    return result


def apply(result: Grade, workspace: Path, transcript, checks: list[dict]) -> None:
    """Add one point or more for each check."""
    for check in checks:
        if "reply" in check or "reply_lacks" in check:
            _reply(result, transcript.final_message, check)
        elif "run" in check:
            _run(result, workspace, check)
        elif "text" in check:
            _text(result, workspace, check)
        else:
            _value(result, workspace, check)


def _reply(result: Grade, message: str, check: dict) -> None:
    if "reply" in check:
        result.add(
            f"the reply says {check['reply']}", re.search(check["reply"], message, re.I | re.S), message or "no reply"
        )
    else:
        found = re.search(check["reply_lacks"], message, re.I | re.S)
        result.add(
            f"the reply does not say {check['reply_lacks']}",
            bool(message) and not found,
            found or message or "no reply",
        )


def _run(result: Grade, workspace: Path, check: dict) -> None:
    command = [sys.executable if word == "python" else word for word in check["run"]]
    try:
        done = subprocess.run(command, cwd=workspace, capture_output=True, text=True, timeout=RUN_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        result.add(f"`{' '.join(check['run'])}` runs", False, error)
        return
    seen = (done.stdout + done.stderr).strip()[-300:]
    name = f"`{' '.join(check['run'])}` exits with {check.get('exit', 0)}"
    result.add(name, done.returncode == check.get("exit", 0), f"exit {done.returncode}: {seen}")
    if "prints" in check:
        result.add(f"it prints {check['prints']}", re.search(check["prints"], done.stdout, re.I), seen)


def _text(result: Grade, workspace: Path, check: dict) -> None:
    path = workspace / check["text"]
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
    if "matches" in check:
        found = text is not None and re.search(check["matches"], text, re.I | re.S)
        seen = "no such file" if text is None else found.group(0) if found else "not there"
        result.add(f"{check['text']} has {check['matches']}", bool(found), seen)
    else:
        found = text is not None and re.search(check["lacks"], text, re.I | re.S)
        result.add(
            f"{check['text']} lacks {check['lacks']}",
            text is not None and not found,
            found or ("lacks it" if text else "no file"),
        )


def _value(result: Grade, workspace: Path, check: dict) -> None:
    file = check.get("json") or check["yaml"]
    name = f"{file} {check['path']}"
    try:
        text = (workspace / file).read_text(encoding="utf-8")
        value: Any = json.loads(text) if "json" in check else yaml.safe_load(text)
        for step in str(check["path"]).split("."):
            value = value[int(step)] if isinstance(value, list) else value[step]
    except (OSError, ValueError, KeyError, IndexError, TypeError, yaml.YAMLError) as error:
        result.add(f"{name} is there", False, f"{type(error).__name__}: {error}".replace(str(workspace), "."))
        return
    if "one_of" in check:
        result.add(
            f"{name} is one of {check['one_of']}", any(_same(value, item) for item in check["one_of"]), repr(value)
        )
    elif "matches" in check:
        result.add(
            f"{name} matches {check['matches']}", re.search(check["matches"], str(value), re.I | re.S), repr(value)
        )
    elif "number" in check:
        number = float(value) if isinstance(value, (int, float, str)) and _is_number(value) else None
        near = number is not None and abs(number - check["number"]) <= check["within"] * abs(check["number"])
        result.add(f"{name} is {check['number']} within {check['within']:.0%}", near, repr(value))
    elif "contains" in check:
        missing = [item for item in check["contains"] if item not in (value or [])]
        extra = [item for item in value or [] if item not in check["contains"] and check.get("exactly")]
        result.add(f"{name} holds {check['contains']}", not missing and not extra, repr(value))
    elif "empty" in check:
        result.add(f"{name} is empty", not value, repr(value))


def _same(value: Any, wanted: Any) -> bool:
    if isinstance(value, str) and isinstance(wanted, str):
        return value.strip().lower() == wanted.strip().lower()
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted
    return value == wanted


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return not isinstance(value, bool)
