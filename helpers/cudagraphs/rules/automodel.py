# SPDX-License-Identifier: Apache-2.0
"""CG6xx: NeMo AutoModel's partial graphs (`backend.cuda_graph.modules`)."""

from __future__ import annotations

from typing import Any

from cudagraphs.rules.base import AUTOMODEL, Example, Facts, Rule

MODULES = "backend.cuda_graph.modules"
KNOWN = ("attn", "te_dpa", "moe_router", "moe_preprocess")
BACKEND = "nemo_automodel/components/models/common/utils.py BackendConfig.__post_init__"
GRAPHS = "nemo_automodel/components/models/common/utils.py CudaGraphConfig.__post_init__"
PARTIAL = "nemo_automodel/components/cuda_graphs/partial.py PartialCudaGraphManager.from_model_parts"
NEW = {"automodel": "0.7.0"}
ATTN = {
    MODULES: ["attn"],
    "backend.attn": "te",
    "backend.linear": "torch",
    "backend.rms_norm": "torch",
}
DPA = {MODULES: ["te_dpa"], "backend.attn": "te"}
ROUTER = {MODULES: ["moe_router"]}


def modules(f: Facts) -> list[Any]:
    return f[MODULES] if isinstance(f[MODULES], list) else []


def attention(f: Facts) -> bool:
    return "attn" in modules(f) or "te_dpa" in modules(f)


def _without(*gone: str):
    return lambda f, v: {MODULES: [name for name in modules(f) if name not in gone]}


def _rule(**fields: Any) -> Rule:
    return Rule(frameworks=(AUTOMODEL,), automodel=((0, 6), None), severity="error", layer="automodel", **fields)


