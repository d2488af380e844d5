# SPDX-License-Identifier: Apache-2.0
"""Recommend: which graphs a run should capture, and every setting that they need, in the names of its versions.

The choice is the narrowest scopes that are known to pay for the kind of model, cut down until no rule objects. What the
graphs
need beside the implementation and the scopes comes from two places: the short list below, and the safe fixes of the
rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from cudagraphs import families, rules
from cudagraphs.families import Family
from cudagraphs.rules import mends
from cudagraphs.rules.base import BRIDGE, LM, MEGATRON, Finding
from cudagraphs.rules.evaluate import Reader, explore
from cudagraphs.rules.normalize import MODULES, implementations, scope_names
from cudagraphs.settings import Known, Settings

PRESETS = ("narrow", "widest")
GRAPH_FACTS = frozenset(
    (
        "cuda_graph_impl",
        "cuda_graph_scope",
        "cuda_graph_modules",
        "enable_cuda_graph",
        "external_cuda_graph",
        "inference_cuda_graph_scope",
    )
)
DEFAULT_WARMUP = 3
BLOCKING = ("error", "runtime")
# how often the fixes of rules are applied before what is left counts as an objection
MAX_ROUNDS = 6


class Recommendation(NamedTuple):
    """What to capture, and how.

    impl: the implementation in words: "none", "local", "transformer_engine" or "full_iteration" whatever the version
    calls it.
    modules: the scopes, () for the whole layer (or the whole iteration).
    overrides: fact name -> final value of every setting that the graphs need.
    exports: environment variables to set before the launch, where the recipe has no environment block.
    reasons: one line a decision. next_steps: what to try after this works.
    refused: why what was asked for is not done, None if it is; `overrides` is empty then.
    """

    impl: str
    modules: tuple[str, ...]
    overrides: dict[str, Any]
    exports: dict[str, str]
    reasons: list[str]
    next_steps: list[str]
    refused: str | None = None


def recommend(
    settings: Settings,
    preset: str | None = None,
    impl: str | None = None,
    scopes: Sequence[str] | None = None,
    warmup_steps: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Recommendation:
    """The graphs to capture for one run of a framework that builds on megatron-core.

    Args:
        settings: the run as it is.
        preset: None for the default, "narrow" or "widest".
        impl: "local", "transformer_engine" or "full_iteration" to ask for one implementation, "none" to turn graphs
        off.
        scopes: scope names to ask for; an empty sequence asks for the whole layer.
        warmup_steps: eager steps before the capture.
        extra: further settings that the user asks for; they are part of the overrides.

    Raises:
        ValueError: an unknown preset, implementation or scope.
    """
    _check_arguments(settings, preset, impl, scopes)
    if extra:
        settings = settings.with_values(extra)
    if impl == "none":
        return Recommendation("none", (), {**off(settings), **(extra or {})}, {}, ["graphs off, as asked for"], [])
    family = families.infer(settings)
    asked = impl == "full_iteration" or "full_iteration" in (scopes or ())
    task = _Task(settings, family, warmup_steps, dict(extra or {}), full_iteration_asked=asked)
    reasons = [f"{family.describe()}: {family.moe.reason or 'nothing in the recipe tells'}"]
    objections: list[str] = []
    for kind, modules in task.candidates(preset, impl, scopes):
        overrides, blocking, notes = task.complete(kind, modules)
        if not blocking:
            reasons += task.explain(kind, modules, overrides, objections)
            return _split(
                settings, Recommendation(kind, modules, overrides, {}, reasons + notes, task.next_steps(kind, modules))
            )
        objections += [
            line for line in (f"{_name(kind, modules)}: {finding.message} ({finding.code})" for finding in blocking)
            if line not in objections
        ]  # fmt: skip
    why = "; ".join(objections[:3]) or "the version has no implementation that fits"
    if impl is not None or scopes is not None:
        return Recommendation(
            impl or "none", tuple(scopes or ()), {}, {}, reasons, [], f"what is asked for is rejected: {why}"
        )
    reasons.append(f"no graphs: {why}")
    return Recommendation("none", (), {**off(settings), **(extra or {})}, {}, reasons, _without_graphs(task))


def off(settings: Settings) -> dict[str, Any]:
    """The overrides that turn every graph of a run off, such that no later migration turns one on again."""
    overrides = mends.off(_facts(settings), settings.versions)
    for name in ("optimizer.optimizer_cuda_graph",):
        if name in settings.facts:
            overrides[name] = False
    if "model.vision_cuda_graph_impl" in settings.facts:
        overrides["model.vision_cuda_graph_impl"] = "none"
    return overrides


def _check_arguments(settings: Settings, preset: str | None, impl: str | None, scopes: Sequence[str] | None) -> None:
    if settings.framework not in MEGATRON:
        raise ValueError(f"no recommendation for {settings.framework}: it has no settings of megatron-core")
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; there are {', '.join(PRESETS)}")
    minor = settings.versions.minor
    known = (*implementations(minor), *(("full_iteration",) if 14 <= minor < 18 else ()))
    if impl is not None and impl not in known:
        raise ValueError(f"unknown implementation {impl!r}; megatron-core 0.{minor} has {', '.join(known)}")
    for name in scopes or ():
        if name not in scope_names(minor):
            raise ValueError(f"unknown scope {name!r}; megatron-core 0.{minor} has {', '.join(scope_names(minor))}")


def _facts(settings: Settings) -> Reader:
    """The facts on the default side of every branch."""
    sides = {}
    for world in settings.worlds()[:1]:
        sides = dict(world.sides)
    return Reader(settings, sides)


def _name(kind: str, modules: tuple[str, ...]) -> str:
    if kind == "full_iteration":
        return "full iteration"
    return f"{kind} with {', '.join(modules)}" if modules else f"{kind} with whole layers"


def _undecided_experts(finding: Finding) -> Finding:
    """The objection to a full iteration of which it is not known whether it holds dropless experts."""
    needs = "num_moe_experts" if "num_moe_experts" in finding.needs else " and ".join(finding.needs)
    return finding._replace(
        message=f"it is not known whether the experts of a dropless MoE would lie inside the capture; give {needs}"
    )


class _Task:
    """One recommendation in the making."""

    def __init__(
        self,
        settings: Settings,
        family: Family,
        warmup_steps: int | None,
        extra: dict[str, Any],
        full_iteration_asked: bool,
    ):
        self.settings, self.family, self.extra = settings, family, extra
        self.full_iteration_asked = full_iteration_asked
        self.minor = settings.versions.minor
        self.facts = _facts(settings)
        self.judged = families.assume(settings, family)
        self.warmup = warmup_steps

    # -- what to try, best first
    # ---------------------------------------------------------------------------------------------

    def candidates(
        self, preset: str | None, impl: str | None, scopes: Sequence[str] | None
    ) -> Iterator[tuple[str, tuple[str, ...]]]:
        if impl == "full_iteration":
            yield "full_iteration", ()
            return
        kind = impl or "transformer_engine"
        if scopes is not None:
            yield from (
                [("full_iteration", ())] if "full_iteration" in scopes else [(kind, tuple(dict.fromkeys(scopes)))]
            )
            return
        if impl is None and self.needs_full_iteration():
            if self.minor >= 14:
                yield "full_iteration", ()
            return
        if self.minor < 16:
            # one scope at most: attention, or the whole layer
            first, second = (("attn",), ()) if preset != "widest" else ((), ("attn",))
            yield from ((kind, modules) for modules in (first, second) if kind == "transformer_engine" or not modules)
            return
        if kind == "local" and not self.family.mamba.value and not self.family.moe.value:
            yield kind, ()
        wanted = self.wanted(preset)
        for size in range(len(wanted), 0, -1):
            for modules in combinations(wanted, size):
                if mends.closed(kind, modules):
                    yield kind, modules
        if preset is None:
            yield from ((kind, (name,)) for name in ("mlp", "attn") if name not in wanted and self.has(name))

    def wanted(self, preset: str | None) -> tuple[str, ...]:
        """The scopes for this kind of model, the most telling first; what rules object to is dropped from the end."""
        if preset == "widest":
            order = ("attn", "moe", "moe_router", "moe_preprocess", "mlp", "mamba")
            return tuple(name for name in order if self.has(name))
        moe, mamba = self.family.moe.value, self.family.mamba.value
        if preset == "narrow":
            return ("moe_router", "moe_preprocess") if moe else ("attn",)
        names = ["attn"]
        if moe:
            names += ["moe"] if self.drop_and_pad() else ["moe_router", "moe_preprocess"]
        if mamba:
            names.append("mamba")
        return tuple(names)

    def has(self, name: str) -> bool:
        """Whether the model is known, or inferred, to have what the scope names."""
        if name == "mamba":
            return bool(self.family.mamba.value)
        if name == "mlp":
            frequency = mends.known(self.facts, "moe_layer_freq")
            mixed = isinstance(frequency, int) and frequency > 1 or isinstance(frequency, list) and 0 in frequency
            return self.family.moe.value is False or bool(self.family.moe.value and mixed)
        if name == "moe":
            return bool(self.family.moe.value) and self.drop_and_pad()
        return name in MODULES[:1] or bool(self.family.moe.value)

    def drop_and_pad(self) -> bool:
        capacity = mends.known(self.facts, "moe_expert_capacity_factor")
        return (
            capacity is not None and capacity >= 0 and bool(mends.known(self.facts, "moe_pad_expert_input_to_capacity"))
        )

    def needs_full_iteration(self) -> bool:
        """Whether whole layers are recomputed or offloaded, on any branch: graphs of layers exclude that."""
        recompute = (leaf.answer for leaf in explore(self.settings, lambda reader: (reader["recompute.granularity"],)))
        offload = (leaf.answer for leaf in explore(self.settings, lambda reader: (reader["cpu_offloading"],)))
        return any(answer and answer[0] not in (None, "selective") for answer in recompute) or any(
            answer and answer[0] for answer in offload
        )

    # -- every setting that a candidate needs
    # ------------------------------------------------------------------------------------

    def complete(self, kind: str, modules: tuple[str, ...]) -> tuple[dict[str, Any], list[Finding], list[str]]:
        """The overrides of a candidate, the findings that stand against it, and notes on what the rules made it set."""
        overrides = {**self.choice(kind, modules), **self.needs(kind)}
        notes: list[str] = []
        for _ in range(MAX_ROUNDS):
            findings = rules.check(self.judged.with_values({**overrides, **self.extra}))
            decided = GRAPH_FACTS | set(self.extra)
            fixes = [
                finding
                for finding in findings
                if finding.severity != "info" and finding.fix and finding.safe and not decided & set(finding.fix)
            ]
            new = [
                finding
                for finding in fixes
                if any(overrides.get(name, ...) != value for name, value in finding.fix.items())
            ]
            if not new:
                break
            for finding in new:
                overrides.update(finding.fix)
                settings = ", ".join(f"{name}={value}" for name, value in finding.fix.items())
                notes.append(f"{settings}: {finding.message} ({finding.code})")
        blocking = [finding for finding in findings if finding.severity in BLOCKING and not finding.needs]
        if kind == "full_iteration" and not self.full_iteration_asked:
            blocking += [_undecided_experts(finding) for finding in findings if finding.code == "CG714" and finding.needs]
        return {**overrides, **self.extra}, blocking, notes

    def accepted(self, kind: str, modules: tuple[str, ...]) -> bool:
        """Whether no rule stands against the candidate."""
        return not self.complete(kind, modules)[1]

    def choice(self, kind: str, modules: tuple[str, ...]) -> dict[str, Any]:
        """Implementation and scopes in the version's names, with every other name for them out of the way."""
        versions = self.settings.versions
        if kind == "full_iteration":
            overrides = mends.full_iteration(self.facts, versions)
        elif self.minor >= 15:
            overrides = {"cuda_graph_impl": kind, **mends.scopes(self.facts, versions, modules)}
        else:
            local = kind == "local"
            overrides = {
                "enable_cuda_graph": local,
                "external_cuda_graph": not local,
                **mends.scopes(self.facts, versions, modules),
            }
        if self.minor >= 15:
            for name in ("enable_cuda_graph", "external_cuda_graph"):
                if self.may_be_set(name):
                    overrides[name] = False
        if self.minor >= 18 and kind != "local" and self.may_be_set("inference_cuda_graph_scope"):
            overrides["inference_cuda_graph_scope"] = None
        return overrides

    def may_be_set(self, name: str) -> bool:
        """Whether the recipe, or a base recipe that is not known, may set the field."""
        return name in self.settings.facts or not self.settings.complete

    def needs(self, kind: str) -> dict[str, Any]:
        """What every graph needs: warmup steps and a random number generator that capture can record."""
        set_already = mends.known(self.facts, "cuda_graph_warmup_steps")
        steps = set_already if isinstance(set_already, int) and set_already > 0 else DEFAULT_WARMUP
        overrides: dict[str, Any] = {"cuda_graph_warmup_steps": steps if self.warmup is None else self.warmup}
        if self.settings.framework == LM:
            overrides["rng.te_rng_tracker"] = True
        else:
            overrides["use_te_rng_tracker"] = True
            if self.settings.framework == BRIDGE:
                overrides["rng.te_rng_tracker"] = True
        if kind == "full_iteration":
            overrides["rerun_state_machine.check_for_nan_in_loss"] = False
            overrides["ddp.check_for_nan_in_grad"] = False
        return overrides

    # -- what to say
    # ----------------------------------------------------------------------------------------------------------------

    def explain(
        self, kind: str, modules: tuple[str, ...], overrides: Mapping[str, Any], objections: list[str]
    ) -> list[str]:
        lines = [f"left out, {line}" for line in objections[:3]]
        if kind == "full_iteration":
            if self.needs_full_iteration():
                lines.append(
                    "full iteration: whole layers are recomputed or offloaded, which only a graph of the whole "
                    "iteration holds"
                )
            else:
                lines.append("full iteration: as asked for")
            lines.append("NaN checks of loss and gradients off: they read the device inside what is captured")
        elif not modules:
            lines.append("whole layers: this version and implementation have no narrower scope that fits")
        for name in modules:
            lines.append(f"{name}: {_WHY[name]}")
        if self.family.vlm.value:
            lines.append("vision-language model: only the language model is captured; wait with graphs until the "
            "real-data path "
                         "is stable, because images change the lengths of the batch")  # fmt: skip
        if self.family.gdn.value and "attn" in modules:
            lines.append("Gated DeltaNet layers are captured under attn")
        # the performance scripts keep the old name for their option, and on Megatron-LM's command line nothing stands there
        harness = any(name.startswith("harness.") for name in self.settings.facts)
        if self.minor >= 18 and not harness:
            neutral = self.settings.framework != LM and overrides.get("cuda_graph_scope", ...) is None
            lines.append(
                "the field is cuda_graph_modules in this version"
                + (", and cuda_graph_scope is kept out of the way" if neutral else "")
            )
        return lines

    def next_steps(self, kind: str, modules: tuple[str, ...]) -> list[str]:
        """What to try after this works; nothing that the rules reject."""
        steps = []
        if kind == "transformer_engine" and self.minor >= 16:
            for name, has in (("mlp", self.has("mlp")), ("attn", modules[:1] == ("moe_router",))):
                if name not in modules and has and self.accepted(kind, (*modules, name)):
                    steps.append(f"add {name} to the scopes once this runs and is faster")
        wider = kind != "full_iteration" and self.minor >= 14 and not self.family.moe.value
        if wider and self.accepted("full_iteration", ()):
            steps.append(
                "full iteration where the host is still the limit: it also needs static shapes and no NaN checks"
            )
        steps.append("smoke run: compare eager and graphed steps, and count graph launches")
        return steps


_WHY = {
    "attn": "attention has static shapes in every layer and many small kernels",
    "mlp": "the dense MLP has static shapes",
    "moe": "experts are padded to a fixed capacity, so the whole MoE layer has static shapes",
    "moe_router": "the router has static shapes and launches many small kernels",
    "moe_preprocess": "the dispatcher's preparation follows the router and stays on the device",
    "mamba": "Mamba layers have static shapes",
}


def _without_graphs(task: _Task) -> list[str]:
    if task.needs_full_iteration():
        return [
            'selective recompute (recompute_granularity="selective" with recompute_modules) would allow graphs of '
            "layers"
        ]
    return []


def _split(settings: Settings, recommendation: Recommendation) -> Recommendation:
    """Environment variables go into the recipe's block where it has one, else to the launch."""
    has_block = any(name.startswith("env.") for name in settings.facts)
    exports = {name[4:]: str(value) for name, value in recommendation.overrides.items() if name.startswith("env.")}
    if has_block or not exports:
        return recommendation
    overrides = {name: value for name, value in recommendation.overrides.items() if not name.startswith("env.")}
    return recommendation._replace(overrides=overrides, exports=exports)


__all__ = ["PRESETS", "Known", "Recommendation", "off", "recommend"]
