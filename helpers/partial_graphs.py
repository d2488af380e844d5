#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Capture chosen submodules of a training model as CUDA graphs, and replay them where that is safe.

Usage, in a training script (needs torch 2.4 or newer; `helpers/` on the import path):

    manager = PartialCudaGraphManager.from_modules(model, select="model.layers.*")
    with manager:                   # closes on every exit, before the process groups go
        train_step(...)             # one eager step with all its microbatches is recorded
        manager.capture()           # right after it, before the next forward
        for batch in batches:
            train_step(...)         # selected modules replay graphs where the guards hold

With a torch that shows its graphs (`CUDAGraph.raw_cuda_graph_exec`) and CUDA bindings of its major version, arguments
and gradients are copied by nodes of the graphs; otherwise by operations beside them, which costs the host more.

Output: nothing; `stats()`, `fallback_reasons()` and `log_stats()` tell what was captured, replayed and run eagerly.
Exit codes: this is a library; as a script it prints this text, imports nothing, and exits with 0.

The public methods and their meaning are those of NeMo AutoModel's manager of the same name (0.7.0,
nemo_automodel/components/cuda_graphs/partial.py).
"""

from __future__ import annotations

if __name__ == "__main__":  # before torch, which need not be here for the text
    print(__doc__)
    raise SystemExit(0)

import contextlib
import logging
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from cudagraphs.partial.backends import CudaBackend
from cudagraphs.partial.body import Body
from cudagraphs.partial.capture import capture_all, capture_through, finish_all, release
from cudagraphs.partial.chain import Follower, chain_runner
from cudagraphs.partial.discovery import automodel_targets, select_modules
from cudagraphs.partial.errors import CaptureError, FallbackError, PartialGraphError, StaleGraphError, Unsupported
from cudagraphs.partial.recording import Recorder, Signature
from cudagraphs.partial.replay import Variant
from torch import nn

__all__ = ["CaptureError", "FallbackError", "PartialCudaGraphManager", "PartialGraphEntry", "PartialGraphError",
           "StaleGraphError", "Unsupported"]

logger = logging.getLogger("partial_graphs")
is_compiling = torch.compiler.is_dynamo_compiling

Canonicalize = Callable[[tuple, dict[str, Any]], tuple[tuple, dict[str, Any]]]


class PartialGraphEntry:
    """One module to capture, its signatures, and its counters.

    Args:
        name: in messages and statistics.
        target: the module; its `forward`, or what `module.compile()` made of it, is replaced while the manager is open.
        max_signatures: how many ways of calling it are captured; further ones run eagerly.
        canonicalize: `(args, kwargs) -> (args, kwargs)`, what the guards and the graph see of a call; where it raises,
            the call runs eagerly as it is.
        owner: the FSDP2 unit that frees and gathers the module's parameters. Its parameters are then copied into the
            graph at every call, since their addresses change.
    """

    def __init__(self, name: str, target: nn.Module, *, max_signatures: int = 4,
                 canonicalize: Canonicalize | None = None, owner: nn.Module | None = None):
        if max_signatures < 1:
            raise ValueError(f"max_signatures must be at least 1, got {max_signatures}")
        self.name, self.target = name, target
        self.max_signatures, self.canonicalize, self.owner = max_signatures, canonicalize, owner
        self.signatures: list[Signature] = []
        self.variants: list[Variant] = []
        self.capture_count = 0
        self.replay_count = 0
        self.fallbacks: Counter[str] = Counter()
        self.prepaid: tuple | None = None  # the share of a replayed chain that the next call may take
        # A module that was compiled in place (`module.compile()`) does not come to its `forward` when it is called.
        self.way_in = "forward" if getattr(target, "_compiled_call_impl", None) is None else "_compiled_call_impl"
        self.original_forward = getattr(target, self.way_in)
        self._had_own_forward = self.way_in in vars(target)

    @property
    def fallback_count(self) -> int:
        return sum(self.fallbacks.values())

    def seen(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return (args, kwargs) if self.canonicalize is None else self.canonicalize(args, kwargs)

    def body(self) -> Body:
        return Body(self.target, self.original_forward, copied=self.owner is not None)

    @contextlib.contextmanager
    def materialized(self) -> Iterator[None]:
        """Gather FSDP2 parameters for the time of the capture."""
        if self.owner is None:
            yield
            return
        self.owner.unshard(async_op=False)
        try:
            yield
        finally:
            self.owner.reshard()

    def install(self, forward: Callable[..., Any]) -> None:
        """Put `forward(module, *args, **kwargs)` in place of the target's forward.

        It is bound to the module, so that a deep copy or an unpickled copy of the module is recognised as another one.
        """
        forward.__name__ = "forward"
        setattr(self.target, self.way_in, types.MethodType(forward, self.target))

    def restore(self) -> None:
        """Make the target eager again. Safe to call again."""
        if self._had_own_forward:
            setattr(self.target, self.way_in, self.original_forward)
        else:
            vars(self.target).pop(self.way_in, None)


class PartialCudaGraphManager:
    """Captures its entries after an eager iteration, then replays each call that the guards accept.

    Differs from eager where no guard can look: an output that the loss does not use counts as one with a gradient of
    zero (which a derivative of infinity turns into NaN); a hook on a parameter that only such an output reaches is
    called with None; a hook on an output does not see what reaches that output inside the module; outputs that are views of
    each other come back as separate tensors; `is_grads_batched` and `create_graph` raise.

    Args:
        entries: what to capture; see also `from_modules` and `from_model_parts`.
        strict: raise `FallbackError` instead of running a call eagerly.
        max_slots: how many calls of one signature may be in flight at once, at most; a slot holds the activations of
            one call. As many are made as the recording saw alive at once, and one more than it saw kept at its end.
        merge: make one graph of neighbouring entries where nothing runs between them. Entries that draw random numbers
            or change buffers are left alone.
        accumulate_in_graph: let the graphs themselves write and add to the parameters' `.grad`. Autograd then never
            sees those parameters: `torch.autograd.grad` with respect to them fails, or returns None with
            `allow_unused`, and one with respect to something else still adds to `.grad`. Entries keep the usual way
            where a parameter has hooks or is used by two entries, where several calls are in flight, and under a
            process group with more than one member.
        share_pool: one memory pool for all entries, in capture order, and not one for each. That needs less memory,
            but a call is eager while results of an entry captured after it are kept. Entries whose results were kept
            when the recording ended, such as the last one's output, have a pool of their own all the same.
        backend: how to capture; torch's CUDA graphs unless given.
    """

    def __init__(self, entries: Sequence[PartialGraphEntry], *, strict: bool = False, max_slots: int = 8,
                 merge: bool = False, accumulate_in_graph: bool = False, share_pool: bool = False, backend: Any = None):
        if max_slots < 1:
            raise ValueError(f"max_slots must be at least 1, got {max_slots}")
        self.entries = list(entries)
        self.strict, self.max_slots = strict, max_slots
        self.merge, self.accumulate_in_graph, self.share_pool = merge, accumulate_in_graph, share_pool
        self._backend = backend
        self._home: Any = None
        self._captured = False
        self._closed = False
        self._recording = False
        self._logged: set[str] = set()
        _refuse_nested(self.entries)

    # Construction

    @classmethod
    def from_modules(cls, model: nn.Module, select: Any, *, max_signatures: int = 4,
                     **options: Any) -> PartialCudaGraphManager:
        """Select submodules of any model and start recording.

        Args:
            select: a name pattern (`layers.*.mlp`; `*` within one part of a dotted name, `**` across parts), a module
                class, a predicate `(name, module) -> bool`, or several of these.
            max_signatures: of each entry.
            options: of the manager.

        Raises:
            PartialGraphError: where a selection matches nothing.
        """
        entries = [PartialGraphEntry(target.name, target.module, max_signatures=max_signatures, owner=target.owner)
                   for target in select_modules(model, select)]
        manager = cls(entries, **options)
        manager.start_recording()
        return manager

    @classmethod
    def from_model_parts(cls, model_parts: Sequence[nn.Module], activation_checkpointing: bool = False,
                         pipeline_parallel: bool = False, *, max_signatures: int = 4,
                         **options: Any) -> PartialCudaGraphManager | None:
        """Select by NeMo AutoModel's `backend.cuda_graph.modules` and start recording.

        Several parts, pipeline stages and activation checkpointing are supported: the recording shows how many calls
        are in flight and which signatures recomputation uses. `activation_checkpointing` makes room for the second
        signature that recomputation needs, `pipeline_parallel` is accepted for the sake of AutoModel's callers.

        Returns:
            None where no part selects anything.
        """
        del pipeline_parallel
        enabled = [part for part in model_parts
                   if getattr(part, "backend", None) is not None and part.backend.cuda_graph.modules]
        if not enabled:
            return None
        entries = []
        for index, part in enumerate(model_parts):
            if not any(part is one for one in enabled):
                continue
            prefix = f"part{index}." if len(model_parts) > 1 else ""
            entries += [PartialGraphEntry(prefix + target.name, target.module, canonicalize=target.canonicalize,
                                          max_signatures=max(max_signatures, 2 if activation_checkpointing else 1),
                                          owner=target.owner)
                        for target in automodel_targets(part)]
        manager = cls(entries, **options)
        manager.start_recording()
        return manager

    # Life

    def __enter__(self) -> PartialCudaGraphManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_recording(self) -> None:
        """Watch the eager calls of every entry until `capture()`. Record a whole step, with all its microbatches.

        Raises:
            PartialGraphError: after `close()` or `capture()`.
        """
        self._refuse_closed()
        if self._captured:
            raise PartialGraphError("the manager has captured already; make a new one to record again")
        if self._recording:
            return
        if self._backend is None:
            self._backend = CudaBackend()
        self._home = None
        recorder = Recorder(self._backend.device_type)
        for entry in self.entries:
            if entry.canonicalize is None:
                entry.canonicalize = getattr(self._backend, "canonicalize", None)
            entry.install(self._recording_forward(entry, recorder))
        self._recording = True

    def capture(self) -> None:
        """Capture everything that was recorded, in the order of the recorded calls, as one transaction.

        Call it between two steps: after a backward, before the next forward. Does nothing when called again.

        Raises:
            PartialGraphError: after `close()`, or where an entry was never called.
            CaptureError: where capturing an entry failed; the whole model is eager again, and can be recorded again.
            FallbackError: in strict mode, where a recorded call was refused.
        """
        self._refuse_closed()
        if self._captured:
            return
        self._stop_recording()
        missing = tuple(entry.name for entry in self.entries if not entry.signatures)
        if missing:
            raise PartialGraphError(f"every entry must have an iteration-0 sample before capture; missing: {missing} (calls "
                                    "from inside of what torch.compile compiled are not seen)")
        for entry in self.entries:
            for signature in entry.signatures:
                signature.count_kept()
        if hasattr(self._backend, "slot"):
            planned = capture_through(self.entries, self._backend, self.max_slots)
        else:
            planned = capture_all(self.entries, self._backend, self.max_slots, self.merge,
                                  self.accumulate_in_graph and not _gradients_are_reduced(), self.share_pool)
        try:
            finish_all(planned, self._home)
            for entry in self.entries:
                for signature in entry.signatures:
                    if signature.refusal is not None:
                        self._refused(entry, signature.refusal)
        except BaseException:
            release(item.variant for item in planned)
            raise
        chained = {id(item): self._followers(item) for item in planned if item.chain is not None}
        for item in planned:
            item.entry.capture_count += 1
            if not item.follows:
                item.entry.variants.append(item.variant)
        for entry in self.entries:
            ways = [(item.variant, chained.get(id(item), [])) for item in planned
                    if item.entry is entry and not item.follows]
            entry.install(self._replaying_forward(entry, ways))
        self._captured = True
        self.log_stats("capture")

    def close(self) -> None:
        """Make every entry eager and free every graph. Call it before the process groups are destroyed.

        Does nothing when called again. Where freeing an entry fails, the first error is raised after all others were
        tried, and calling again tries that entry again.
        """
        if self._closed:
            return
        self._stop_recording()
        first: Exception | None = None
        for entry in self.entries:
            entry.restore()
        for entry in self.entries:
            try:
                for variant in entry.variants:
                    variant.reset()
            except Exception as error:
                logger.exception("could not free the graphs of %s", entry.name)
                first = first or error
                continue
            entry.variants = []
            entry.signatures = []
            entry.prepaid = None
        if first is not None:
            raise first
        self._closed = True

    # Statistics

    def stats(self) -> dict[str, int]:
        """Counts over all entries: signatures captured, calls replayed, calls run eagerly since capture."""
        return {
            "captured": sum(entry.capture_count for entry in self.entries),
            "replayed": sum(entry.replay_count for entry in self.entries),
            "fallback": sum(entry.fallback_count for entry in self.entries),
        }

    def fallback_reasons(self) -> dict[str, int]:
        """How many calls ran eagerly for each reason, most frequent first."""
        total: Counter[str] = Counter()
        for entry in self.entries:
            total.update(entry.fallbacks)
        return dict(total.most_common())

    def log_stats(self, phase: str) -> None:
        """Log the counters, all together and entry by entry, under a name for this point of the run."""
        counts = self.stats()
        logger.info("Partial CUDA graph stats (%s): captured=%d replayed=%d fallback=%d", phase, *counts.values())
        for entry in self.entries:
            logger.info("Partial CUDA graph entry stats (%s): name=%s captured=%d replayed=%d fallback=%d%s", phase,
                        entry.name, entry.capture_count, entry.replay_count, entry.fallback_count,
                        "".join(f" {reason}={count}" for reason, count in entry.fallbacks.most_common()))

    # Inside

    def _refuse_closed(self) -> None:
        if self._closed:
            raise PartialGraphError("Partial CUDA graph manager is closed")

    def _stop_recording(self) -> None:
        if self._recording:
            for entry in self.entries:
                entry.restore()
            self._recording = False

    def _refused(self, entry: PartialGraphEntry, reason: str) -> None:
        if self.strict:
            raise FallbackError(f"{entry.name}: no graph can stand for a recorded call: {reason}")
        logger.warning("Partial CUDA graphs leave a call of %s eager: %s", entry.name, reason)

    def _recording_forward(self, entry: PartialGraphEntry, recorder: Recorder) -> Callable[..., Any]:
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module is not entry.target:
                return type(module).forward(module, *args, **kwargs)
            if is_compiling():  # a model around it: what is traced now must not depend on this call
                return entry.original_forward(*args, **kwargs)
            try:
                seen = entry.seen(args, kwargs)
            except Exception:  # noqa: BLE001 - a canonicalizer of the caller; the call stays as it is
                return entry.original_forward(*args, **kwargs)
            if self._home is None:
                self._home = self._backend.stream()
            return recorder.call(module, entry.signatures, entry.max_signatures, entry.original_forward, args, kwargs,
                                 seen)

        return forward

    def _followers(self, item: Any) -> list[Follower]:
        """The later members of a chain, with guards of their own."""
        return [Follower(member, member.planned.variant.build_guard(self._home)) for member in item.chain[1:]]

    def _replaying_forward(self, entry: PartialGraphEntry,
                           ways: list[tuple[Variant, list[Follower]]]) -> Callable[..., Any]:
        """The hot path: first guard that matches, a free slot, replay. Everything else is eager and counted."""
        target, canonicalize = entry.target, entry.canonicalize
        steps = tuple((variant.guard.match, variant.take,
                       chain_runner(variant.analysis.plan.rebuild, followers) if followers else variant.runner())
                      for variant, followers in ways)
        led = tuple({id(follower.entry): follower.entry for _, followers in ways for follower in followers}.values())

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module is not target:
                return type(module).forward(module, *args, **kwargs)
            if is_compiling():
                return entry.original_forward(*args, **kwargs)
            paid = entry.prepaid
            if paid is not None:
                entry.prepaid = None
                tensors = paid[0].match(args, kwargs)
                if tensors is not None:
                    fits, result = paid[0].answer(paid, tensors)
                    if fits:
                        entry.replay_count += 1
                        return result
                paid = None
            for follower in led:
                follower.prepaid = None  # its share would keep the chain's slot taken
            if canonicalize is not None:
                try:
                    seen_args, seen_kwargs = canonicalize(args, kwargs)
                except Exception as error:  # noqa: BLE001
                    return self._fall_back(entry, "argument", str(error), args, kwargs)
            else:
                seen_args, seen_kwargs = args, kwargs
            matched = False
            for match, take, run in steps:
                tensors = match(seen_args, seen_kwargs)
                if tensors is not None:
                    slot = take(tensors)
                    if slot is not None:
                        entry.replay_count += 1
                        return run(slot, tensors)
                    matched = True
            if matched:
                return self._fall_back(entry, "in flight", "every graph of this signature still waits for its "
                                       "backward, or its outputs are still referred to", args, kwargs)
            reason, where = self._explain(entry, seen_args, seen_kwargs)
            return self._fall_back(entry, reason, where, args, kwargs)

        return forward

    @staticmethod
    def _explain(entry: PartialGraphEntry, args: tuple, kwargs: dict[str, Any]) -> tuple[str, str]:
        """Why no variant matched: what the closest one, the one that failed latest, says."""
        failures = [variant.guard.explain(args, kwargs) for variant in entry.variants]
        closest = max((failure for failure in failures if failure is not None), key=lambda one: one.position,
                      default=None)
        refusals = [signature.refusal for signature in entry.signatures if signature.refusal is not None]
        if closest is None:
            if entry.capture_count:
                return "merged graph", "the entry before it did not replay their common graph for this call"
            return "refused", refusals[0] if refusals else "no signature of this entry was captured"
        return closest.reason, closest.where

    def _fall_back(self, entry: PartialGraphEntry, reason: str, where: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.strict:
            raise FallbackError(f"{entry.name}: not replayed, {reason} ({where})")
        entry.fallbacks[reason] += 1
        if reason not in self._logged:
            self._logged.add(reason)
            logger.warning("Partial CUDA graph eager fallback, %s: first seen at %s (%s)", reason, entry.name, where)
        return entry.original_forward(*args, **kwargs)


def _gradients_are_reduced() -> bool:
    """Whether a process group may want to see gradients of parameters as they arrive (DDP hooks are not visible)."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _refuse_nested(entries: Iterable[PartialGraphEntry]) -> None:
    owners: dict[int, PartialGraphEntry] = {}
    for entry in entries:
        if id(entry.target) in owners:
            raise PartialGraphError(f"{entry.name} and {owners[id(entry.target)].name} are the same module; one entry "
                                    "serves all of its calls")
        owners[id(entry.target)] = entry
    for entry in entries:
        for child in entry.target.modules():
            if child is not entry.target and id(child) in owners:
                raise PartialGraphError(f"{owners[id(child)].name} is inside {entry.name}; capture one of them")
