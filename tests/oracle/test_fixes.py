# SPDX-License-Identifier: Apache-2.0
"""Safe fixes mend what upstream rejects: the findings go, upstream accepts the result, and as many scopes as possible
stay.

The rejected configurations are those of the recorded lattice, a sample of each combination of rules. Our own verdict
judges all of the sample; the real constructor judges the mended ones again where the wheels and torch can be had.
"""

import random
from collections import Counter, defaultdict
from itertools import combinations

import pytest

from cudagraphs import rules, versions
from cudagraphs.rules import mends
from cudagraphs.rules.config import untag, verdict
from cudagraphs.rules.normalize import MODULES
from cudagraphs.settings import Known, Settings
from oracle import record
from oracle.lattice import MINORS
from oracle.transformer_config import DEFAULT_TE

SEED = 7
PER_COMBINATION = 6  # configurations of each combination of broken rules
ROUNDS = 8
# What only a person can decide: the fix is there, and marked unsafe.
UNSAFE = {"CG002"}
CONFIG_RULES = [rule for rule in rules.REGISTRY if rule.layer == "config"]


def sample(minor: str, most: int = PER_COMBINATION) -> list[tuple[dict, str | None]]:
    """(fields, TE version) of rejected configurations, at most `most` a combination of broken rules."""
    by_codes = defaultdict(list)
    for request, upstream in record.load(minor):
        if upstream["verdict"] == "rejected":
            te = request.get("te", DEFAULT_TE)
            by_codes[tuple(verdict(request["fields"], minor, te)["codes"])].append((request["fields"], te))
    pick = random.Random(SEED)
    return [
        item for codes in sorted(by_codes) for item in pick.sample(by_codes[codes], min(most, len(by_codes[codes])))
    ]


def mended(fields: dict, minor: str, te: str | None) -> tuple[dict, list[str]]:
    """The fields after the safe fixes, one finding at a time, and the codes that were mended."""
    resolved = versions.resolve("megatron-core", mcore=minor, te=te or "none", torch="2.11", automodel="none")
    fields, codes = dict(fields), []
    for _ in range(ROUNDS):
        settings = Settings("megatron-core", resolved, {name: Known(untag(value)) for name, value in fields.items()})
        fixes = [finding for finding in rules.check(settings, CONFIG_RULES) if finding.fix and finding.safe]
        if not fixes:
            break
        fields.update(fixes[0].fix)
        codes.append(fixes[0].code)
    return fields, codes


@pytest.mark.parametrize("minor", MINORS)
def test_safe_fixes_lead_to_an_accepted_configuration(minor):
    counts, failures = Counter(), []
    for fields, te in sample(minor):
        codes = verdict(fields, minor, te)["codes"]
        after, applied = mended(fields, minor, te)
        left = verdict(after, minor, te)["codes"]
        if left and not UNSAFE & set(left):
            failures.append((fields, te, codes, applied, after, left))
        counts["left to a person" if left else "mended"] += 1
        counts["rounds", len(applied)] += 1
    print(f"\nmegatron-core {minor}: {dict(counts)}")
    assert not failures, f"{len(failures)}; the first: {failures[0]}"
    assert counts["mended"] > 5


@pytest.mark.parametrize("minor", [minor for minor in MINORS if minor >= "0.16"])
def test_fixes_keep_as_many_scopes_as_upstream_accepts(minor):
    number = int(minor.split(".")[1])
    field = "cuda_graph_modules" if number >= 18 else "cuda_graph_scope"
    judged = 0
    for fields, te in sample(minor):
        before = verdict(fields, minor, te)
        if any(code < "CG1" for code in before["codes"]):
            continue  # names are mended first; what they then mean is judged by the other cases
        impl, scopes = before["normalized"]["impl"], before["normalized"]["modules"]
        if impl not in ("local", "transformer_engine") or "full_iteration" in scopes:
            continue
        after, _ = mended(fields, minor, te)
        result = verdict(after, minor, te)
        if result["codes"] or result["normalized"]["impl"] not in (impl, "none"):
            continue
        kept = result["normalized"]["modules"] if result["normalized"]["impl"] == impl else []
        # a fix for another rule may have replaced what was named (router and preprocessing for the whole MoE layer)
        universe = list(dict.fromkeys(scopes)) or [name for name in MODULES if name != "mamba"]
        others = {
            name: value
            for name, value in after.items()
            if name not in ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")
        }
        others.update({"cuda_graph_impl": impl, "cuda_graph_scope": None})
        if "inference_cuda_graph_scope" in fields:
            others["inference_cuda_graph_scope"] = fields["inference_cuda_graph_scope"]
        best = max(
            (
                size
                for size in range(len(universe) + 1)
                for subset in combinations(universe, size)
                if size
                and mends.closed(impl, subset)
                and not verdict({**others, field: list(subset)}, minor, te)["codes"]
            ),
            default=0,
        )
        whole_layer_stays = not scopes and not kept and result["normalized"]["impl"] == impl
        assert whole_layer_stays or len(kept) >= best, (fields, before["codes"], after, kept, best)
        judged += 1
    print(f"\nmegatron-core {minor}: {judged} judged")
    assert judged > 30


@pytest.mark.parametrize("minor", MINORS)
def test_the_real_constructor_accepts_what_was_mended(minor):
    pytest.importorskip("torch")
    import wheels
    from oracle import transformer_config

    wheels.fetch_or_skip("megatron-core", transformer_config.full_version(minor))
    requests = []
    for fields, te in sample(minor, most=1):
        after, applied = mended(fields, minor, te)
        if applied and not verdict(after, minor, te)["codes"]:
            requests.append({"id": len(requests), "fields": after, "te": te})
    answers = list(transformer_config.ask(transformer_config.full_version(minor), requests))
    refused = [(request, answer) for request, answer in zip(requests, answers) if answer["verdict"] != "accepted"]
    print(f"\nmegatron-core {minor}: {len(answers)} mended configurations built for real, {len(refused)} refused")
    assert len(answers) == len(requests) > 2
    assert not refused, refused[0]
