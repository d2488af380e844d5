#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PartialCudaGraphManager under data and pipeline parallelism: are the gradients those of the eager run?

Usage:
    python3 evals/multi_gpu/partial_parallel.py --output FILE [--variants ddp fsdp2-keep ...] [--revision REV]
    python3 evals/multi_gpu/partial_parallel.py --output FILE --share-gpu     # both ranks on one GPU, see share_gpu.py
    python3 evals/multi_gpu/partial_parallel.py --output FILE --device cpu    # stand-in graphs of the tests, gloo

Start it with plain python3, not with torchrun: it starts two processes for each variant itself, one a GPU, because a
failed capture leaves its process unusable. The variants (parallel_modes.py) are DDP, FSDP2 and a two-stage pipeline.
In each, one small model is trained twice from the same seed, eagerly and with every block captured, in turn and on the
same data: five steps of four microbatches, of which the first is recorded. Losses, gradients and parameters are
compared after every step on every rank.

Processes of all variants start together and get ready; then one variant after the other has its turn. One that takes
longer than `--variant-limit` is ended, and so is a rank whose partner failed. FILE is written anew after every variant.

Output: one JSON object in FILE; on stderr a line a variant. For each variant and rank: bitwise equal or not, the
largest difference, the manager's counters and slots, graph launches in one step as the profiler counts them, and the
median step in milliseconds (information only). DDP also says whether gradients are the mean over the ranks. A rank that
failed has `error`, the stage it was in, and the end of its log. On the CPU the launches and times are those of stand-in
graphs.

Exit codes: 0 every variant is equal and replayed on every rank, 1 not so, 2 usage, 4 fewer than two GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import re
import shlex
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from parallel_modes import BLOCKS, LEARNING_RATE, MICROBATCHES, ROWS, SEED, VARIANTS  # noqa: E402
from parallel_worker import ROOT, STEPS, TIMED_STEPS, save, work  # noqa: E402

RANKS = 2
GRACE_SECONDS = 3.0  # for a rank whose partner has ended
START_SECONDS = 60.0  # for imports and the device


@dataclass
class Run:
    """The processes of one variant."""

    name: str
    processes: list[Any]
    ready: list[Any]
    turn: Any
    ended: str | None = None  # why processes were killed


def start(names: Sequence[str], device_type: str, hidden: int, scratch: Path, limit: float) -> list[Run]:
    """Start the processes of all variants; each waits for its turn."""
    # CUDA does not survive a fork; on the CPU a fork saves every process the import of torch
    context = multiprocessing.get_context("spawn" if device_type == "cuda" else "fork")
    runs = []
    for name in names:
        turn, ready = context.Event(), [context.Event() for _ in range(RANKS)]
        processes = [context.Process(target=work, daemon=True, args=(
            name, rank, RANKS, device_type, hidden, str(scratch), ready[rank], turn, limit)) for rank in range(RANKS)]
        runs.append(Run(name, processes, ready, turn))
        for process in processes:
            process.start()
    return runs


def give_turn(run: Run, limit: float, deadline: float) -> None:
    """Let one variant run to its end, at most `limit` seconds and never past `deadline` (of time.monotonic)."""
    until = min(time.monotonic() + START_SECONDS, deadline)
    for event, process in zip(run.ready, run.processes):
        while not event.wait(0.1) and process.is_alive():
            if time.monotonic() > until:
                return stop(run, "a rank was not ready in time")
    run.turn.set()
    until = min(time.monotonic() + limit, deadline)
    while any(process.is_alive() for process in run.processes):
        if any(process.exitcode for process in run.processes):
            until = min(until, time.monotonic() + GRACE_SECONDS)
            join(run, until)
            return stop(run, "the other rank failed")
        if time.monotonic() > until:
            return stop(run, "the time limit was reached")
        time.sleep(0.05)
    return None


def join(run: Run, until: float) -> None:
    for process in run.processes:
        process.join(max(0.0, until - time.monotonic()))


def stop(run: Run, reason: str) -> None:
    for process in run.processes:
        if process.is_alive():
            run.ended = reason
            process.kill()
    for process in run.processes:
        process.join(5)


def collect(run: Run, scratch: Path) -> list[dict[str, Any]]:
    """The row of every rank, with the end of its log where something went wrong."""
    rows = []
    for rank, process in enumerate(run.processes):
        written = scratch / f"{run.name}.{rank}.json"
        row = json.loads(written.read_text(encoding="utf-8")) if written.exists() else {"rank": rank}
        if process.exitcode != 0:
            killed = process.exitcode == -signal.SIGKILL and run.ended is not None
            row.setdefault("error", f"ended by the launcher: {run.ended}" if killed else
                           f"the process ended with {process.exitcode}")
            row["log_end"] = log_end(scratch / f"{run.name}.{rank}.log")
        if "error" in row:
            row["error"] = anonymous(row["error"])
        rows.append(row)
    return rows


def log_end(path: Path, lines: int = 60) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return [anonymous(line) for line in text.splitlines()[-lines:]]


def anonymous(text: str) -> str:
    """Without the paths and the name of this machine."""
    for path, stands_for in ((str(ROOT), "."), (sysconfig.get_path("purelib"), "site-packages"),
                             (sysconfig.get_path("stdlib"), "python"), (tempfile.gettempdir(), "tmp")):
        text = text.replace(path, stands_for)
    return re.sub(rf"(?<!\w){re.escape(socket.gethostname())}(?!\w)", "host", text)


