# SPDX-License-Identifier: Apache-2.0
"""One memory pool for many slots, in capture order.

What a graph frees while it is captured becomes memory of the graphs captured after it. So a replay may destroy the
results of later graphs in its pool, never those of earlier ones: a forward graph is replayed only where nobody needs
those any more, and a backward graph, which cannot wait, puts them back.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Results(Protocol):
    """What a replay left in its static memory."""

    def idle(self) -> bool:
        """Whether nobody needs it any more."""

    def tensors(self) -> list[torch.Tensor]:
        """Their memory, to save it and put it back. Asked of gradients only: activations are nobody's to list."""


class SharedPool:
    """The places of graphs in one pool, in capture order, and which results may still be needed.

    Attributes:
        handle: for the backend.
    """

    def __init__(self, handle: Any):
        self.handle = handle
        self._places = 0
        self._results: dict[int, Results] = {}
        self._needed: list[int] = []  # places replayed since they were last seen idle, ascending

    def place(self, results: Results) -> int:
        """The next place, for a graph that is about to be captured."""
        self._places += 1
        self._results[self._places] = results
        return self._places

    def free_after(self, place: int) -> bool:
        """Whether a replay at `place` would destroy nothing that is needed."""
        needed = self._needed
        while needed and needed[-1] > place:
            if not self._results[needed[-1]].idle():
                return False
            needed.pop()
        return True

    def note(self, place: int) -> None:
        """A graph at `place` was replayed: its results may be needed from now on."""
        needed = self._needed
        if not needed or needed[-1] < place:
            needed.append(place)
        elif place not in needed:
            insort(needed, place)

    def noted(self, replay: Callable[[], None], place: int) -> Callable[[], None]:
        """`replay` of a forward graph. Only where `free_after(place)`."""
        def run() -> None:
            replay()
            self.note(place)

        return run

    def guarded(self, replay: Callable[[], None], place: int) -> Callable[[], None]:
        """`replay` of a backward graph, which puts back what it destroys of gradients that somebody still needs.

        After it come backward graphs only: all forward graphs of a pool are captured first.
        """
        def run() -> None:
            saved = [] if self.free_after(place) else [
                (tensor, tensor.clone()) for later in self._needed if later > place
                for tensor in self._results[later].tensors()]
            replay()
            for tensor, value in saved:
                tensor.data.copy_(value)
            self.note(place)

        return run
