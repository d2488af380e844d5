# SPDX-License-Identifier: Apache-2.0
"""CG3xx: overlapped communication and delayed weight gradients beside graphs."""

from __future__ import annotations

from cudagraphs.rules import mends
from cudagraphs.rules.base import Example, Facts, Rule
from cudagraphs.rules.names import CONFIG
from cudagraphs.rules.registry import config_rules
from cudagraphs.versions import Versions

EP_OVERLAP = {
    "cuda_graph_impl": "transformer_engine",
    "num_moe_experts": 8,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    "overlap_moe_expert_parallel_comm": True,
    "bf16": True,
}
narrower = mends.narrower(config_rules)


def _ep_overlap(f: Facts, v: Versions) -> bool:
    if not f["overlap_moe_expert_parallel_comm"] or f["graph.impl"] == "none":
        return False
    inside = "moe" in f["graph.modules"] or "mlp" in f["graph.modules"]
    if v.minor >= 18:
        return f["graph.impl"] == "transformer_engine" and inside
    return f["graph.impl"] != "transformer_engine" or inside


RULES = (
    Rule(
        code="CG301",
        title="Expert-parallel overlap with captured experts or MLPs",
        layer="config",
        severity="error",
        mcore=(16, None),
        when=_ep_overlap,
        message="overlap_moe_expert_parallel_comm does not go with the implementation {graph.impl} and the scopes "
        "{graph.modules}",
        mend="drop moe and mlp from the scopes; up to 0.17 the implementation must be transformer_engine",
        fix=narrower,
        why="The overlap interleaves the forward of one microbatch with the backward of another, in pieces that a "
        "graph of the "
        "whole MoE layer or MLP would weld together.",
        source=CONFIG,
        upstream=("CUDA graph scope on moe and mlp is not supported with overlap_moe_expert_parallel_comm",),
        bad=(
            Example({**EP_OVERLAP, "cuda_graph_modules": ["mlp"], "moe_layer_freq": [0, 1]}, {"mcore": "0.19"}),
            Example({**EP_OVERLAP, "cuda_graph_impl": "local", "cuda_graph_scope": ["attn"]}, {"mcore": "0.17"}),
        ),
        good=(
            Example({**EP_OVERLAP, "cuda_graph_modules": ["attn", "moe_router"]}, {"mcore": "0.19"}),
            Example({**EP_OVERLAP, "cuda_graph_impl": "local", "cuda_graph_modules": ["attn"]}, {"mcore": "0.18"}),
        ),
    ),
    Rule(
        code="CG302",
        title="Delayed weight gradients with an old Transformer Engine",
        layer="config",
        severity="error",
        mcore=(16, None),
        when=lambda f, v: (
            bool(f["delay_wgrad_compute"]) and f["graph.impl"] == "transformer_engine" and not v.at_least("te", 2, 10)
        ),
        message="delay_wgrad_compute with Transformer Engine graphs needs Transformer Engine 2.10",
        mend="use Transformer Engine 2.10 or newer, or turn delay_wgrad_compute off, or turn graphs off",
        fix=lambda f, v: {"delay_wgrad_compute": False},
        why="The delayed weight gradient runs after the graph's backward; Transformer Engine can split the two from "
        "2.10 on. "
        "Where it is absent the check fails too.",
        source=CONFIG,
        upstream=("TE version >= 2.10.0 is required for delay_wgrad_compute with partial cuda graph",),
        bad=(
            Example(
                {**EP_OVERLAP, "delay_wgrad_compute": True, "cuda_graph_modules": ["attn"]},
                {"mcore": "0.19", "te": "2.9"},
            ),
        ),
        good=(
            Example(
                {**EP_OVERLAP, "delay_wgrad_compute": True, "cuda_graph_modules": ["attn"]},
                {"mcore": "0.19", "te": "2.10"},
            ),
        ),
    ),
)
