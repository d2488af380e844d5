# SPDX-License-Identifier: Apache-2.0
"""Judge a run: every rule, on every side of every branch that it reads, whatever else is unknown.

A condition is run again and again: once a side of each branch that it meets, and once a candidate value of each unknown
fact (`defaults.DOMAINS`). Only what the condition really reads is decided, so a recipe with many branches stays cheap,
and a rule whose answer does not hang on an unknown fact never asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cudagraphs.rules import defaults
from cudagraphs.rules.base import AUTOMODEL, BRIDGE, Finding, GraphState, NeedsFact, NeedsSide, Open, Rule
from cudagraphs.rules.normalize import normalize
from cudagraphs.settings import Branch, Choice, Known, Settings, Source

# A rule that is run more often than this to decide on branches and unknown facts is reported as undetermined.
MAX_RUNS = 200


class Reader(Mapping[str, Any]):
    """The facts as a condition sees them: values by name, some of them derived, and a trace of what was read.

    Derived names:
        graph.impl, graph.modules, graph.inference_scope   after upstream's migrations (`normalize`)
        graph.problems          codes of the rules that reject the raw graph fields
        graph.foreign           graph fields that the run sets and the version does not have
        graph.active            anything is captured
        graph.has_mamba         the model has Mamba layers: `model.has_mamba`, else its hybrid layer pattern
        graph.full_iteration    the whole iteration is captured, under whichever name the version has for it
        graph.whole_layer       each layer is captured whole
        graph.sequence_length   under whichever name the run sets it; None where it does not, or not as a number
        recompute.granularity, recompute.modules    after the legacy flag `moe_layer_recompute`
        version.minor           the megatron-core minor version
    """

    def __init__(
        self, settings: Settings, sides: Mapping[Branch, bool] | None = None, assumed: Mapping[str, Any] | None = None
    ):
        self.settings = settings
        self.sides = sides or {}
        self.assumed = assumed or {}
        self.trace: dict[str, Source | None] = {}
        self._state: tuple[Any, ...] | None = None

    def __getitem__(self, name: str) -> Any:
        derived = _DERIVED.get(name)
        if derived is not None:
            return derived(self)
        fact = self.settings.facts.get(name)
        while isinstance(fact, Choice):
            self.trace.setdefault(name, fact.branch.source)
            if fact.branch not in self.sides:
                raise NeedsSide(fact.branch)
            fact = fact.if_true if self.sides[fact.branch] else fact.if_false
        if isinstance(fact, Known):
            self.trace[name] = fact.source or self.trace.get(name)
            try:
                return defaults.as_read(name, fact.value)
            except ValueError:
                pass  # what was written says nothing about the value at run time: as good as unknown
        self.trace.setdefault(name, fact.source if fact is not None else None)
        if name in self.assumed:
            return self.assumed[name]
        if fact is None and name in defaults.BESIDE:
            return defaults.BESIDE[name]
        if fact is None and (self.settings.complete or self._left_alone(name)):
            try:
                return defaults.default(name, self.settings.versions.minor, self.settings.framework)
            except KeyError:
                pass
        raise NeedsFact(name)

    def _left_alone(self, name: str) -> bool:
        """Whether an absent fact of a run that was not seen whole holds its default all the same."""
        if name.startswith("env."):
            return True
        checkpoint = self.settings.facts.get("model.hf_id")
        if checkpoint is None or name not in defaults.NOT_FROM_CHECKPOINTS:
            return False
        known = str(checkpoint.value).lower() if isinstance(checkpoint, Known) else ""
        return not (name.startswith("recompute") and defaults.RECOMPUTES_BY_CLASS in known)

    def __contains__(self, name: object) -> bool:
        """Whether the run names the fact; its default does not count."""
        return name in self.settings.facts

    def __iter__(self):
        return iter(self.settings.facts)

    def __len__(self) -> int:
        return len(self.settings.facts)

    def foreign(self) -> tuple[str, ...]:
        fields = defaults.field_names(self.settings.versions.minor)
        missing = [name for name in defaults.ABSENT if name in self.settings.facts and name not in fields]
        return tuple(name for name in missing if self[name] is not None and self[name] != defaults.ABSENT[name])

    def has_mamba(self) -> bool:
        for name in defaults.PATTERNS:
            if name in self.settings.facts and self[name] is not None:
                return "M" in self[name]
        return bool(self["model.has_mamba"])

    def sequence_length(self) -> int | None:
        for name in defaults.SEQUENCE_LENGTHS:
            if name in self.settings.facts:
                try:
                    return int(self[name])
                except (NeedsFact, TypeError, ValueError):
                    continue
        return None

    def state(self) -> tuple[Any, ...]:
        if self._state is None:
            versions = self.settings.versions
            bridge = versions.bridge if self.settings.framework == BRIDGE else None
            if self.settings.framework == AUTOMODEL:
                # AutoModel captures modules with Transformer Engine, and has no other implementation
                modules = self["backend.cuda_graph.modules"] or ()
                self._state = ("transformer_engine" if modules else "none", tuple(map(str, modules)), None, ())
            else:
                self._state = normalize(versions.minor, self.__getitem__, bridge)
        return self._state


def is_full_iteration(state: tuple[Any, ...]) -> bool:
    return state[0] == "full_iteration" or (state[0] == "local" and "full_iteration" in state[1])


def is_whole_layer(state: tuple[Any, ...]) -> bool:
    return state[0] in ("local", "transformer_engine") and not state[1]


def recompute(get: Callable[[str], Any]) -> tuple[str | None, tuple[str, ...]]:
    """Granularity and modules after `moe_layer_recompute` and the default of the modules (`["core_attn"]`)."""
    granularity, legacy = get("recompute_granularity"), get("moe_layer_recompute")
    if not granularity and not legacy:
        return None, ()
    if granularity and granularity != "selective":
        return granularity, ()
    modules = get("recompute_modules")
    modules = ("core_attn",) if modules is None else tuple(modules)
    if legacy and "moe" not in modules:
        modules = (*modules, "moe")
    return "selective", modules


_DERIVED: dict[str, Callable[[Reader], Any]] = {
    "graph.impl": lambda reader: reader.state()[0],
    "graph.modules": lambda reader: reader.state()[1],
    "graph.inference_scope": lambda reader: reader.state()[2],
    "graph.problems": lambda reader: reader.state()[3],
    "graph.has_mamba": lambda reader: reader.has_mamba(),
    "graph.foreign": lambda reader: reader.foreign(),
    "version.minor": lambda reader: reader.settings.versions.minor,
    "graph.active": lambda reader: reader.state()[0] != "none",
    "graph.full_iteration": lambda reader: is_full_iteration(reader.state()),
    "graph.whole_layer": lambda reader: is_whole_layer(reader.state()),
    "graph.sequence_length": lambda reader: reader.sequence_length(),
    "recompute.granularity": lambda reader: recompute(reader.__getitem__)[0],
    "recompute.modules": lambda reader: recompute(reader.__getitem__)[1],
}


class _Leaf:
    """One way through a condition: the sides taken, the answer (None: undetermined), and what was read."""

    __slots__ = ("sides", "answer", "reader", "needs")

    def __init__(self, sides: Mapping[Branch, bool], answer: Any, reader: Reader, needs: tuple[str, ...] = ()):
        self.sides, self.answer, self.reader, self.needs = sides, answer, reader, needs


def explore(settings: Settings, question: Callable[[Reader], Any]) -> list[_Leaf]:
    """The answers of `question` on every side of every branch that it reads, the default sides first."""
    budget = [MAX_RUNS]

    def fork(sides: dict[Branch, bool], branch: Branch) -> list[_Leaf]:
        if budget[0] <= 0:
            return [_Leaf(sides, None, Reader(settings, sides), (f"the side of `{branch.text}`",))]
        order = (False, True) if branch.default is False else (True, False)
        return [leaf for side in order for leaf in run({**sides, branch: side}, {})]

    def run(sides: dict[Branch, bool], assumed: dict[str, Any]) -> list[_Leaf]:
        reader = Reader(settings, sides, assumed)
        budget[0] -= 1
        try:
            return [_Leaf(sides, question(reader), reader)]
        except NeedsSide as stop:
            if assumed:
                raise  # branches are decided before values are tried, so that each side has an answer of its own
            return fork(sides, stop.branch)
        except NeedsFact as stop:
            name = stop.name
            candidates = defaults.candidates(name, settings.versions.minor)
            if not candidates or budget[0] <= 0:
                return [_Leaf(sides, None, reader, (name,))]
            # one list of leaves a candidate; they agree where the fact does not matter
            try:
                tried = [run(sides, {**assumed, name: candidate}) for candidate in candidates]
            except NeedsSide as side:
                if assumed:
                    raise
                return fork(sides, side.branch)
            answers = [leaf.answer for leaves in tried for leaf in leaves]
            if answers[0] is not None and all(answer == answers[0] for answer in answers):
                first = tried[0][0]
                for leaves in tried:
                    for leaf in leaves:
                        for read, source in leaf.reader.trace.items():
                            first.reader.trace.setdefault(read, source)
                return [_Leaf(sides, first.answer, first.reader)]
            needs = tuple(dict.fromkeys([name, *(need for leaves in tried for leaf in leaves for need in leaf.needs)]))
            return [_Leaf(sides, None, reader, needs)]

    return run({}, {})


def when_text(leaves: Iterable[_Leaf], total: int) -> str:
    """The branch sides of these leaves, "" if they are all the ways there are."""
    leaves = list(leaves)
    if len(leaves) == total:
        return ""
    ways = [" and ".join(branch.describe(side) for branch, side in leaf.sides.items()) for leaf in leaves]
    return " or ".join(dict.fromkeys(ways))


def judge(rule: Rule, settings: Settings) -> list[Finding]:
    """The findings of one rule: none, one, or one for what holds and one for what cannot be told."""
    leaves = explore(settings, lambda reader: bool(rule.when(reader, settings.versions)))
    findings = []
    broken = [leaf for leaf in leaves if leaf.answer]
    if broken:
        findings.append(_finding(rule, settings, broken, len(leaves)))
    open_leaves = [leaf for leaf in leaves if leaf.answer is None]
    if open_leaves:
        findings.append(_undetermined(rule, open_leaves, len(leaves)))
    return findings


def _finding(rule: Rule, settings: Settings, broken: list[_Leaf], total: int) -> Finding:
    fix = None
    if rule.fix is not None:
        fixes = []
        for leaf in broken:
            try:
                fixes.append(rule.fix(leaf.reader, settings.versions))
            except Open:
                fixes.append(None)
        # one edit for all sides, or none
        if all(candidate == fixes[0] for candidate in fixes):
            fix = fixes[0]
    return Finding(
        code=rule.code,
        severity=rule.severity,
        title=rule.title,
        message=fill(rule.message, broken[0].reader),
        mend=fill(rule.mend, broken[0].reader),
        fix=fix,
        safe=rule.safe,
        layer=rule.layer,
        source=rule.source,
        locations=_locations(broken),
        when=when_text(broken, total),
    )


def _undetermined(rule: Rule, leaves: list[_Leaf], total: int) -> Finding:
    needs = tuple(dict.fromkeys(need for leaf in leaves for need in leaf.needs))
    return Finding(
        code=rule.code,
        severity="info",
        title=rule.title,
        message=f"cannot be judged without {', '.join(needs)}",
        mend=f"give the value with --set, for example --set {needs[0]}=...",
        fix=None,
        safe=False,
        layer=rule.layer,
        source=rule.source,
        locations=_locations(leaves),
        when=when_text(leaves, total),
        needs=needs,
    )


def _locations(leaves: Iterable[_Leaf]) -> tuple[Source, ...]:
    sources = (source for leaf in leaves for source in leaf.reader.trace.values() if source is not None)
    return tuple(dict.fromkeys(sources))


def fill(template: str, facts: Mapping[str, Any]) -> str:
    """The template with each {fact} replaced by its value, "unknown" where it has none."""
    if "{" not in template:
        return template
    import re

    def value(match: re.Match[str]) -> str:
        try:
            return show(facts[match.group(1)])
        except (Open, KeyError):
            return "unknown"

    return re.sub(r"\{([\w.]+)\}", value, template)


def show(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(str(item) for item in value) + "]"
    return str(value)


def graph_state(settings: Settings) -> GraphState:
    """What is captured after upstream's migrations, on every side of the branches that decide it."""
    leaves = explore(settings, lambda reader: reader.state())

    def state(leaf: _Leaf) -> GraphState:
        if leaf.answer is None:
            return GraphState(None, unknown=f"unknown: {', '.join(leaf.needs)}")
        impl, modules, inference, _ = leaf.answer
        return GraphState(impl, modules, inference, is_full_iteration(leaf.answer), is_whole_layer(leaf.answer))

    states = [state(leaf) for leaf in leaves]
    first = states[0]
    if all(other == first for other in states):
        return first
    by_world = tuple((when_text([leaf], len(leaves)), found) for leaf, found in zip(leaves, states))
    return GraphState(
        first.impl,
        first.modules,
        first.inference_scope,
        first.full_iteration,
        first.whole_layer,
        by_world,
        first.unknown,
    )
