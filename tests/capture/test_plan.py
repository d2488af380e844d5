# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from cudagraphs.capture import plan, variants

GIB = 2**30
BIG = plan.Shape(layers=61, hidden=7168, heads=128, kv_heads=128, ffn=2048, sequence=4096, experts=256, top_k=8)


def test_a_model_that_fits_is_left_alone():
    assert plan.scale(plan.Shape(), 100 * GIB) == (plan.Shape(), [])


def test_layers_and_experts_go_before_what_changes_a_kernel():
    scaled, changes = plan.scale(BIG, 80 * GIB)
    assert plan.memory_bytes(scaled) <= 80 * GIB
    assert (scaled.hidden, scaled.sequence) == (BIG.hidden, BIG.sequence)
    assert scaled.layers < BIG.layers and BIG.top_k <= scaled.experts < BIG.experts
    assert changes[0].startswith("layers 61 -> ") and any(text.startswith("experts 256 -> ") for text in changes)


def test_a_small_card_changes_kernels_last_and_says_so():
    scaled, changes = plan.scale(BIG, 12 * GIB)
    assert plan.memory_bytes(scaled) <= 12 * GIB and scaled.sequence < BIG.sequence
    assert any("the real run gains less" in text for text in changes)


def test_what_remains_divides_by_the_parallel_sizes():
    scaled, _ = plan.scale(BIG, 60 * GIB, divisors={"pipeline": 3, "expert": 12, "tensor": 8})
    assert scaled.layers % 3 == 0 and scaled.experts % 12 == 0 and scaled.heads % 8 == 0


def test_repeated_halvings_are_told_as_one_change():
    _, changes = plan.scale(BIG, 12 * GIB)
    names = [text.split(" ")[0] for text in changes]
    assert len(names) == len(set(names))


def test_processes_share_the_gpu_only_where_they_fit():
    assert plan.at_once(plan.Shape(), 7, 139 * GIB) == 7
    large = plan.shape("compute", "moe-dropless")
    assert 1 < plan.at_once(large, 7, 139 * GIB) < 7
    assert plan.at_once(large, 7, 8 * GIB) == 1
    assert plan.at_once(plan.Shape(), 7, 139 * GIB, world=2) == 1


@pytest.mark.parametrize(
    ("values", "model"),
    [
        ({}, "dense"),
        ({"num_moe_experts": 1}, "dense"),
        ({"num_moe_experts": 8}, "moe-dropless"),
        ({"num_moe_experts": 8, "moe_pad_expert_input_to_capacity": True}, "moe-drop-pad"),
        ({"hybrid_layer_pattern": "M*-"}, "hybrid"),
        ({"hybrid_layer_pattern": "MEM*E", "num_moe_experts": 8}, "hybrid-moe"),
    ],
)
def test_the_model_of_a_recipe(values, model):
    assert plan.model_of(values) == model


def test_a_recipe_gives_the_shape_and_what_it_lacks_is_told():
    shape, notes = plan.shape_from_recipe(
        {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8}
    )
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.ffn) == (32, 4096, 32, 8, 16384)
    assert notes == ["seq_length is not known from the recipe: 512 taken"]


def test_config_fields_name_what_upstream_needs():
    shape = plan.shape("launch", "moe-drop-pad")
    out = plan.config_fields("moe-drop-pad", shape, "fp8-delayed", 0.0, {"tensor": 2, "pipeline": 1, "virtual": 1, "expert": 4})
    assert out["moe_pad_expert_input_to_capacity"] and out["moe_expert_capacity_factor"] == 1.0
    assert (out["fp8"], out["fp8_recipe"], out["sequence_parallel"]) == ("hybrid", "delayed", True)
    dense = plan.config_fields(
        "dense", plan.Shape(), "bf16", 0.1, {"tensor": 1, "pipeline": 1, "virtual": 1, "expert": 1}, extra={"qk_layernorm": True}
    )
    assert (
        "num_moe_experts" not in dense
        and dense["qk_layernorm"]
        and "fp8" not in dense
        and dense["hidden_dropout"] == 0.1
    )


def test_hybrid_patterns_have_one_letter_a_layer():
    assert plan.hybrid_pattern("hybrid", 6, True) == "M*-M*-" and plan.hybrid_pattern("hybrid", 4, False) == "*-*-"
    assert plan.hybrid_pattern("hybrid-moe", 4, True) == "*E*E" and plan.hybrid_pattern("dense", 4, True) is None
    config = plan.config_fields(
        "hybrid", replace(plan.Shape(), layers=1), "bf16", 0, {"tensor": 1, "pipeline": 1, "virtual": 1, "expert": 1}, "M*-"
    )
    assert config["num_layers"] == 3


def test_a_job_is_the_setup_with_its_variant():
    job = plan.job({"stack": "torch"}, variants.Variant("full_iteration", ("optimizer",)), drill="sync")
    assert job == {
        "stack": "torch",
        "name": "full_iteration:optimizer",
        "impl": "full_iteration",
        "modules": ["optimizer"],
        "drill": "sync",
    }
