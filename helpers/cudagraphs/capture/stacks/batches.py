# SPDX-License-Identifier: Apache-2.0
"""Random tokens that are the same in every process: fresh at each step, drawn on the CPU from (seed, stage, step).
Torch only."""

from __future__ import annotations

import torch


class Batches:
    """Microbatches of a run. `rank` is the data-parallel rank: ranks of one model replica share their data."""

    def __init__(self, shape: dict, seed: int, rank: int, device: torch.device):
        self._shape, self._seed, self._rank, self._device = shape, seed, rank, device

    def at(self, stage: str, step: int) -> list[dict[str, torch.Tensor]]:
        """One dict a microbatch: `tokens`, `labels`, `position_ids`, each int64 [microbatch, sequence] on the
        device."""
        s = self._shape
        number = ((self._seed * 65537 + self._rank) * 2 + (stage == "train")) * 10_000_019 + step
        source = torch.Generator().manual_seed(number % 2**63)
        size = (s["microbatches"], s["microbatch"], s["sequence"] + 1)
        tokens = torch.randint(0, s["vocabulary"], size, generator=source)
        if self._device.type == "cuda":
            tokens = tokens.pin_memory()
        tokens = tokens.to(self._device, non_blocking=True)
        positions = torch.arange(s["sequence"], device=self._device).expand(s["microbatch"], -1)
        return [
            {
                "tokens": row[:, :-1].contiguous(),
                "labels": row[:, 1:].contiguous(),
                "position_ids": positions.contiguous(),
            }
            for row in tokens
        ]
