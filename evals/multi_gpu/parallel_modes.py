# SPDX-License-Identifier: Apache-2.0
"""What partial_parallel.py trains: one small model under DDP, FSDP2 or a pipeline, in several variants.

A build function makes a `Twin`: the model, wrapped, with an optimizer and a function that runs one training step of
`MICROBATCHES` microbatches. Called twice on a rank it gives two twins with the same weights.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

ROWS, BLOCKS, MICROBATCHES, SEED = 64, 4, 4, 1234
LEARNING_RATE = 0.05


class Block(nn.Module):
    """Normalisation and a two-layer MLP with a residual, (rows, hidden) -> (rows, hidden) float32."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@dataclass(frozen=True)
class Place:
    """Where a twin lives: its rank, the number of ranks, the device of this rank, and the width of the model."""

    rank: int
    world: int
    device: torch.device
    hidden: int


def model(place: Place) -> nn.Sequential:
    """BLOCKS blocks, the same weights every time."""
    torch.manual_seed(SEED)
    return nn.Sequential(*(Block(place.hidden) for _ in range(BLOCKS))).to(place.device)


@functools.cache
def batches(step: int, rank: int, place: Place) -> tuple[torch.Tensor, ...]:
    """The MICROBATCHES inputs of one step, (ROWS, hidden) float32, different for each `rank`."""
    generator = torch.Generator().manual_seed(SEED + 1000 * rank + step)
    return tuple(torch.randn(ROWS, place.hidden, generator=generator).to(place.device) for _ in range(MICROBATCHES))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@dataclass
class Twin:
    """One of the two models that are compared.

    Attributes:
        bare: the modules of this rank, whose children are captured.
        step: `(index) -> losses` runs forward and backward of every microbatch; an empty list where this rank computes
            no loss.
        facts: what the wrapper tells about itself after training.
    """

    bare: nn.Sequential
    step: Callable[[int], list[torch.Tensor]]
    facts: Callable[[], dict[str, Any]] = dict
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.bare.parameters(), lr=LEARNING_RATE)


def ddp(place: Place, *, gradient_as_bucket_view: bool) -> Twin:
    """DistributedDataParallel: gradients are reduced in the backward of the last microbatch of a step."""
    bare = model(place)
    # buckets of about half a block, so that several all-reduces overlap with backward
    bucket_mib = sum(parameter.numel() * parameter.element_size() for parameter in bare[0].parameters()) / 2**21
    wrapped = DistributedDataParallel(bare, device_ids=[place.device.index] if place.device.type == "cuda" else None,
                                      bucket_cap_mb=bucket_mib, gradient_as_bucket_view=gradient_as_bucket_view)

    def step(index: int) -> list[torch.Tensor]:
        losses = []
        for number, batch in enumerate(batches(index, place.rank, place)):
            last = number == MICROBATCHES - 1
            with contextlib.nullcontext() if last else wrapped.no_sync():
                loss = loss_of(wrapped(batch))
                loss.backward()
            losses.append(loss.detach())
        return losses

    def facts() -> dict[str, Any]:
        known = wrapped._get_ddp_logging_data()
        return {name: known.get(name) for name in ("bucket_sizes", "rebuilt_bucket_sizes")}

    return Twin(bare, step, facts)


def fsdp2(place: Place, *, reshard_after_forward: bool, reduce_every_microbatch: bool) -> Twin:
    """fully_shard on every block and on the whole model."""
    bare = model(place)
    mesh = init_device_mesh(place.device.type, (place.world,))
    for block in bare:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(bare, mesh=mesh, reshard_after_forward=reshard_after_forward)

    def step(index: int) -> list[torch.Tensor]:
        losses = []
        for number, batch in enumerate(batches(index, place.rank, place)):
            bare.set_requires_gradient_sync(reduce_every_microbatch or number == MICROBATCHES - 1)
            loss = loss_of(bare(batch))
            loss.backward()
            losses.append(loss.detach())
        return losses

    return Twin(bare, step)


def pipeline(place: Place, *, schedule: str) -> Twin:
    """One stage a rank. The first keeps one microbatch a stage in flight ("1F1B"), or all of them ("GPipe")."""
    rank, world = place.rank, place.world
    part = model(place)[rank * BLOCKS // world : (rank + 1) * BLOCKS // world]
    kind = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}[schedule]
    runner = kind(PipelineStage(part, rank, world, place.device), n_microbatches=MICROBATCHES,
                  loss_fn=lambda output, target: (output - target).square().mean())

    def step(index: int) -> list[torch.Tensor]:
        whole = torch.cat(batches(index, 0, place))
        losses: list[torch.Tensor] = []
        if rank == 0:
            runner.step(whole)
        elif rank == world - 1:
            runner.step(target=torch.zeros_like(whole), losses=losses)
        else:
            runner.step()
        return [loss.detach() for loss in losses]

    return Twin(part, step)


@dataclass(frozen=True)
class Variant:
    """One thing to compare: a mode, its settings, and the options of the manager."""

    mode: str
    build: Callable[..., Twin]
    settings: dict[str, Any]
    manager: dict[str, Any] = field(default_factory=dict)


VARIANTS = {
    "ddp": Variant("ddp", ddp, {"gradient_as_bucket_view": False}),
    "ddp-bucket-view": Variant("ddp", ddp, {"gradient_as_bucket_view": True}),
    # the manager itself must leave accumulation to autograd here, since DDP waits for it
    "ddp-merged": Variant("ddp", ddp, {"gradient_as_bucket_view": True}, {"merge": True, "accumulate_in_graph": True}),
    "fsdp2-reshard": Variant("fsdp2", fsdp2, {"reshard_after_forward": True, "reduce_every_microbatch": True}),
    "fsdp2-keep": Variant("fsdp2", fsdp2, {"reshard_after_forward": False, "reduce_every_microbatch": False}),
    "pipeline-1f1b": Variant("pipeline", pipeline, {"schedule": "1F1B"}),
    "pipeline-gpipe": Variant("pipeline", pipeline, {"schedule": "GPipe"}),
}
