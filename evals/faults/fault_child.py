#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One rank of one row of the fault matrix: train, capture, and meet the fault. Started by fault_matrix.py.

Usage: python evals/faults/fault_child.py ROW    ROW is the JSON that fault_matrix.py writes
Output: JSON lines in the file that the row names: how far it came, and the time of the fault.
Exit codes: those that the fault and the cleanup make; 96 the graphs of this row could not be made, 97 the fault was
survived, 98 its place was not reached.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "multi_gpu"), str(HERE.parents[1] / "helpers")]

import share_gpu  # noqa: E402

NOT_MADE, SURVIVED, NOT_REACHED = 96, 97, 98
SYS_EXIT_CODE, OS_EXIT_CODE = 3, 9
TOO_MUCH = 1 << 44  # bytes, more than any device has: refused, and nothing is filled
STACK_SIGNAL = signal.SIGRTMAX - 1  # one that neither torch nor the helper uses


class Fault:
    """The row's fault. Acts once, at the row's place, on the faulty rank."""

    def __init__(self, row: dict[str, Any], mark) -> None:
        self.place, self.how, self.mark = row["where"], row["how"], mark
        self.here = row["rank"] == row["faulty_rank"]
        self.fired = False

    def __call__(self, place: str) -> None:
        if place != self.place or not self.here or self.fired:
            return
        self.fired = True
        self.mark("fault", reserved_bytes=_reserved())
        act = getattr(self, f"_{self.how}")
        act()

    def _exception(self):
        raise RuntimeError("injected fault")

    _exception_then_destroy = _exception  # run() has the finally block

    def _sys_exit(self):
        sys.exit(SYS_EXIT_CODE)

    def _keyboard_interrupt(self):
        raise KeyboardInterrupt

    def _sigterm(self):
        os.kill(os.getpid(), signal.SIGTERM)

    def _sigint(self):
        os.kill(os.getpid(), signal.SIGINT)

    def _sigkill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def _sigterm_all(self):
        os.killpg(0, signal.SIGTERM)  # the ranks of a row are one process group

    def _out_of_memory(self):
        import torch

        torch.empty(TOO_MUCH, dtype=torch.uint8, device="cuda" if torch.cuda.is_initialized() else "cpu")

    def _os_exit(self):
        os._exit(OS_EXIT_CODE)


class _Trap:
    """An object in the checkpoint whose pickling is the fault."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def __reduce__(self):
        self.fault("checkpoint_save")
        return (str, ())


def _reserved() -> int:
    import torch

    return torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0


def run(row: dict[str, Any]) -> int:
    """Play the row. Returns an exit status only when the fault did not end the process."""
    if row["rank"] is None:  # started by torchrun
        row = {**row, "rank": int(os.environ["RANK"])}
    rank, ranks, cuda = row["rank"], row["ranks"], row["device"] == "cuda"
    file = open(f"{row['base']}.marks{rank}", "a", buffering=1)

    def mark(what: str, **more: Any) -> None:
        file.write(json.dumps({"mark": what, "time": time.time(), **more}) + "\n")

    # The matrix asks a process that hangs where it is. Runs without the interpreter lock.
    faulthandler.register(STACK_SIGNAL, open(f"{row['base']}.stack{rank}", "w"), all_threads=False)
    mark("started", pid=os.getpid())
    if row["helper"] == "library":
        import delete_graphs

        delete_graphs.install(limit=row["helper_limit"], report=f"{row['base']}.report{rank}")
    import torch
    import torch.distributed as dist

    if row["share_gpu"]:
        os.environ.update(share_gpu.environment(rank))
    device = torch.device("cuda", 0 if row["share_gpu"] else rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if cuda else "gloo"
    if row["start"] == "torchrun":
        dist.init_process_group(backend)
    else:
        store = dist.FileStore(f"{row['base']}.store", ranks)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    mark("ready")
    try:
        return _train(row, device, mark)
    finally:
        if row["how"] == "exception_then_destroy":
            dist.destroy_process_group()


def _train(row: dict[str, Any], device, mark) -> int:
    import torch
    import torch.distributed as dist
    import workloads

    fault = Fault(row, mark)
    on_gpu = device.type == "cuda"
    capturing = torch.cuda.is_current_stream_capturing if on_gpu else (lambda: workloads.StandIn.in_capture)
    points = workloads.Points(fault, capturing)
    where = row["where"]
    try:
        workload = workloads.build(row["graphs"], points, row["rank"], row["ranks"], row["seed"], device)
        for _ in range(workload.eager_steps):
            workload.step()
        # A step that captures by itself is also the first eager one of a local graph: it stays in "warmup".
        points.phase = "capture" if workload.eager_steps else "warmup"
        workload.capture()
    except Exception as error:
        if fault.fired:
            raise
        mark("not made", reason=_one_line(error))
        if not fault.here:  # the fault on another rank may be the reason, and this rank ends as a training does
            raise
        return NOT_MADE
    points.phase = "settled"
    mark("captured", reserved_bytes=_reserved())
    for _ in range(2):
        workload.step()
    points.phase = where
    if where.startswith("replay") or where == "optimizer_step":
        workload.step()
    if where == "evaluation":
        workload.evaluate()
        fault(where)
    if where == "checkpoint_save":
        with open(f"{row['base']}.checkpoint{row['rank']}", "wb") as checkpoint:
            torch.save({"model": workload.state(), "trap": _Trap(fault)}, checkpoint)
    if where == "evaluation_recaptured":
        try:
            if row["helper"] == "without":
                workload.delete()
            else:
                import delete_graphs

                delete_graphs.delete_cuda_graphs()
            points.phase = "recapture"
            workload.recapture()
        except Exception as error:
            mark("not made", reason=_one_line(error))
            return NOT_MADE
        if not _live_graphs():
            mark("not made", reason="nothing was captured again")
            return NOT_MADE
        mark("recaptured")
        workload.evaluate()
        fault(where)
    if where == "end":
        live = _live_graphs()
        # No fault: the clock of an orderly end starts here. `workload` keeps the graphs alive until after the destroy.
        mark("fault", reserved_bytes=_reserved(), live_graphs=live)
        dist.destroy_process_group()
        return 0
    if not fault.here:  # peers go on until the missing rank is noticed
        while True:
            workload.step()
    return SURVIVED if fault.fired else NOT_REACHED


def _live_graphs() -> int:
    """Graphs alive in this process, counted the same way with and without the helper."""
    from cudagraphs.cleanup import finders

    return sum(map(finders.is_live, finders.walk_heap().cuda_graphs))


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    return run(json.loads(arguments[0]))


if __name__ == "__main__":
    sys.exit(main())
