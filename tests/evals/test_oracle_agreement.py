# SPDX-License-Identifier: Apache-2.0
"""The counts that BENCHMARK.md shows are those that the agreement tests print."""

import oracle_agreement

PRINTED = """
megatron-core 0.17: 48151 judged, {'accepted': 24411, 'rejected': 23740, 'baseline_rejected': 4149}, 0 mismatches, 2.1 s
.
megatron-lm-0.18: {'rejected': 1000, 'accepted': 1212, 'left out': 150}, 3 mismatches
something else: 5
"""


def test_counts():
    assert oracle_agreement.counts(PRINTED) == {
        "megatron-core 0.17": {"accepted": 24411, "rejected": 23740, "left_out": 4149, "mismatches": 0},
        "megatron-lm-0.18": {"accepted": 1212, "rejected": 1000, "left_out": 150, "mismatches": 3},
    }


def test_no_counts():
    assert oracle_agreement.counts("2 errors in 0.1s") == {}
