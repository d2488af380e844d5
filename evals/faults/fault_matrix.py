#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fault matrix: where x how x graphs, each row in processes of its own, with and without delete_graphs.

Usage:
    python evals/faults/fault_matrix.py --out FILE                         every row on one GPU
    python evals/faults/fault_matrix.py --graphs local --how sigterm --ranks 2 --out FILE
    python evals/faults/fault_matrix.py --ranks 2 --start torchrun --helper launcher --graphs local --out FILE
    python evals/faults/fault_matrix.py --device cpu --graphs stand_in --out FILE      the matrix itself, without a GPU
    python evals/faults/fault_matrix.py --judge FILE       the verdicts of a file again; what was measured stays

A row starts one process a rank. --start fork (the default): forked from this one, which has imported the stack and has
no CUDA context. spawn: fresh interpreters, as a user starts them. torchrun: one torchrun, which starts the ranks.
--helper: without it; library, with install() in the script; launcher, the unchanged script run by delete_graphs.py.

The last rank meets the fault. As torchrun does, the others get SIGTERM once a rank has failed. A row that is still
there --hang-after seconds after its fault, or at --row-limit, is a hang: it is asked for its stacks and killed. Rows
with and without the helper follow each other, so that a run that ends at --budget has both.

Required with the helper: no hang, out within 10 s of the fault, the exit code that the fault has without the helper
(peers: any but 0), and the device memory back. os._exit() and SIGKILL run no code in the process; without peers they
are shown, not judged.

Output: FILE, one JSON object (schema_version 1) with every row; a line on stderr every few seconds. With --json the
object's totals and requirements on stdout.
Exit codes: 0 the requirements hold; 1 they do not; 2 usage, or a FILE that is no such result; 3 a fault of the matrix itself.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HELPERS = HERE.parents[1] / "helpers"
sys.path[:0] = [str(HERE), str(HELPERS), str(HERE.parent)]

import fault_child
import result_files
from devices import Nvml, open_devices

SCHEMA_VERSION = 1
MEGATRON = ("transformer_engine", "local", "full_iteration", "optimizer")
GRAPHS = (*MEGATRON, "partial", "torch_callable", "bare", "eager")
STAND_IN = "stand_in"
ON_CPU = (STAND_IN, "eager")
WHERE = (
    "warmup",
    "capture_forward",
    "capture_backward",
    "replay_forward",
    "replay_backward",
    "optimizer_step",
    "evaluation",
    "evaluation_recaptured",
    "checkpoint_save",
)
HOW = ("exception", "sys_exit", "keyboard_interrupt", "sigterm", "sigint", "out_of_memory", "os_exit", "sigkill")
HOW_OF_RANKS = ("exception", "exception_then_destroy", "out_of_memory", "sys_exit", "sigterm_all", "sigkill")
CANNOT_BE_HELPED = ("os_exit", "sigkill")
END = ("end", "none")  # an orderly end, destroy_process_group() included: the row that every run has besides the faults
FORMS = ("without", "library", "launcher")
EXIT_CODES = {
    "exception": 1,
    "exception_then_destroy": 1,
    "out_of_memory": 1,
    "sys_exit": fault_child.SYS_EXIT_CODE,
    "keyboard_interrupt": -signal.SIGINT,
    "sigint": -signal.SIGINT,
    "sigterm": -signal.SIGTERM,
    "sigterm_all": -signal.SIGTERM,
    "sigkill": -signal.SIGKILL,
    "os_exit": fault_child.OS_EXIT_CODE,
    "none": 0,
}
REQUIRED_S = 10.0
HELPER_LIMIT_S = 8.0
SURVIVORS_SIGNALLED_AFTER_S = 0.3  # torchrun looks at its workers every 0.1 s and then signals the others
STACKS_WITHIN_S = 0.5
SAVE_EVERY_S = 10.0
# Places that a kind of graph does not have: an optimizer graph and a bare one capture no backward pass, local graphs
# are captured once a process (megatron-core 0.19), nothing is captured in the eager loop.
MISSING = {
    "optimizer": {"capture_backward"},
    "local": {"evaluation_recaptured"},
    "bare": {"capture_backward", "replay_backward", "optimizer_step"},
    "eager": {"capture_forward", "capture_backward", "evaluation_recaptured"},
}
NOT_RUN = {fault_child.NOT_MADE: "not made", fault_child.SURVIVED: "survived", fault_child.NOT_REACHED: "not reached"}
MODULES = {
    "transformer_engine": (
        "torch",
        "transformer_engine.pytorch",
        "megatron.core.models.gpt",
        "megatron.core.optimizer",
        "megatron.core.full_cuda_graph",
        "cudagraphs.capture.stacks.megatron",
    ),
    "partial": ("torch", "partial_graphs"),
    STAND_IN: ("torch",),
}
PACKAGES = ("torch", "megatron-core", "transformer-engine", "triton")


