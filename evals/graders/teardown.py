# SPDX-License-Identifier: Apache-2.0
"""Grades a training script by how it ends: run under a fake stack (graders/fake_stack) in which live graphs make
destroy_process_group() wait for ever, as they do under NCCL.

Parameters of the case:
    command      how the job is started: [bash, run.sh] or [python, train.py, ...]
    scenarios    list of {name, arguments, fail_at, code, captures, steps}
                   fail_at    the replay that raises, as a CUDA error does
                   code       the exit code: a number, or "failure" for any that is not 0
                   captures   false: the run ends before a graph exists
    may_edit     globs of files that may be edited
    keeps        regexes that the edited script must still match: training work that must not be dropped to get out of
    the hang
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from graders import Grade, only_changed

FAKE_STACK = Path(__file__).parent / "fake_stack"
RUN_LIMIT_S = 20
# How long destroy_process_group() may wait for graphs that are alive before it counts as a hang: nobody frees them any
# more.
HANG_AFTER_S = 1.5
TORCHRUN = """#!/bin/bash
while [[ $1 == -* ]]; do case $1 in -m|--module) shift; exec {python} -m "$@";; --*=*) shift;; --standalone) shift;; *)
shift 2;; esac; done exec {python} "$@"
"""


def grade(workspace, transcript, *, case, upstream) -> Grade:
    result = Grade()
    wanted = case.parameters
    only_changed(result, case.workspace, workspace, wanted["may_edit"])
    for scenario in wanted["scenarios"]:
        _scenario(result, workspace, wanted["command"], scenario)
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in sorted(workspace.glob("*.py")))
    for pattern in wanted.get("keeps", []):
        result.add(f"the script still has {pattern}", re.search(pattern, text), "searched all *.py")
    return result


def _scenario(result: Grade, workspace: Path, command: list[str], scenario: dict) -> None:
    name = scenario["name"]
    code, events, said = run(workspace, [*command, *scenario.get("arguments", [])], scenario.get("fail_at", 0))
    kinds = [event["event"] for event in events]
    if not result.add(
        f"{name}: no hang", code is not None, f"exit {code}" if code is not None else "killed while it waited"
    ):
        return
    expected = scenario.get("code", 0)
    right = code != 0 if expected == "failure" else code == expected
    result.add(f"{name}: exit code is {expected}", right, f"exit {code}: {said[-200:]}")
    if scenario.get("captures", True):
        result.add(
            f"{name}: graphs were captured and replayed",
            "capture" in kinds and "replay" in kinds,
            f"{kinds.count('replay')} replays",
        )
        if "steps" in scenario:
            result.add(
                f"{name}: every step was trained",
                kinds.count("replay") >= scenario["steps"],
                f"{kinds.count('replay')} replays",
            )
        result.add(f"{name}: graphs were reset, not abandoned", "reset" in kinds, f"{kinds.count('reset')} resets")
    left = [event for event in events if event["event"] == "exit"]
    result.add(
        f"{name}: left through a normal exit with no live graph",
        bool(left) and left[-1]["live"] == 0,
        left or "no exit event",
    )
    if expected == 0:
        result.add(f"{name}: the process group was destroyed", "destroyed" in kinds, kinds[-5:])


def run(workspace: Path, command: list[str], fail_at: int) -> tuple[int | None, list[dict], str]:
    """Exit code (None for a hang), events and stderr of the job, in a copy of the workspace."""
    with tempfile.TemporaryDirectory() as scratch:
        copy, tools = Path(scratch, "workspace"), Path(scratch, "bin")
        shutil.copytree(workspace, copy, symlinks=True)
        tools.mkdir()
        for name in ("python", "python3"):
            (tools / name).symlink_to(sys.executable)
        (tools / "torchrun").write_text(TORCHRUN.format(python=sys.executable), encoding="utf-8")
        (tools / "torchrun").chmod(0o755)
        log = Path(scratch, "events.jsonl")
        env = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "HOME": scratch,
            "PYTHONPATH": str(FAKE_STACK),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TEARDOWN_EVENTS": str(log),
            "TEARDOWN_FAIL_AT": str(fail_at),
        }
        command = [str(tools / "python") if command[0] == "python" else command[0], *command[1:]]
        process = subprocess.Popen(
            command,
            cwd=copy,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        code = _wait(process, log)
        _, said = process.communicate()
        return code, _events(log), said.replace(scratch, "").strip()


def _wait(process: subprocess.Popen, log: Path) -> int | None:
    """The exit code, or None for a process that hangs and was killed."""
    started, waiting_since = time.monotonic(), None
    while process.poll() is None:
        now, events = time.monotonic(), _events(log)
        waits = bool(events) and events[-1]["event"] == "destroy" and events[-1]["live"] > 0
        waiting_since = (waiting_since or now) if waits else None
        if now - started > RUN_LIMIT_S or (waiting_since and now - waiting_since > HANG_AFTER_S):
            os.killpg(process.pid, 9)
            process.wait()
            return None
        time.sleep(0.03)
    return process.returncode


def _events(log: Path) -> list[dict]:
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.is_file() else []
