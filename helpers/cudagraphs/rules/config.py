# SPDX-License-Identifier: Apache-2.0
"""The fast path: the verdict of TransformerConfig over plain field overrides, some microseconds each.

It runs the same conditions as `rules.check`, over a dictionary in which every field and every derived name is there.
Most configurations switch few features on, so rules that need one (`_GATES`) are run only where it is on.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from cudagraphs.rules import defaults
from cudagraphs.rules.base import Condition, Member
from cudagraphs.rules.evaluate import is_full_iteration, is_whole_layer, recompute
from cudagraphs.rules.normalize import State, normalize
from cudagraphs.rules.registry import config_rules
from cudagraphs.versions import Versions, check_covered, parse

UNKNOWN_FIELD = "CG016"
_ENUM_FIELDS = frozenset(("cuda_graph_scope", "cuda_graph_modules", "inference_cuda_graph_scope"))
# fact -> rules that cannot hold where it is off; the comparison with upstream over the lattice would show a wrong entry
_GATES = {
    "cpu_offloading": ("CG201",),
    "recompute.granularity": ("CG202", "CG203", "CG204", "CG205", "CG206", "CG207", "CG208", "CG209"),
    "fine_grained_activation_offloading": ("CG210", "CG211", "CG212", "CG213", "CG214", "CG215"),
    "overlap_moe_expert_parallel_comm": ("CG301",),
    "delay_wgrad_compute": ("CG302",),
    "graph.modules": ("CG101", "CG102", "CG103", "CG104", "CG105", "CG106", "CG107"),
}

Group = tuple[tuple[str, Condition], ...]


class _Prepared(NamedTuple):
    """What one pair of versions needs: the facts' class (its missing entries are the defaults), and rules by gate."""

    versions: Versions
    minor: int
    facts: type[dict[str, Any]]
    names: frozenset[str]
    always: Group
    gated: tuple[tuple[str, Group], ...]


class Judgement(NamedTuple):
    """Codes of the rules that reject the fields, sorted, and the state after upstream's migrations."""

    codes: list[str]
    state: State
    minor: int
    scope: Any = None  # up to 0.15: cuda_graph_scope as it was given or by default
    both_legacy: bool = False


def untag(value: Any) -> Any:
    """Typed values put in place: {"enum": "Class.member"} becomes a `Member`, and {"tuple": [...]} a tuple."""
    if isinstance(value, list):
        return [untag(item) for item in value]
    if not isinstance(value, dict) or len(value) != 1:
        return value
    if isinstance(value.get("tuple"), list):
        return tuple(untag(item) for item in value["tuple"])
    tag = value.get("enum")
    if not isinstance(tag, str) or tag.count(".") != 1:
        return value
    enum, name = tag.split(".")
    return Member(name, enum)


@lru_cache(maxsize=64)
def _prepared(mcore: str, te: str | None) -> _Prepared:
    versions = Versions(mcore=parse(mcore), te=parse(te) if te else None)
    check_covered(versions.mcore)
    rules = {rule.code: rule.when for rule in config_rules(versions.minor)}
    gated = tuple(
        (gate, tuple((code, rules[code]) for code in codes if code in rules)) for gate, codes in _GATES.items()
    )
    behind = {code for codes in _GATES.values() for code in codes}
    always = tuple((code, when) for code, when in rules.items() if code not in behind)
    # a bound method of a built-in is called with the key alone: a missing field costs no Python call
    facts = type("Fields", (dict,), {"__missing__": defaults.of_config(versions.minor).__getitem__})
    return _Prepared(versions, versions.minor, facts, defaults.field_names(versions.minor), always, gated)


def judge(fields: Mapping[str, Any], mcore: str, te: str | None = None) -> Judgement:
    """What `verdict` says, before it is put into words. Arguments and errors as there."""
    versions, minor, make, names, always, gated = _prepared(mcore, te)
    facts = make(fields)
    if not _ENUM_FIELDS.isdisjoint(fields):
        for name in _ENUM_FIELDS.intersection(fields):
            if isinstance(fields[name], (dict, list)):
                facts[name] = untag(fields[name])
    state = normalize(minor, facts.__getitem__)
    impl, modules, _, problems = state
    codes = list(problems)
    if not fields.keys() <= names:
        codes.append(UNKNOWN_FIELD)
    if impl != "none":
        facts["graph.impl"] = impl
        facts["graph.modules"] = modules
        facts["graph.active"] = True
        facts["graph.full_iteration"] = is_full_iteration(state)
        facts["graph.whole_layer"] = is_whole_layer(state)
        facts["recompute.granularity"], facts["recompute.modules"] = recompute(facts.__getitem__)
        for code, when in always:
            if when(facts, versions):
                codes.append(code)
        for gate, rules in gated:
            if facts[gate]:
                for code, when in rules:
                    if when(facts, versions):
                        codes.append(code)
    if len(codes) > 1:
        codes.sort()
    if minor >= 16:
        return Judgement(codes, state, minor)
    both = minor < 15 and bool(facts["enable_cuda_graph"] and facts["external_cuda_graph"])
    return Judgement(codes, state, minor, facts["cuda_graph_scope"], both)


def normalized(judgement: Judgement) -> dict[str, Any]:
    """The state after upstream's migrations as `verdict` gives it."""
    impl, modules, inference, _ = judgement.state
    return {
        # up to 0.14 upstream does not mind both flags: both kinds of graphs are made
        "impl": "local+transformer_engine" if judgement.both_legacy else impl,
        # up to 0.15 upstream keeps the scope as it was given
        "modules": list(modules) if judgement.minor >= 16 else judgement.scope,
        "inference_scope": inference,
    }


def verdict(fields: Mapping[str, Any], mcore: str, te: str | None = None) -> dict[str, Any]:
    """What TransformerConfig says to these overrides of its defaults.

    Args:
        fields: field name to value, as JSON has them; enum members as {"enum": "CudaGraphModule.attn"}.
        mcore: the megatron-core version, for example "0.19".
        te: the Transformer Engine version, None where it is absent.

    Returns:
        {"verdict": "accepted" or "rejected", "codes": the config-layer rules that reject it,
        "normalized": {"impl", "modules", "inference_scope"} after upstream's migrations}. "modules" is a list of names,
        up to 0.15 the scope as it was given, which those versions keep. "inference_scope" is None before 0.18.

    Raises:
        versions.VersionError: a version that is not one.
    """
    judgement = judge(fields, mcore, te)
    return {
        "verdict": "rejected" if judgement.codes else "accepted",
        "codes": judgement.codes,
        "normalized": normalized(judgement),
    }