def applies(graphs: str, where: str) -> bool:
    return where not in MISSING.get(graphs, ())


def plan_rows(
    graphs: Sequence[str], where: Sequence[str], how: Sequence[str], seed: int, ends: Sequence[str] | None = None
) -> list[tuple[str, str, str]]:
    """Combinations in rounds: each round visits every place of every kind of graph once, with the next way to fail.

    So a run that ends early has seen all places, and every way about equally often. The orderly ends, of `graphs` unless
    `ends` says otherwise, come first.
    """
    places = [(g, w) for g in graphs for w in where if applies(g, w)]
    random.Random(seed).shuffle(places)
    faults = [(g, w, how[(i + turn) % len(how)]) for turn in range(len(how)) for i, (g, w) in enumerate(places)]
    return [(g, *END) for g in (graphs if ends is None else ends)] + faults


@dataclass
class Process:
    """One rank of a running row, or the torchrun of all of them."""

    pid: int
    status: int | None = None
    ended: float | None = None


@dataclass
class Row:
    graphs: str
    where: str
    how: str
    form: str
    base: str = ""
    started: float = 0.0
    hung: bool = False
    stacks_asked: float | None = None
    signalled: float | None = None  # when the survivors got SIGTERM
    memory_at_limit: int | None = None
    memory_left: int | None = None
    processes: list[Process] = field(default_factory=list)

    def alive(self) -> list[Process]:
        return [p for p in self.processes if p.status is None]

    def file(self, kind: str, rank: int) -> Path:
        """marks, report, stack: written by the rank; log: what it says, in one file for all ranks of a torchrun."""
        return Path(f"{self.base}.{kind}{rank}")


@dataclass(frozen=True)
class ChildRow:
    """What a forked child plays. It travels up to main(), so that the child ends as an interpreter of its own does."""

    row: dict[str, Any]


