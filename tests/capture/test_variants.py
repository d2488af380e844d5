# SPDX-License-Identifier: Apache-2.0
import pytest

from cudagraphs.capture import plan, variants
from cudagraphs.capture.variants import Variant

FOUND = {"megatron-core": "0.19.2", "transformer-engine": "2.20.2", "torch": "2.11.0+cu130"}
ALONE = {"tensor": 1, "pipeline": 1, "virtual": 1, "expert": 1}
PLAIN = {"overlap_grad_reduce": False, "distributed_optimizer": False, "overlap_param_gather": False}


def setup(model):
    config = plan.config_fields(model, plan.shape("launch", model), "bf16", 0.0, ALONE)
    return {"stack": "megatron-core", "model": model, "versions": FOUND, "data_parallel": PLAIN, "config": config}


def judged(model, text, environment=None):
    return variants.legal(setup(model), variants.parse(text, "megatron-core"), environment or {})


@pytest.mark.parametrize("text", ["none", "local", "transformer_engine:attn+mlp", "full_iteration"])
def test_a_variant_reads_back_as_it_is_written(text):
    assert variants.parse(text, "megatron-core").name == text


@pytest.mark.parametrize(
    ("text", "stack", "word"),
    [
        ("te", "megatron-core", "transformer_engine"),
        ("local:mpl", "megatron-core", "mlp"),
        ("local", "torch", "full_iteration"),
        ("make_graphed_callables:attn", "transformer-engine", "leave the scope out"),
    ],
)
def test_an_unknown_variant_names_the_known_ones(text, stack, word):
    with pytest.raises(variants.VariantError, match=word):
        variants.parse(text, stack)


def test_every_candidate_of_every_model_can_be_written_and_read():
    for stack, models in variants.MODELS.items():
        for model in models:
            for variant in variants.candidates(stack, model, "M*-"):
                assert variants.parse(variant.name, stack) == variant


def test_mamba_is_tried_only_where_there_is_a_mamba_layer():
    def scopes(pattern):
        return [v.modules for v in variants.candidates("megatron-core", "hybrid", pattern)]

    assert ("mamba",) in scopes("M*-") and not any("mamba" in modules for modules in scopes("*-"))


@pytest.mark.parametrize(
    ("minor", "variant", "expected"),
    [
        (
            19,
            Variant("transformer_engine", ("attn",)),
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]},
        ),
        (18, Variant("full_iteration"), {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []}),
        (17, Variant("full_iteration"), {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}),
        (
            16,
            Variant("transformer_engine", ("attn", "mlp")),
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn", "mlp"]},
        ),
        (
            15,
            Variant("transformer_engine", ("attn",)),
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn"},
        ),
        (15, Variant("local"), {"cuda_graph_impl": "local", "cuda_graph_scope": "full"}),
        (19, variants.EAGER, {"cuda_graph_impl": "none"}),
    ],
)
def test_fields_follow_the_version(minor, variant, expected):
    assert variants.fields(variant, minor) == expected


def test_the_rules_see_the_whole_configuration():
    assert judged("moe-drop-pad", "transformer_engine:moe")["verdict"] == "legal"
    refused = judged("moe-dropless", "transformer_engine:moe")
    assert refused["verdict"] == "illegal" and refused["codes"] and set(refused["titles"]) == set(refused["codes"])
    assert judged("dense", "transformer_engine:moe_router")["verdict"] == "illegal"
    assert judged("dense", "none") == {"verdict": "legal", "codes": [], "titles": {}}


def test_every_dense_candidate_is_legal():
    for variant in variants.candidates("megatron-core", "dense"):
        assert judged("dense", variant.name)["verdict"] == "legal", variant.name


def test_an_assert_of_upstream_finds_its_rule():
    codes = variants.rules_for("AssertionError: moe cuda graph is only supported with drop-padding MoE.")
    assert codes == tuple(judged("moe-dropless", "transformer_engine:moe")["codes"])
    assert variants.rules_for("something that upstream never says") == ()
    assert variants.rules_for("assert fwd_buffer_reuse_ref_count == 0") == ("CG730",)


@pytest.mark.parametrize("text", ["local:attn+moe_router+moe_preprocess", "local", "transformer_engine", "full_iteration"])
def test_what_failed_to_capture_on_the_gpu_is_known_to_the_rules(text):
    # cudaErrorCapturedEvent in evals/results/gpu/smoke-mcore-moe-dropless-launch.json
    assert "CG714" in judged("moe-dropless", text)["codes"]
