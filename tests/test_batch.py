# SPDX-License-Identifier: Apache-2.0
"""Batch mode: the line protocol, and lines that cannot be judged."""

import json

import pytest

from cudagraphs import batch


def judged(*requests, mcore="0.19", te=None):
    return [json.loads(line) for line in batch.run(map(json.dumps, requests), mcore, te)]


def test_a_line_in_is_a_line_out_in_order():
    results = judged(
        {"id": "a", "fields": {}}, {"id": 7, "fields": {"cuda_graph_impl": "te"}}, {"fields": {"nonsense": 1}}
    )
    assert [result["id"] for result in results] == ["a", 7, None]
    assert [result["verdict"] for result in results] == ["accepted", "rejected", "rejected"]
    assert [result["codes"] for result in results] == [[], ["CG012"], ["CG016"]]
    assert results[0]["normalized"] == {"impl": "none", "modules": [], "inference_scope": "none"}


def test_a_line_may_name_its_own_version():
    full = {"cuda_graph_impl": "full_iteration"}
    assert [r["verdict"] for r in judged({"fields": full}, {"version": "0.17", "fields": full})] == [
        "accepted",
        "rejected",
    ]


def test_transformer_engine_is_absent_old_or_new():
    fields = {
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_modules": ["attn"],
        "delay_wgrad_compute": True,
    }
    requests = (
        {"fields": fields},
        {"te": "2.9", "fields": fields},
        {"te": "2.10", "fields": fields},
        {"te": None, "fields": fields},
    )
    assert [r["codes"] for r in judged(*requests, te="2.14")] == [[], ["CG302"], [], ["CG302"]]
    assert [r["codes"] for r in judged({"fields": fields}, te="none")] == [["CG302"]]


def test_enum_members_travel_as_tagged_objects():
    member = {"enum": "CudaGraphModule.attn"}
    old = {"enum": "CudaGraphScope.attn"}
    te = {"cuda_graph_impl": "transformer_engine"}
    forms = ({"cuda_graph_modules": [member]}, {"cuda_graph_modules": [old]}, {"cuda_graph_scope": [old]})
    results = judged(*({"fields": {**te, **form}} for form in forms))
    assert [r["codes"] for r in results] == [[], ["CG006"], []]
    assert results[0]["normalized"]["modules"] == ["attn"]


def test_empty_lines_and_a_byte_order_mark_are_skipped():
    assert len(list(batch.run(["\n", '\ufeff{"fields": {}}\n', "  \n"], "0.19"))) == 1


@pytest.mark.parametrize(
    "line,complaint",
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: "),
        ('{"id": 1}', "line 2: no 'fields'"),
        ('{"fields": 3}', 'line 2: "fields" is not an object'),
        ('{"fields": {}, "version": "new"}', "line 2: 'new' is not a version"),
        (
            '{"fields": {"num_moe_experts": "many", "cuda_graph_impl": "local", "cuda_graph_modules": ["moe"]}}',
            "line 2: ",
        ),
    ],
)
def test_a_line_that_cannot_be_judged_is_named(line, complaint):
    with pytest.raises(batch.BatchError) as error:
        list(batch.run(['{"fields": {}}', line], "0.19"))
    assert str(error.value).startswith(complaint)
    assert "\n" not in str(error.value)