class Matrix:
    """Runs rows side by side, a few processes at a time."""

    def __init__(self, options: argparse.Namespace, nvml: Nvml | None) -> None:
        self.options, self.nvml = options, nvml
        self.folder = Path(tempfile.mkdtemp(prefix="fault-matrix-"))
        self.queue = [
            Row(*combination, form=form)
            for combination in plan_rows(options.graphs, options.where, options.how, options.seed, options.ends)
            for form in options.helper
        ]
        self.running: list[Row] = []
        self.done: list[Row] = []
        self.memory_before = nvml.used_bytes() if nvml else None
        self.memory_after: int | None = None
        self.began = time.time()
        self.started = 0
        self._said, self._saved = 0.0, time.time()
        self._fixed = {"command": _command(options), "revision": _revision(), "versions": _versions()}

    def run(self) -> ChildRow | None:
        """Until the queue is empty or the budget is spent. In a forked child: the row to play, at once."""
        while self.queue or self.running:
            spent = time.time() - self.began > self.options.budget
            while self.queue and not spent and len(self.running) < self.options.parallel:
                row = self.queue.pop(0)
                child = self._start(row)
                if child is not None:
                    return child
                self.running.append(row)
            if spent and not self.running:
                break
            self._reap()
            for row in list(self.running):
                self._watch(row)
            self._say()
            self._save()
            time.sleep(0.005)
        self.memory_after = self._settled_memory()
        return None

    def _start(self, row: Row) -> ChildRow | None:
        row.started, row.base = time.time(), str(self.folder / str(self.started))
        self.started += 1
        ranks, start = self.options.ranks, self.options.start
        for rank in range(ranks):
            for kind in ("marks", "log"):
                row.file(kind, rank).touch()
        task = {
            "graphs": row.graphs,
            "where": row.where,
            "how": row.how,
            "helper": row.form,
            "start": start,
            "ranks": ranks,
            "faulty_rank": ranks - 1,
            "device": self.options.device,
            "share_gpu": self.options.share_gpu,
            "seed": self.options.seed,
            "helper_limit": HELPER_LIMIT_S,
            "base": row.base,
        }
        for rank in [None] if start == "torchrun" else range(ranks):
            of_rank = {**task, "rank": rank}
            log = row.file("log", rank or 0)
            group = row.processes[0].pid if row.processes else 0
            pid = self._fork(of_rank, log, group) if start == "fork" else self._spawn(of_rank, log, group)
            if pid == 0:
                return ChildRow(of_rank)
            row.processes.append(Process(pid))
        return None

    def _fork(self, task: dict[str, Any], log: Path, group: int) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            _set_group(pid, group)
            return pid
        _set_group(0, group)
        file = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
        return 0

    def _spawn(self, task: dict[str, Any], log: Path, group: int) -> int:
        command = [sys.executable]
        if task["start"] == "torchrun":
            command += ["-m", "torch.distributed.run", "--nproc-per-node", str(task["ranks"])]
            command += ["--master-addr", "127.0.0.1", "--master-port", str(_free_port())]
        words = child_words(task)
        with open(log, "a") as file:
            process = subprocess.Popen(
                command + words,
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                preexec_fn=lambda: _set_group(0, group),  # before exec: afterwards the parent may not
            )
        process.returncode = 0  # waited for here, by pid; Popen must not
        return process.pid

    def _reap(self) -> None:
        by_pid = {p.pid: p for row in self.running for p in row.alive()}
        while by_pid:
            try:
                pid, raw = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in by_pid:
                by_pid[pid].status, by_pid[pid].ended = os.waitstatus_to_exitcode(raw), time.time()

    def _watch(self, row: Row) -> None:
        alive = row.alive()
        if not alive:
            if self.nvml is not None:
                held = self.nvml.bytes_by_process()
                row.memory_left = sum(held.get(p) or (0 if p not in held else 1) for p in self._pids(row))
            self.running.remove(row)
            self.done.append(row)
            return
        now = time.time()
        failed = [p for p in row.processes if p.status not in (None, 0)]
        due = row.signalled is None and row.stacks_asked is None
        if failed and due and now - min(p.ended for p in failed) > SURVIVORS_SIGNALLED_AFTER_S:
            row.signalled = now
            for process in alive:
                os.kill(process.pid, signal.SIGTERM)
        fault = self._fault_time(row)
        limit = (
            self.options.row_limit
            if fault is None
            else min(self.options.row_limit, fault - row.started + self.options.hang_after)
        )
        if now - row.started > limit:
            self._end_hang(row)

    def _end_hang(self, row: Row) -> None:
        """Ask for stacks, and a moment later kill what is left, the ranks of a torchrun included."""
        gone = {p.pid for p in row.processes if p.ended is not None}
        ranks = [pid for pid in self._pids(row, ranks_only=True) if pid not in gone]
        if row.stacks_asked is None:
            row.stacks_asked, row.hung = time.time(), True
            if self.nvml is not None:
                held = self.nvml.bytes_by_process()
                row.memory_at_limit = sum(held.get(pid) or 0 for pid in ranks)
            _signal_each(ranks, fault_child.STACK_SIGNAL)
        elif time.time() - row.stacks_asked > STACKS_WITHIN_S:
            _signal_each([*ranks, *(p.pid for p in row.alive())], signal.SIGKILL)

    def _pids(self, row: Row, ranks_only: bool = False) -> list[int]:
        ranks = [m["pid"] for marks in self._all_marks(row) for m in marks if m["mark"] == "started"]
        return ranks if ranks_only else [*{*ranks, *(p.pid for p in row.processes)}]

    def _all_marks(self, row: Row) -> list[list[dict[str, Any]]]:
        return [_marks(row.file("marks", rank)) for rank in range(self.options.ranks)]

    def _fault_time(self, row: Row) -> float | None:
        times = [m["time"] for marks in self._all_marks(row) for m in marks if m["mark"] == "fault"]
        return min(times, default=None)

    def _settled_memory(self) -> int | None:
        """Memory in use once every process is gone; the driver takes a moment to give it back."""
        if self.nvml is None:
            return None
        deadline = time.time() + 5
        while (used := self.nvml.used_bytes()) > self.memory_before and time.time() < deadline:
            time.sleep(0.1)
        return used

    def _save(self) -> None:
        """So that a run that is cut short leaves the rows that it has."""
        if time.time() - self._saved > SAVE_EVERY_S and self.done:
            self._saved = time.time()
            write_atomically(self.options.out, self.result())

    def _say(self) -> None:
        if not self.options.quiet and time.time() - self._said > 5:
            self._said = time.time()
            hung = sum(row.hung for row in self.done)
            print(
                f"{len(self.done)} rows done, {len(self.running)} running, {len(self.queue)} to go, {hung} hung",
                file=sys.stderr,
            )

    # --- the result ---------------------------------------------------------------------------------------------------

    def result(self) -> dict[str, Any]:
        rows = [self._as_dict(row) for row in self.done]
        judge(rows)
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "fault-matrix",
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            **self._fixed,
            "machine": {
                "cpus": os.cpu_count(),
                "python": platform.python_version(),
                **(self.nvml.describe() if self.nvml else {}),
            },
            "configuration": {
                "ranks": self.options.ranks,
                "device": self.options.device,
                "share_gpu": self.options.share_gpu,
                "start": self.options.start,
                "seed": self.options.seed,
                "parallel_rows": self.options.parallel,
                "row_limit_s": self.options.row_limit,
                "hang_after_s": self.options.hang_after,
                "helper_limit_s": HELPER_LIMIT_S,
                "required_s": REQUIRED_S,
                "budget_s": self.options.budget,
            },
            "seconds": round(time.time() - self.began, 1),
            "device_memory": {"before_bytes": self.memory_before, "after_bytes": self.memory_after},
            "rows_not_run": [[r.graphs, r.where, r.how, r.form] for r in (*self.running, *self.queue)],
            "totals": totals(rows),
            "requirements": requirements(rows, self.memory_before, self.memory_after),
            "rows": rows,
        }

    def _as_dict(self, row: Row) -> dict[str, Any]:
        fault = self._fault_time(row)
        faulty = self.options.ranks - 1
        every = self._all_marks(row)
        marks = every[faulty]
        codes = self._codes(row)
        last = max(p.ended for p in row.processes)
        report = _report(row.file("report", faulty))
        reasons = [m["reason"] for m in [*marks, *(m for of in every[:faulty] for m in of)] if m["mark"] == "not made"]
        job = row.processes[0].status if self.options.start == "torchrun" else None
        timed = [] if fault is None or job is not None else [round(p.ended - fault, 3) for p in row.processes[:faulty]]
        return {
            "graphs": row.graphs,
            "where": row.where,
            "how": row.how,
            "helper": row.form != "without",
            "form": None if row.form == "without" else row.form,
            "reached": [m["mark"] for m in marks if m["mark"] != "started"],
            "hang": row.hung,
            "hung_in": {str(rank): hung for rank in range(faulty + 1) if (hung := _stack(row.file("stack", rank)))},
            "forced_in": self._forced(row),
            "exit_code": codes[faulty],
            "survivor_codes": codes[:faulty],
            "job_code": job,
            "survivor_reports": [_short(_report(row.file("report", rank))) for rank in range(faulty)],
            "seconds_from_fault": None if fault is None else round(last - fault, 3),
            "survivor_seconds": timed,
            "survivors_signalled_at": None if None in (fault, row.signalled) else round(row.signalled - fault, 3),
            "seconds": round(last - row.started, 3),
            "reserved_bytes_at_fault": next((m["reserved_bytes"] for m in marks if m["mark"] == "fault"), None),
            "live_graphs_at_end": next((m["live_graphs"] for m in marks if "live_graphs" in m), None),
            "memory_left_bytes": row.memory_left,
            "memory_at_limit_bytes": row.memory_at_limit,
            "deleted": report
            and {
                k: report[k]
                for k in ("deleted", "failed", "live_graphs_before", "live_graphs_after", "bytes_released", "seconds")
            },
            "reason": next(iter(reasons), None) if fault is None else None,
            "last_words": _last_words(row.file("log", 0 if self.options.start == "torchrun" else faulty)),
        }

    def _forced(self, row: Row) -> dict[str, list[list[str]]]:
        """By rank, or "job" under torchrun: where the threads stood when the helper's watchdog ended the process."""
        logs = ["job"] if self.options.start == "torchrun" else range(self.options.ranks)
        return {str(one): stacks for one in logs if (stacks := forced_stacks(row.file("log", 0 if one == "job" else one)))}

    def _codes(self, row: Row) -> list[int | None]:
        """Exit code of each rank. None: it hung and was killed, or torchrun did not say (it tells who failed first)."""
        if self.options.start != "torchrun":
            killed = [row.hung and p.status == -signal.SIGKILL for p in row.processes]
            killed[-1] = killed[-1] and row.how != "sigkill"
            return [None if was_killed else p.status for was_killed, p in zip(killed, row.processes)]
        told = re.findall(r"rank\s*: (\d+) \(local_rank.*\n\s*exitcode\s*: (-?\d+)", row.file("log", 0).read_text())
        codes = {int(rank): int(code) for rank, code in told}
        return [0 if row.processes[0].status == 0 else codes.get(rank) for rank in range(self.options.ranks)]


