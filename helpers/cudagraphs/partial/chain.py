# SPDX-License-Identifier: Apache-2.0
"""Chains: neighbouring entries merged into one graph.

Where nothing runs between two entries, so that every argument of the second is an output of the first or an argument
that the first had too, both can be one graph. The call of the first entry replays the whole chain; each later call
checks its guards, and that its arguments are the very tensors that the chain computed with, and is handed its results.
A later call that differs runs eagerly on the tensors it got; gradients then reach the chain through its intermediate
outputs, for which a second backward graph is captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cudagraphs.partial.body import Analysis, OutputPlan
from cudagraphs.partial.guards import GuardBuilder
from cudagraphs.partial.recording import Signature, version_of

# Checks that identity with a known tensor, unchanged since, makes superfluous.
KNOWN_BY_IDENTITY = frozenset({"shape", "dtype", "device", "layout", "strides"})


@dataclass(frozen=True)
class Origin:
    """Where a later member's argument comes from: an argument of the chain, or an output in the flat list of all."""

    output: bool
    index: int


@dataclass
class Member:
    """One entry of a chain: its part, and where in the chain's outputs its own are."""

    planned: Any
    origins: list[Origin]
    offset: int = 0

    @property
    def count(self) -> int:
        return self.planned.output_count


class ChainBody:
    """The members' bodies, run one after the other; stands in for a `Body`."""

    copied = False

    def __init__(self, members: list[Member]):
        self.members = members
        bodies = [member.planned.variant.body for member in members]
        self.target = bodies[0].target
        self.parameters = [parameter for body in bodies for parameter in body.parameters]
        self.aliases = [alias for body in bodies for alias in body.aliases]
        self._bodies = bodies

    def run(self, signature: Signature, statics: list[torch.Tensor]) -> tuple[list[torch.Tensor], OutputPlan]:
        """All outputs of all members, and how the first member's result is rebuilt from them."""
        outputs: list[torch.Tensor] = []
        first: OutputPlan | None = None
        for member, body in zip(self.members, self._bodies):
            tensors = [(outputs if origin.output else statics)[origin.index] for origin in member.origins]
            found, plan = body.run(member.planned.signature, tensors)
            first = first or plan
            outputs += found
        return outputs, first

    def differentiable(self, statics: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor for tensor in (*statics, *self.aliases) if tensor.requires_grad]

    def foreign_storages(self, statics: list[torch.Tensor]) -> dict[int, str]:
        return {handle: kind for body in self._bodies for handle, kind in body.foreign_storages(statics).items()}

    def buffer_versions(self) -> list[int]:
        return [version for body in self._bodies for version in body.buffer_versions()]


def find_chains(planned: list[Any]) -> list[list[Member]]:
    """Runs of at least two neighbours in the order of their first calls.

    Left alone are entries that draw random numbers or change buffers (a later call that has to run eagerly would do so
    twice), whose parameters are copied, or whose calls are seen through a canonicalizer.
    """
    chains: list[list[Member]] = []
    current: list[Member] = []
    for item in planned:
        member = _continuation(current, item) if current else None
        if member is not None:
            current.append(member)
            continue
        if len(current) > 1:
            chains.append(current)
        inputs = [Origin(False, index) for index in range(len(item.signature.requires_grad))]
        current = [Member(item, inputs)] if _can_join(item) else []
    if len(current) > 1:
        chains.append(current)
    return [chain for chain in chains if chain[-1].planned.analysis.trainable or not any(
        member.planned.analysis.trainable for member in chain)]


def _can_join(item: Any) -> bool:
    return not (item.analysis.stateful or item.variant.body.copied or item.entry.canonicalize is not None
                or item.signature.ambient.inference)


def _continuation(chain: list[Member], item: Any) -> Member | None:
    """`item` as the next member of `chain`, or None where something may run in between."""
    last, signature = chain[-1].planned, item.signature
    if (not _can_join(item) or signature.previous is not last.signature or signature.ambient != last.signature.ambient
            or (signature.calls, signature.depth) != (last.signature.calls, last.signature.depth)
            or any(item.entry is member.planned.entry for member in chain)):
        return None
    origins = []
    for index in range(len(signature.requires_grad)):
        origin = _origin(chain, signature, index)
        if origin is None:
            return None
        origins.append(origin)
    if not any(origin.output for origin in origins):
        return None
    return Member(item, origins, chain[-1].offset + chain[-1].count)


def _origin(chain: list[Member], signature: Signature, index: int) -> Origin | None:
    source = signature.sources[index]
    if source is not None:
        for member in chain:
            if source[0] is member.planned.signature:
                return Origin(True, member.offset + source[1]) if signature.untouched[index] else None
    place = signature.carried.get(index)
    return None if place is None else chain[-1].origins[place]


def chain_analysis(members: list[Member], analysis: Analysis) -> Analysis:
    """Let the usual backward cover the last member's outputs only: the others are used inside the chain.

    Not where a parameter or an input is reached through an earlier member's output alone (an auxiliary loss): the
    usual backward would have no place for its gradient, and the full one writes where the usual one did. Not where
    only one backward can be captured either.
    """
    last = members[-1]
    lean = [position for position, index in enumerate(analysis.trainable) if index >= last.offset]
    covered = all(not reached or reached & set(lean) for reached in analysis.reaches)
    analysis.lean = lean if covered and analysis.repeatable and len(lean) < len(analysis.trainable) else None
    return analysis


class Follower:
    """What a later member's calls are checked against and how they are answered.

    Args:
        builder: the full guard of the member's own signature and module.
    """

    def __init__(self, member: Member, builder: GuardBuilder):
        self.entry = member.planned.entry
        self.match = builder.without(KNOWN_BY_IDENTITY).build().match
        self._origins = [(origin.output, origin.index) for origin in member.origins]
        self._span = slice(member.offset, member.offset + member.count)
        self._rebuild: Callable[[Any, Any], Any] = member.planned.plan.rebuild

    def answer(self, paid: tuple, tensors: tuple[torch.Tensor, ...]) -> tuple[bool, Any]:
        """(whether the arguments are the chain's own, the result)."""
        _, outputs, inputs, output_versions, input_versions = paid
        for tensor, (output, index) in zip(tensors, self._origins):
            if output:
                if tensor is not outputs[index] or tensor._version != output_versions[index] or _watched(tensor):
                    return False, None
            elif tensor is not inputs[index] or tensor._version != input_versions[index]:
                return False, None
        return True, self._rebuild(outputs[self._span], tensors)


def _watched(tensor: torch.Tensor) -> bool:
    """Whether somebody wants to see the gradient of a tensor between two members, which stays inside the graph."""
    return tensor._backward_hooks is not None or tensor.retains_grad


def chain_runner(rebuild: Callable[[Any, Any], Any], followers: list[Follower]) -> Callable[[Any, tuple], Any]:
    """Replay the whole chain, leave each follower its share, return the first member's result."""

    def run(slot: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
        outputs = slot.launch(tensors)
        output_versions = [output._version for output in outputs]
        input_versions = [version_of(tensor) for tensor in tensors]
        for follower in followers:
            follower.entry.prepaid = (follower, outputs, tensors, output_versions, input_versions)
        return rebuild(outputs, tensors)

    return run
