# SPDX-License-Identifier: Apache-2.0
"""One rank of one variant of partial_parallel.py, in a process of its own: train both twins, compare, write a row."""

from __future__ import annotations

import faulthandler
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import share_gpu
import torch
import torch.distributed as dist
from parallel_modes import VARIANTS, Place, Twin, Variant, batches, loss_of, model

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "helpers"))

from partial_graphs import PartialCudaGraphManager  # noqa: E402

STEPS = 5  # the first is recorded, the others replay
TIMED_STEPS = {"cuda": 20, "cpu": 1}


class Comparison:
    """Tensors of the eager run against those of the captured one."""

    def __init__(self) -> None:
        self.compared, self.unequal, self.largest = 0, 0, 0.0
        self.first: str | None = None

    def add(self, what: str, eager: torch.Tensor | None, graphed: torch.Tensor | None) -> None:
        self.compared += 1
        if eager is None and graphed is None:
            return
        comparable = eager is not None and graphed is not None and eager.shape == graphed.shape
        if comparable and torch.equal(eager, graphed):
            return
        self.unequal += 1
        self.first = self.first or what
        difference = float((eager.double() - graphed.double()).abs().max()) if comparable else math.inf
        self.largest = max(self.largest, math.inf if math.isnan(difference) else difference)

    def row(self) -> dict[str, Any]:
        """`largest_difference` is null where a tensor is missing, not finite, or of another shape."""
        return {"bitwise_equal": self.unequal == 0 and self.compared > 0, "compared_tensors": self.compared,
                "unequal_tensors": self.unequal, "first_unequal": self.first,
                "largest_difference": self.largest if math.isfinite(self.largest) else None}