def judge(rows: list[dict[str, Any]]) -> None:
    """Add "verdict" to each row: ok, hang, slow, exit code, memory, graphs left; or why it is not judged.

    The right exit code is the one that the fault has in the same place without the helper, where that row ran and did
    not hang: a capture that a fault breaks may replace SystemExit by its own error, and that is not ours to change.
    Where that row could not be made, what the fault does without the helper with the same graphs elsewhere counts.
    """
    plain = {(r["graphs"], r["where"], r["how"]): r for r in rows if not r["helper"]}
    for row in rows:
        other = plain.get((row["graphs"], row["where"], row["how"]))
        expected = {EXIT_CODES[row["how"]]}
        if row["helper"] and other is not None and not other["hang"] and other["exit_code"] not in (*NOT_RUN, None):
            expected.add(other["exit_code"])
        if row["helper"] and other is not None and other["exit_code"] in NOT_RUN:
            alike = [r for r in rows if not r["helper"] and (r["graphs"], r["how"]) == (row["graphs"], row["how"])]
            expected |= {r["exit_code"] for r in alike if not r["hang"]} - {*NOT_RUN, None}
        if row["helper"] and row["how"] == "sigterm_all":  # the documented code of a main thread stuck with its peers
            expected.add(128 + signal.SIGTERM)
        row["expected_codes"] = sorted(expected)
        row["verdict"] = _verdict(row, expected)


