# SPDX-License-Identifier: Apache-2.0
"""The fast path: the verdict of TransformerConfig over plain field overrides, some microseconds each.

It runs the same conditions as `rules.check`, over a plain dictionary in which every field and every derived name is
there.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from cudagraphs.rules import defaults
from cudagraphs.rules.base import Condition, Member
from cudagraphs.rules.evaluate import is_full_iteration, is_whole_layer, recompute
from cudagraphs.rules.normalize import normalize
from cudagraphs.rules.registry import config_rules
from cudagraphs.versions import Versions, check_covered, parse

UNKNOWN_FIELD = "CG016"
_ENUM_FIELDS = ("cuda_graph_scope", "cuda_graph_modules", "inference_cuda_graph_scope")


def untag(value: Any) -> Any:
    """The value with typed values put in place: {"enum": "Class.member"} becomes a `Member`, {"tuple": [...]} a "
    "tuple."""
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
def _prepared(
    mcore: str, te: str | None
) -> tuple[Versions, dict[str, Any], frozenset[str], tuple[tuple[str, Condition], ...]]:
    versions = Versions(mcore=parse(mcore), te=parse(te) if te else None)
    check_covered(versions.mcore)
    rules = tuple((rule.code, rule.when) for rule in config_rules(versions.minor))
    return versions, defaults.of_config(versions.minor), defaults.field_names(versions.minor), rules


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
    versions, base, names, rules = _prepared(mcore, te)
    facts = base.copy()
    facts.update(fields)
    for name in _ENUM_FIELDS:
        if name in fields:
            facts[name] = untag(fields[name])
    state = normalize(versions.minor, facts.__getitem__)
    impl, modules, inference, problems = state
    codes = list(problems)
    if not fields.keys() <= names:
        codes.append(UNKNOWN_FIELD)
    if impl != "none":
        full_iteration = is_full_iteration(state)
        granularity, recomputed = recompute(facts.__getitem__)
        facts["graph.impl"] = impl
        facts["graph.modules"] = modules
        facts["graph.active"] = True
        facts["graph.full_iteration"] = full_iteration
        facts["graph.whole_layer"] = is_whole_layer(state)
        facts["recompute.granularity"] = granularity
        facts["recompute.modules"] = recomputed
        codes += [code for code, when in rules if when(facts, versions)]
    if versions.minor < 15 and facts["enable_cuda_graph"] and facts["external_cuda_graph"]:
        impl = "local+transformer_engine"  # upstream does not mind: both kinds of graphs are made
    return {
        "verdict": "rejected" if codes else "accepted",
        "codes": sorted(codes),
        "normalized": {
            "impl": impl,
            # up to 0.15 upstream keeps the scope as it was given
            "modules": list(modules) if versions.minor >= 16 else facts["cuda_graph_scope"],
            "inference_scope": inference,
        },
    }
