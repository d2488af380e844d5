# SPDX-License-Identifier: Apache-2.0
"""CG2xx: activation recomputation, dropout and offloading beside graphs."""

from __future__ import annotations

from typing import Any

from cudagraphs.rules import mends
from cudagraphs.rules.base import Example, Facts, Rule
from cudagraphs.rules.names import CONFIG
from cudagraphs.rules.registry import config_rules
from cudagraphs.versions import Versions

NEW = {"mcore": "0.19"}
TE = {"cuda_graph_impl": "transformer_engine"}
FULL = {"cuda_graph_impl": "full_iteration"}
MOE = {**TE, "num_moe_experts": 8, "moe_token_dispatcher_type": "alltoall"}
PADDED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OFFLOAD = {"fine_grained_activation_offloading": True}
# what the local implementation may offload beside partial MoE capture, from 0.19 on
LOCAL_OFFLOAD = ("expert_fc1", "moe_act", "fused_group_mlp")
narrower = mends.narrower(config_rules)


def whole(f: Facts) -> bool:
    """Everything inside a layer is captured: each layer whole, or the whole iteration."""
    return f["graph.whole_layer"] or f["graph.full_iteration"]


def captured(f: Facts, name: str) -> bool:
    return name in f["graph.modules"] or whole(f)


def recomputed(f: Facts, name: str) -> bool:
    return f["recompute.granularity"] == "selective" and name in f["recompute.modules"]


def offload_modules(f: Facts) -> set[str]:
    return set(f["offload_modules"] or ())


def _cpu_offloading(f: Facts, v: Versions) -> bool:
    if not f["cpu_offloading"]:
        return False
    if v.minor <= 14:
        return bool(f["enable_cuda_graph"])
    return f["graph.active"] and not (v.minor >= 18 and f["graph.full_iteration"])


def _any_recompute(f: Facts, v: Versions) -> bool:
    if f["recompute.granularity"] is None:
        return False
    if v.minor <= 14:
        return bool(f["enable_cuda_graph"])
    allowed = (
        f["recompute.granularity"] == "selective"
        and f["graph.impl"] == "transformer_engine"
        and f["cuda_graph_scope"] == "attn"
    )
    return f["graph.active"] and not allowed


def _recompute_fix(f: Facts, v: Versions) -> dict[str, Any]:
    """In 0.15 TE's attn scope allows selective recompute of what lies outside attention."""
    outside = not {"core_attn", "mla_up_proj"} & set(f["recompute.modules"])
    if (
        v.minor == 15
        and f["graph.impl"] == "transformer_engine"
        and f["recompute.granularity"] == "selective"
        and outside
    ):
        return mends.scopes(f, v, ("attn",))
    return mends.off(f, v)


def _full_recompute(f: Facts, v: Versions) -> bool:
    if f["recompute.granularity"] in (None, "selective") or not f["graph.active"]:
        return False
    return f["graph.impl"] != "full_iteration" if v.minor >= 18 else f["graph.modules"] != ("full_iteration",)


def _offload_impl(f: Facts, v: Versions) -> bool:
    if not f["fine_grained_activation_offloading"] or f["graph.impl"] in (
        "none",
        "transformer_engine",
        "full_iteration",
    ):
        return False
    if v.minor >= 19:
        modules = offload_modules(f)
        return not (modules and modules <= set(LOCAL_OFFLOAD) and "moe" not in f["graph.modules"])
    return True


def _local_offload_fix(f: Facts, v: Versions) -> dict[str, Any]:
    """Transformer Engine takes any offloading: the same scopes under it, or as many as the rules accept."""
    modules = f["graph.modules"]
    if not mends.rejected(config_rules(v.minor), mends.Overlay(f, "transformer_engine", modules), v):
        overrides = {"cuda_graph_impl": "transformer_engine", **mends.scopes(f, v, modules)}
    else:
        overlay = mends.Overlay(f, "transformer_engine", modules)
        overrides = mends.fewest_changes(overlay, v, config_rules(v.minor))
        if overrides.get("cuda_graph_impl") != "none":
            overrides["cuda_graph_impl"] = "transformer_engine"
    if mends.known(f, "inference_cuda_graph_scope") not in (None, "none"):
        overrides["inference_cuda_graph_scope"] = None
    if overrides.get("cuda_graph_impl") == "transformer_engine" and mends.known(f, "enable_cuda_graph"):
        overrides["enable_cuda_graph"] = False
    return overrides


