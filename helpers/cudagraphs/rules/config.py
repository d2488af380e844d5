# SPDX-License-Identifier: Apache-2.0
"""The fast path: the verdict of TransformerConfig over plain field overrides, some microseconds each.

It runs the same conditions as `rules.check`, over a plain dictionary in which every field and every derived name is there.
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
from cudagraphs.versions import Versions, parse

UNKNOWN_FIELD = "CG016"
_ENUM_FIELDS = ("cuda_graph_scope", "cuda_graph_modules", "inference_cuda_graph_scope")


class FieldsError(ValueError):
    """Field overrides that are not a JSON object, or an enum tag that is not {"enum": "Class.member"}."""


def untag(value: Any) -> Any:
    """The value with each {"enum": "Class.member"} replaced by a `Member`. Raises FieldsError for another object."""
    if isinstance(value, dict):
        tag = value.get("enum")
        if len(value) != 1 or not isinstance(tag, str) or tag.count(".") != 1:
            raise FieldsError(f"{value!r} is not a field value; an enum member is written {{\"enum\": \"CudaGraphModule.attn\"}}")
        enum, name = tag.split(".")
        return Member(name, enum)
    if isinstance(value, list):
        return [untag(item) for item in value]
    return value


@lru_cache(maxsize=64)
def _prepared(mcore: str, te: str | None) -> tuple[Versions, dict[str, Any], frozenset[str], tuple[tuple[str, Condition], ...]]:
    versions = Versions(mcore=parse(mcore), te=parse(te) if te else None)
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
        "normalized": {"impl", "modules", "inference_scope"} after upstream's migrations}. "inference_scope" is None before
        0.18, which has no such field.

    Raises:
        FieldsError: an enum tag that cannot be read.
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
    return {
        "verdict": "rejected" if codes else "accepted",
        "codes": sorted(codes),
        "normalized": {"impl": impl, "modules": list(modules), "inference_scope": inference},
    }
