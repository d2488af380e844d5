# SPDX-License-Identifier: Apache-2.0
"""Conditions over branches and unknown facts, and the facts that are derived."""

import pytest

from cudagraphs import rules, versions
from cudagraphs.rules import defaults, evaluate
from cudagraphs.rules.base import NeedsFact
from cudagraphs.settings import Branch, Choice, Known, Settings, Source, Unknown

SOURCE = Source("recipe.py", 12, 5, "cfg.model.cuda_graph_impl = impl")
TE = {"cuda_graph_impl": "transformer_engine"}


def run(facts, complete=True, framework="megatron-core", **given):
    resolved = versions.resolve(framework, **{**versions.NEWEST, "mcore": "0.19", **given})
    wrapped = {n: v if isinstance(v, (Known, Unknown, Choice)) else Known(v) for n, v in facts.items()}
    return Settings(framework, resolved, wrapped, complete=complete)


def only(code, settings):
    return rules.check(settings, [rules.REGISTRY[code]])


def test_an_absent_fact_holds_its_default_only_where_all_was_seen():
    facts = {**TE, "cuda_graph_scope": None, "recompute_granularity": "selective", "cuda_graph_modules": ["attn"]}
    (finding,) = only("CG206", run(facts))
    assert not finding.needs, "attention_dropout is 0.1 by default"
    (finding,) = only("CG206", run({**facts, "recompute_modules": ["core_attn", "mlp"]}))
    assert "recomputed modules: [core_attn, mlp]" in finding.message and "default of" not in finding.message
    (finding,) = only("CG206", run({**facts, "moe_layer_recompute": False, "recompute_modules": None}, complete=False))
    assert finding.needs and finding.severity == "info"


def test_a_fact_that_does_not_matter_is_not_asked_for():
    facts = {**TE, "cuda_graph_modules": ["mlp"], "num_moe_experts": None, "cpu_offloading": Unknown("an argument")}
    assert only("CG105", run(facts)) == []
    assert [finding.needs for finding in only("CG201", run(facts))] == [("cpu_offloading",)]
    # both values of the unknown flag give the same answer
    facts["cuda_graph_impl"] = "none"
    assert only("CG201", run(facts)) == []


def test_an_undetermined_finding_says_what_it_needs_and_is_only_information():
    (finding,) = only(
        "CG103", run({**TE, "cuda_graph_modules": ["moe_router"], "num_moe_experts": Unknown("from a checkpoint")})
    )
    assert finding.needs == ("num_moe_experts",) and finding.severity == "info" and finding.fix is None
    assert "--set num_moe_experts" in finding.mend


def test_locations_are_those_of_the_facts_that_were_read():
    graph, experts, other = Source("recipe.py", 3), Source("base.py", 40), Source("recipe.py", 8)
    facts = {
        "cuda_graph_impl": Known("transformer_engine", graph),
        "cuda_graph_modules": Known(["moe_router"], graph),
        "num_moe_experts": Known(None, experts),
        "attention_dropout": Known(0.1, other),
    }
    (finding,) = only("CG103", run(facts))
    assert set(finding.locations) == {graph, experts}


def test_a_branch_is_named_with_its_side():
    branch = Branch("use_graphs", SOURCE, default=True)
    facts = {
        "cuda_graph_impl": Choice(branch, Known("transformer_engine", SOURCE), Known("none", SOURCE)),
        "cuda_graph_modules": ["moe_router"],
    }
    (finding,) = only("CG103", run(facts))
    assert finding.when == "`use_graphs` is true (recipe.py:12)"
    state = rules.graph_state(run(facts))
    assert state.impl == "transformer_engine" and [inner.impl for _, inner in state.by_world] == [
        "transformer_engine",
        "none",
    ]


def test_two_facts_on_one_branch_are_judged_together():
    branch = Branch("moe", SOURCE, default=False)
    facts = {
        **TE,
        "cuda_graph_modules": Choice(branch, Known(["moe_router"]), Known(["attn"])),
        "num_moe_experts": Choice(branch, Known(8), Known(None)),
    }
    assert only("CG103", run(facts)) == []


def test_the_fix_is_given_only_where_it_fits_every_side():
    branch = Branch("wide", SOURCE)
    facts = {**TE, "cuda_graph_modules": Choice(branch, Known(["attn", "moe_router"]), Known(["mlp", "moe_router"]))}
    (finding,) = only("CG103", run(facts))
    assert finding.when == "" and finding.fix is None


def test_many_branches_stay_cheap_and_are_reported():
    facts = {**TE}
    value = Known(["attn"])
    for number in range(12):
        value = Choice(Branch(f"flag{number}", Source("recipe.py", number + 1)), Known(["moe_router"]), value)
    facts["cuda_graph_modules"] = value
    (finding,) = only("CG103", run(facts))
    assert finding.when.count(" or ") == 11


