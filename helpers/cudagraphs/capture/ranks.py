# SPDX-License-Identifier: Apache-2.0
"""How the parents of several ranks keep step: they exchange small values through a store, and hear of each other's
failures.

Under torchrun every rank runs the whole tool: a parent with its own children. The children of one variant form a
process group; the parents do not belong to it, so they stay able to talk when it breaks.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta


class RanksError(ValueError):
    """The launcher's variables do not describe ranks; the text names the variable."""


class Ranks:
    """A single rank: everybody agrees at once."""

    rank, world, local_rank = 0, 1, 0
    rendezvous: dict | None = None

    def agree(self, tag: str, value) -> list:
        """The values of all ranks for the tag, by rank. Every rank must ask for the same tags in the same order."""
        return [value]

    def tell_failed(self, name: str, message: str) -> None:
        """Lets the other ranks know that this rank's process of a variant failed."""

    def failed(self, name: str) -> tuple[int, str] | None:
        """(rank, message) if another rank told of a failure of the variant."""
        return None

    def leave(self) -> None:
        """Called last. The rank that holds the store stays until the others have read what they need."""


class StoreRanks(Ranks):
    """Ranks that meet in a key-value store with the methods set, get, wait and check of torch.distributed.Store."""

    def __init__(self, store, rank: int, world: int, local_rank: int = 0, limit_s: float = 600.0, rendezvous=None):
        self._store, self.rank, self.world, self.local_rank = store, rank, world, local_rank
        self._limit = timedelta(seconds=limit_s)
        self._count = 0
        self.rendezvous = rendezvous

    def agree(self, tag: str, value) -> list:
        self._count += 1
        keys = [f"agree/{self._count}/{tag}/{rank}" for rank in range(self.world)]
        self._store.set(keys[self.rank], json.dumps(value))
        self._store.wait(keys, self._limit)
        return [json.loads(self._store.get(key)) for key in keys]

    def tell_failed(self, name: str, message: str) -> None:
        self._store.set(f"failed/{name}", json.dumps([self.rank, message]))

    def failed(self, name: str) -> tuple[int, str] | None:
        key = f"failed/{name}"
        if not self._store.check([key]):
            return None
        rank, message = json.loads(self._store.get(key))
        return None if rank == self.rank else (rank, message)

    def leave(self) -> None:
        keys = [f"left/{rank}" for rank in range(self.world)]
        self._store.set(keys[self.rank], "1")
        if self.rank == 0:
            self._store.wait(keys, self._limit)


def world_size() -> int:
    """How many ranks the launcher's variables describe, 1 without them. Raises RanksError for odd or missing ones."""
    world = _number("WORLD_SIZE") if "WORLD_SIZE" in os.environ else 1
    if world < 1:
        raise RanksError(f"WORLD_SIZE={world}: there is at least one rank")
    if world > 1:
        rank = _number("RANK")
        _number("MASTER_PORT")
        if not 0 <= rank < world:
            raise RanksError(f"RANK={rank}: of {world} ranks (WORLD_SIZE) it is one from 0 to {world - 1}")
        if not os.environ.get("MASTER_ADDR"):
            raise RanksError(f"MASTER_ADDR is not set, and WORLD_SIZE is {world}: {_START}")
    return world


_START = "start the ranks with torchrun, or set WORLD_SIZE, RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each"


def _number(name: str) -> int:
    if name not in os.environ:
        raise RanksError(f"{name} is not set, and WORLD_SIZE is {os.environ['WORLD_SIZE']}: {_START}")
    try:
        return int(os.environ[name])
    except ValueError:
        raise RanksError(f"{name}={os.environ[name]}: not a number; {_START}") from None


def from_environment(limit_s: float, run: int = 0) -> Ranks:
    """The ranks that torchrun's environment describes; a single rank without it.

    The store is the launcher's own where it offers one (TORCHELASTIC_USE_AGENT_STORE, set by torchrun), else rank 0
    holds it. `run` tells runs of one process apart. Raises RanksError as `world_size` does.
    """
    world = world_size()
    if world == 1:
        return Ranks()
    from torch.distributed import PrefixStore, TCPStore

    rank = int(os.environ["RANK"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(host, port, world, is_master=master, timeout=timedelta(seconds=limit_s), wait_for_workers=False)
    # The store outlives a run and a restart of torchrun: keys of the one before must not answer for this one.
    prefix = f"smoke/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{run}"
    meeting = {"host": host, "port": port, "prefix": prefix}
    return StoreRanks(
        PrefixStore(prefix, store), rank, world, int(os.environ.get("LOCAL_RANK", rank)), limit_s, meeting
    )