def _verdict(row: dict[str, Any], expected: set[int]) -> str:
    if row["exit_code"] in NOT_RUN and not row["hang"]:
        return NOT_RUN[row["exit_code"]]
    if "fault" not in row["reached"]:
        return "hang before the fault" if row["hang"] else "failed before the fault"
    if row["hang"]:
        return "hang"
    if row["seconds_from_fault"] > REQUIRED_S:
        return "slow"
    if row["exit_code"] not in expected:
        return "exit code"
    if row["how"] != "none" and (0 in row["survivor_codes"] or row.get("job_code") == 0):
        return "a survivor left with 0"
    if row["memory_left_bytes"]:
        return "memory"
    if row["deleted"] and row["deleted"]["live_graphs_after"]:
        return "graphs left"
    return "ok"


def judged(row: dict[str, Any]) -> bool:
    """Whether the requirements speak about this row."""
    unreached = (*NOT_RUN.values(), "failed before the fault", "hang before the fault")
    return row["verdict"] not in unreached and (row["how"] not in CANNOT_BE_HELPED or bool(row["survivor_codes"]))


def totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        name: {"rows": len(part), "verdicts": dict(sorted(Counter(r["verdict"] for r in part).items()))}
        for name, part in (
            ("with", [r for r in rows if r["helper"]]),
            ("without", [r for r in rows if not r["helper"]]),
        )
    }


