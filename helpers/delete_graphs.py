#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Delete CUDA graphs on every way out of a training process, so that it does not hang at exit.

A CUDA graph that captured a collective keeps the NCCL communicator in use; torch.distributed.destroy_process_group()
then waits for ever, and the job holds its nodes until the scheduler ends it.

Usage, without a line of code (also as the script of torchrun or srun):
    python helpers/delete_graphs.py [--limit SECONDS] [--report FILE] -- train.py arguments...
    python helpers/delete_graphs.py [--limit SECONDS] [--report FILE] -- -m package.module arguments...
    torchrun --nproc-per-node 8 helpers/delete_graphs.py -- train.py arguments...

Usage, with one line:
    import delete_graphs; delete_graphs.install()             signals, exceptions, atexit, process groups, a deadline
    with delete_graphs.graphs_deleted_on_exit(): ...          or as a decorator: @graphs_deleted_on_exit()
    report = delete_graphs.delete_cuda_graphs()               now; idempotent

Options:
    --limit SECONDS   time from a fault to the end of the process (default 8); an orderly end has four times as long; with
                      peers half of it, five eighths for a main thread that is stuck when a signal comes, and three
                      quarters for one that had to be freed
    --report FILE     write what was deleted as JSON; under several ranks name it with {rank}

Output: nothing on stdout, which belongs to the program. On stderr one line for each graph that could not be deleted,
and the stacks of all threads when the limit is reached.

Exit codes: those of the program, a death by signal included. Besides:
    75   teardown was still hanging at the limit; the stacks and what keeps graphs alive are on stderr
    128 + signal   a signal came and the main thread was stuck until the limit (143 for SIGTERM)
    142  (SIGALRM) it hung where Python could not run any more
    2    usage: no program given, or it cannot be read

What cannot be helped: os._exit() and SIGKILL run nothing; the driver frees the device memory, and peers learn of it
only through their launcher (torchrun and `srun --kill-on-bad-exit` signal the survivors, which then leave by the rules
above).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ContextDecorator
from typing import Any

from cudagraphs.cleanup import exits, launcher
from cudagraphs.cleanup.deletion import delete_cuda_graphs
from cudagraphs.cleanup.exits import DEFAULT_LIMIT_S, uninstall
from cudagraphs.cleanup.finders import check_given
from cudagraphs.cleanup.report import DeletionReport, Failure, Remainder
from cudagraphs.cleanup.watchdog import EXIT_TEARDOWN_HUNG

__all__ = [
    "DEFAULT_LIMIT_S",
    "EXIT_TEARDOWN_HUNG",
    "DeletionReport",
    "Failure",
    "Remainder",
    "delete_cuda_graphs",
    "graphs_deleted_on_exit",
    "install",
    "uninstall",
]


class graphs_deleted_on_exit(ContextDecorator):  # noqa: N801  reads as a phrase, like contextlib's own
    """Delete every CUDA graph when a block or a function ends: return, exception, KeyboardInterrupt, sys.exit.

        with graphs_deleted_on_exit(model) as graphs:
            train(model)
        print(graphs.report.deleted)

    objects: as in delete_cuda_graphs(), deleted first; none are needed. Exceptions pass through unchanged, and a
    deletion that fails never replaces them: it is in `report`. Signals that end the process run no Python code without
    install(). Reusable, and several may be nested.
    """

    def __init__(self, *objects: Any) -> None:
        self.objects = objects
        self.report: DeletionReport | None = None
        for obj in objects:
            check_given(obj)

    def __enter__(self) -> graphs_deleted_on_exit:
        return self

    def __exit__(self, *exception: object) -> None:
        self.report = delete_cuda_graphs(*self.objects)


def install(limit: float = DEFAULT_LIMIT_S, report: str | None = None) -> None:
    """Delete graphs on every way out of this process. Call it once, as early as possible, in the main thread.

    limit: seconds from a fault to the end of the process; an orderly end has four times as long, because cutting it
    makes a failure of a run that succeeded. Raises ValueError when it is not positive.
    report: a file to write at exit, what was deleted as JSON.

    Signals (SIGTERM, SIGINT, SIGUSR1, SIGUSR2): a handler that the program has set, before or after, decides alone;
    where there is none the main thread unwinds as for sys.exit(), graphs are deleted, and the process dies by the
    signal. A main thread that is stuck (in a collective, say) is freed after a quarter of the limit: graphs are deleted
    and communicators aborted from a thread. Ignored signals stay ignored. Also: sys.excepthook, atexit (before callbacks
    registered earlier, torch's included), destroy_process_group() and abort of all groups. With peers, a
    destroy_process_group() in a finally or except block of an error becomes an abort: peers in a collective would make
    it wait for ever. From another thread than the main one everything but the signals is put in place. A forked child
    gets the default behaviour back.
    """
    exits.install(limit, report)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    own, program = _split(arguments)
    parser = argparse.ArgumentParser(
        prog="delete_graphs.py",
        usage="delete_graphs.py [--limit SECONDS] [--report FILE] [--] {train.py | -m module} [arguments ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--limit",
        type=_seconds,
        default=DEFAULT_LIMIT_S,
        metavar="SECONDS",
        help=f"time from a fault to the end of the process, {DEFAULT_LIMIT_S:g} by default; an orderly end has four times "
        "as long",
    )
    parser.add_argument("--report", metavar="FILE", help="JSON; {rank} is replaced by RANK from the environment")
    options = parser.parse_args(own)
    as_module = program[:1] == ["-m"]
    if not program[as_module:]:
        parser.error("no program given: a training script, or -m and a module")
    target, rest = program[as_module], program[as_module + 1 :]
    if not as_module:
        try:
            launcher.check_script(target)
        except launcher.Unrunnable as error:
            print(f"delete_graphs.py: {error}", file=sys.stderr)
            return 2
    report = options.report and options.report.replace("{rank}", os.environ.get("RANK", "0"))
    guard = exits.install(options.limit, report, own_files=(__file__, launcher.__file__))
    launcher.run(target, rest, as_module, guard)
    return 0


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Our options, and the program with its arguments. The -- between them may be missing: torchrun removes it."""
    at = 0
    while at < len(arguments):
        word = arguments[at]
        if word == "--":
            return arguments[:at], arguments[at + 1 :]
        if word == "-m" or not word.startswith("-"):
            return arguments[:at], arguments[at:]
        at += 1 if "=" in word or word in ("-h", "--help") else 2
    return arguments, []


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


if __name__ == "__main__":
    sys.exit(main())