def test_more_ways_than_can_be_tried_are_undetermined():
    def nested(depth):
        if depth == 0:
            return Known(["attn"])
        branch = Branch(f"flag{depth}-{id(object())}", Source("recipe.py", depth))
        return Choice(branch, nested(depth - 1), nested(depth - 1))

    findings = only("CG103", run({**TE, "cuda_graph_modules": nested(9)}))
    assert any("the side of" in need for finding in findings for need in finding.needs)


@pytest.mark.parametrize(
    "facts,version,impl,modules,full,whole",
    [
        (
            {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]},
            "0.17",
            "local",
            ("full_iteration",),
            True,
            False,
        ),
        ({"cuda_graph_impl": "full_iteration"}, "0.18", "full_iteration", (), True, False),
        ({"cuda_graph_impl": "transformer_engine"}, "0.19", "transformer_engine", (), False, True),
        (
            {"cuda_graph_impl": "none", "cuda_graph_modules": ["full_iteration"]},
            "0.19",
            "full_iteration",
            (),
            True,
            False,
        ),
        (
            {"cuda_graph_impl": "local", "cuda_graph_modules": ["moe_router"]},
            "0.19",
            "local",
            ("moe_router", "moe_preprocess"),
            False,
            False,
        ),
        (
            {"enable_cuda_graph": True, "cuda_graph_scope": "full_iteration"},
            "0.14",
            "local",
            ("full_iteration",),
            True,
            False,
        ),
    ],
)
def test_graph_state(facts, version, impl, modules, full, whole):
    state = rules.graph_state(run(facts, mcore=version))
    assert (state.impl, state.modules, state.full_iteration, state.whole_layer) == (impl, modules, full, whole)


def test_bridge_keeps_graphs_off_where_megatron_core_alone_would_turn_them_on():
    facts = {"cuda_graph_impl": "none", "cuda_graph_modules": ["full_iteration"]}
    assert rules.graph_state(run(facts, framework="megatron-bridge", bridge="0.6.2")).impl == "none"
    assert (
        rules.graph_state(run(facts, framework="megatron-bridge", bridge="0.5.1", mcore="0.18.2")).impl
        == "full_iteration"
    )


def test_an_unknown_implementation_makes_the_state_unknown():
    state = rules.graph_state(run({"cuda_graph_impl": Unknown("an argument"), "cuda_graph_modules": ["attn"]}))
    assert state.impl is None and state.active is None and "cuda_graph_impl" in state.unknown


def test_fields_that_checkpoints_leave_alone_hold_their_defaults():
    reader = evaluate.Reader(run({"model.hf_id": "Qwen/Qwen3-8B"}, complete=False))
    assert reader["cuda_graph_impl"] == "none" and reader["recompute_granularity"] is None
    assert reader["env.PYTORCH_ALLOC_CONF"] is None
    with pytest.raises(NeedsFact):
        reader["num_moe_experts"]
    with pytest.raises(NeedsFact):
        evaluate.Reader(run({"model.hf_id": "sarvam/sarvam-m"}, complete=False))["recompute_granularity"]


def test_defaults_follow_the_version_and_the_framework():
    assert defaults.default("cuda_graph_scope", 17) == "full" and defaults.default("cuda_graph_scope", 18) is None
    assert defaults.default("cuda_graph_use_single_mempool", 17) is False
    assert defaults.default("cuda_graph_use_single_mempool", 18) is True
    assert defaults.default("ddp.check_for_nan_in_grad", 19) is False
    assert defaults.default("ddp.check_for_nan_in_grad", 19, "megatron-lm") is True
    assert "cuda_graph_modules" in defaults.field_names(18) and "cuda_graph_modules" not in defaults.field_names(17)
    with pytest.raises(KeyError):
        defaults.default("activation_func", 19)


def test_codes_are_unique_and_findings_come_in_a_fixed_order():
    registry = rules.base.Registry()
    registry.add(rules.REGISTRY["CG001"])
    with pytest.raises(ValueError, match="CG001"):
        registry.add(rules.REGISTRY["CG001"])
    findings = rules.check(run({**TE, "cuda_graph_modules": ["moe", "moe_router"], "cuda_graph_warmup_steps": 0}))
    assert [finding.code for finding in findings] == ["CG101", "CG103", "CG701", "CG804", "CG728"]


def test_the_defaults_are_those_of_the_released_wheels():
    import wheels
    from rules import write_fields

    for version in wheels.versions("megatron-core"):
        wheels.fetch_or_skip("megatron-core", version)
    assert write_fields.TARGET.read_text(encoding="utf-8") == write_fields.render()