def requirements(rows: list[dict[str, Any]], before: int | None, after: int | None) -> dict[str, Any]:
    """What is required with the helper, and whether it holds. Memory: none by process, and the device as before."""
    ours = [r for r in rows if r["helper"] and judged(r)]
    times = sorted(r["seconds_from_fault"] for r in ours if not r["hang"])
    broken = [[r["graphs"], r["where"], r["how"], r["verdict"]] for r in ours if r["verdict"] != "ok"]
    memory_back = None if after is None else after <= before
    return {
        "rows_judged": len(ours),
        "broken": broken,
        "device_memory_back": memory_back,
        "slowest_s": times[-1] if times else None,
        "median_s": times[len(times) // 2] if times else None,
        "hold": bool(ours) and not broken and memory_back is not False,
    }


def _marks(path: Path) -> list[dict[str, Any]]:
    out = []
    for line in path.read_text().splitlines():
        try:
            out.append(json.loads(line))
        except ValueError:  # the last line of a process that was killed
            continue
    return out


def _report(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def _short(report: dict[str, Any] | None) -> dict[str, Any] | None:
    names = ("signal", "aborted", "live_graphs_before", "live_graphs_after", "seconds")
    return report and {name: report[name] for name in names}


def _stack(path: Path) -> list[str]:
    """The innermost frames of the main thread of a process that hung, without folders."""
    text = path.read_text() if path.exists() else ""
    frames = re.findall(r'File "(?:.*/)?(.*)", line (\d+) in (.*)', text)
    if not frames and "no Python frame" in text:
        return ["no Python frame: the interpreter has ended or is ending"]
    return [f"{function} ({file}:{line})" for file, line, function in frames[:4]]


def forced_stacks(log: Path) -> list[list[str]]:
    """The innermost frames of each thread from the watchdog's dump, without folders; empty where it did not come."""
    _, found, dump = (log.read_text(errors="replace") if log.exists() else "").partition("Stacks of all threads follow")
    if not found:
        return []
    threads = re.split(r"^(?:Current thread|Thread) 0x", dump, flags=re.M)[1:]
    frames = [re.findall(r'File "(?:.*/)?(.*)", line (\d+) in (.*)', text.partition("\n\n")[0]) for text in threads]
    return [[f"{name} ({file}:{line})" for file, line, name in one[:5]] for one in frames[:12] if one]


def _signal_each(pids: Sequence[int], signum: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def child_words(task: dict[str, Any]) -> list[str]:
    """What comes after `python`: the row's script, alone or behind the launcher."""
    script = [str(HERE / "fault_child.py"), json.dumps(task)]
    if task["helper"] != "launcher":
        return script
    return [str(HELPERS / "delete_graphs.py"), *launcher_words(task), *script]


def launcher_words(task: dict[str, Any]) -> list[str]:
    rank = "{rank}" if task["rank"] is None else task["rank"]
    return ["--limit", str(task["helper_limit"]), "--report", f"{task['base']}.report{rank}", "--"]


def _last_words(log: Path) -> str:
    """The last line of stderr without machine paths: what a user would have seen."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if any(map(str.isalpha, line))]
    return " ".join(word for word in (lines[-1] if lines else "").split() if "/" not in word)[:200]


def _set_group(pid: int, group: int) -> None:
    """Parent and child both do it, so that it is done whoever comes first; the loser's call fails."""
    try:
        os.setpgid(pid, group)
    except OSError:
        pass


def _command(options: argparse.Namespace) -> str:
    words = [
        "python",
        "evals/faults/fault_matrix.py",
        "--device",
        options.device,
        "--ranks",
        str(options.ranks),
        "--start",
        options.start,
        "--parallel",
        str(options.parallel),
        "--seed",
        str(options.seed),
        "--graphs",
        *options.graphs,
        "--where",
        *options.where,
        "--how",
        *options.how,
        "--helper",
        *options.helper,
        *(["--ends", *options.ends] if options.ends else []),
        *(["--share-gpu"] if options.share_gpu else []),
    ]
    return " ".join(words)


def _revision() -> str | None:
    """$REVISION where it is set: a copy of the working tree may lie over another commit."""
    if os.environ.get("REVISION"):
        return os.environ["REVISION"]
    try:
        done = subprocess.run(["git", "-C", str(HERE), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def write_atomically(path: Path, body: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(body, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _import_stack(graphs: Sequence[str]) -> None:
    """Import what the children need, once, without making a CUDA context."""
    wanted = ["delete_graphs", "workloads"]
    for kind in graphs:
        key = "transformer_engine" if kind in MEGATRON else "partial" if kind == "partial" else STAND_IN
        wanted = [*MODULES[key], *wanted]
    for name in dict.fromkeys(wanted):
        importlib.import_module(name)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fault_matrix.py", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--graphs", nargs="+", choices=(*GRAPHS, STAND_IN))
    parser.add_argument("--ends", nargs="+", choices=(*GRAPHS, STAND_IN), help="orderly ends (default: of --graphs)")
    parser.add_argument("--where", nargs="+", choices=WHERE, default=list(WHERE))
    parser.add_argument("--how", nargs="+", choices=sorted({*HOW, *HOW_OF_RANKS}))
    parser.add_argument("--helper", nargs="+", choices=FORMS, default=["without", "library"])
    parser.add_argument(
        "--ranks", type=int, default=1, help="processes a row, one GPU each; the last one meets the fault"
    )
    parser.add_argument(
        "--share-gpu", action="store_true", help="all ranks on one GPU, see ../multi_gpu/share_gpu.py"
    )
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="rows at once")
    parser.add_argument("--start", choices=("fork", "spawn", "torchrun"), default="fork")
    parser.add_argument(
        "--row-limit", type=float, default=60.0, metavar="SECONDS", help="a row's whole life (default 60)"
    )
    parser.add_argument("--hang-after", type=float, default=15.0, metavar="SECONDS", help="from the fault (default 15)")
    parser.add_argument("--budget", type=float, default=3600.0, metavar="SECONDS", help="start no row after this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="totals and requirements on stdout")
    parser.add_argument("--quiet", action="store_true")
    options = parser.parse_args(argv)
    options.graphs = options.graphs or ([STAND_IN] if options.device == "cpu" else list(GRAPHS))
    options.how = options.how or list(HOW if options.ranks == 1 else HOW_OF_RANKS)
    named = {*options.graphs, *(options.ends or ())}
    if options.device == "cpu" and not named <= set(ON_CPU):
        parser.error(f"--device cpu has only --graphs {' '.join(ON_CPU)}")
    if options.device == "cuda" and STAND_IN in named:
        parser.error(f"--graphs {STAND_IN} needs --device cpu")
    if options.start == "torchrun" and "sigterm_all" in options.how:
        parser.error("--start torchrun has no --how sigterm_all: each rank leads a process group of its own")
    if options.ranks < 1 or options.parallel < 1:
        parser.error("--ranks and --parallel must be at least 1")
    return options


def judge_again(path: Path) -> bool:
    """Rewrite the verdicts of a result file by the present rules. Returns whether the requirements hold.

    Raises ResultError for a file that is no result of this program; it stays as it was.
    """
    made_by = "python evals/faults/fault_matrix.py --out FILE"
    result = result_files.load(path, made_by)
    with result_files.reading(path, made_by):
        memory = result["device_memory"]
        judge(result["rows"])
        result["totals"] = totals(result["rows"])
        result["requirements"] = requirements(result["rows"], memory["before_bytes"], memory["after_bytes"])
    write_atomically(path, result)
    return result["requirements"]["hold"]


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) == 2 and words[0] == "--judge":
        try:
            return 0 if judge_again(Path(words[1])) else 1
        except result_files.ResultError as error:
            print(f"fault_matrix.py: {error}", file=sys.stderr)
            return 2
    options = _options(words)
    # Compiled regions would cost each child seconds and change nothing here; is_available() must not make a context.
    os.environ.update(TORCHDYNAMO_DISABLE="1", PYTORCH_NVML_BASED_CUDA_CHECK="1", OMP_NUM_THREADS="1")
    gpus = 1 if options.share_gpu else options.ranks
    nvml = open_devices(gpus) if options.device == "cuda" else None
    if options.device == "cuda" and nvml is None:
        missing = "no GPU" if gpus == 1 else f"not {gpus} GPUs"
        print(f"fault_matrix.py: {missing} here; --device cpu runs the matrix with stand-in graphs", file=sys.stderr)
        return 2
    parent = os.getpid()
    try:
        if options.start == "fork":
            _import_stack([*options.graphs, *(options.ends or ())])
        matrix = Matrix(options, nvml)
        child = matrix.run()
        result = None if child is not None else matrix.result()
        if result is not None:
            write_atomically(options.out, result)
            shutil.rmtree(matrix.folder)
    except Exception:
        if os.getpid() != parent:
            raise
        traceback.print_exc()
        return 3
    if child is not None:  # a forked child: from here on it is the training process and ends as one
        if child.row["helper"] != "launcher":
            return fault_child.run(child.row)
        import delete_graphs

        return delete_graphs.main([*launcher_words(child.row), str(HERE / "fault_child.py"), json.dumps(child.row)])
    if options.json:
        shown = {name: result[name] for name in ("schema_version", "totals", "requirements")}
        print(json.dumps(shown, indent=1))
    return 0 if result["requirements"]["hold"] else 1


if __name__ == "__main__":
    sys.exit(main())
