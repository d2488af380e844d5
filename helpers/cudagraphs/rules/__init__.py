# SPDX-License-Identifier: Apache-2.0
"""The rules on CUDA graph settings: one module a topic, one object a rule.

* `check(settings)` judges a run and returns every finding.
* `graph_state(settings)` says what is captured after upstream's migrations.
* `explain(text)` finds rules by code or by a piece of an upstream message.
* `config.verdict(fields, mcore, te)` is the fast path over plain TransformerConfig fields.
"""

from __future__ import annotations

from collections.abc import Iterable

from cudagraphs.rules import (
    arguments,
    automodel,
    bridge,
    capture,
    config,
    moe,
    names,
    overlap,
    pytorch,
    recompute,
    reported,
)
from cudagraphs.rules.base import Example, Finding, GraphState, Member, Rule
from cudagraphs.rules.evaluate import graph_state, judge
from cudagraphs.rules.registry import REGISTRY
from cudagraphs.settings import Settings

TOPICS = {
    "0": ("Names and renames", names),
    "1": ("Scopes and mixtures of experts", moe),
    "2": ("Recompute, dropout and offloading", recompute),
    "3": ("Overlap and delayed weight gradients", overlap),
    "4": ("Megatron-LM's command line", arguments),
    "5": ("Megatron Bridge", bridge),
    "6": ("NeMo AutoModel", automodel),
    "7": ("Capture and environment", capture),
    "8": ("Reported failures", reported),
    "9": ("Plain PyTorch, FSDP and DeepSpeed", pytorch),
}
for _, _module in TOPICS.values():
    REGISTRY.add(*_module.RULES)

_ORDER = {"error": 0, "runtime": 1, "warning": 2, "info": 3}

__all__ = [
    "REGISTRY",
    "TOPICS",
    "Example",
    "Finding",
    "GraphState",
    "Member",
    "Rule",
    "check",
    "config",
    "explain",
    "graph_state",
]


def check(settings: Settings, rules: Iterable[Rule] | None = None) -> list[Finding]:
    """Every finding on this run, errors first, then by code. `rules` (all by default) may come in any order."""
    findings = [
        finding
        for rule in (REGISTRY if rules is None else rules)
        if rule.holds_for(settings.framework, settings.versions)
        for finding in judge(rule, settings)
    ]
    return sorted(
        findings, key=lambda finding: (bool(finding.needs), _ORDER[finding.severity], finding.code, finding.when)
    )


def explain(text: str) -> list[Rule]:
    """The rules with this code, or those with an upstream message that holds the text, the best match first.

    Case, punctuation and line breaks do not matter; where no message holds the text whole, the rules whose messages
    share most of its words are returned, at most five. An empty list where nothing is near.
    """
    wanted = text.strip()
    if wanted.upper() in REGISTRY:
        return [REGISTRY[wanted.upper()]]
    words = _words(wanted)
    if not words:
        return []
    whole, partial = [], []
    for rule in REGISTRY:
        for fragment in (*rule.upstream, rule.title):
            have = _words(fragment)
            if " ".join(words) in " ".join(have) or (len(have) > 2 and " ".join(have) in " ".join(words)):
                whole.append(rule)
                break
        else:
            share = max(len(set(words) & set(_words(fragment))) for fragment in (*rule.upstream, rule.title)) / len(
                set(words)
            )
            if share >= 0.6:
                partial.append((-share, rule.code, rule))
    return whole or [rule for _, _, rule in sorted(partial)[:5]]


def _words(text: str) -> list[str]:
    return "".join(char.lower() if char.isalnum() else " " for char in text).split()
