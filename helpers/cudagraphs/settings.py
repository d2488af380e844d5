# SPDX-License-Identifier: Apache-2.0
"""Settings: the neutral picture of one training run that the rules judge.

A run is a mapping from fact names to facts. Fact names are upstream's own field names:

* a bare name is a field of `megatron.core.transformer.TransformerConfig` (`cuda_graph_impl`, `num_moe_experts`, ...) or a
  parallel size (`tensor_model_parallel_size`, ...), which upstream keeps on the same object;
* a dotted name lives elsewhere, under the section name that Megatron Bridge's `ConfigContainer` gives it:
  `ddp.overlap_grad_reduce`, `optimizer.optimizer_cuda_graph`, `rng.te_rng_tracker`, `comm_overlap.delay_wgrad_compute`,
  `rerun_state_machine.check_for_nan_in_loss`, `dataset.pad_to_max_length`, `train.rampup_batch_size`, ...;
* `env.NAME` is an environment variable of the training processes, its value always a string;
* `automodel.*`, `torch.*` and `deepspeed.*` hold what only those frameworks know.

A fact is known with its source, unknown with a reason, or a choice between both sides of a branch that only run time decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Union

from cudagraphs.versions import Versions

# Past this many combinations of undecided branches the remaining branches are treated as unknown: a recipe with nine independent
# switches would otherwise be judged 512 times.
MAX_WORLDS = 64


@dataclass(frozen=True)
class Source:
    """Where a fact comes from: `path:line:column`, lines and columns counted from 1; `text` is the source line, stripped."""

    path: str
    line: int
    column: int = 1
    text: str = ""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True)
class Known:
    """A fact with a value. `how` is "assigned", "default", "inferred" or "given" (by a command-line flag)."""

    value: Any
    source: Source | None = None
    how: str = "assigned"


@dataclass(frozen=True)
class Unknown:
    """A fact that reading cannot establish; `reason` completes the sentence "unknown, because ..."."""

    reason: str
    source: Source | None = None


@dataclass(frozen=True)
class Branch:
    """A condition that only run time decides. `default` is the side taken when the recipe is called without arguments."""

    text: str
    source: Source
    default: bool | None = None
    # what the condition hangs on: one line of a helper that is called twice, with two arguments, is two branches
    about: str = ""

    def describe(self, side: bool) -> str:
        if "`" in self.text:  # not an expression of the recipe but a sentence about an argument
            return self.text if side else self.text.replace("is left at its default", "is given")
        return f"`{self.text}` is {'true' if side else 'false'} ({self.source})"

    def __str__(self) -> str:
        text = self.text if "`" in self.text else f"`{self.text}`"
        return f"{text} ({self.source})" if self.source.path else text


@dataclass(frozen=True)
class Choice:
    """A fact whose value depends on a branch."""

    branch: Branch
    if_true: "Fact"
    if_false: "Fact"


Fact = Union[Known, Unknown, Choice]


def join(branch: Branch, if_true: Fact, if_false: Fact) -> Fact:
    """The fact after both sides of `branch` meet again: one fact where the sides agree, else a choice."""
    if_true, if_false = decided(if_true, branch, True), decided(if_false, branch, False)
    if if_true == if_false:
        return if_true
    if isinstance(if_true, Known) and isinstance(if_false, Known):
        if type(if_true.value) is type(if_false.value) and if_true.value == if_false.value:
            return if_true
    return Choice(branch, if_true, if_false)


def decided(fact: Fact, branch: Branch, side: bool) -> Fact:
    """The fact where `branch` is known to go to `side`."""
    if not isinstance(fact, Choice):
        return fact
    if fact.branch == branch:
        return decided(fact.if_true if side else fact.if_false, branch, side)
    if_true, if_false = decided(fact.if_true, branch, side), decided(fact.if_false, branch, side)
    return if_true if if_true == if_false else Choice(fact.branch, if_true, if_false)


@dataclass(frozen=True)
class World:
    """The facts with every branch decided: no `Choice` is left. `sides` names the decisions that matter here."""

    facts: Mapping[str, Known | Unknown]
    sides: tuple[tuple[Branch, bool], ...] = ()

    def describe(self) -> str:
        return " and ".join(branch.describe(side) for branch, side in self.sides)


@dataclass
class Settings:
    """One run. `name` is the recipe function, or what else tells this run from others in the same file.

    `complete` says whether a fact that is absent from `facts` holds its upstream default (True: the whole configuration was seen)
    or is unknown (False: a base configuration could not be followed; `incomplete_reason` says which).
    """

    framework: str
    versions: Versions
    facts: dict[str, Fact] = field(default_factory=dict)
    name: str = ""
    path: str = ""
    complete: bool = True
    incomplete_reason: str = ""

    def get(self, name: str) -> Fact | None:
        return self.facts.get(name)

    def with_values(self, values: Mapping[str, Any], how: str = "given") -> "Settings":
        """A copy in which the named facts are known to hold `values`."""
        facts = dict(self.facts)
        facts.update({name: Known(value, None, how) for name, value in values.items()})
        return Settings(self.framework, self.versions, facts, self.name, self.path, self.complete, self.incomplete_reason)

    def worlds(self, names: Iterable[str] | None = None) -> list[World]:
        """Every combination of undecided branches that the named facts (all by default) depend on, the default sides first."""
        facts = self.facts if names is None else {n: self.facts[n] for n in names if n in self.facts}
        branches = list(dict.fromkeys(b for fact in facts.values() for b in _branches(fact)))
        kept = branches[: MAX_WORLDS.bit_length() - 1]
        worlds = []
        for sides in product((False, True), repeat=len(kept)):
            # side False here means "as by default", so that the first world is the recipe called without arguments
            decided = {b: (b.default is not False) != flip for b, flip in zip(kept, sides)}
            resolved = {n: _decide(f, decided) for n, f in facts.items()}
            worlds.append(World(resolved, tuple(decided.items())))
        return worlds


def _branches(fact: Fact) -> Iterator[Branch]:
    if isinstance(fact, Choice):
        yield fact.branch
        yield from _branches(fact.if_true)
        yield from _branches(fact.if_false)


def _decide(fact: Fact, sides: Mapping[Branch, bool]) -> Known | Unknown:
    while isinstance(fact, Choice):
        if fact.branch not in sides:
            return Unknown(f"it depends on `{fact.branch.text}`", fact.branch.source)
        fact = fact.if_true if sides[fact.branch] else fact.if_false
    return fact
