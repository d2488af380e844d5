# SPDX-License-Identifier: Apache-2.0
"""What the oracle workers share: the JSON-lines protocol, its typed values, and how a worker is run.

A worker is a script that reads one JSON object a line on stdin and answers each with one line on stdout, in order.
JSON has no enum members, tuples or dtypes, so these travel as one-key objects:
    {"enum": "CudaGraphScope.attn"}   a member of one of the enum classes that the release has
    {"dtype": "bfloat16"}             torch.bfloat16
    {"tuple": [...]}                  a tuple
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

UPSTREAM = "/unpacked/"  # every release is run from below this folder of the cache (wheels.py)


class OracleFailed(RuntimeError):
    """A worker could not start or stopped before it had answered everything. The text ends with what it last said."""


def decode(value, enums: dict[str, type]):
    """A JSON value with typed values put in place.

    Raises:
        AttributeError: the enum class or the member does not exist in the release, as in user code that names it.
    """
    if isinstance(value, list):
        return [decode(item, enums) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"enum"}:
        kind, _, member = value["enum"].partition(".")
        if kind not in enums:
            raise AttributeError(f"this release has no enum {kind}")
        return getattr(enums[kind], member)
    if set(value) == {"dtype"}:
        import torch

        return getattr(torch, value["dtype"])
    if set(value) == {"tuple"}:
        return tuple(decode(item, enums) for item in value["tuple"])
    return {key: decode(item, enums) for key, item in value.items()}


def error_of(error: BaseException) -> dict[str, str]:
    """Type, text (on one line), and the innermost function of upstream's code that raised or let it through."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    upstream = [frame.f_code.co_name for frame in frames if UPSTREAM in frame.f_code.co_filename.replace("\\", "/")]
    return {
        "type": type(error).__name__,
        "text": " ".join(str(error).split()),
        "in": upstream[-1] if upstream else "",
    }


def serve(answer: Callable[[dict], dict]) -> None:
    """Answer every request on stdin. What upstream code prints goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    try:
        for line in sys.stdin:
            if line.strip():
                answers.write(json.dumps(answer(json.loads(line)), separators=(",", ":")) + "\n")
    finally:
        sys.stdout = answers
        answers.flush()


def ask(script: Path, arguments: Sequence[str], requests: Iterable[dict]) -> Iterator[dict]:
    """Run a worker in a process of its own, and yield its answers in the order of the requests.

    Raises:
        OracleFailed: it ended with an error, or answered fewer requests than there were.
    """
    asked = answered = 0
    with tempfile.TemporaryFile("w+") as questions, tempfile.TemporaryFile("w+") as complaints:
        for request in requests:
            questions.write(json.dumps(request) + "\n")
            asked += 1
        questions.seek(0)
        command = [sys.executable, str(script), *arguments]
        streams = {"stdin": questions, "stdout": subprocess.PIPE, "stderr": complaints}
        with subprocess.Popen(command, text=True, **streams) as process:
            for line in process.stdout:
                answered += 1
                yield json.loads(line)
        complaints.seek(0)
        said = complaints.read().strip().splitlines()
    if process.returncode or answered != asked:
        last = said[-1] if said else "nothing"
        raise OracleFailed(f"{script.name} {' '.join(arguments)}: {answered} of {asked} answers; it last said: {last}")