def local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's own part: the shard of an FSDP2 tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def prepare(rank: int, ranks: int, device_type: str) -> torch.device:
    """Kernels that give the same bits twice, so that a difference is ours; and the device of this rank."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    if device_type == "cpu":
        torch.set_num_threads(1)
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus < ranks:  # the launcher was asked to share
        os.environ.update(share_gpu.environment(rank))
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    torch.empty(1, device=device)  # makes the CUDA context
    return device


def make_backend(device_type: str) -> Any:
    if device_type == "cuda":
        return None  # the manager's own
    sys.path.insert(0, str(ROOT / "tests"))
    from fake_graphs import FakeBackend

    return FakeBackend()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def train_step(twin: Twin, index: int) -> list[torch.Tensor]:
    twin.optimizer.zero_grad(set_to_none=True)
    losses = twin.step(index)
    twin.optimizer.step()
    return losses


def compare(variant: Variant, place: Place, row: dict[str, Any], note: Callable[[str], None]) -> None:
    """Train the twins step by step on the same data; compare losses, gradients and parameters after every step.

    What is found goes into `row` bit by bit, so that a later failure leaves it there.
    """
    eager, graphed = (variant.build(place, **variant.settings) for _ in range(2))
    backend = make_backend(place.device.type)
    names = [name for name, _ in eager.bare.named_parameters()]
    comparison = Comparison()
    with PartialCudaGraphManager.from_modules(graphed.bare, "*", backend=backend, **variant.manager) as manager:
        for index in range(STEPS):
            note(f"step {index}")
            losses = train_step(eager, index), train_step(graphed, index)
            for number, (one, other) in enumerate(zip(*losses, strict=True)):
                comparison.add(f"step {index} loss of microbatch {number}", one, other)
            for name, one, other in zip(names, eager.bare.parameters(), graphed.bare.parameters()):
                comparison.add(f"step {index} gradient of {name}", local(one.grad), local(other.grad))
                comparison.add(f"step {index} {name}", local(one.detach()), local(other.detach()))
            if index == 0:
                graphed.optimizer.zero_grad(set_to_none=True)  # as between any two steps
                note("capture")
                manager.capture()
        row.update(comparison.row())
        row["counters"] = {**manager.stats(), "reasons": manager.fallback_reasons()}
        row["slots"] = {entry.name: [len(one.slots) for one in entry.variants] for entry in manager.entries}
        row.update(graphed.facts())
        if variant.mode == "ddp":
            note("averaging")
            row["averaging"] = averaging(graphed, place)
        note("timing")
        row["median_step_milliseconds"] = timings(eager, graphed, place.device)
        note("launches")
        row["launches_in_one_step"] = launches(graphed, manager, backend, place.device)
        note("close")


def averaging(twin: Twin, place: Place) -> dict[str, Any]:
    """Whether a replayed step leaves the mean of all ranks' own gradients on every rank.

    The own gradients come from a plain eager model with the same parameters and this rank's data.
    """
    alone = model(place)
    alone.load_state_dict(twin.bare.state_dict())
    for batch in batches(STEPS, place.rank, place):
        loss_of(alone(batch)).backward()
    twin.optimizer.zero_grad(set_to_none=True)
    twin.step(STEPS)
    found = torch.cat([parameter.grad.flatten() for parameter in twin.bare.parameters()])
    own = torch.cat([parameter.grad.flatten() for parameter in alone.parameters()])
    all_found, all_own = ([torch.empty_like(found) for _ in range(place.world)] for _ in range(2))
    dist.all_gather(all_found, found)
    dist.all_gather(all_own, own)
    mean = sum(one / place.world for one in all_own)
    return {"own_gradients_differ_between_ranks": not torch.equal(all_own[0], all_own[-1]),
            "equal_on_all_ranks": all(torch.equal(found, one) for one in all_found),
            "largest_difference_to_mean": float((found - mean).abs().max()),
            "largest_gradient": float(mean.abs().max())}


def timings(eager: Twin, graphed: Twin, device: torch.device) -> dict[str, float]:
    """Median host time of a step, synchronised before and after, the twins in turn."""
    spent: dict[str, list[float]] = {"eager": [], "graphs": []}
    for _ in range(TIMED_STEPS[device.type]):
        for name, twin in (("eager", eager), ("graphs", graphed)):
            wait(device)
            started = time.perf_counter()
            train_step(twin, STEPS)
            wait(device)
            spent[name].append(time.perf_counter() - started)
    return {name: round(1000 * statistics.median(times), 3) for name, times in spent.items()}


def launches(twin: Twin, manager: PartialCudaGraphManager, backend: Any, device: torch.device) -> dict[str, int]:
    """Graph launches in one step, as the profiler counts them, beside the calls that the manager says were replayed."""
    before = manager.stats()["replayed"]
    if device.type == "cuda":
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            train_step(twin, STEPS)
            wait(device)
        count = sum(event.count for event in profile.key_averages() if event.key == "cudaGraphLaunch")
    else:
        count = -backend.replays
        train_step(twin, STEPS)
        count += backend.replays
    return {"graph_launches": count, "replayed_calls": manager.stats()["replayed"] - before}


def work(name: str, rank: int, world: int, device_type: str, hidden: int, scratch: str, ready: Any, turn: Any,
         limit: float) -> None:
    """Process entry: everything that is left of it is `NAME.RANK.json` and `NAME.RANK.log` in `scratch`.

    Args:
        ready: set once torch is there and the device is up.
        turn: waited for before the process group is made.
        limit: seconds for this variant. Shortly before, the stacks of all threads go to the log.
    """
    log = os.open(Path(scratch, f"{name}.{rank}.log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
    row: dict[str, Any] = {"rank": rank}
    stage = ["device"]
    try:
        device = prepare(rank, world, device_type)
        ready.set()
        while not turn.wait(1.0):
            if not multiprocessing.parent_process().is_alive():
                os._exit(1)
        faulthandler.dump_traceback_later(max(1.0, limit - 2), file=sys.stderr)
        started = time.perf_counter()

        def note(text: str) -> None:
            stage[0] = text
            print(f"{time.perf_counter() - started:.2f} s: {text}", file=sys.stderr, flush=True)

        note("process group")
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo", init_method=f"file://{scratch}/{name}.store", rank=rank,
            world_size=world, timeout=timedelta(seconds=limit), device_id=device if device_type == "cuda" else None)
        compare(VARIANTS[name], Place(rank, world, device, hidden), row, note)
        row["seconds"] = round(time.perf_counter() - started, 2)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the row must say so
        traceback.print_exc()
        row.update(error=f"{type(error).__name__}: {error}", stage=stage[0])
        save(row, Path(scratch, f"{name}.{rank}.json"))
        ready.set()
        os._exit(1)  # a process group whose other side may be stuck cannot be destroyed in order
    save(row, Path(scratch, f"{name}.{rank}.json"))
    dist.barrier()
    dist.destroy_process_group()


def save(value: Any, path: Path) -> None:
    """Write JSON so that a reader sees all of it or nothing."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)
