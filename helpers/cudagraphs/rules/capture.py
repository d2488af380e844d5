# SPDX-License-Identifier: Apache-2.0
"""CG7xx: what every check lets pass, and what then fails at capture, captures nothing, or replays something stale."""

from __future__ import annotations

from typing import Any

from cudagraphs.rules import mends
from cudagraphs.rules.arguments import expandable, registered, without_expandable
from cudagraphs.rules.base import BRIDGE, CORE, LM, Example, Facts, Rule
from cudagraphs.rules.moe import dense, drop_and_pad
from cudagraphs.rules.recompute import captured, offload_modules
from cudagraphs.rules.registry import config_rules
from cudagraphs.versions import Versions

GRAPHS = "megatron/core/transformer/cuda_graphs.py"
FULL_GRAPH = "megatron/core/full_cuda_graph.py FullCudaGraphWrapper"
LAYER = "megatron/core/transformer/transformer_layer.py"
NEW = {"mcore": "0.19", "te": "2.14", "torch": "2.11"}
TE = {"cuda_graph_impl": "transformer_engine", "use_te_rng_tracker": True}
FULL = {"cuda_graph_impl": "full_iteration", "use_te_rng_tracker": True}
LOCAL = {"cuda_graph_impl": "local", "use_te_rng_tracker": True}
MOE = {"num_moe_experts": 8, "moe_token_dispatcher_type": "alltoall"}
EXPANDABLE = {"env.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def te(f: Facts) -> bool:
    return f["graph.impl"] == "transformer_engine"


def local_layers(f: Facts) -> bool:
    """The local implementation's graphs of layers; up to 0.17 the whole iteration is local too."""
    return f["graph.impl"] == "local" and not f["graph.full_iteration"]


def plain_gpt(f: Facts) -> bool:
    """The model is built from plain layers: only hybrid models use the MoE layer that is captured in part."""
    return not f["graph.has_mamba"]


def welded(f: Facts) -> bool:
    """Whether whole layers end up in one graph: asked for, or by the local implementation's attn on a plain layer."""
    return f["graph.full_iteration"] or f["graph.whole_layer"] or (
        local_layers(f) and ("attn" in f["graph.modules"] or "mlp" in f["graph.modules"]) and plain_gpt(f)
    )  # fmt: skip


def tracked(f: Facts) -> bool:
    return bool(f["use_te_rng_tracker"] or f["rng.te_rng_tracker"] or f["rng.inference_rng_tracker"])


def _untracked(f: Facts, v: Versions) -> bool:
    """Bridge and Megatron-LM have rules of their own."""
    return f["graph.active"] and not tracked(f)


def _untracked_lm(f: Facts, v: Versions) -> bool:
    if not f["graph.active"] or tracked(f):
        return False
    if v.minor == 13:
        return bool(f["enable_cuda_graph"])  # external graphs are asserted before
    by_itself = f["transformer_impl"] == "transformer_engine" or (v.minor >= 16 and te(f))
    return not by_itself


def _dynamic_experts(f: Facts, v: Versions) -> bool:
    if dense(f) or drop_and_pad(f) or not f["graph.active"] or not welded(f):
        return False
    # a capacity per rank makes the shapes static without a capacity per expert; the paged stash keeps what overflows
    return f["moe_expert_rank_capacity_factor"] is None and not f["moe_paged_stash"]


def _dynamic_experts_fix(f: Facts, v: Versions) -> dict[str, Any]:
    if v.minor < 16:
        return mends.scopes(f, v, ("attn",)) if te(f) else mends.off(f, v)
    if local_layers(f):
        return mends.off(f, v)
    rules = config_rules(v.minor)
    for wanted in (
        ("attn", "moe_router", "moe_preprocess"),
        ("attn", "moe_router"),
        ("attn",),
        ("moe_router", "moe_preprocess"),
    ):
        if not mends.rejected(rules, mends.Overlay(f, "transformer_engine", wanted), v):
            return {"cuda_graph_impl": "transformer_engine", **mends.scopes(f, v, wanted)}
    return mends.off(f, v)


def _te_instead_fix(f: Facts, v: Versions) -> dict[str, Any]:
    """The same scopes captured by Transformer Engine; graphs off where the version refuses that."""
    wanted = tuple(f["graph.modules"])
    if not mends.rejected(config_rules(v.minor), mends.Overlay(f, "transformer_engine", wanted), v):
        return {"cuda_graph_impl": "transformer_engine", **mends.scopes(f, v, wanted)}
    return mends.off(f, v)


def _without(name: str, *more: str):
    """The fix that drops scopes; graphs off where none is left."""

    def fix(f: Facts, v: Versions) -> dict[str, Any]:
        names = [scope for scope in f["graph.modules"] if scope not in (name, *more)]
        return mends.scopes(f, v, names) if names else mends.off(f, v)

    return fix


def _odd_attention(f: Facts, v: Versions) -> bool:
    """cuDNN's attention over a sequence that is no multiple of 128, in a graph that Transformer Engine does not know."""

    def named(name: str, otherwise: Any) -> Any:  # what a run leaves unsaid is no reason to ask for it here
        return f[name] if name in f else otherwise

    length = f["graph.sequence_length"]
    if not length or length % 128 == 0 or not f["graph.full_iteration"]:
        return False
    if named("transformer_impl", "transformer_engine") != "transformer_engine":
        return False
    if str(named("attention_backend", "auto")).rpartition(".")[2] not in ("auto", "fused"):
        return False
    packing = ("dataset.packed_sequences", "dataset.enable_offline_packing", "dataset.enable_in_batch_packing")
    # context parallelism cuts the sequence, in ways of its own
    return named("context_parallel_size", 1) == 1 and not any(named(name, False) for name in packing)


def _packed_fix(f: Facts, v: Versions) -> dict[str, Any]:
    """Scopes without attention: what is left of those named, else what the model has beside attention."""
    if v.minor < 16:
        return mends.off(f, v)
    names = [name for name in f["graph.modules"] if name != "attn"]
    if not names and f["graph.whole_layer"]:
        names = ["mlp"] if dense(f) else ["moe_router", "moe_preprocess"]
    if names and not mends.rejected(config_rules(v.minor), mends.Overlay(f, "transformer_engine", tuple(names)), v):
        return mends.scopes(f, v, names)
    return mends.off(f, v)


def _te_expandable(f: Facts, v: Versions) -> bool:
    if not te(f) or not expandable(f):
        return False
    return v.minor <= 15 or registered(f)


def _local_expandable(f: Facts, v: Versions) -> bool:
    if not local_layers(f) or not expandable(f):
        return False
    return v.minor <= 15 or ((v.arch is None or v.arch < (10, 0)) and registered(f))


def _expandable_fix(f: Facts, v: Versions) -> dict[str, Any]:
    if v.minor >= 16:
        return {"env.NCCL_GRAPH_REGISTER": "0"}
    return {"env.PYTORCH_CUDA_ALLOC_CONF": without_expandable(f["env.PYTORCH_CUDA_ALLOC_CONF"])}


def _captured_offload(f: Facts, v: Versions) -> bool:
    if (
        not f["fine_grained_activation_offloading"]
        or not te(f)
        or (v.at_least("torch", 2, 9) and v.at_least("te", 2, 14))
    ):
        return False
    inside = offload_modules(f)
    return ("attn" in f["graph.modules"] and bool(inside & {"core_attn", "attn_proj", "qkv_linear"})) or (
        "mlp" in f["graph.modules"] and "mlp_norm" in inside
    )


def _local_in_pipeline(f: Facts, v: Versions) -> bool:
    if not local_layers(f) or (f["graph.inference_scope"] == "block" and not f["graph.modules"]):
        return False  # graphs for inference alone (CG719) capture nothing in training
    stages = f["pipeline_model_parallel_size"]
    return isinstance(stages, int) and stages > 1


def _p2p_sync(f: Facts, v: Versions) -> bool:
    if not f["graph.full_iteration"] or f["pipeline_model_parallel_size"] <= 1:
        return False
    if (f["virtual_pipeline_model_parallel_size"] or 1) > 1:
        return False  # interleaved schedules overlap their transfers and do not batch them
    return bool(f["batch_p2p_comm"]) and bool(f["batch_p2p_sync"])


RULES = (
    Rule(
        code="CG701",
        title="Graphs without a random number tracker that capture can record",
        layer="capture",
        severity="runtime",
        frameworks=(CORE,),
        when=_untracked,
        message="graphs are on, and no tracker of Transformer Engine (or of inference) is asked for",
        mend="set use_te_rng_tracker=True and call model_parallel_cuda_manual_seed(..., te_rng_tracker=True)",
        fix=lambda f, v: {"use_te_rng_tracker": True},
        why="The plain tracker keeps generator states on the host. Both managers of graphs assert that the tracker is "
        "one that "
        "a graph can hold.",
        source=f"{GRAPHS} CudaGraphManager.__init__, TECudaGraphHelper.__init__",
        upstream=("RNG tracker does not support cudagraphs!",),
        bad=(Example({"cuda_graph_impl": "local"}, NEW),),
        good=(Example(LOCAL, NEW), Example({}, NEW)),
    ),
    Rule(
        code="CG702",
        title="Local graphs with the plain random number tracker",
        layer="capture",
        severity="runtime",
        frameworks=(LM,),
        when=_untracked_lm,
        message="transformer_impl={transformer_impl} with the implementation {graph.impl}: the tracker is not "
        "switched on by itself",
        mend="add --te-rng-tracker",
        fix=lambda f, v: {"rng.te_rng_tracker": True},
        why="validate_args switches Transformer Engine's tracker on only where Transformer Engine is in use; the "
        "manager of "
        "local graphs then asserts.",
        source=f"megatron/training/arguments.py validate_args; {GRAPHS} CudaGraphManager.__init__",
        upstream=("RNG tracker does not support cudagraphs!",),
        bad=(Example({"cuda_graph_impl": "local", "transformer_impl": "local"}, NEW),),
        good=(
            Example({"cuda_graph_impl": "local"}, NEW),
            Example({"cuda_graph_impl": "local", "transformer_impl": "local", "rng.te_rng_tracker": True}, NEW),
        ),
    ),
    Rule(
        code="CG703",
        title="Expandable segments with Transformer Engine graphs",
        layer="environment",
        severity="error",
        frameworks=(BRIDGE, CORE),
        mcore=(16, None),
        when=_te_expandable,
        message="PYTORCH_CUDA_ALLOC_CONF={env.PYTORCH_CUDA_ALLOC_CONF}, and NCCL_GRAPH_REGISTER is "
        "{env.NCCL_GRAPH_REGISTER}",
        mend="set NCCL_GRAPH_REGISTER=0 in the environment of the training processes",
        fix=_expandable_fix,
        why="NCCL registers the memory that it meets in a graph by address, and expandable segments remap what lies "
        "there: "
        "replays then touch memory that is not theirs. The helper asserts this on every architecture.",
        source=f"{GRAPHS} TECudaGraphHelper.__init__ (0.16+)",
        upstream=(
            "Setting NCCL_GRAPH_REGISTER=0 to avoid illegal memory access",
            "an illegal memory access was encountered",
        ),
        bad=(Example({**TE, "cuda_graph_modules": ["attn"], **EXPANDABLE}, NEW),),
        good=(
            Example({**TE, "cuda_graph_modules": ["attn"], **EXPANDABLE, "env.NCCL_GRAPH_REGISTER": "0"}, NEW),
            Example({**TE, "cuda_graph_modules": ["attn"]}, NEW),
        ),
    ),
    Rule(
        code="CG704",
        title="Expandable segments with graphs up to 0.15",
        layer="environment",
        severity="error",
        frameworks=(BRIDGE, CORE),
        mcore=(14, 15),
        when=lambda f, v: (
            (f["graph.impl"] == "local" or (te(f) and v.minor == 15))
            and not f["graph.full_iteration"]
            and expandable(f)
        ),
        message="PYTORCH_CUDA_ALLOC_CONF={env.PYTORCH_CUDA_ALLOC_CONF} with graphs",
        mend="take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF; from 0.16 NCCL_GRAPH_REGISTER=0 is enough",
        fix=_expandable_fix,
        safe=False,
        why="These versions assert that the setting is absent, whatever NCCL is told.",
        source=f"{GRAPHS} CudaGraphManager.__init__ (0.14, 0.15), TECudaGraphHelper.__init__ (0.15)",
        upstream=("expandable_segments:True may not be safe when using CUDA Graphs",),
        bad=(Example({**LOCAL, **EXPANDABLE}, {"mcore": "0.15"}),),
        good=(Example(LOCAL, {"mcore": "0.15"}),),
    ),
    Rule(
        code="CG705",
        title="Expandable segments with local graphs",
        layer="environment",
        severity="error",
        mcore=(16, 18),
        when=_local_expandable,
        message="PYTORCH_CUDA_ALLOC_CONF={env.PYTORCH_CUDA_ALLOC_CONF}, and NCCL_GRAPH_REGISTER is "
        "{env.NCCL_GRAPH_REGISTER}",
        mend="set NCCL_GRAPH_REGISTER=0 (asserted below compute capability 10; harmless above)",
        fix=_expandable_fix,
        why="NCCL registers the memory that it meets in a graph by address, and expandable segments remap what lies "
        "there. The "
        "manager asserts this below compute capability 10.",
        source=f"{GRAPHS} CudaGraphManager.__init__ (0.16 to 0.18)",
        upstream=("Setting NCCL_GRAPH_REGISTER=0 to avoid illegal memory access",),
        bad=(Example({**LOCAL, **EXPANDABLE}, {"mcore": "0.18", "arch": "h100"}),),
        good=(
            Example({**LOCAL, **EXPANDABLE, "env.NCCL_GRAPH_REGISTER": "0"}, {"mcore": "0.18", "arch": "h100"}),
            Example({**LOCAL, **EXPANDABLE}, {"mcore": "0.18", "arch": "b200"}),
        ),
    ),
    Rule(
        code="CG706",
        title="Expandable segments that no check looks at",
        layer="environment",
        severity="warning",
        mcore=(14, None),
        when=lambda f, v: (
            f["graph.active"]
            and (
                (expandable(f, "PYTORCH_ALLOC_CONF") and registered(f))
                or (
                    expandable(f)
                    and registered(f)
                    and (f["graph.full_iteration"] or (v.minor >= 19 and local_layers(f)))
                )
            )
        ),
        message="expandable segments are on (PYTORCH_CUDA_ALLOC_CONF={env.PYTORCH_CUDA_ALLOC_CONF}, "
        "PYTORCH_ALLOC_CONF={env.PYTORCH_ALLOC_CONF}), and NCCL_GRAPH_REGISTER is {env.NCCL_GRAPH_REGISTER}",
        mend="set NCCL_GRAPH_REGISTER=0 in the environment of the training processes",
        fix=lambda f, v: {"env.NCCL_GRAPH_REGISTER": "0"},
        why="The hazard is the same wherever a graph holds NCCL calls, but no check looks at the variable's new name "
        "PYTORCH_ALLOC_CONF, none guards full-iteration capture, and 0.19 dropped the one on local graphs.",
        source=f"{GRAPHS} (the checks read PYTORCH_CUDA_ALLOC_CONF only); {FULL_GRAPH} (has none)",
        upstream=("an illegal memory access was encountered",),
        bad=(
            Example({**TE, "cuda_graph_modules": ["attn"], "env.PYTORCH_ALLOC_CONF": "expandable_segments:True"}, NEW),
            Example({**FULL, **EXPANDABLE}, NEW),
            Example({**LOCAL, **EXPANDABLE}, NEW),
        ),
        good=(
            Example({**FULL, **EXPANDABLE, "env.NCCL_GRAPH_REGISTER": "0"}, NEW),
            Example({**FULL, "env.PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, NEW),
        ),
    ),
    Rule(
        code="CG707",
        title="Packed sequences through a captured attention",
        layer="capture",
        severity="error",
        mcore=(None, 19),
        when=lambda f, v: te(f) and captured(f, "attn") and bool(f["dataset.packed_sequences"]),
        message="sequences are packed, and attention is captured by Transformer Engine (scopes {graph.modules})",
        mend="drop attn from the scopes (mlp, or moe_router and moe_preprocess, may stay), pad instead of packing, or "
        "use "
        "full-iteration capture with padded packs",
        fix=_packed_fix,
        why="A replay takes tensors only; the description of the pack is an object, and the layer asserts that it is "
        "absent. "
        "Bridge's check passes with padded boundaries, and the replay fails all the same.",
        source=f"{LAYER} TransformerLayer._te_cuda_graph_replay",
        upstream=("CUDA graph accepts only Tensor inputs.", "packed_seq_params are excluded from input list"),
        bad=(
            Example({**TE, "cuda_graph_modules": ["attn"], "dataset.packed_sequences": True}, NEW),
            Example({**TE, "dataset.packed_sequences": True}, NEW),
        ),
        good=(
            Example({**TE, "cuda_graph_modules": ["mlp"], "dataset.packed_sequences": True}, NEW),
            Example({**FULL, "dataset.packed_sequences": True}, NEW),
        ),
    ),
    Rule(
        code="CG708",
        title="Batches whose number of tokens changes",
        layer="capture",
        severity="runtime",
        when=lambda f, v: (
            f["graph.active"]
            and (
                (bool(f["dataset.packed_sequences"]) and bool(f["dataset.enable_in_batch_packing"]))
                or bool(f["variable_seq_lengths"])
            )
        ),
        message="variable_seq_lengths={variable_seq_lengths}, "
        "dataset.enable_in_batch_packing={dataset.enable_in_batch_packing}: "
        "the shapes change from batch to batch",
        mend="pad every batch to one length, or turn graphs off",
        fix=mends.off,
        why="A graph replays the shapes of its capture. Another shape is refused, or worse, read from the old "
        "addresses.",
        source=f"{GRAPHS}; megatron/core/model_parallel_config.py ModelParallelConfig.variable_seq_lengths",
        bad=(Example({**TE, "cuda_graph_modules": ["attn"], "variable_seq_lengths": True}, NEW),),
        good=(Example({**TE, "cuda_graph_modules": ["attn"]}, NEW), Example({"variable_seq_lengths": True}, NEW)),
    ),
    Rule(
        code="CG709",
        title="Batch-size ramp-up with full-iteration capture",
        layer="capture",
        severity="error",
        when=lambda f, v: f["graph.full_iteration"] and f["train.rampup_batch_size"] is not None,
        message="the batch size ramps up ({train.rampup_batch_size}), and the graph replays the number of "
        "microbatches that it "
        "was captured with",
        mend="unset the ramp-up, or start with graphs off and turn them on in a run that resumes after it",
        fix=lambda f, v: {"train.rampup_batch_size": None},
        safe=False,
        why="The wrapper captures one iteration and never looks at the number of microbatches again: after the "
        "ramp-up the "
        "steps are silently too small.",
        source=f"{FULL_GRAPH}.__call__",
        bad=(Example({**FULL, "train.rampup_batch_size": [32, 32, 1000000]}, NEW),),
        good=(Example(FULL, NEW), Example({**TE, "train.rampup_batch_size": [32, 32, 1000000]}, NEW)),
    ),
    Rule(
        code="CG710",
        title="Batch-size ramp-up with captured microbatches of a pipeline",
        layer="capture",
        severity="warning",
        when=lambda f, v: (
            te(f)
            and f["train.rampup_batch_size"] is not None
            and (f["pipeline_model_parallel_size"] > 1 or bool(f["overlap_moe_expert_parallel_comm"]))
        ),
        message="the batch size ramps up ({train.rampup_batch_size}), and one graph a microbatch is captured for the "
        "number that "
        "holds at the capture",
        mend="unset the ramp-up, or start with graphs off and turn them on in a run that resumes after it",
        why="With a pipeline, or with expert-parallel overlap, every microbatch of the step has graphs of its own; "
        "more "
        "microbatches later find none.",
        source=f"{GRAPHS} TECudaGraphHelper",
        bad=(
            Example(
                {
                    **TE,
                    "cuda_graph_modules": ["attn"],
                    "pipeline_model_parallel_size": 2,
                    "train.rampup_batch_size": [32, 32, 1000000],
                },
                NEW,
            ),
        ),
        good=(Example({**TE, "cuda_graph_modules": ["attn"], "train.rampup_batch_size": [32, 32, 1000000]}, NEW),),
    ),
    Rule(
        code="CG711",
        title="Transformer Engine's cross entropy in a full-iteration graph",
        layer="capture",
        severity="runtime",
        when=lambda f, v: (
            f["graph.full_iteration"]
            and bool(f["cross_entropy_loss_fusion"])
            and f["cross_entropy_fusion_impl"] == "te"
            and not v.at_least("te", 2, 7)
        ),
        message="cross_entropy_fusion_impl=te inside a full-iteration graph needs Transformer Engine 2.7",
        mend='use Transformer Engine 2.7 or newer, or cross_entropy_fusion_impl="native"',
        fix=lambda f, v: {"cross_entropy_fusion_impl": "native"},
        why="Older versions read a value on the host inside the fused loss.",
        source="megatron/core/extensions/transformer_engine.py te_parallel_cross_entropy",
        bad=(
            Example(
                {**FULL, "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}, {**NEW, "te": "2.6"}
            ),
        ),
        good=(Example({**FULL, "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}, NEW),),
    ),
    Rule(
        code="CG712",
        title="Offloading inside a captured module with old libraries",
        layer="capture",
        severity="runtime",
        mcore=(18, None),
        when=_captured_offload,
        message="offload_modules {offload_modules} lie inside the scopes {graph.modules}; that needs PyTorch 2.9 and "
        "Transformer "
        "Engine 2.14",
        mend="upgrade, or offload only what lies outside the scopes",
        why="Copies to the host inside a graph need external events that these versions brought.",
        source=f"{LAYER} TransformerLayer._set_offload_modules (0.18+)",
        upstream=(
            "Offloading modules captured in cuda graph requires torch>=2.9.0.",
            "Offloading modules captured in cuda graph requires TE>=2.14.0.",
        ),
        bad=(
            Example(
                {
                    **TE,
                    "cuda_graph_modules": ["attn"],
                    "fine_grained_activation_offloading": True,
                    "offload_modules": ["core_attn"],
                },
                {**NEW, "te": "2.13"},
            ),
        ),
        good=(
            Example(
                {
                    **TE,
                    "cuda_graph_modules": ["attn"],
                    "fine_grained_activation_offloading": True,
                    "offload_modules": ["core_attn"],
                },
                NEW,
            ),
        ),
    ),
    Rule(
        code="CG713",
        title="Router padding for quantization with captured preprocessing",
        layer="capture",
        severity="runtime",
        mcore=(16, None),
        when=lambda f, v: (
            "moe_preprocess" in f["graph.modules"]
            and f["graph.active"]
            and bool(f["moe_router_padding_for_quantization"])
            and f["moe_token_dispatcher_type"] == "alltoall"
            and not drop_and_pad(f)
        ),
        message="moe_router_padding_for_quantization with the alltoall dispatcher copies counts to the host inside "
        "moe_preprocess",
        mend="drop moe_preprocess from the scopes, or turn moe_router_padding_for_quantization off",
        fix=_without("moe_preprocess"),
        why="The configuration checks the field's old name (moe_router_padding_for_fp8) only; the dispatcher "
        "synchronizes under "
        "the new name too, and asserts during capture.",
        source="megatron/core/transformer/moe/token_dispatcher.py MoEAlltoAllTokenDispatcher.preprocess",
        bad=(
            Example(
                {
                    **TE,
                    **MOE,
                    "cuda_graph_modules": ["moe_router", "moe_preprocess"],
                    "moe_router_padding_for_quantization": True,
                },
                NEW,
            ),
        ),
        good=(
            Example(
                {**TE, **MOE, "cuda_graph_modules": ["moe_router"], "moe_router_padding_for_quantization": True}, NEW
            ),
            Example(
                {
                    **TE,
                    **MOE,
                    "moe_token_dispatcher_type": "flex",
                    "cuda_graph_modules": ["moe_router", "moe_preprocess"],
                    "moe_router_padding_for_quantization": True,
                },
                NEW,
            ),
        ),
    ),
    Rule(
        code="CG714",
        title="Dropless experts inside a whole captured layer or iteration",
        layer="capture",
        severity="runtime",
        when=_dynamic_experts,
        message="the experts of a dropless MoE lie inside what is captured (implementation {graph.impl}, scopes "
        "{graph.modules})",
        mend="capture attn, moe_router and moe_preprocess with transformer_engine instead; or fix the number of "
        "tokens: drop and "
        "pad (moe_expert_capacity_factor with moe_pad_expert_input_to_capacity), or from 0.19 moe_paged_stash with "
        "moe_expert_rank_capacity_factor",
        fix=_dynamic_experts_fix,
        why="Dropless routing decides on the device how many tokens each expert gets, and the dispatcher reads it on "
        "the host to "
        "size its buffers. No check stops this when the layer or the iteration is captured whole.",
        source="megatron/core/transformer/moe/token_dispatcher.py; no check in TransformerConfig; seen failing with "
        "cudaErrorCapturedEvent on megatron-core 0.19.2 for whole layers, local with attn, and full iteration "
        "(evals/results/gpu/smoke-mcore-moe-dropless-launch.json)",
        upstream=(
            "operation not permitted when stream is capturing",
            "cudaErrorStreamCaptureUnsupported",
            "cudaErrorCapturedEvent",
        ),
        bad=(
            Example({**TE, **MOE}, NEW),
            Example({**FULL, **MOE}, NEW),
            Example({**LOCAL, **MOE, "cuda_graph_modules": ["attn"], "model.has_mamba": False}, NEW),
        ),
        good=(
            Example({**TE, **MOE, "cuda_graph_modules": ["attn", "moe_router"]}, NEW),
            Example({**FULL, **MOE, "moe_expert_rank_capacity_factor": 1.5, "moe_paged_stash": True}, NEW),
            Example({**TE, **MOE, "moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}, NEW),
        ),
    ),
    Rule(
        code="CG715",
        title="Expert-parallel overlap with whole captured layers",
        layer="capture",
        severity="runtime",
        mcore=(16, None),
        when=lambda f, v: bool(f["overlap_moe_expert_parallel_comm"]) and te(f) and f["graph.whole_layer"],
        message="overlap_moe_expert_parallel_comm with whole layers in one graph each",
        mend="name scopes (attn, moe_router, moe_preprocess)",
        fix=lambda f, v: mends.scopes(f, v, ("attn",)),
        why="The overlap runs each layer in pieces, and a graph of the whole layer has none. The check of the "
        "configuration "
        "looks for moe and mlp by name, and an empty list names neither.",
        source="megatron/core/transformer/transformer_config.py TransformerConfig.__post_init__ (no check)",
        bad=(
            Example(
                {
                    **TE,
                    **MOE,
                    "moe_expert_capacity_factor": 1.0,
                    "moe_pad_expert_input_to_capacity": True,
                    "overlap_moe_expert_parallel_comm": True,
                    "expert_model_parallel_size": 2,
                },
                NEW,
            ),
        ),
        good=(
            Example(
                {
                    **TE,
                    **MOE,
                    "cuda_graph_modules": ["attn"],
                    "overlap_moe_expert_parallel_comm": True,
                    "expert_model_parallel_size": 2,
                },
                NEW,
            ),
        ),
    ),
    Rule(
        code="CG716",
        title="Scope mamba on a model without Mamba layers",
        layer="capture",
        severity="runtime",
        mcore=(16, None),
        when=lambda f, v: "mamba" in f["graph.modules"] and f["graph.active"] and not f["graph.has_mamba"],
        message="mamba is among the scopes {graph.modules}, and the model has no Mamba layer",
        mend="drop mamba from the scopes",
        fix=_without("mamba"),
        why="No check compares the scope with the layers. As the only scope it makes a run that captures nothing.",
        source=f"{LAYER} and megatron/core/ssm/mamba_layer.py (each looks for its own name)",
        bad=(Example({**TE, "cuda_graph_modules": ["attn", "mamba"], "model.has_mamba": False}, NEW),),
        good=(Example({**TE, "cuda_graph_modules": ["attn", "mamba"], "model.has_mamba": True}, NEW),),
    ),
    Rule(
        code="CG717",
        title="Local graphs with scopes that create none",
        layer="capture",
        severity="runtime",
        mcore=(16, None),
        when=lambda f, v: (
            local_layers(f)
            and bool(f["graph.modules"])
            and not {"attn", "mlp"} & set(f["graph.modules"])
            and plain_gpt(f)
        ),
        message="the scopes {graph.modules} create no graph on plain layers with the local implementation",
        mend="use transformer_engine with these scopes; only hybrid models have the MoE layer that local graphs "
        "capture in part",
        fix=lambda f, v: {
            "cuda_graph_impl": "transformer_engine",
            **({"inference_cuda_graph_scope": None} if mends.known(f, "inference_cuda_graph_scope") else {}),
        },
        why="A plain layer makes a manager of graphs for an empty list, attn or mlp, and for nothing else; the run "
        "goes on "
        "eagerly without a word.",
        source=f"{LAYER} TransformerLayer.create_mcore_cudagraph_manager",
        bad=(Example({**LOCAL, **MOE, "cuda_graph_modules": ["moe_router"], "model.has_mamba": False}, NEW),),
        good=(Example({**LOCAL, **MOE, "cuda_graph_modules": ["moe_router"], "model.has_mamba": True}, NEW),),
    ),
    Rule(
        code="CG718",
        title="Local graphs capture more than the scope says",
        layer="capture",
        severity="warning",
        mcore=(16, None),
        when=lambda f, v: (
            local_layers(f)
            and "attn" in f["graph.modules"]
            and "mlp" not in f["graph.modules"]
            and plain_gpt(f)
            and (dense(f) or drop_and_pad(f))
        ),
        message="the local implementation captures whole plain layers for the scope attn",
        mend="use transformer_engine for attention alone, or say what happens: an empty list of scopes",
        why="The manager of graphs wraps the layer, not its attention; memory and the parts that are captured are "
        "those of the "
        "whole layer.",
        source=f"{LAYER} TransformerLayer.create_mcore_cudagraph_manager",
        bad=(Example({**LOCAL, "cuda_graph_modules": ["attn"], "model.has_mamba": False}, NEW),),
        good=(Example(LOCAL, NEW), Example({**TE, "cuda_graph_modules": ["attn"]}, NEW)),
    ),
    Rule(
        code="CG719",
        title="Local graphs for inference only",
        layer="capture",
        severity="runtime",
        frameworks=(LM, CORE),
        mcore=(17, None),
        when=lambda f, v: (
            local_layers(f)
            and (
                (f["graph.inference_scope"] == "block" and not f["graph.modules"])
                if v.minor >= 18
                else f["graph.modules"] == ("full_iteration_inference",)
            )
        ),
        message="graphs are asked for at inference alone (scopes {graph.modules}, inference scope "
        "{graph.inference_scope}): "
        "training is not captured",
        mend='set inference_cuda_graph_scope="layer" (0.17: the scope "full") to capture whole layers in training, or '
        "name "
        "scopes",
        fix=lambda f, v: (
            {"cuda_graph_scope": []}
            if v.minor == 17
            else {"inference_cuda_graph_scope": "layer", **mends.scopes(f, v, ())}
        ),
        why="With block, the enclosing block owns the graphs, and it makes them for inference only.",
        source=f"{LAYER} TransformerLayer.create_mcore_cudagraph_manager",
        bad=(
            Example({**LOCAL, "inference_cuda_graph_scope": "block"}, NEW),
            Example({**LOCAL, "cuda_graph_scope": ["full_iteration_inference"]}, {"mcore": "0.17"}),
        ),
        good=(Example(LOCAL, NEW),),
    ),
    Rule(
        code="CG720",
        title="Resumed runs never capture in 0.15",
        layer="capture",
        severity="runtime",
        frameworks=(LM,),
        mcore=(15, 15),
        when=lambda f, v: te(f) and f["checkpoint.load"] is not None,
        message="the run resumes from {checkpoint.load}, and 0.15 captures at an absolute iteration that has passed",
        mend="use megatron-core 0.16 or newer, which counts from the iteration that the run starts with",
        why="The loop compares the absolute iteration with cuda_graph_warmup_steps; a run that starts beyond it stays "
        "eager.",
        source="megatron/training/training.py train (0.15)",
        bad=(Example({**TE, "checkpoint.load": "/checkpoints/run"}, {"mcore": "0.15"}),),
        good=(Example(TE, {"mcore": "0.15"}), Example({**TE, "checkpoint.load": "/checkpoints/run"}, NEW)),
    ),
    Rule(
        code="CG721",
        title="NaN checks inside a full-iteration graph",
        layer="capture",
        severity="runtime",
        frameworks=(BRIDGE, CORE),
        when=lambda f, v: f["graph.full_iteration"] and bool(f["ddp.check_for_nan_in_grad"]),
        message="ddp.check_for_nan_in_grad={ddp.check_for_nan_in_grad}: gradients are checked inside what is captured",
        mend="set ddp.check_for_nan_in_grad=False",
        fix=lambda f, v: {"ddp.check_for_nan_in_grad": False},
        why="The buckets check their gradients on the host before they are reduced, in the middle of the captured "
        "iteration. "
        "Bridge validates the check of the loss and not this one.",
        source="megatron/core/distributed/param_and_grad_buffer.py _ParamAndGradBucketGroup.check_grads",
        upstream=("operation not permitted when stream is capturing",),
        bad=(Example({**FULL, "ddp.check_for_nan_in_grad": True}, NEW),),
        good=(
            Example({**FULL, "ddp.check_for_nan_in_grad": False}, NEW),
            Example({"ddp.check_for_nan_in_grad": True}, NEW),
        ),
    ),
    Rule(
        code="CG722",
        title="Spiky-loss check inside a full-iteration graph",
        layer="capture",
        severity="runtime",
        when=lambda f, v: f["graph.full_iteration"] and bool(f["rerun_state_machine.check_for_spiky_loss"]),
        message="rerun_state_machine.check_for_spiky_loss={rerun_state_machine.check_for_spiky_loss}: the loss is "
        "read on the "
        "host inside what is captured",
        mend="set rerun_state_machine.check_for_spiky_loss=False",
        fix=lambda f, v: {"rerun_state_machine.check_for_spiky_loss": False},
        why="It validates the loss in the same place as the NaN check, which is refused by name; this one is not.",
        source="megatron/bridge/training/losses.py masked_next_token_loss; pretrain_gpt.py loss_func of Megatron-LM",
        bad=(Example({**FULL, "rerun_state_machine.check_for_spiky_loss": True}, NEW),),
        good=(Example(FULL, NEW),),
    ),
    Rule(
        code="CG723",
        title="Synchronizing transfers between pipeline stages in a full-iteration graph",
        layer="capture",
        severity="runtime",
        when=_p2p_sync,
        message="pipeline_model_parallel_size={pipeline_model_parallel_size} with batch_p2p_sync={batch_p2p_sync}: "
        "each batched "
        "transfer waits for the device",
        mend="set batch_p2p_sync=False (recent PyTorch does not need it)",
        fix=lambda f, v: {"batch_p2p_sync": False},
        why="torch.cuda.synchronize() inside a capture invalidates it.",
        source="megatron/core/pipeline_parallel/p2p_communication.py P2PCommunicator._communicate",
        upstream=("operation not permitted when stream is capturing",),
        bad=(Example({**FULL, "pipeline_model_parallel_size": 2}, NEW),),
        good=(
            Example({**FULL, "pipeline_model_parallel_size": 2, "batch_p2p_sync": False}, NEW),
            Example({**FULL, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, NEW),
        ),
    ),
    Rule(
        code="CG724",
        title="Parameter gather inside the optimizer step with full-iteration capture",
        layer="capture",
        severity="error",
        when=lambda f, v: (
            f["graph.full_iteration"]
            and bool(
                f["optimizer.overlap_param_gather_with_optimizer_step"]
                or f["comm_overlap.overlap_param_gather_with_optimizer_step"]
            )
        ),
        message="overlap_param_gather_with_optimizer_step starts communication outside the graph that the graph waits "
        "for",
        mend="turn overlap_param_gather_with_optimizer_step off; overlap_param_gather may stay",
        fix=lambda f, v: {
            name: False
            for name in (
                "optimizer.overlap_param_gather_with_optimizer_step",
                "comm_overlap.overlap_param_gather_with_optimizer_step",
            )
            if f[name]
        },
        why="Waiting inside a capture for work that was launched outside it breaks the isolation of the capture, on "
        "every rank.",
        source="Megatron-Bridge#1688, PR 5788",
        upstream=("cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"),
        bad=(Example({**FULL, "optimizer.overlap_param_gather_with_optimizer_step": True}, NEW),),
        good=(Example({**FULL, "ddp.overlap_param_gather": True}, NEW),),
    ),
    Rule(
        code="CG725",
        title="Optimizer graph with values read on the host",
        layer="capture",
        severity="error",
        when=lambda f, v: (
            bool(f["optimizer.optimizer_cuda_graph"])
            and bool(f["optimizer.log_num_zeros_in_grad"] or f["fp16"] or f["optimizer.optimizer_cpu_offload"])
        ),
        message="the optimizer step is captured, and it reads values on the host (log_num_zeros_in_grad="
        "{optimizer.log_num_zeros_in_grad}, fp16={fp16}, optimizer_cpu_offload={optimizer.optimizer_cpu_offload})",
        mend="turn log_num_zeros_in_grad (and CPU offload) off, train in BF16, or keep the optimizer step eager",
        fix=lambda f, v: {"optimizer.optimizer_cuda_graph": False},
        why="Counting zeros, the loss scaler's overflow flag and an optimizer on the host all copy from the device "
        "inside the "
        "step.",
        source="megatron/core/optimizer/optimizer.py MixedPrecisionOptimizer.step; clip_grads.py count_zeros_fp32; "
        "Megatron-LM PR 7407",
        upstream=("operation not permitted when stream is capturing",),
        bad=(
            Example({"optimizer.optimizer_cuda_graph": True, "optimizer.log_num_zeros_in_grad": True}, NEW),
            Example({"optimizer.optimizer_cuda_graph": True, "fp16": True}, NEW),
        ),
        good=(Example({"optimizer.optimizer_cuda_graph": True, "bf16": True}, NEW),),
    ),
    Rule(
        code="CG726",
        title="Hybrid context parallelism with graphs",
        layer="capture",
        severity="runtime",
        mcore=(16, None),
        when=lambda f, v: f["graph.active"] and bool(f["hybrid_context_parallel"]),
        message="hybrid_context_parallel with the implementation {graph.impl}",
        mend="turn graphs off, or hybrid_context_parallel",
        fix=mends.off,
        why="Sequences are split over a different number of ranks from batch to batch, so the shapes change. The "
        "documented "
        "check tests only the legacy flag enable_cuda_graph, and never sees the present ones.",
        source="megatron/training/arguments.py validate_args (tests the legacy flag only)",
        upstream=("Hybrid context parallelism not supported with CUDA Graph",),
        bad=(Example({**TE, "cuda_graph_modules": ["attn"], "hybrid_context_parallel": True}, NEW),),
        good=(Example({"hybrid_context_parallel": True}, NEW),),
    ),
    Rule(
        code="CG727",
        title="Megatron FSDP with captured parameters",
        layer="capture",
        severity="warning",
        when=lambda f, v: (
            f["graph.active"]
            and bool(f["ddp.use_megatron_fsdp"])
            and f["ddp.data_parallel_sharding_strategy"] == "optim_grads_params"
            and not f["ddp.megatron_fsdp_cuda_graph_mode"]
        ),
        message="parameters are sharded ({ddp.data_parallel_sharding_strategy}) and gathered into other buffers at "
        "every step",
        mend="shard optimizer states and gradients only (optim or optim_grads), or from 0.19 set "
        "ddp.megatron_fsdp_cuda_graph_mode=True with fsdp_double_buffer; check with a smoke run",
        why="A graph reads parameters at the addresses of its capture; FSDP frees and gathers them elsewhere unless "
        "its buffers "
        "are kept. One experiment replayed a full-iteration graph five times and crashed on the sixth.",
        source="megatron/core/distributed/distributed_data_parallel_config.py megatron_fsdp_cuda_graph_mode (0.19); "
        "Megatron-LM#6152",
        bad=(
            Example(
                {
                    **TE,
                    "cuda_graph_modules": ["attn"],
                    "ddp.use_megatron_fsdp": True,
                    "ddp.data_parallel_sharding_strategy": "optim_grads_params",
                },
                NEW,
            ),
        ),
        good=(
            Example(
                {
                    **TE,
                    "cuda_graph_modules": ["attn"],
                    "ddp.use_megatron_fsdp": True,
                    "ddp.data_parallel_sharding_strategy": "optim_grads",
                },
                NEW,
            ),
        ),
    ),
    Rule(
        code="CG728",
        title="DDP built on the default stream before a capture",
        layer="capture",
        severity="info",
        frameworks=(CORE,),
        torch=((2, 11), None),
        when=lambda f, v: f["graph.full_iteration"] or te(f),
        message="the capture needs DDP's gradient hooks to have been made on a side stream",
        mend="wrap the model in DistributedDataParallel inside `with torch.cuda.stream(side)`; for full-iteration "
        "capture on the "
        "stream that get_shared_capture_stream() returns",
        why="The nodes that accumulate gradients run on the stream on which they were made; on the default stream "
        "they make the "
        "capture depend on uncaptured work. The training loops of Megatron-LM and Bridge do this by themselves.",
        source="megatron/training/training.py get_model; megatron/core/full_cuda_graph.py get_shared_capture_stream "
        "(0.19)",
        upstream=("cudaErrorStreamCaptureImplicit",),
        bad=(Example(FULL, NEW),),
        good=(Example(LOCAL, NEW), Example(FULL, {**NEW, "torch": "2.10"})),
    ),
    Rule(
        code="CG729",
        title="Routers of a hybrid model's dropless experts, captured by the local implementation",
        layer="capture",
        severity="runtime",
        mcore=(19, None),
        when=lambda f, v: (
            local_layers(f)
            and not plain_gpt(f)
            and "moe_router" in f["graph.modules"]
            and not (dense(f) or drop_and_pad(f))
        ),
        message="local graphs of moe_router in a hybrid model with dropless experts",
        mend="capture the same scopes with transformer_engine; local graphs of attn alone work too",
        fix=_te_instead_fix,
        why="The capture succeeds, and the first replay fails on the device: a device-side assert, a failed launch of "
        "the grouped matrix product, or a hang. No check stops it.",
        source="megatron/core/transformer/transformer_layer.py MoETransformerLayer._forward_mlp (no check); seen on "
        "megatron-core 0.19.2 with three combinations of scopes (evals/results/gpu/smoke-mcore-hybrid-moe-local.json)",
        bad=(
            Example({**LOCAL, **MOE, "cuda_graph_modules": ["moe_router"], "model.has_mamba": True}, NEW),
            Example(
                {
                    **LOCAL,
                    **MOE,
                    "cuda_graph_modules": ["attn", "moe_router", "moe_preprocess"],
                    "model.has_mamba": True,
                },
                NEW,
            ),
        ),
        good=(
            Example({**LOCAL, **MOE, "cuda_graph_modules": ["attn"], "model.has_mamba": True}, NEW),
            Example({**TE, **MOE, "cuda_graph_modules": ["moe_router"], "model.has_mamba": True}, NEW),
        ),
    ),
    Rule(
        code="CG730",
        title="Local graphs of pipeline stages",
        layer="capture",
        severity="runtime",
        mcore=(19, None),
        when=_local_in_pipeline,
        message="pipeline_model_parallel_size={pipeline_model_parallel_size} with the local implementation",
        mend="capture with transformer_engine or full_iteration, which work in a pipeline",
        fix=_te_instead_fix,
        why="A tensor that several microbatches share (the rotary embedding) keeps its buffer in use when the first "
        "backward graph is created, and the creation asserts that none is. With one stage a single microbatch is "
        "recorded, and the assert holds.",
        source="megatron/core/transformer/cuda_graphs.py _CudagraphGlobalRecord._create_cudagraphs; seen on "
        "megatron-core 0.19.2 with two stages on both ranks (evals/results/gpu/smoke-2gpu-pp2-shared.json). By reading "
        "only: 0.16 to 0.18 have the same assert in create_cudagraphs, but there create_fwd_graph looks for shared "
        "inputs among tensors while the recorded inputs are ArgMetadata, so none is counted and the assert holds",
        upstream=("assert fwd_buffer_reuse_ref_count == 0",),
        bad=(Example({**LOCAL, "pipeline_model_parallel_size": 2, "cuda_graph_modules": ["attn"]}, NEW),),
        good=(
            Example({**LOCAL, "cuda_graph_modules": ["attn"]}, NEW),
            Example({**TE, "pipeline_model_parallel_size": 2, "cuda_graph_modules": ["attn"]}, NEW),
            Example({**LOCAL, "pipeline_model_parallel_size": 2, "inference_cuda_graph_scope": "block"}, NEW),
        ),
    ),
    Rule(
        code="CG731",
        title="A sequence length that cuDNN before 9.15.1 cannot have in a graph",
        layer="capture",
        severity="warning",
        when=_odd_attention,
        message="a sequence length of {graph.sequence_length}, no multiple of 128, with the whole iteration captured and "
        "Transformer Engine's attention",
        mend="cuDNN 9.15.1 or newer (`smoke_capture.py` names the one in use), a multiple of 128, attention_backend "
        "flash or unfused, or graphs by transformer_engine, which keep clear of it",
        why="Up to cuDNN 9.15.0 the backward of its fused attention goes wrong in a CUDA graph at such lengths (BSHD and "
        "SBHD, no padding mask): the replay reads outside of its memory, or gives NaN. Transformer Engine takes another "
        "attention while it knows of a capture, as in its own graphs and the local implementation's, which is slower and "
        "no longer equal to eager to the last bit; nobody tells it of a full-iteration capture.",
        source="transformer_engine/common/fused_attn/fused_attn.cpp nvte_get_fused_attn_backend (2.20: "
        "cudnn_runtime_version <= 91500); transformer_engine/pytorch/graph.py is_graph_capturing; "
        f"{FULL_GRAPH}; seen on megatron-core 0.19.2 with cuDNN 9.14.0: a length of 320 "
        "fails, 384 does not (evals/results/gpu/smoke-mcore-dense-odd-sequence.json, -384.json)",
        upstream=("an illegal memory access was encountered",),
        bad=(
            Example({**FULL, "seq_length": 320}, NEW),
            Example({**FULL, "dataset.seq_length": 4000, "attention_backend": "fused"}, NEW),
        ),
        good=(
            Example({**FULL, "seq_length": 4096}, NEW),
            Example(FULL, NEW),
            Example({**TE, "seq_length": 320, "cuda_graph_modules": ["attn"]}, NEW),
            Example({**FULL, "seq_length": 320, "attention_backend": "flash"}, NEW),
            Example({**FULL, "seq_length": 320, "transformer_impl": "local"}, NEW),
        ),
    ),
)
