# SPDX-License-Identifier: Apache-2.0
"""Memory of one process on its GPU, in bytes. Imports torch."""

from __future__ import annotations

import torch


def snapshot(device: torch.device) -> dict[str, int]:
    """`{"allocated", "reserved", "private_pool"}`; zeros on a CPU. `private_pool` is reserved memory that only graphs
    may use.

    Source: torch.cuda.memory_snapshot, key `segment_pool_id`, (0, 0) for the common pool (torch 2.11).
    """
    if device.type != "cuda":
        return {"allocated": 0, "reserved": 0, "private_pool": 0}
    stats = torch.cuda.memory_stats(device)
    private = sum(
        segment["total_size"] for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) != (0, 0)
    )
    return {
        "allocated": stats["allocated_bytes.all.current"],
        "reserved": stats["reserved_bytes.all.current"],
        "private_pool": private,
    }


def peak(device: torch.device) -> dict[str, int]:
    """`{"allocated", "reserved"}`, the largest since the process began or `reset_peak`."""
    if device.type != "cuda":
        return {"allocated": 0, "reserved": 0}
    return {"allocated": torch.cuda.max_memory_allocated(device), "reserved": torch.cuda.max_memory_reserved(device)}


def limit(device: torch.device, size: int) -> None:
    """No more than `size` bytes of the GPU for this process; a larger need raises torch.OutOfMemoryError."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, size / total), device)
