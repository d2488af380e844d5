# SPDX-License-Identifier: Apache-2.0
"""CG1xx: scopes that the model does not have, or that a mixture of experts does not allow."""

from __future__ import annotations

from typing import Any

from cudagraphs.rules import mends
from cudagraphs.rules.base import Example, Facts, Rule
from cudagraphs.rules.names import CONFIG
from cudagraphs.rules.registry import config_rules
from cudagraphs.versions import Versions

TE_19 = {"mcore": "0.19"}
MOE = {"cuda_graph_impl": "transformer_engine", "num_moe_experts": 8, "moe_token_dispatcher_type": "alltoall"}
DENSE = {"cuda_graph_impl": "transformer_engine"}
narrower = mends.narrower(config_rules)


def dense(f: Facts) -> bool:
    """One expert counts as none."""
    return f["num_moe_experts"] is None or f["num_moe_experts"] <= 1


def layerwise(f: Facts, v: Versions) -> bool:
    """Whether the scopes of single layers are checked: from 0.18 only for the two implementations that have them."""
    impl = f["graph.impl"]
    return impl in ("local", "transformer_engine")


def capacity(f: Facts) -> float | None:
    """The capacity factor of an expert; a negative one means none."""
    factor = f["moe_expert_capacity_factor"]
    return None if factor is None or factor < 0 else factor


def drop_and_pad(f: Facts) -> bool:
    return capacity(f) is not None and bool(f["moe_pad_expert_input_to_capacity"])


def _mlp_without_dense_layers(f: Facts, v: Versions) -> bool:
    if "mlp" not in f["graph.modules"] or not layerwise(f, v) or dense(f):
        return False
    frequency = f["moe_layer_freq"]
    return frequency == 1 or (isinstance(frequency, list) and 0 not in frequency)


def _synchronizing_preprocess(f: Facts, v: Versions) -> bool:
    return (
        "moe_preprocess" in f["graph.modules"]
        and layerwise(f, v)
        and not dense(f)
        and f["moe_token_dispatcher_type"] == "alltoall"
        and not drop_and_pad(f)
        and (capacity(f) is not None or bool(f["moe_router_padding_for_fp8"]))
    )


def _moe_to_router(f: Facts, v: Versions) -> dict[str, Any]:
    """Router and preprocessing in place of the whole MoE layer where the rules take them, else fewer scopes."""
    modules = [name for name in f["graph.modules"] if name != "moe"]
    for extra in (("moe_router", "moe_preprocess"), ("moe_router",)):
        wanted = tuple(dict.fromkeys((*modules, *extra)))
        overlay = mends.Overlay(f, f["graph.impl"], wanted)
        if mends.closed(f["graph.impl"], wanted) and not mends.rejected(config_rules(v.minor), overlay, v):
            return mends.scopes(f, v, wanted)
    return narrower(f, v)