def is_good(row: dict[str, Any]) -> bool:
    """Equal to eager, replayed, by real launches, and under DDP averaged."""
    if "error" in row or not row["bitwise_equal"]:
        return False
    mean = row.get("averaging")
    if mean is not None and not (mean["own_gradients_differ_between_ranks"] and mean["equal_on_all_ranks"]
                                 and mean["largest_difference_to_mean"] <= 1e-6 * mean["largest_gradient"]):
        return False
    return row["counters"]["replayed"] > 0 and row["launches_in_one_step"]["graph_launches"] > 0


def describe(device_type: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(machine, versions), without a CUDA context in this process."""
    machine: dict[str, Any] = {"cpus": os.cpu_count(), "gpu": None, "gpus": 0, "driver": None}
    versions: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__,
                                "cuda": torch.version.cuda, "nccl": None}
    if device_type == "cuda":
        machine["gpus"] = torch.cuda.device_count()
        with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError, ValueError):
            asked = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                                   capture_output=True, text=True, timeout=20, check=True).stdout
            machine["gpu"], machine["driver"] = asked.splitlines()[0].rsplit(", ", 1)
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return machine, versions


def line_of(name: str, rows: list[dict[str, Any]]) -> str:
    parts = []
    for row in rows:
        if "error" in row:
            parts.append(f"rank {row['rank']}: {row['error'].splitlines()[0][:200]}")
            continue
        counts, times = row["counters"], row["median_step_milliseconds"]
        parts.append(f"rank {row['rank']}: {'equal' if row['bitwise_equal'] else 'NOT EQUAL'}, {counts['replayed']} "
                     f"replayed, {counts['fallback']} eager {counts['reasons'] or ''}, {times['eager']} ms eager, "
                     f"{times['graphs']} ms graphs")
    return f"{name}: " + "; ".join(parts)


def command(argv: Sequence[str]) -> str:
    """The command line. The output is named from the project's folder where it lies in there, else by its file name."""
    words = []
    for before, word in zip(("", *argv), argv):
        option, joined, value = word.partition("=")
        if before == "--output":
            word = output_name(Path(word))
        elif option == "--output" and joined:
            word = f"--output={output_name(Path(value))}"
        words.append(word)
    return shlex.join(["python3", "evals/multi_gpu/partial_parallel.py", *words])


def output_name(path: Path) -> str:
    whole = path.resolve()
    return whole.relative_to(ROOT).as_posix() if whole.is_relative_to(ROOT) else path.name


def main(argv: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)  # the result records the names in full
    parser.add_argument("--output", type=Path, required=True, help="the JSON result")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="NAME",
                        help=f"of {', '.join(VARIANTS)}; all unless given")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--share-gpu", action="store_true", help="let the ranks share one GPU, where there is only one")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model (default 256)")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for everything (default 90)")
    parser.add_argument("--variant-limit", type=float, default=25.0, help="seconds for one variant (default 25)")
    parser.add_argument("--revision", help="git revision to note in the result")
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(words)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error("start it with plain python3: it starts its ranks by itself")
    if arguments.hidden < 1:
        parser.error(f"--hidden must be at least 1, got {arguments.hidden}")
    if not arguments.output.parent.is_dir():
        parser.error(f"--output: there is no directory {arguments.output.parent}")
    if arguments.device == "cuda" and torch.cuda.device_count() < (1 if arguments.share_gpu else RANKS):
        print(f"partial_parallel: needs {RANKS} GPUs, found {torch.cuda.device_count()}; --share-gpu does with one", file=sys.stderr)
        return 4
    if arguments.device == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the children's cuBLAS; deterministic kernels need it
    machine, versions = describe(arguments.device)
    result: dict[str, Any] = {
        "schema_version": 1,
        "what": "partial graphs under data and pipeline parallelism against eager",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command(words),
        "revision": arguments.revision,
        "seed": SEED,
        "machine": machine,
        "versions": versions,
        "configuration": {
            "device": arguments.device, "graphs": "CUDA graphs" if arguments.device == "cuda" else "stand-in graphs",
            "ranks": RANKS, "hidden": arguments.hidden, "rows": ROWS, "blocks": BLOCKS, "steps": STEPS,
            "timed_steps": TIMED_STEPS[arguments.device], "microbatches": MICROBATCHES, "dtype": "float32",
            "learning_rate": LEARNING_RATE,
        },
        "all_good": False,
        "variants": {},
    }  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    deadline = began + arguments.limit
    names = list(dict.fromkeys(arguments.variants))
    with tempfile.TemporaryDirectory(prefix="partial-parallel-") as scratch:
        runs = start(names, arguments.device, arguments.hidden, Path(scratch), arguments.variant_limit)
        try:
            for run in runs:
                if time.monotonic() < deadline:
                    give_turn(run, arguments.variant_limit, deadline)
                else:
                    stop(run, "the limit for everything was reached")
                rows = collect(run, Path(scratch))
                variant = VARIANTS[run.name]
                result["variants"][run.name] = {
                    "mode": variant.mode, "settings": variant.settings, "manager": variant.manager,
                    "good": all(is_good(row) for row in rows), "ranks": rows,
                }  # fmt: skip
                result["all_good"] = len(result["variants"]) == len(names) and all(
                    one["good"] for one in result["variants"].values())
                result["seconds"] = round(time.monotonic() - began, 1)
                save(result, arguments.output)
                print(line_of(run.name, rows), file=sys.stderr, flush=True)
        finally:
            for run in runs:
                stop(run, "the launcher was stopped")
    return 0 if result["all_good"] else 1


if __name__ == "__main__":
    sys.exit(main())
