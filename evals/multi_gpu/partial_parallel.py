#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PartialCudaGraphManager under data and pipeline parallelism: are the gradients those of the eager run?

Usage:
    torchrun --nproc-per-node 2 evals/multi_gpu/partial_parallel.py --output FILE [--modes ddp fsdp2 pipeline]

Each mode trains one small model twice from the same seed, eagerly and with every block captured, on the same data: four steps of
several microbatches, gradients compared after every step and parameters at the end, on every rank.

Output: one JSON object in FILE (written by rank 0) and on stdout: for each mode equal or not, the largest difference, and the
manager's counters.

Exit codes: 0 every mode is equal and replayed, 1 not so, 2 usage, 4 fewer than two GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "helpers"))

from partial_graphs import PartialCudaGraphManager  # noqa: E402

HIDDEN, ROWS, BLOCKS, STEPS, MICROBATCHES, SEED = 256, 64, 4, 4, 4, 1234


class Block(nn.Module):
    """Normalisation and a two-layer MLP with a residual, (rows, HIDDEN) -> (rows, HIDDEN) float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def model(blocks: int, device: torch.device) -> nn.Sequential:
    torch.manual_seed(SEED)
    return nn.Sequential(*(Block() for _ in range(blocks))).to(device)


def data(rank: int, device: torch.device) -> list[list[torch.Tensor]]:
    """STEPS x MICROBATCHES inputs of (ROWS, HIDDEN) float32, different on each rank."""
    generator = torch.Generator().manual_seed(SEED + rank)
    draw = lambda: torch.randn(ROWS, HIDDEN, generator=generator).to(device)  # noqa: E731
    return [[draw() for _ in range(MICROBATCHES)] for _ in range(STEPS)]


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [full(p.grad).detach().clone() for p in module.parameters()]


def train(build: Callable[[], tuple[nn.Module, nn.Module, Callable]], graphs: bool, select: str) -> tuple[list, list, dict]:
    """Gradients after each step, parameters at the end, and the manager's counters (empty without graphs)."""
    wrapped, bare, step = build()
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    manager = PartialCudaGraphManager.from_modules(bare, select=select) if graphs else None
    history = []
    counters: dict = {}
    try:
        for index in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            step(index)
            history.append(gradients(wrapped))
            optimizer.step()
            if manager is not None and index == 0:
                # gradients of the recorded step are gone before capture, as after any optimizer step
                optimizer.zero_grad(set_to_none=True)
                manager.capture()
        if manager is not None:
            counters = {**manager.stats(), "fallback_reasons": manager.fallback_reasons()}
    finally:
        if manager is not None:
            manager.close()
    return history, [full(p).detach().clone() for p in wrapped.parameters()], counters


def ddp(rank: int, device: torch.device) -> Callable:
    from torch.nn.parallel import DistributedDataParallel

    batches = data(rank, device)

    def build():
        bare = model(BLOCKS, device)
        stream = torch.cuda.Stream()
        # the gradient accumulators must not live on the default stream, or capture fails
        with torch.cuda.stream(stream):
            wrapped = DistributedDataParallel(bare, device_ids=[device.index])
        torch.cuda.current_stream().wait_stream(stream)

        def step(index: int) -> None:
            for number, batch in enumerate(batches[index]):
                last = number == MICROBATCHES - 1
                with torch.enable_grad() if last else wrapped.no_sync():
                    wrapped(batch).square().mean().backward()

        return wrapped, bare, step

    return build


def fsdp2(rank: int, device: torch.device) -> Callable:
    from torch.distributed.fsdp import fully_shard

    batches = data(rank, device)

    def build():
        bare = model(BLOCKS, device)
        for block in bare:
            fully_shard(block)
        fully_shard(bare)

        def step(index: int) -> None:
            for batch in batches[index]:
                bare(batch).square().mean().backward()

        return bare, bare, step

    return build


def pipeline(rank: int, device: torch.device) -> Callable:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    world = dist.get_world_size()
    batches = data(0, device)

    def build():
        bare = model(BLOCKS, device)
        part = bare[rank * BLOCKS // world : (rank + 1) * BLOCKS // world]
        stage = PipelineStage(part, rank, world, device)
        schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=lambda out, target: (out - target).square().mean())

        def step(index: int) -> None:
            whole = torch.cat(batches[index])
            if rank == 0:
                schedule.step(whole)
            elif rank == world - 1:
                schedule.step(target=torch.zeros_like(whole))
            else:
                schedule.step()

        return part, part, step

    return build


MODES = {"ddp": (ddp, "*"), "fsdp2": (fsdp2, "*"), "pipeline": (pipeline, "*")}


def compare(mode: str, rank: int, device: torch.device) -> dict:
    build, select = MODES[mode]
    started = time.perf_counter()
    eager, eager_parameters, _ = train(build(rank, device), False, select)
    graphed, graphed_parameters, counters = train(build(rank, device), True, select)
    pairs = [(a, b) for x, y in zip(eager, graphed) for a, b in zip(x, y)] + list(zip(eager_parameters, graphed_parameters))
    return {
        "rank": rank,
        "bitwise_equal": all(torch.equal(a, b) for a, b in pairs),
        "largest_difference": max(float((a - b).abs().max()) for a, b in pairs),
        "compared_tensors": len(pairs),
        "counters": counters,
        "seconds": round(time.perf_counter() - started, 2),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--modes", nargs="+", choices=sorted(MODES), default=sorted(MODES))
    arguments = parser.parse_args(argv)
    if torch.cuda.device_count() < 2:
        print("partial_parallel: needs two GPUs", file=sys.stderr)
        return 4
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rows = {}
    for mode in arguments.modes:
        try:
            mine = compare(mode, rank, device)
        except Exception as error:
            mine = {"rank": rank, "bitwise_equal": False, "error": f"{type(error).__name__}: {error}"}
        gathered: list = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        rows[mode] = gathered
    good = all(row["bitwise_equal"] and row["counters"]["replayed"] > 0 for ranks in rows.values() for row in ranks)
    if rank == 0:
        result = {
            "schema_version": 1, "what": "partial graphs under parallelism", "date": time.strftime("%Y-%m-%d"),
            "machine": {"gpus": torch.cuda.device_count(), "gpu": torch.cuda.get_device_name(0)},
            "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))},
            "configuration": {"hidden": HIDDEN, "rows": ROWS, "blocks": BLOCKS, "steps": STEPS, "microbatches": MICROBATCHES, "seed": SEED},
            "command": " ".join(["torchrun", *sys.argv]), "all_equal": good, "modes": rows,
        }  # fmt: skip
        arguments.output.write_text(json.dumps(result, indent=1))
        print(json.dumps(result["modes"]))
    dist.destroy_process_group()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
