# SPDX-License-Identifier: Apache-2.0
"""Our verdict on a TransformerConfig is upstream's, over the recorded answers of every megatron-core minor.

The recorded answers are those of the released code (tests/oracle/record.py writes and refreshes them). Configurations
that upstream refuses without graphs too say nothing about graphs; they are left out and counted.
"""

import time
from collections import Counter

import pytest

from cudagraphs.rules.config import verdict
from oracle import record
from oracle.lattice import MINORS
from oracle.transformer_config import DEFAULT_TE

# upstream's first complaint (tests/oracle/errors.py) -> the rule that must be among ours
RULES = {
    "UNKNOWN_FIELD": "CG016",
    "UNKNOWN_ENUM": None,  # the class or member does not exist: user code fails before any rule can
    "LEGACY_AND_IMPL": "CG001",
    "LEGACY_BOTH": "CG002",
    "SCOPE_AND_MODULES": "CG003",
    "FULL_WITH_OTHERS": "CG004",
    "SCOPE_UNKNOWN": "CG005",
    "SCOPE_TYPE": "CG006",
    "TWO_DEPRECATED": "CG007",
    "FI_WITH_IMPL": "CG008",
    "FI_WITH_INF": "CG009",
    "FII_WITH_IMPL": "CG010",
    "FII_WITH_INF": "CG011",
    "IMPL_INVALID": "CG012",
    "INF_UNKNOWN": "CG013",
    "INF_TYPE": "CG013",
    "INF_NOT_ALLOWED": "CG014",
    "FI_MODULES_NOT_EMPTY": "CG015",
    "MOE_AND_ROUTER": "CG101",
    "PREPROCESS_NEEDS_ROUTER": "CG102",
    "MOE_ON_DENSE": "CG103",
    "MLP_ON_ALL_MOE": "CG104",
    "MOE_NEEDS_DROP_PAD": "CG105",
    "PREPROCESS_DTOH": "CG106",
    "TE_FULL_ITERATION": "CG107",
    "INFOPT_GATED": "CG108",
    "INFOPT_TE_GROUPED_GEMM": "CG109",
    "CPU_OFFLOAD": "CG201",
    "RECOMPUTE_ANY": "CG202",
    "ATTN_RECOMPUTE_CORE_MLA": "CG203",
    "FULL_RECOMPUTE": "CG204",
    "MOE_RECOMPUTE_TE_ROUTER": "CG205",
    "DROPOUT_ATTN": "CG206",
    "DROPOUT_HIDDEN": "CG207",
    "JITTER": "CG208",
    "GTP_SHARED_RECOMPUTE": "CG209",
    "FGO_IMPL": "CG210",
    "FGO_LOCAL_MODULES": "CG211",
    "FGO_LOCAL_WHOLE_LAYER": "CG212",
    "FGO_MOE": "CG213",
    "FGO_WARMUP": "CG214",
    "FGO_INFLIGHT": "CG215",
    "EP_OVERLAP": "CG301",
    "DWG_TE_2_10": "CG302",
}


@pytest.mark.parametrize("minor", MINORS)
def test_verdict_and_normalized_result_are_upstreams(minor):
    counts, mismatches, started = Counter(), [], time.perf_counter()
    for request, upstream in record.load(minor):
        counts[upstream["verdict"]] += 1
        if upstream["verdict"] == "baseline_rejected":
            continue
        ours = verdict(request["fields"], minor, request.get("te", DEFAULT_TE))
        same = ours["verdict"] == upstream["verdict"]
        if same and ours["verdict"] == "accepted":
            same = ours["normalized"] == upstream["normalized"]
        elif same:
            # upstream stops at its first complaint; ours must name it, whatever else it names
            code = RULES[upstream["error_id"]]
            if upstream["error"]["in"] == "normalize_inference_cuda_graph_scope":
                code = "CG013"  # its text differs from that of a wrong scope in one word only
            same = code is None or code in ours["codes"]
            counts["first complaint named"] += same
        if not same:
            mismatches.append((request, upstream, ours))
    judged = counts["accepted"] + counts["rejected"]
    print(f"\nmegatron-core {minor}: {judged} judged, {dict(counts)}, {len(mismatches)} mismatches,"
          f" {time.perf_counter() - started:.1f} s")  # fmt: skip
    assert not mismatches, f"{len(mismatches)} of {judged}; the first: {mismatches[0]}"
    assert judged >= 25_000 and counts["rejected"] > 1_000 and counts["accepted"] > 1_000


def test_every_error_of_upstream_has_a_rule():
    from cudagraphs.rules import REGISTRY
    from oracle.errors import CONFIG_ERRORS

    assert {name for name, *_ in CONFIG_ERRORS} == set(RULES)
    assert {code for code in RULES.values() if code} <= {rule.code for rule in REGISTRY}
