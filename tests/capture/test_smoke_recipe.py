# SPDX-License-Identifier: Apache-2.0
"""What a smoke run takes from a recipe file. The files are read, never run."""

import pytest

from cudagraphs.capture import plan, recipe
from cudagraphs.capture.variants import Variant

PLAIN = """
from megatron.core.transformer import TransformerConfig

def pretrain():
    return TransformerConfig(
        num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=8, ffn_hidden_size=14336,
        cuda_graph_impl="transformer_engine", cuda_graph_modules=["mlp", "attn"], recompute_granularity="selective",
        recompute_modules=["core_attn"],
    )
"""
MOE = PLAIN.replace(
    "ffn_hidden_size=14336,",
    """ffn_hidden_size=14336, num_moe_experts=128, moe_router_topk=8, moe_ffn_hidden_size=768,
        moe_token_dispatcher_type="flex",""",
).replace('["mlp", "attn"]', '["attn", "moe_router", "moe_preprocess"]')


def read(tmp_path, text, function=None):
    path = tmp_path / "recipe.py"
    path.write_text(text)
    return recipe.read(path, function)


def test_shape_graphs_and_recompute_come_from_the_recipe(tmp_path):
    out = read(tmp_path, PLAIN)
    assert out.variant == Variant("transformer_engine", ("attn", "mlp"))
    shape, _ = plan.shape_from_recipe(out.values)
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.ffn) == (32, 4096, 32, 8, 14336)
    assert out.config["recompute_modules"] == ["core_attn"] and plan.model_of(out.values) == "dense"


def test_a_mixture_of_experts_keeps_its_experts_and_tells_what_it_cannot_use(tmp_path):
    out = read(tmp_path, MOE)
    shape, _ = plan.shape_from_recipe(out.values)
    assert (shape.experts, shape.top_k, shape.ffn) == (128, 8, 768) and plan.model_of(out.values) == "moe-dropless"
    assert out.variant == Variant("transformer_engine", ("attn", "moe_router", "moe_preprocess"))
    assert any("flex -> alltoall" in note for note in out.notes)


def test_what_cannot_be_compared_or_built_is_told(tmp_path):
    text = PLAIN.replace("num_layers=32,", "num_layers=32, hidden_dropout=0.1, multi_latent_attention=True,")
    out = read(tmp_path, text)
    assert "hidden_dropout" not in out.config
    assert any("hidden_dropout 0.1 -> 0" in note for note in out.notes)
    assert any("multi_latent_attention" in note for note in out.notes)


def test_graphs_that_are_off_leave_the_choice_to_the_sweep(tmp_path):
    out = read(tmp_path, PLAIN.replace('"transformer_engine"', '"none"').replace('["mlp", "attn"]', "[]"))
    assert out.variant is None and any("graphs are off" in note for note in out.notes)


def test_a_hybrid_is_known_by_its_pattern(tmp_path):
    text = PLAIN.replace(
        "from megatron.core.transformer import TransformerConfig",
        """
from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider as TransformerConfig
""",
    ).replace("num_layers=32,", 'num_layers=5, hybrid_layer_pattern="MEM*E",')
    assert plan.model_of(read(tmp_path, text).values) == "hybrid-moe"


def test_full_iteration_is_a_variant_of_its_own(tmp_path):
    out = read(tmp_path, PLAIN.replace('"transformer_engine"', '"full_iteration"').replace('["mlp", "attn"]', "[]"))
    assert out.variant == Variant("full_iteration")


@pytest.mark.parametrize(
    ("text", "function", "word"),
    [
        (PLAIN + PLAIN.replace("pretrain", "finetune"), None, "--function"),
        (PLAIN, "missing", "missing"),
        ("def pretrain(:\n", None, "recipe.py"),
        ("", None, "empty"),
    ],
    ids=["two functions", "no such function", "syntax error", "empty file"],
)
def test_a_recipe_that_cannot_be_read_says_what_to_do(tmp_path, text, function, word):
    with pytest.raises(recipe.RecipeError, match=word):
        read(tmp_path, text, function)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(recipe.RecipeError, match="gone.py"):
        recipe.read(tmp_path / "gone.py", None)