RULES = (
    Rule(
        code="CG101",
        title="Scopes moe and moe_router together",
        layer="config",
        severity="error",
        mcore=(16, None),
        when=lambda f, v: "moe" in f["graph.modules"] and "moe_router" in f["graph.modules"] and layerwise(f, v),
        message="the scopes hold moe and moe_router; the whole MoE layer already contains its router",
        mend="keep one of the two: moe for drop-and-pad MoE, moe_router for dropless MoE",
        fix=narrower,
        why="moe captures the whole MoE layer, moe_router only its head; capturing the head twice is not possible.",
        source=CONFIG,
        upstream=("must not contain both moe and moe_router",),
        bad=(
            Example(
                {
                    **MOE,
                    "cuda_graph_modules": ["moe", "moe_router"],
                    "moe_expert_capacity_factor": 1.0,
                    "moe_pad_expert_input_to_capacity": True,
                },
                TE_19,
            ),
        ),
        good=(Example({**MOE, "cuda_graph_modules": ["moe_router"]}, TE_19),),
    ),
    Rule(
        code="CG102",
        title="Scope moe_preprocess without moe_router",
        layer="config",
        severity="error",
        mcore=(16, None),
        when=lambda f, v: (
            "moe_preprocess" in f["graph.modules"] and "moe_router" not in f["graph.modules"] and layerwise(f, v)
        ),
        message="moe_preprocess is captured only together with moe_router",
        mend="add moe_router to the scopes, or drop moe_preprocess",
        fix=narrower,
        why="The preprocessing reads what the router writes; the two share one graph. The local implementation adds "
        "the missing "
        "one by itself, Transformer Engine's does not.",
        source=CONFIG,
        upstream=("moe_preprocess cuda graph is only supported with moe_router cuda graph.",),
        bad=(Example({**MOE, "cuda_graph_modules": ["moe_preprocess"]}, TE_19),),
        good=(
            Example({**MOE, "cuda_graph_modules": ["moe_router", "moe_preprocess"]}, TE_19),
            Example({**MOE, "cuda_graph_impl": "local", "cuda_graph_modules": ["moe_preprocess"]}, TE_19),
        ),
    ),
    Rule(
        code="CG103",
        title="MoE scopes on a dense model",
        layer="config",
        severity="error",
        mcore=(16, None),
        when=lambda f, v: (
            ("moe" in f["graph.modules"] or "moe_router" in f["graph.modules"]) and layerwise(f, v) and dense(f)
        ),
        message="the scopes {graph.modules} name parts of an MoE layer, and num_moe_experts is {num_moe_experts}",
        mend="drop moe, moe_router and moe_preprocess; a dense model has attn and mlp",
        fix=narrower,
        why="A model without experts (or with a single one, which upstream counts as dense) has no MoE layer to "
        "capture.",
        source=CONFIG,
        upstream=("moe cuda graph is only supported for MoE.",),
        bad=(
            Example({**DENSE, "cuda_graph_modules": ["attn", "moe_router"]}, TE_19),
            Example({**DENSE, "num_moe_experts": 1, "cuda_graph_scope": ["moe_router"]}, {"mcore": "0.16"}),
        ),
        good=(Example({**DENSE, "cuda_graph_modules": ["attn", "mlp"]}, TE_19),),
    ),
    Rule(
        code="CG104",
        title="Scope mlp where every layer is MoE",
        layer="config",
        severity="error",
        mcore=(16, None),
        when=_mlp_without_dense_layers,
        message="mlp captures dense layers, and moe_layer_freq={moe_layer_freq} leaves none",
        mend="drop mlp",
        fix=narrower,
        why="With moe_layer_freq 1, or a pattern without a 0, every layer is an MoE layer. A frequency of 2 or more "
        "leaves dense "
        "layers and passes.",
        source=CONFIG,
        upstream=("mlp cuda graph is only supported for dense layers, but not found in the model.",),
        bad=(
            Example({**MOE, "cuda_graph_modules": ["attn", "mlp"]}, TE_19),
            Example({**MOE, "cuda_graph_modules": ["mlp"], "moe_layer_freq": [1, 1]}, TE_19),
        ),
        good=(
            Example({**MOE, "cuda_graph_modules": ["mlp"], "moe_layer_freq": [0, 1]}, TE_19),
            Example({**MOE, "cuda_graph_modules": ["mlp"], "moe_layer_freq": 2}, TE_19),
        ),
    ),
    Rule(
        code="CG105",
        title="Scope moe on a dropless MoE",
        layer="config",
        severity="error",
        mcore=(16, None),
        when=lambda f, v: "moe" in f["graph.modules"] and layerwise(f, v) and not dense(f) and not drop_and_pad(f),
        message="the whole MoE layer is captured only for drop-and-pad MoE; moe_expert_capacity_factor is "
        "{moe_expert_capacity_factor}, moe_pad_expert_input_to_capacity is {moe_pad_expert_input_to_capacity}",
        mend="moe_router and moe_preprocess instead of moe (then attn); or set a capacity factor and "
        "moe_pad_expert_input_to_capacity=True, which drops tokens",
        fix=_moe_to_router,
        why="Without padding to a capacity the number of tokens an expert gets changes with every batch, and the "
        "dispatcher "
        "copies it to the host; neither can be recorded.",
        source=CONFIG,
        upstream=("moe cuda graph is only supported with drop-padding MoE.",),
        bad=(Example({**MOE, "cuda_graph_modules": ["moe"]}, TE_19),),
        good=(
            Example(
                {
                    **MOE,
                    "cuda_graph_modules": ["moe"],
                    "moe_expert_capacity_factor": 1.0,
                    "moe_pad_expert_input_to_capacity": True,
                },
                TE_19,
            ),
            Example({**MOE, "cuda_graph_modules": ["moe_router", "moe_preprocess"]}, TE_19),
        ),
    ),
    Rule(
        code="CG106",
        title="Scope moe_preprocess where the preprocessing synchronizes",
        layer="config",
        severity="error",
        mcore=(16, None),
        when=_synchronizing_preprocess,
        message="with the alltoall dispatcher, moe_expert_capacity_factor={moe_expert_capacity_factor} without "
        "padding and "
        "moe_router_padding_for_fp8={moe_router_padding_for_fp8}, the preprocessing copies counts to the host",
        mend="drop moe_preprocess and keep moe_router",
        fix=narrower,
        why="The alltoall dispatcher reads token counts on the host when it drops without padding or pads for FP8; a "
        "copy to the "
        "host and the wait for it cannot be recorded.",
        source=CONFIG,
        upstream=("moe_preprocess cuda graph is not supported when there are DtoH copies and synchronizations",),
        bad=(
            Example(
                {
                    **MOE,
                    "cuda_graph_modules": ["attn", "moe_router", "moe_preprocess"],
                    "moe_expert_capacity_factor": 1.25,
                },
                TE_19,
            ),
            Example(
                {**MOE, "cuda_graph_modules": ["moe_router", "moe_preprocess"], "moe_router_padding_for_fp8": True},
                TE_19,
            ),
        ),
        good=(
            Example({**MOE, "cuda_graph_modules": ["attn", "moe_router"], "moe_expert_capacity_factor": 1.25}, TE_19),
        ),
    ),
    Rule(
        code="CG107",
        title="Scope full_iteration with Transformer Engine graphs",
        layer="config",
        severity="error",
        mcore=(16, 17),
        when=lambda f, v: f["graph.impl"] == "transformer_engine" and "full_iteration" in f["graph.modules"],
        message="full_iteration is a scope of the local implementation, and cuda_graph_impl is transformer_engine",
        mend='set cuda_graph_impl="local" with the scope full_iteration alone',
        fix=mends.full_iteration,
        why="Transformer Engine captures layers; the whole iteration is captured by megatron-core itself.",
        source=CONFIG,
        upstream=("To use full iteration cuda graph, please use cuda_graph_impl=local instead",),
        bad=(Example({**DENSE, "cuda_graph_scope": ["full_iteration"]}, {"mcore": "0.17"}),),
        good=(Example({"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}, {"mcore": "0.17"}),),
    ),
    Rule(
        code="CG108",
        title="Local graphs on inference-optimized gated experts",
        layer="config",
        severity="error",
        mcore=(17, 17),
        when=lambda f, v: (
            f["cuda_graph_impl"] == "local"
            and f["transformer_impl"] == "inference_optimized"
            and f["num_moe_experts"] is not None
            and bool(f["gated_linear_unit"])
        ),
        message="transformer_impl=inference_optimized with gated experts has no local CUDA graphs",
        mend="turn graphs off, or use an activation without a gate",
        fix=mends.off,
        why="The fused inference kernel and megatron-core lay the gated weights out differently.",
        source=CONFIG,
        upstream=("--transformer-impl='inference_optimized' does not yet support CUDA graphs with gated linear units",),
        bad=(
            Example(
                {
                    **MOE,
                    "cuda_graph_impl": "local",
                    "transformer_impl": "inference_optimized",
                    "gated_linear_unit": True,
                    "moe_router_dtype": "fp32",
                },
                {"mcore": "0.17"},
            ),
        ),
        good=(Example({**MOE, "cuda_graph_impl": "local", "gated_linear_unit": True}, {"mcore": "0.17"}),),
    ),
    Rule(
        code="CG109",
        title="Local graphs on inference-optimized experts with TE's grouped GEMM",
        layer="config",
        severity="error",
        mcore=(17, 17),
        when=lambda f, v: (
            f["cuda_graph_impl"] == "local"
            and f["transformer_impl"] == "inference_optimized"
            and f["num_moe_experts"] is not None
            and f["inference_grouped_gemm_backend"] == "te"
        ),
        message="inference_grouped_gemm_backend=te does not go with local CUDA graphs",
        mend='set inference_grouped_gemm_backend="torch" (or auto), or turn graphs off',
        fix=mends.off,
        why="TE's grouped GEMM reads the sizes of the groups on the host.",
        source=CONFIG,
        upstream=("TE GroupedGEMM is not supported with CUDA graphs.",),
        bad=(
            Example(
                {
                    **MOE,
                    "cuda_graph_impl": "local",
                    "transformer_impl": "inference_optimized",
                    "inference_grouped_gemm_backend": "te",
                },
                {"mcore": "0.17"},
            ),
        ),
        good=(
            Example(
                {
                    **MOE,
                    "cuda_graph_impl": "local",
                    "transformer_impl": "inference_optimized",
                    "inference_grouped_gemm_backend": "torch",
                },
                {"mcore": "0.17"},
            ),
        ),
    ),
)
