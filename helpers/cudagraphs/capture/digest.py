# SPDX-License-Identifier: Apache-2.0
"""Digests of tensors, so that two processes compare gradients and parameters without exchanging them. Imports torch.

Each digest has an exact hash (equal hashes: equal bits) and a linear sketch. The sketch adds the elements, each with a
random sign, into `SKETCH` buckets. It is linear, so sketch(a) - sketch(b) = sketch(a - b), and with pairwise
independent signs the expected squared norm of a sketch is the squared norm of the tensor (Charikar, Chen, Farach-Colton
2002; the estimate of |a - b| has a relative standard deviation of about sqrt(1 / (2 * SKETCH)), 9% here).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable

import torch

SKETCH = 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASK = 2**64 - 1
# A parameter's group by its name, first match wins. Names of megatron-core's GPTModel and HybridModel, TE's
# TransformerLayer, and ours.
_GROUPS = (
    # a fused layer norm sits inside the linear that follows it: only its own weight and bias count
    ("norm", r"norm[._](weight|bias)$"),
    ("embedding", r"embedding"),
    ("output", r"output_layer|head"),
    ("router", r"router|gate\b"),
    ("experts", r"experts"),
    ("mamba", r"mixer"),
    ("attention", r"attention|attn|linear_qkv|linear_proj|qkv"),
    ("mlp", r"mlp|linear_fc|fc1|fc2"),
)


def group(name: str) -> str:
    """The parameter group that a parameter's name belongs to; `other` where none fits."""
    return next((label for label, pattern in _GROUPS if re.search(pattern, name)), "other")


class Digester:
    """Digests named tensors by group. Signs are kept by name: a tensor meets the same ones at every step."""

    def __init__(self, device: torch.device):
        self._device = device
        self._signs: dict[tuple[str, int], torch.Tensor] = {}
        self._weights: dict[int, torch.Tensor] = {}

    def groups(self, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, dict]:
        """`{group: {"numel", "norm", "hash", "sketch"}}` of (name, tensor) pairs; one device-to-host copy in all."""
        parts: dict[str, list[tuple[str, torch.Tensor, torch.Tensor]]] = {}
        for name, tensor in named:
            numbers, code = self._one(name, tensor.detach())
            parts.setdefault(group(name), []).append((name, numbers, code))
        order = [(label, name, numbers, code) for label, items in parts.items() for name, numbers, code in items]
        if not order:
            return {}
        host_numbers = torch.stack([numbers for *_, numbers, _ in order]).cpu().tolist()
        host_codes = torch.stack([code for *_, code in order]).cpu().tolist()
        out: dict[str, dict] = {}
        for (label, name, *_), numbers, code in zip(order, host_numbers, host_codes):
            entry = out.setdefault(label, {"numel": 0, "norm": 0.0, "hash": 0, "sketch": [0.0] * SKETCH})
            entry["numel"] += int(numbers[1])
            entry["norm"] += numbers[0]
            entry["hash"] = (entry["hash"] * 1000003 + (code ^ zlib.crc32(name.encode()))) & _MASK
            entry["sketch"] = [a + b for a, b in zip(entry["sketch"], numbers[2:])]
        for entry in out.values():
            entry["norm"] = entry["norm"] ** 0.5 if entry["norm"] >= 0 else float("nan")
            entry["hash"] = f"{entry['hash']:016x}"
        return out

    def _one(self, name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(float64 [squared norm, numel, sketch...], int64 hash) of one tensor, on its device."""
        flat = tensor.reshape(-1)
        size = flat.numel()
        padded = -(-size // SKETCH) * SKETCH
        values = torch.zeros(padded, dtype=torch.float32, device=flat.device)
        values[:size] = flat.float()
        squared = (values.double() ** 2).sum()
        sketch = (values * self._sign(name, padded)).view(-1, SKETCH).sum(0, dtype=torch.float64)
        head = torch.stack([squared, torch.tensor(float(size), dtype=torch.float64, device=flat.device)])
        bits = flat.contiguous().view(_INTEGERS[flat.element_size()]).to(torch.int64)
        code = ((bits + 1) * self._weight(size)).sum()
        return torch.cat([head, sketch]), code

    def _sign(self, name: str, size: int) -> torch.Tensor:
        # a sharded optimizer's part of a parameter has the parameter's name and another size
        key = (name, size)
        if key not in self._signs:
            source = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
            bits = torch.randint(0, 2, (size,), generator=source, device=self._device, dtype=torch.int8)
            self._signs[key] = bits * 2 - 1
        return self._signs[key]

    def _weight(self, size: int) -> torch.Tensor:
        """Odd multipliers, different for every place, so that a swap of two elements changes the sum modulo 2**64."""
        if size not in self._weights:
            place = torch.arange(size, dtype=torch.int64, device=self._device)
            self._weights[size] = (place * 0x5851F42D4C957F2D + 0x14057B7EF767814F) | 1
        return self._weights[size]
