# SPDX-License-Identifier: Apache-2.0
"""Delete the graphs of this process, in order, and say what happened."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

from cudagraphs.cleanup import finders
from cudagraphs.cleanup.holders import held_by
from cudagraphs.cleanup.report import DeletionReport, Failure, Remainder

_MAX_HOLDERS = 3  # finding a holder walks the heap; the first few name the culprit

# One deletion at a time. Re-entrant, because a manager's close() may itself call delete_cuda_graphs().
_lock = threading.RLock()


def delete_cuda_graphs(*objects: Any, release_memory: bool = True, lock_timeout: float = -1) -> DeletionReport:
    """Delete every CUDA graph in this process: first those of `objects`, in order, then everything that can be found.

    objects: torch.cuda.CUDAGraph, graphed callables, modules, graph helpers, managers, or containers of them. They
        need not hold a graph yet. None are needed: they only fix what goes first.
    release_memory: also collect garbage and return freed blocks to the device (torch.cuda.empty_cache()). That takes
        time and waits for the device, where a collective may be stuck: a process that is leaving does without.
    lock_timeout: seconds to wait for a deletion that another thread is in; -1 waits for ever.

    Idempotent. Never imports torch, megatron or Transformer Engine; without them it finds nothing. What is deleted can
    no longer be replayed: torch raises on replay, Transformer Engine on call. megatron-core's full-iteration, optimizer
    and TE-scoped graphs can be captured again; layers with local graphs run eagerly.
    Raises TypeError for an object that cannot hold a graph, and TimeoutError when the lock was not had in time; a
    deletion that fails is reported and does not stop the rest.
    """
    for obj in objects:
        finders.check_given(obj)
    if not _lock.acquire(timeout=lock_timeout):
        raise TimeoutError("another thread is deleting the CUDA graphs")
    try:
        return _delete([finders.reach(obj) for obj in objects], release_memory)
    finally:
        _lock.release()


def _delete(given: list[finders.Heap], release_memory: bool) -> DeletionReport:
    started = time.monotonic()
    report = DeletionReport()
    reserved = _reserved_bytes()
    heap = finders.walk_heap()
    report.live_graphs_before = sum(map(finders.is_live, heap.cuda_graphs))
    for part in given:
        _delete_targets(part, report, whole_process=False)
    _delete_targets(heap, report, whole_process=True)
    warning = finders.old_te_warning(heap)
    if warning:
        report.warnings.append(warning)
    remaining = [graph for graph in heap.cuda_graphs if finders.is_live(graph)]
    given.clear()
    part = heap = None  # so that what only they still refer to can be collected
    if release_memory:
        gc.collect()
        _release_memory(report, reserved)
    report.live_graphs_after = len(remaining)
    for graph in islice(remaining, _MAX_HOLDERS):  # a slice would be one more holder
        report.remaining.append(Remainder(f"CUDAGraph at {id(graph):#x}", held_by(graph, besides=remaining)))
    report.seconds = time.monotonic() - started
    return report


def _delete_targets(heap: finders.Heap, report: DeletionReport, whole_process: bool) -> None:
    for kind, found in finders.targets(heap, whole_process):
        while True:
            try:
                target = next(found)
            except StopIteration:
                break
            except Exception as error:  # a half-made object of upstream's must not keep the other kinds alive
                report.failed.append(Failure(kind, "search", _reason(error)))
                break
            report.found[kind] = report.found.get(kind, 0) + 1
            try:
                target.delete()
            except Exception as error:
                report.failed.append(Failure(kind, target.name, _reason(error)))
            else:
                report.deleted[kind] = report.deleted.get(kind, 0) + 1


def _release_memory(report: DeletionReport, reserved: int | None) -> None:
    if reserved is None:
        return
    try:
        finders.loaded("torch").cuda.empty_cache()
    except Exception as error:
        report.failed.append(Failure("memory", "torch.cuda.empty_cache()", _reason(error)))
    after = _reserved_bytes()
    report.bytes_released = None if after is None else reserved - after


def _reserved_bytes() -> int | None:
    """Bytes that torch's caching allocator holds on all devices, None where CUDA is not initialised."""
    cuda = getattr(finders.loaded("torch"), "cuda", None)
    reserved: Callable[[int], int] | None = getattr(cuda, "memory_reserved", None)
    if reserved is None or not cuda.is_initialized():
        return None
    try:
        return sum(reserved(device) for device in range(cuda.device_count()))
    except Exception:  # a device that has failed answers no question
        return None


def _live_graphs() -> list[Any]:
    return [graph for graph in finders.walk_heap().cuda_graphs if finders.is_live(graph)]


def who_keeps_graphs() -> list[str]:
    """One line for each CUDAGraph that still owns a captured graph, with what holds it; the first few are explained."""
    graphs = _live_graphs()
    lines = [f"CUDAGraph at {id(g):#x}, held by {held_by(g, besides=graphs)}" for g in islice(graphs, _MAX_HOLDERS)]
    return lines + ([f"and {len(graphs) - _MAX_HOLDERS} more"] if len(graphs) > _MAX_HOLDERS else [])


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:500]
