# SPDX-License-Identifier: Apache-2.0
"""The client of released upstream code: recipes cannot disturb each other, and what goes wrong is told."""

import pytest
from upstream import Upstream, UpstreamUnavailable

VERSIONS = {"mcore": "0.19.2"}
GOOD = """
from megatron.core.transformer.transformer_config import TransformerConfig

def config():
    return TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, {more})
"""
TABLE = [
    ("accepted", GOOD.format(more="cuda_graph_impl='transformer_engine', cuda_graph_modules=['attn']"), "accepted", ""),
    (
        "rejected by upstream",
        GOOD.format(more="cuda_graph_impl='transformer_engine', cuda_graph_modules=['moe']"),
        "rejected",
        "MoE",
    ),
    ("unknown field", GOOD.format(more="cuda_graphs=True"), "rejected", "unexpected keyword"),
    (
        "kernels of Transformer Engine are there",
        GOOD.format(more="num_moe_experts=4, moe_permute_fusion=True, add_bias_linear=False"),
        "accepted",
        "",
    ),
    ("leaves the process", "import sys\n\ndef config():\n    sys.exit(0)\n", "broken", "SystemExit"),
    ("leaves it at once", "import os\n\ndef config():\n    os._exit(0)\n", "broken", "no answer"),
    ("recursion", "def config():\n    return config()\n", "broken", "RecursionError"),
    ("prints", "print('noise')\n" + GOOD.format(more=""), "accepted", ""),
    ("no such function", "def other():\n    pass\n", "broken", "config"),
]


@pytest.mark.wheels
@pytest.mark.parametrize("text, verdict, says", [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_a_recipe(text, verdict, says, upstream, tmp_path):
    (tmp_path / "recipe.py").write_text(text, encoding="utf-8")
    answer = upstream.recipe(VERSIONS, tmp_path, "recipe.py", "config")
    assert answer["verdict"] == verdict, answer
    assert says in str(answer["error"])


@pytest.mark.wheels
def test_a_recipe_leaves_no_trace(upstream, tmp_path):
    spoil = (
        "from megatron.core.transformer import transformer_config\n\ndef config():\n"
        "    transformer_config.TransformerConfig = None\n"
    )
    (tmp_path / "spoil.py").write_text(spoil, encoding="utf-8")
    (tmp_path / "recipe.py").write_text(GOOD.format(more=""), encoding="utf-8")
    assert upstream.recipe(VERSIONS, tmp_path, "spoil.py", "config")["verdict"] == "broken"
    assert upstream.recipe(VERSIONS, tmp_path, "recipe.py", "config")["verdict"] == "accepted"


def test_a_release_that_is_not_pinned(tmp_path, capfd):
    pytest.importorskip("torch")
    with Upstream() as client, pytest.raises(UpstreamUnavailable, match="wheels.py"):
        client.recipe({"mcore": "0.1.0"}, tmp_path, "recipe.py", "config")