RULES = (
    Rule(
        code="CG201",
        title="CPU offloading with graphs",
        layer="config",
        severity="error",
        when=_cpu_offloading,
        message="cpu_offloading does not go with the implementation {graph.impl} in this version",
        mend="turn graphs off, or turn cpu_offloading off; from 0.18 full-iteration capture passes this check",
        fix=mends.off,
        why="The offloading hooks copy between host and device on their own stream at every layer, which the graphs "
        "of single "
        "layers cannot hold. From 0.18 full-iteration capture is let through.",
        source=CONFIG,
        upstream=("CUDA graphs not supported with CPU offloading.",),
        bad=(
            Example({**TE, "cpu_offloading": True, "cpu_offloading_num_layers": 1}, NEW),
            Example(
                {"enable_cuda_graph": True, "cpu_offloading": True, "cpu_offloading_num_layers": 1}, {"mcore": "0.13"}
            ),
        ),
        good=(
            Example({**FULL, "cpu_offloading": True, "cpu_offloading_num_layers": 1}, {"mcore": "0.18"}),
            Example(
                {"external_cuda_graph": True, "cpu_offloading": True, "cpu_offloading_num_layers": 1}, {"mcore": "0.14"}
            ),
        ),
    ),
    Rule(
        code="CG202",
        title="Recompute with graphs in an old version",
        layer="config",
        severity="error",
        mcore=(13, 15),
        when=_any_recompute,
        message="recompute_granularity={recompute.granularity} does not go with graphs in this version",
        mend="turn recompute off or turn graphs off; 0.15 allows selective recompute with transformer_engine and the "
        "scope "
        '"attn" written as a plain string; newer versions allow more',
        fix=_recompute_fix,
        why="Up to 0.14 enable_cuda_graph excludes every recompute. 0.15 lets one combination through and compares "
        "the scope "
        'with the string "attn", so a list with that one name fails too.',
        source=CONFIG,
        upstream=("CUDA graphs not supported with activation recomputation.",),
        bad=(
            Example({"cuda_graph_impl": "local", "recompute_granularity": "selective"}, {"mcore": "0.15"}),
            Example(
                {
                    **TE,
                    "cuda_graph_scope": ["attn"],
                    "recompute_granularity": "selective",
                    "recompute_modules": ["mlp"],
                },
                {"mcore": "0.15"},
            ),
            Example({"enable_cuda_graph": True, "recompute_granularity": "selective"}, {"mcore": "0.14"}),
        ),
        good=(
            Example(
                {**TE, "cuda_graph_scope": "attn", "recompute_granularity": "selective", "recompute_modules": ["mlp"]},
                {"mcore": "0.15"},
            ),
        ),
    ),
    Rule(
        code="CG203",
        title="Recompute inside a captured attention in 0.15",
        layer="config",
        severity="error",
        mcore=(15, 15),
        when=lambda f, v: (
            f["graph.impl"] == "transformer_engine"
            and f["cuda_graph_scope"] == "attn"
            and (recomputed(f, "core_attn") or recomputed(f, "mla_up_proj"))
        ),
        message="attention is captured, and the recomputed modules {recompute.modules} lie inside it",
        mend="take core_attn and mla_up_proj out of recompute_modules (unset means core_attn), or turn graphs off",
        fix=mends.off,
        why="0.15 cannot recompute a part of what a graph holds.",
        source=CONFIG,
        upstream=("attn cuda graph is not supported with",),
        bad=(Example({**TE, "cuda_graph_scope": "attn", "recompute_granularity": "selective"}, {"mcore": "0.15"}),),
        good=(
            Example(
                {**TE, "cuda_graph_scope": "attn", "recompute_granularity": "selective", "recompute_modules": ["mlp"]},
                {"mcore": "0.15"},
            ),
        ),
    ),
    Rule(
        code="CG204",
        title="Full recompute with graphs of single layers",
        layer="config",
        severity="error",
        mcore=(16, None),
        when=_full_recompute,
        message="recompute_granularity={recompute.granularity} goes only with full-iteration capture; the "
        "implementation is "
        "{graph.impl} with the scopes {graph.modules}",
        mend="selective recompute with recompute_modules, or full-iteration capture, or no graphs",
        fix=mends.off,
        why="Full recompute runs each layer again in the backward pass, from outside the graphs that hold the layer. "
        "Only a "
        "graph of the whole iteration holds both runs. Up to 0.17 the scope must be full_iteration and nothing else.",
        source=CONFIG,
        upstream=("full recompute is only supported with full iteration CUDA graph.",),
        bad=(
            Example({**TE, **FULL_RECOMPUTE, "cuda_graph_modules": ["mlp"]}, NEW),
            Example(
                {"cuda_graph_impl": "local", **FULL_RECOMPUTE, "cuda_graph_scope": ["full_iteration", "attn"]},
                {"mcore": "0.17"},
            ),
        ),
        good=(
            Example({**FULL, **FULL_RECOMPUTE}, NEW),
            Example(
                {"cuda_graph_impl": "local", **FULL_RECOMPUTE, "cuda_graph_scope": ["full_iteration"]},
                {"mcore": "0.17"},
            ),
        ),
    ),
    Rule(
        code="CG205",
        title="MoE recompute with a captured router",
        layer="config",
        severity="error",
        mcore=(16, None),
        when=lambda f, v: (
            f["graph.impl"] == "transformer_engine" and "moe_router" in f["graph.modules"] and recomputed(f, "moe")
        ),
        message="the whole MoE layer is recomputed, and its router is captured by Transformer Engine",
        mend="drop moe_router and moe_preprocess from the scopes, or take moe out of recompute_modules (moe_act may "
        "stay)",
        fix=narrower,
        why="The recomputed MoE layer would run through the router's graph a second time within one backward pass.",
        source=CONFIG,
        upstream=("moe recompute is not supported with moe_router CUDA graph",),
        bad=(
            Example(
                {
                    **MOE,
                    "cuda_graph_modules": ["moe_router"],
                    "recompute_granularity": "selective",
                    "recompute_modules": ["moe"],
                },
                NEW,
            ),
            Example({**MOE, "cuda_graph_modules": ["moe_router"], "moe_layer_recompute": True}, NEW),
        ),
        good=(
            Example(
                {
                    **MOE,
                    "cuda_graph_modules": ["moe_router"],
                    "recompute_granularity": "selective",
                    "recompute_modules": ["moe_act"],
                    "moe_grouped_gemm": True,
                },
                NEW,
            ),
        ),
    ),
    Rule(
        code="CG206",
        title="Attention dropout in a captured attention that is recomputed",
        layer="config",
        severity="error",
        mcore=(16, None),
        when=lambda f, v: (
            f["graph.active"] and recomputed(f, "core_attn") and captured(f, "attn") and f["attention_dropout"] != 0.0
        ),
        message="attention is captured, core_attn is recomputed (recomputed modules: {recompute.modules}; core_attn "
        "where recompute_modules is not set), and attention_dropout is {attention_dropout}",
        mend="set attention_dropout to 0, or drop attn from the scopes, or recompute other modules; Transformer "
        "Engine's fused "
        "attention makes recomputing core_attn needless",
        fix=narrower,
        why="Recomputation must draw the same random numbers a second time, and a captured kernel cannot go back in "
        "its stream "
        "of random numbers. The default of attention_dropout is 0.1, not 0.",
        source=CONFIG,
        upstream=("attention dropout is not supported with graphed attention recomputation.",),
        bad=(Example({**TE, "cuda_graph_modules": ["attn"], "recompute_granularity": "selective"}, NEW),),
        good=(
            Example(
                {**TE, "cuda_graph_modules": ["attn"], "recompute_granularity": "selective", "attention_dropout": 0.0},
                NEW,
            ),
            Example({**TE, "cuda_graph_modules": ["mlp"], "recompute_granularity": "selective"}, NEW),
        ),
    ),
    Rule(
        code="CG207",
        title="Hidden dropout in a captured MLP or MoE layer that is recomputed",
        layer="config",
        severity="error",
        mcore=(16, None),
        when=lambda f, v: (
            f["graph.active"]
            and ((recomputed(f, "mlp") and captured(f, "mlp")) or (recomputed(f, "moe") and captured(f, "moe")))
            and f["hidden_dropout"] != 0.0
        ),
        message="a captured MLP or MoE layer is recomputed, and hidden_dropout is {hidden_dropout}",
        mend="set hidden_dropout to 0, or drop the recomputed module from the scopes, or from recompute_modules",
        fix=narrower,
        why="Recomputation must draw the same random numbers a second time, and a captured kernel cannot go back in "
        "its stream "
        "of random numbers. The default of hidden_dropout is 0.1, not 0.",
        source=CONFIG,
        upstream=("hidden dropout is not supported with graphed MLP/MoE recomputation.",),
        bad=(
            Example(
                {
                    **TE,
                    "cuda_graph_modules": ["mlp"],
                    "recompute_granularity": "selective",
                    "recompute_modules": ["mlp"],
                },
                NEW,
            ),
        ),
        good=(
            Example(
                {
                    **TE,
                    "cuda_graph_modules": ["mlp"],
                    "recompute_granularity": "selective",
                    "recompute_modules": ["mlp"],
                    "hidden_dropout": 0.0,
                },
                NEW,
            ),
        ),
    ),
    Rule(
        code="CG208",
        title="Input jitter in a captured MoE layer that is recomputed",
        layer="config",
        severity="error",
        mcore=(16, None),
        when=lambda f, v: (
            f["graph.active"] and recomputed(f, "moe") and captured(f, "moe") and f["moe_input_jitter_eps"] is not None
        ),
        message="a captured MoE layer is recomputed, and moe_input_jitter_eps is {moe_input_jitter_eps}",
        mend="unset moe_input_jitter_eps, or take moe out of recompute_modules",
        fix=narrower,
        why="The jitter is random, and recomputation would have to repeat it.",
        source=CONFIG,
        upstream=("moe_input_jitter_eps is not supported with graphed moe recomputation.",),
        bad=(
            Example(
                {
                    **MOE,
                    **PADDED,
                    "cuda_graph_modules": ["moe"],
                    "recompute_granularity": "selective",
                    "recompute_modules": ["moe"],
                    "moe_input_jitter_eps": 0.01,
                    "hidden_dropout": 0.0,
                },
                NEW,
            ),
        ),
        good=(
            Example(
                {
                    **MOE,
                    **PADDED,
                    "cuda_graph_modules": ["moe"],
                    "recompute_granularity": "selective",
                    "recompute_modules": ["moe"],
                    "hidden_dropout": 0.0,
                },
                NEW,
            ),
        ),
    ),
    Rule(
        code="CG209",
        title="Recomputed shared experts in local graphs with resharded weights",
        layer="config",
        severity="error",
        mcore=(19, None),
        when=lambda f, v: (
            f["graph.impl"] == "local"
            and recomputed(f, "shared_experts")
            and f["gtp_weight_remat_size"] > 1
            and (captured(f, "moe") or "moe_router" in f["graph.modules"])
            and (f["fp8"] is not None or f["fp4"] is not None)
            and f["moe_shared_expert_intermediate_size"] is not None
            and not f["moe_shared_expert_overlap"]
        ),
        message="shared experts are captured by local graphs and recomputed under FP8 or FP4, with "
        "gtp_weight_remat_size="
        "{gtp_weight_remat_size}",
        mend="take shared_experts out of recompute_modules, or use full-iteration capture",
        fix=narrower,
        why="Transformer Engine's checkpoint needs a plain backward call, and the warm-up of the local forward graph "
        "asks for "
        "gradients in another way.",
        source=CONFIG,
        upstream=("GTP + local CUDA graphs that capture shared_experts",),
        bad=(
            Example(
                {
                    **MOE,
                    "cuda_graph_impl": "local",
                    "cuda_graph_modules": ["moe_router"],
                    "gtp_weight_remat_size": 2,
                    "fp8": "hybrid",
                    "moe_shared_expert_intermediate_size": 2048,
                    "recompute_granularity": "selective",
                    "recompute_modules": ["shared_experts"],
                },
                NEW,
            ),
        ),
        good=(
            Example(
                {
                    **MOE,
                    "cuda_graph_impl": "local",
                    "cuda_graph_modules": ["moe_router"],
                    "gtp_weight_remat_size": 2,
                    "fp8": "hybrid",
                    "moe_shared_expert_intermediate_size": 2048,
                },
                NEW,
            ),
        ),
    ),
    Rule(
        code="CG210",
        title="Fine-grained activation offloading with local graphs",
        layer="config",
        severity="error",
        mcore=(18, None),
        when=_offload_impl,
        message="fine_grained_activation_offloading does not go with the local implementation and the scopes "
        "{graph.modules}",
        mend="use transformer_engine with the same scopes, or full-iteration capture; from 0.19 local may offload "
        "expert_fc1, moe_act or fused_group_mlp beside partial MoE scopes",
        fix=_local_offload_fix,
        why="Offloading has to know the order in which graphs are replayed; only Transformer Engine's graphs and "
        "full-iteration "
        "capture tell it, and from 0.19 the local implementation where the offloaded part runs outside its graphs.",
        source=CONFIG,
        upstream=(
            "fine-grained activation offloading is only supported with transformer_engine CUDA graph implementation",
        ),
        bad=(
            Example(
                {
                    "cuda_graph_impl": "local",
                    "cuda_graph_modules": ["attn"],
                    **OFFLOAD,
                    "offload_modules": ["core_attn"],
                },
                {"mcore": "0.18"},
            ),
        ),
        good=(
            Example(
                {**TE, "cuda_graph_modules": ["attn"], **OFFLOAD, "offload_modules": ["core_attn"]}, {"mcore": "0.18"}
            ),
            Example(
                {
                    **MOE,
                    "cuda_graph_impl": "local",
                    "cuda_graph_modules": ["moe_router"],
                    **OFFLOAD,
                    "offload_modules": ["moe_act"],
                },
                NEW,
            ),
        ),
    ),
    Rule(
        code="CG211",
        title="Local graphs offload only what lies outside them",
        layer="config",
        severity="error",
        mcore=(19, None),
        when=lambda f, v: (
            f["graph.impl"] == "local"
            and bool(f["fine_grained_activation_offloading"])
            and bool(offload_modules(f) - set(LOCAL_OFFLOAD))
        ),
        message="offload_modules {offload_modules} name more than expert_fc1, moe_act and fused_group_mlp",
        mend="use transformer_engine with the same scopes, or offload only expert_fc1, moe_act or fused_group_mlp",
        fix=_local_offload_fix,
        why="The local implementation can leave these three outside its graphs, and nothing else.",
        source=CONFIG,
        upstream=("fine-grained activation offloading with cuda_graph_impl='local' only supports offload_modules",),
        bad=(
            Example(
                {
                    **MOE,
                    "cuda_graph_impl": "local",
                    "cuda_graph_modules": ["moe_router"],
                    **OFFLOAD,
                    "offload_modules": ["core_attn"],
                },
                NEW,
            ),
        ),
        good=(
            Example(
                {
                    **MOE,
                    "cuda_graph_impl": "local",
                    "cuda_graph_modules": ["moe_router"],
                    **OFFLOAD,
                    "offload_modules": ["expert_fc1"],
                },
                NEW,
            ),
        ),
    ),
    Rule(
        code="CG212",
        title="Offloading with whole layers in local graphs",
        layer="config",
        severity="error",
        mcore=(19, None),
        when=lambda f, v: (
            f["graph.impl"] == "local" and bool(f["fine_grained_activation_offloading"]) and not f["graph.modules"]
        ),
        message="fine_grained_activation_offloading does not go with local graphs of whole layers",
        mend="name scopes that leave the offloaded part out (attn, moe_router), or use transformer_engine",
        fix=_local_offload_fix,
        why="A graph of the whole layer contains what is to be offloaded.",
        source=CONFIG,
        upstream=("is not supported with whole-layer CUDA graph capture.",),
        bad=(Example({**MOE, "cuda_graph_impl": "local", **OFFLOAD, "offload_modules": ["moe_act"]}, NEW),),
        good=(
            Example(
                {
                    **MOE,
                    "cuda_graph_impl": "local",
                    "cuda_graph_modules": ["attn", "moe_router"],
                    **OFFLOAD,
                    "offload_modules": ["moe_act"],
                },
                NEW,
            ),
        ),
    ),
    Rule(
        code="CG213",
        title="Scope moe with fine-grained activation offloading",
        layer="config",
        severity="error",
        mcore=(18, None),
        when=lambda f, v: (
            "moe" in f["graph.modules"] and f["graph.active"] and bool(f["fine_grained_activation_offloading"])
        ),
        message="the whole MoE layer is captured while activations are offloaded",
        mend="drop moe from the scopes, or turn fine_grained_activation_offloading off",
        fix=narrower,
        why="Upstream does not support offloading inside a captured drop-and-pad MoE layer yet.",
        source=CONFIG,
        upstream=("Token-drop MoE is temporarily not supported with activation offloading.",),
        bad=(
            Example(
                {**MOE, **PADDED, "cuda_graph_modules": ["attn", "moe"], **OFFLOAD, "offload_modules": ["core_attn"]},
                NEW,
            ),
        ),
        good=(Example({**MOE, "cuda_graph_modules": ["attn"], **OFFLOAD, "offload_modules": ["core_attn"]}, NEW),),
    ),
    Rule(
        code="CG214",
        title="Offloading without a warmup step",
        layer="config",
        severity="error",
        mcore=(18, None),
        when=lambda f, v: (
            f["graph.active"] and bool(f["fine_grained_activation_offloading"]) and f["cuda_graph_warmup_steps"] <= 0
        ),
        message="cuda_graph_warmup_steps is {cuda_graph_warmup_steps}, and offloading must see an eager step first",
        mend="set cuda_graph_warmup_steps to 1 or more (3 is the default)",
        fix=lambda f, v: {"cuda_graph_warmup_steps": 3},
        why="The offloading manager learns the order and sizes of the tensors during an eager step.",
        source=CONFIG,
        upstream=("cuda_graph_warmup_steps must be greater than 0",),
        bad=(
            Example(
                {
                    **TE,
                    "cuda_graph_modules": ["attn"],
                    **OFFLOAD,
                    "offload_modules": ["core_attn"],
                    "cuda_graph_warmup_steps": 0,
                },
                NEW,
            ),
        ),
        good=(Example({**TE, "cuda_graph_modules": ["attn"], **OFFLOAD, "offload_modules": ["core_attn"]}, NEW),),
    ),
    Rule(
        code="CG215",
        title="Offloading in a full-iteration graph without a limit in flight",
        layer="config",
        severity="error",
        mcore=(18, None),
        when=lambda f, v: (
            f["graph.full_iteration"]
            and bool(f["fine_grained_activation_offloading"])
            and (
                f["fine_grained_offloading_max_inflight_offloads"] is None
                or f["fine_grained_offloading_max_inflight_offloads"] < 0
            )
        ),
        message="fine_grained_offloading_max_inflight_offloads is {fine_grained_offloading_max_inflight_offloads}",
        mend="set fine_grained_offloading_max_inflight_offloads to 0 or more, for example 1",
        fix=lambda f, v: {"fine_grained_offloading_max_inflight_offloads": 1},
        why="Inside one graph the offloads cannot wait for the host, so their number in flight has to be fixed before.",
        source=CONFIG,
        upstream=("fine_grained_offloading_max_inflight_offloads must be a non-negative integer",),
        bad=(Example({**FULL, **OFFLOAD, "offload_modules": ["core_attn"]}, NEW),),
        good=(
            Example(
                {
                    **FULL,
                    **OFFLOAD,
                    "offload_modules": ["core_attn"],
                    "fine_grained_offloading_max_inflight_offloads": 1,
                },
                NEW,
            ),
        ),
    ),
)