RULES = (
    _rule(
        code="CG601",
        title="Graph modules that AutoModel does not have",
        when=lambda f, v: not isinstance(f[MODULES], list) or any(name not in KNOWN for name in f[MODULES]),
        message="backend.cuda_graph.modules={backend.cuda_graph.modules}",
        mend="give a list of names out of attn, te_dpa, moe_router and moe_preprocess",
        fix=lambda f, v: {
            MODULES: [
                name for name in (f[MODULES].split(",") if isinstance(f[MODULES], str) else modules(f)) if name in KNOWN
            ]
        },
        why="The names follow Megatron-Core's where AutoModel has the same boundary, and no others are taken; mlp, "
        "moe and mamba "
        "are not among them.",
        source=GRAPHS,
        upstream=("Unsupported cuda_graph.modules", "cuda_graph.modules must be a list"),
        bad=(Example({MODULES: ["attn", "mlp"]}, NEW), Example({MODULES: "attn"}, NEW)),
        good=(Example(ATTN, NEW),),
    ),
    _rule(
        code="CG602",
        title="A graph module named twice",
        when=lambda f, v: len(modules(f)) != len(set(map(str, modules(f)))),
        message="backend.cuda_graph.modules={backend.cuda_graph.modules}",
        mend="name each module once",
        fix=lambda f, v: {MODULES: list(dict.fromkeys(modules(f)))},
        why="Each name selects one boundary in every layer.",
        source=GRAPHS,
        upstream=("cuda_graph.modules must not contain duplicates",),
        bad=(Example({MODULES: ["te_dpa", "te_dpa"]}, NEW),),
        good=(Example(DPA, NEW),),
    ),
    _rule(
        code="CG603",
        title="Whole attention and its inner part together",
        when=lambda f, v: "attn" in modules(f) and "te_dpa" in modules(f),
        message="attn and te_dpa are both captured; te_dpa lies inside attn",
        mend="keep te_dpa (narrow) or attn (whole)",
        fix=_without("attn"),
        why="The dot-product attention is a part of the attention module and cannot be captured twice.",
        source=GRAPHS,
        upstream=("cuda_graph.modules cannot contain both 'attn' and 'te_dpa'",),
        bad=(Example({**ATTN, MODULES: ["attn", "te_dpa"]}, NEW),),
        good=(Example(ATTN, NEW),),
    ),
    _rule(
        code="CG604",
        title="Module moe_preprocess without moe_router",
        when=lambda f, v: "moe_preprocess" in modules(f) and "moe_router" not in modules(f),
        message="moe_preprocess is captured only together with moe_router",
        mend="add moe_router, or drop moe_preprocess",
        fix=_without("moe_preprocess"),
        why="The preprocessing reads what the router writes; the two share one graph.",
        source=GRAPHS,
        upstream=("'moe_preprocess' in cuda_graph.modules requires 'moe_router'",),
        bad=(Example({MODULES: ["moe_preprocess"], "backend.dispatcher": "hybridep"}, NEW),),
        good=(Example({MODULES: ["moe_router", "moe_preprocess"], "backend.dispatcher": "hybridep"}, NEW),),
    ),
    _rule(
        code="CG605",
        title="Captured attention that is not Transformer Engine's",
        when=lambda f, v: attention(f) and f["backend.attn"] != "te",
        message="backend.attn={backend.attn}, and attention is captured",
        mend="set backend.attn: te, or drop attn and te_dpa",
        fix=_without("attn", "te_dpa"),
        why="The graphs are made by Transformer Engine, around its own attention module.",
        source=BACKEND,
        upstream=("in cuda_graph.modules requires attn='te'",),
        bad=(Example({**DPA, "backend.attn": "sdpa"}, NEW),),
        good=(Example(DPA, NEW),),
    ),
    _rule(
        code="CG606",
        title="Whole-attention capture with other than plain PyTorch layers",
        when=lambda f, v: "attn" in modules(f) and (f["backend.linear"] != "torch" or f["backend.rms_norm"] != "torch"),
        message="attn is captured with backend.linear={backend.linear} and backend.rms_norm={backend.rms_norm}",
        mend="use te_dpa instead; or set backend.linear: torch and backend.rms_norm: torch (the default is torch_fp32)",
        fix=lambda f, v: {MODULES: ["te_dpa" if name == "attn" else name for name in modules(f)]},
        why="The whole attention is called with its parameters as arguments, so that sharded parameters may move; "
        "only the plain "
        "modules can be called that way.",
        source=BACKEND,
        upstream=(
            "'attn' in cuda_graph.modules currently requires linear='torch'",
            "'attn' in cuda_graph.modules currently requires rms_norm='torch'",
        ),
        bad=(
            Example({**ATTN, "backend.rms_norm": "torch_fp32"}, NEW),
            Example({**ATTN, "backend.linear": "te"}, NEW),
        ),
        good=(Example(ATTN, NEW), Example({**DPA, "backend.linear": "te"}, NEW)),
    ),
    _rule(
        code="CG607",
        title="Captured attention in FP8",
        when=lambda f, v: attention(f) and bool(f["backend.te_fp8.recipe.fp8_dpa"]),
        message="the dot-product attention runs in FP8 and is captured",
        mend="set fp8_dpa: false in the FP8 recipe, or drop attn and te_dpa",
        fix=_without("attn", "te_dpa"),
        why="The scaling factors of an FP8 attention are kept outside what is captured.",
        source=BACKEND,
        upstream=("in cuda_graph.modules requires BF16 dot-product attention",),
        bad=(Example({**DPA, "backend.te_fp8.recipe.fp8_dpa": True}, NEW),),
        good=(Example(DPA, NEW),),
    ),
    _rule(
        code="CG608",
        title="Captured router that is a stand-in",
        when=lambda f, v: "moe_router" in modules(f) and bool(f["backend.fake_balanced_gate"]),
        message="backend.fake_balanced_gate is on, and the router is captured",
        mend="set backend.fake_balanced_gate: false, or drop moe_router and moe_preprocess",
        fix=_without("moe_router", "moe_preprocess"),
        why="The stand-in that balances experts for benchmarks has no graph of its own.",
        source=BACKEND,
        upstream=("'moe_router' in cuda_graph.modules requires the learned Gate",),
        bad=(Example({**ROUTER, "backend.fake_balanced_gate": True}, NEW),),
        good=(Example(ROUTER, NEW),),
    ),
    _rule(
        code="CG609",
        title="Module moe_preprocess with another dispatcher",
        when=lambda f, v: "moe_preprocess" in modules(f) and f["backend.dispatcher"] != "hybridep",
        message="moe_preprocess is captured, and backend.dispatcher is {backend.dispatcher}",
        mend="set backend.dispatcher: hybridep, or drop moe_preprocess",
        fix=_without("moe_preprocess"),
        why="Only HybridEP prepares the dispatch on the device.",
        source=BACKEND,
        upstream=("'moe_preprocess' in cuda_graph.modules requires dispatcher='hybridep'",),
        bad=(Example({MODULES: ["moe_router", "moe_preprocess"], "backend.dispatcher": "deepep"}, NEW),),
        good=(Example({MODULES: ["moe_router", "moe_preprocess"], "backend.dispatcher": "hybridep"}, NEW),),
    ),
    _rule(
        code="CG610",
        title="Partial graphs with pipeline parallelism",
        when=lambda f, v: bool(modules(f)) and (f["distributed.pp_size"] or 1) > 1,
        message="distributed.pp_size={distributed.pp_size}, and partial graphs need one model root",
        mend="set distributed.pp_size: 1, or empty backend.cuda_graph.modules",
        fix=lambda f, v: {MODULES: []},
        why="Microbatches in flight would overwrite each other's static buffers.",
        source=PARTIAL,
        upstream=("Partial CUDA graphs require one non-pipeline model root",),
        bad=(Example({**DPA, "distributed.pp_size": 2}, NEW),),
        good=(Example(DPA, NEW),),
    ),
    _rule(
        code="CG611",
        title="Activation checkpointing over what is captured",
        when=lambda f, v: (
            bool(f["distributed.activation_checkpointing"]) and bool(set(map(str, modules(f))) - {"te_dpa"})
        ),
        message="activation checkpointing with the captured modules {backend.cuda_graph.modules}",
        mend="keep te_dpa only, or turn distributed.activation_checkpointing off",
        fix=lambda f, v: {MODULES: [name for name in modules(f) if name == "te_dpa"]},
        why="Checkpointing runs the captured module a second time within one backward pass; the narrow attention "
        "allows it, the "
        "whole attention and the router do not.",
        source=PARTIAL,
        upstream=(
            "Whole-attention CUDA graphs do not support activation checkpointing",
            "PyTorch activation checkpointing cannot recompute across the partial MoE router/preprocess CUDA graph "
            "scope",
        ),
        bad=(Example({**ATTN, "distributed.activation_checkpointing": True}, NEW),),
        good=(Example({**DPA, "distributed.activation_checkpointing": True}, NEW),),
    ),
    _rule(
        code="CG612",
        title="Captured router with replay or a score correction",
        when=lambda f, v: (
            "moe_router" in modules(f) and bool(f["automodel.router_replay"] or f["automodel.score_correction_bias"])
        ),
        message="the router is captured, and it replays routes or corrects scores with a bias",
        mend="drop moe_router and moe_preprocess (DeepSeek-V3 and its kin correct scores), or turn router replay off",
        fix=_without("moe_router", "moe_preprocess"),
        why="Both change between steps outside what the graph sees.",
        source="nemo_automodel/components/cuda_graphs/partial.py _build_moe_router_entry",
        upstream=("Partial MoE router graphs require routing replay and score-correction bias to be disabled",),
        bad=(Example({**ROUTER, "automodel.score_correction_bias": True}, NEW),),
        good=(Example(ROUTER, NEW),),
    ),
    _rule(
        code="CG613",
        title="Captured modules that are shared or repeated",
        when=lambda f, v: bool(modules(f)) and bool(f["automodel.repeated_mtp_layer"] or f["automodel.shared_modules"]),
        message="a captured module is called several times a step (repeated multi-token prediction, shared or tied "
        "modules)",
        mend="empty backend.cuda_graph.modules, or use a model that repeats no layer",
        fix=lambda f, v: {MODULES: []},
        why="One physical module would need one set of static buffers a call.",
        source="nemo_automodel/components/cuda_graphs/partial.py _select_graph_targets",
        upstream=("cannot capture repeated-layer MTP", "selected a shared physical target more than once"),
        bad=(Example({**DPA, "automodel.repeated_mtp_layer": True}, NEW),),
        good=(Example(DPA, NEW),),
    ),
    _rule(
        code="CG614",
        title="A graph block that AutoModel does not read",
        when=lambda f, v: (
            any(name.startswith("backend.cuda_graph.") and name != MODULES for name in f)
            or ("backend.cuda_graph" in f and not isinstance(f["backend.cuda_graph"], dict))
        ),
        message="backend.cuda_graph is not a block with modules alone",
        mend="write a block with the one key modules; an empty list turns graphs off",
        why="The block is built with its keys as arguments, and modules is the only one; anything but a block is "
        "refused.",
        source="nemo_automodel/components/models/common/utils.py CudaGraphConfig",
        upstream=(
            "CudaGraphConfig.__init__() got an unexpected keyword argument",
            "cuda_graph must be a CudaGraphConfig or mapping",
        ),
        bad=(
            Example({"backend.cuda_graph.module": ["te_dpa"], "backend.attn": "te"}, NEW),
            Example({"backend.cuda_graph": "attn"}, NEW),
        ),
        good=(Example(DPA, NEW),),
    ),
)
