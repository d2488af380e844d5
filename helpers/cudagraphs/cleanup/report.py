# SPDX-License-Identifier: Apache-2.0
"""What one deletion found and did."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Failure:
    """One thing that could not be deleted. `reason` is the exception's type and text."""

    kind: str
    name: str
    reason: str


@dataclass(frozen=True)
class Remainder:
    """A graph that is still alive after deletion, and the chain of objects that keeps it."""

    name: str
    held_by: str


@dataclass
class DeletionReport:
    """The result of delete_cuda_graphs().

    found, deleted: number of objects by kind (finders.KINDS). A kind without objects is absent.
    live_graphs_before, live_graphs_after: torch.cuda.CUDAGraph objects that own a captured graph, whoever made them.
    bytes_released: bytes that torch's caching allocator handed back, all devices together (reserved before minus
        reserved after, torch.cuda.memory_reserved). None where CUDA is not initialised or memory was not released.
    seconds: wall clock of the deletion.
    """

    found: dict[str, int] = field(default_factory=dict)
    deleted: dict[str, int] = field(default_factory=dict)
    failed: list[Failure] = field(default_factory=list)
    remaining: list[Remainder] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    live_graphs_before: int = 0
    live_graphs_after: int = 0
    bytes_released: int | None = None
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        """True when nothing failed and no graph is left alive."""
        return not self.failed and self.live_graphs_after == 0

    def as_dict(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, "clean": self.clean, **asdict(self)}

    def problems(self) -> list[str]:
        """One line for each failure, remaining graph and warning; empty after a clean deletion."""
        return (
            [f"could not delete {f.kind} {f.name}: {f.reason}" for f in self.failed]
            + [f"{r.name} is still alive, held by {r.held_by}" for r in self.remaining]
            + self.warnings
        )
