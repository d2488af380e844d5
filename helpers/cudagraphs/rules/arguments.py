# SPDX-License-Identifier: Apache-2.0
"""CG4xx: what Megatron-LM's command line checks before a configuration is built."""

from __future__ import annotations

from typing import Any

from cudagraphs.rules import mends
from cudagraphs.rules.base import LM, Example, Facts, Rule
from cudagraphs.rules.bridge import delayed_wgrad_captured, named
from cudagraphs.versions import Versions

ARGUMENTS = "megatron/training/arguments.py validate_args"
TE = {"cuda_graph_impl": "transformer_engine"}
NO_NAN_CHECK = {"rerun_state_machine.check_for_nan_in_loss": False, "ddp.check_for_nan_in_grad": False}
EXPANDABLE = {"env.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def expandable(f: Facts, name: str = "PYTORCH_CUDA_ALLOC_CONF") -> bool:
    """Whether the allocator is told to use expandable segments under this variable name, as upstream tests it."""
    return "expandable_segments:True" in (f[f"env.{name}"] or "")


def registered(f: Facts) -> bool:
    """Whether NCCL may register what it finds in graphs: upstream wants this off beside expandable segments."""
    return f["env.NCCL_GRAPH_REGISTER"] != "0"


def without_expandable(value: str) -> str:
    """An allocator setting without expandable segments."""
    return ",".join(part for part in value.split(",") if not part.strip().startswith("expandable_segments"))


def nan_checks(f: Facts) -> bool:
    return bool(f["rerun_state_machine.check_for_nan_in_loss"] or f["ddp.check_for_nan_in_grad"])


def _never_expandable(f: Facts, v: Versions) -> bool:
    if v.minor == 14:
        return bool(f["external_cuda_graph"]) and expandable(f)
    return f["graph.active"] and expandable(f)


def _full_recompute(f: Facts, v: Versions) -> bool:
    if f["recompute.granularity"] in (None, "selective"):
        return False
    return bool(f["external_cuda_graph"]) if v.minor == 14 else f["graph.active"]


def _delayed(f: Facts) -> bool:
    return (
        bool(f["delay_wgrad_compute"])
        and bool(f["ddp.overlap_grad_reduce"])
        and f["graph.active"]
        and delayed_wgrad_captured(f)
    )


def _block_fp8(f: Facts, v: Versions) -> bool:
    block = f["graph.inference_scope"] == "block" if v.minor >= 18 else (
        f["graph.impl"] == "local" and "full_iteration_inference" in f["graph.modules"]
    )  # fmt: skip
    return (
        block
        and f["fp8"] is not None
        and (f["transformer_impl"] != "inference_optimized" or f["fp8_recipe"] != "mxfp8")
    )


def _split_commas(f: Facts, v: Versions) -> dict[str, Any]:
    field = "cuda_graph_modules" if v.minor >= 18 and mends.known(f, "cuda_graph_scope") is None else "cuda_graph_scope"
    return {field: [name for item in named(f[field]) for name in item.split(",") if name]}


DELAYED = {
    **TE,
    "cuda_graph_modules": ["attn"],
    "num_moe_experts": 8,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    "overlap_moe_expert_parallel_comm": True,
    "delay_wgrad_compute": True,
    "ddp.overlap_grad_reduce": True,
    "gradient_accumulation_fusion": True,
    "add_bias_linear": False,
}

RULES = (
    Rule(
        code="CG401",
        title="Scopes joined by commas on the command line",
        layer="arguments",
        severity="error",
        frameworks=(LM,),
        mcore=(16, None),
        when=lambda f, v: any(
            "," in item
            for field in (("cuda_graph_modules", "cuda_graph_scope") if v.minor >= 18 else ("cuda_graph_scope",))
            for item in (f[field] if isinstance(f[field], list) else ())
            if isinstance(item, str)
        ),
        message="a scope argument holds a comma: scope {cuda_graph_scope}, modules {cuda_graph_modules}",
        mend="separate scopes by spaces: --cuda-graph-modules attn mlp",
        fix=_split_commas,
        why='Each word after the option is looked up as one name, and "attn,mlp" is not one. Configuration files and '
        "Python do "
        "take commas, which makes the mistake easy.",
        source=f"{ARGUMENTS}; _parse_cuda_graph_modules_arg (0.18+)",
        upstream=("KeyError", "invalid _parse_cuda_graph_modules_arg value"),
        bad=(Example({**TE, "cuda_graph_modules": ["attn,mlp"]}, {"mcore": "0.19"}),),
        good=(Example({**TE, "cuda_graph_modules": ["attn", "mlp"]}, {"mcore": "0.19"}),),
    ),
    Rule(
        code="CG402",
        title="External graphs without --te-rng-tracker in 0.13",
        layer="arguments",
        severity="error",
        frameworks=(LM,),
        mcore=(13, 13),
        when=lambda f, v: bool(f["external_cuda_graph"]) and not f["rng.te_rng_tracker"],
        message="external CUDA graphs need Transformer Engine's random number tracker",
        mend="add --te-rng-tracker",
        fix=lambda f, v: {"rng.te_rng_tracker": True},
        why="The plain tracker keeps its state on the host. From 0.14 the flag is switched on by itself.",
        source=f"{ARGUMENTS} (0.13)",
        upstream=("--te-rng-tracker must be enabled when using CUDA Graphs.",),
        bad=(Example({"external_cuda_graph": True}, {"mcore": "0.13"}),),
        good=(Example({"external_cuda_graph": True, "rng.te_rng_tracker": True}, {"mcore": "0.13"}),),
    ),
    Rule(
        code="CG403",
        title="NaN checks in a full-iteration graph",
        layer="arguments",
        severity="error",
        frameworks=(LM,),
        mcore=(14, None),
        when=lambda f, v: f["graph.full_iteration"] and nan_checks(f),
        message="full-iteration capture with NaN checks of the loss or the gradients",
        mend="add --no-check-for-nan-in-loss-and-grad",
        fix=lambda f, v: dict(NO_NAN_CHECK),
        why="The checks read device values on the host in the middle of the iteration, and that cannot be captured. "
        "One flag "
        "governs both, and it is on by default.",
        source=f"{ARGUMENTS} (0.14+)",
        upstream=("--no-check-for-nan-in-loss-and-grad should be set with",),
        bad=(Example({"cuda_graph_impl": "full_iteration"}, {"mcore": "0.19"}),),
        good=(Example({"cuda_graph_impl": "full_iteration", **NO_NAN_CHECK}, {"mcore": "0.19"}),),
    ),
    Rule(
        code="CG404",
        title="Expandable segments with graphs in 0.14 and 0.15",
        layer="arguments",
        severity="error",
        frameworks=(LM,),
        mcore=(14, 15),
        when=_never_expandable,
        message="PYTORCH_CUDA_ALLOC_CONF={env.PYTORCH_CUDA_ALLOC_CONF} with graphs",
        mend="take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF; from 0.16 NCCL_GRAPH_REGISTER=0 is enough",
        fix=lambda f, v: {"env.PYTORCH_CUDA_ALLOC_CONF": without_expandable(f["env.PYTORCH_CUDA_ALLOC_CONF"])},
        safe=False,
        why="Memory that a graph uses may be remapped while NCCL has it registered. These versions forbid the setting "
        "outright.",
        source=f"{ARGUMENTS} (0.14, 0.15)",
        upstream=("expandable_segments:True may not be safe when using CUDA Graphs",),
        bad=(
            Example({**TE, **EXPANDABLE}, {"mcore": "0.15"}),
            Example({"external_cuda_graph": True, **EXPANDABLE}, {"mcore": "0.14"}),
        ),
        good=(Example(TE, {"mcore": "0.15"}), Example({"enable_cuda_graph": True, **EXPANDABLE}, {"mcore": "0.14"})),
    ),
    Rule(
        code="CG405",
        title="Expandable segments with Transformer Engine graphs while NCCL registers graph memory",
        layer="arguments",
        severity="error",
        frameworks=(LM,),
        mcore=(16, None),
        when=lambda f, v: f["graph.impl"] == "transformer_engine" and expandable(f) and registered(f),
        message="PYTORCH_CUDA_ALLOC_CONF={env.PYTORCH_CUDA_ALLOC_CONF} with Transformer Engine graphs, and "
        "NCCL_GRAPH_REGISTER is "
        "{env.NCCL_GRAPH_REGISTER}",
        mend="export NCCL_GRAPH_REGISTER=0",
        fix=lambda f, v: {"env.NCCL_GRAPH_REGISTER": "0"},
        why="NCCL registers the memory that it meets in a graph by address, and expandable segments remap what lies "
        "there: "
        "replays then read or write memory that is not theirs.",
        source=f"{ARGUMENTS} (0.16+)",
        upstream=("Setting NCCL_GRAPH_REGISTER=0 to avoid illegal memory access",),
        bad=(Example({**TE, "cuda_graph_modules": ["attn"], **EXPANDABLE}, {"mcore": "0.19"}),),
        good=(
            Example(
                {**TE, "cuda_graph_modules": ["attn"], **EXPANDABLE, "env.NCCL_GRAPH_REGISTER": "0"}, {"mcore": "0.19"}
            ),
            Example({**TE, "cuda_graph_modules": ["attn"]}, {"mcore": "0.19"}),
        ),
    ),
    Rule(
        code="CG406",
        title="Full recompute with graphs in 0.14 and 0.15",
        layer="arguments",
        severity="error",
        frameworks=(LM,),
        mcore=(14, 15),
        when=_full_recompute,
        message="recompute_granularity={recompute.granularity} does not go with graphs in this version",
        mend="turn graphs off, or use selective recompute where the version takes it",
        fix=mends.off,
        why="A recomputed layer would have to run outside the graph that holds it.",
        source=f"{ARGUMENTS} (0.14: external graphs; 0.15: all)",
        upstream=("recompute_granularity must not be full when CUDA Graphs are enabled.",),
        bad=(
            Example({"external_cuda_graph": True, "recompute_granularity": "full"}, {"mcore": "0.14"}),
            Example({**TE, "recompute_granularity": "full"}, {"mcore": "0.15"}),
        ),
        good=(Example({"external_cuda_graph": True, "recompute_granularity": "selective"}, {"mcore": "0.14"}),),
    ),
    Rule(
        code="CG407",
        title="Local graphs with expert parallelism and unpadded inference",
        layer="arguments",
        severity="error",
        frameworks=(LM,),
        mcore=(16, 17),
        when=lambda f, v: (
            f["graph.impl"] == "local"
            and f["expert_model_parallel_size"] > 1
            and f["transformer_impl"] != "inference_optimized"
            and not f["moe_pad_experts_for_cuda_graph_inference"]
        ),
        message="local graphs with expert_model_parallel_size={expert_model_parallel_size} need padded experts at "
        "inference",
        mend="add --moe-pad-experts-for-cuda-graph-inference",
        fix=lambda f, v: {"moe_pad_experts_for_cuda_graph_inference": True},
        why="The same graphs serve inference, where the number of tokens an expert gets must be fixed.",
        source=f"{ARGUMENTS} (0.16, 0.17)",
        upstream=(
            "--moe-pad-experts-for-cuda-graph-inference must be set when using CUDA graphs with expert parallelism",
        ),
        bad=(
            Example(
                {
                    "cuda_graph_impl": "local",
                    "cuda_graph_scope": ["moe_router"],
                    "num_moe_experts": 8,
                    "expert_model_parallel_size": 2,
                },
                {"mcore": "0.17"},
            ),
        ),
        good=(
            Example(
                {
                    "cuda_graph_impl": "local",
                    "cuda_graph_scope": ["moe_router"],
                    "num_moe_experts": 8,
                    "expert_model_parallel_size": 2,
                    "moe_pad_experts_for_cuda_graph_inference": True,
                },
                {"mcore": "0.17"},
            ),
        ),
    ),
    Rule(
        code="CG408",
        title="Block inference graphs in FP8",
        layer="arguments",
        severity="error",
        frameworks=(LM,),
        mcore=(17, None),
        when=_block_fp8,
        message="inference graphs of whole blocks with fp8={fp8}, transformer_impl={transformer_impl}, "
        "fp8_recipe={fp8_recipe}",
        mend="add --transformer-impl inference_optimized --fp8-recipe mxfp8, or set --inference-cuda-graph-scope layer",
        why="Only the inference-optimized layers hold FP8 state that a graph of the whole block can replay, and only "
        "in MXFP8.",
        source=f"{ARGUMENTS} (0.17: scope full_iteration_inference; 0.18+: inference scope block)",
        upstream=(
            "fp8 with --inference-cuda-graph-scope=block is only supported with",
            "Only --fp8-recipe=mxfp8 is supported",
        ),
        bad=(
            Example(
                {"cuda_graph_impl": "local", "inference_cuda_graph_scope": "block", "fp8": "hybrid"}, {"mcore": "0.19"}
            ),
        ),
        good=(
            Example({"cuda_graph_impl": "local", "inference_cuda_graph_scope": "block"}, {"mcore": "0.19"}),
            Example(
                {
                    "cuda_graph_impl": "local",
                    "inference_cuda_graph_scope": "block",
                    "fp8": "e4m3",
                    "fp8_recipe": "mxfp8",
                    "transformer_impl": "inference_optimized",
                },
                {"mcore": "0.19"},
            ),
        ),
    ),
    Rule(
        code="CG409",
        title="Captured delayed weight gradient with an old Transformer Engine",
        layer="arguments",
        severity="error",
        frameworks=(LM,),
        mcore=(17, None),
        when=lambda f, v: not v.at_least("te", 2, 12) and _delayed(f),
        message="delay_wgrad_compute and overlap_grad_reduce with the scopes {graph.modules} need Transformer Engine "
        "2.12",
        mend="use Transformer Engine 2.12 or newer, or drop the scope (attn; moe_router with shared experts), or drop "
        "--delay-wgrad-compute",
        fix=lambda f, v: {"delay_wgrad_compute": False},
        why="The delayed weight gradient of a captured module runs from a graph of its own, which Transformer Engine "
        "has from "
        "2.12 on.",
        source=f"{ARGUMENTS} (0.17+)",
        upstream=("CUDA graph with delay_wgrad_compute requires TE version >= 2.12.0.",),
        bad=(Example(DELAYED, {"mcore": "0.19", "te": "2.11"}),),
        good=(
            Example(DELAYED, {"mcore": "0.19", "te": "2.12"}),
            Example({**DELAYED, "ddp.overlap_grad_reduce": False}, {"mcore": "0.19", "te": "2.11"}),
        ),
    ),
    Rule(
        code="CG410",
        title="Captured delayed weight gradient without gradient accumulation fusion",
        layer="arguments",
        severity="error",
        frameworks=(LM,),
        mcore=(17, None),
        when=lambda f, v: v.at_least("te", 2, 12) and _delayed(f) and not f["gradient_accumulation_fusion"],
        message="delay_wgrad_compute and overlap_grad_reduce with the scopes {graph.modules}, and "
        "gradient_accumulation_fusion is off",
        mend="drop --no-gradient-accumulation-fusion, or drop --delay-wgrad-compute",
        fix=lambda f, v: {"gradient_accumulation_fusion": True},
        why="Without the fusion each step accumulates into freshly allocated gradients, and a graph keeps writing to "
        "the "
        "addresses that it saw at capture.",
        source=f"{ARGUMENTS} (0.17+)",
        upstream=("CUDA graph with delay_wgrad_compute requires gradient_accumulation_fusion",),
        bad=(Example({**DELAYED, "gradient_accumulation_fusion": False}, {"mcore": "0.19", "te": "2.14"}),),
        good=(Example(DELAYED, {"mcore": "0.19", "te": "2.14"}),),
    ),
    Rule(
        code="CG411",
        title="Captured delayed weight gradient of an attention with bias",
        layer="arguments",
        severity="error",
        frameworks=(LM,),
        mcore=(17, None),
        when=lambda f, v: (
            v.at_least("te", 2, 12)
            and "attn" in f["graph.modules"]
            and _delayed(f)
            and bool(f["add_bias_linear"] or f["add_qkv_bias"])
        ),
        message="delay_wgrad_compute and overlap_grad_reduce with a captured attention that has a bias",
        mend="drop --delay-wgrad-compute, or drop attn from the scopes, or add --disable-bias-linear",
        fix=lambda f, v: {"delay_wgrad_compute": False},
        why="The gradient of the bias is part of the delayed step and is not supported there yet.",
        source=f"{ARGUMENTS} (0.17+)",
        upstream=("CUDA graph with delay_wgrad_compute doesn't support attn bias for now.",),
        bad=(Example({**DELAYED, "add_qkv_bias": True}, {"mcore": "0.19", "te": "2.14"}),),
        good=(Example(DELAYED, {"mcore": "0.19", "te": "2.14"}),),
    ),
    Rule(
        code="CG412",
        title="Microbatched pipeline inference with graphs",
        layer="arguments",
        severity="error",
        frameworks=(LM,),
        when=lambda f, v: (
            f["arguments.inference_batch_times_seqlen_threshold"] > -1
            and (f["graph.active"] if v.minor >= 15 else bool(f["enable_cuda_graph"]))
        ),
        message="--inference-batch-times-seqlen-threshold {arguments.inference_batch_times_seqlen_threshold} with "
        "graphs",
        mend="drop --inference-batch-times-seqlen-threshold, or turn graphs off",
        fix=lambda f, v: {"arguments.inference_batch_times_seqlen_threshold": -1},
        why="Splitting a batch for the pipeline changes its shape with its size.",
        source=f"{ARGUMENTS} (0.13+)",
        upstream=("Pipeline-parallel microbatched inference is incompatible with CUDA graphs",),
        bad=(
            Example(
                {"cuda_graph_impl": "local", "arguments.inference_batch_times_seqlen_threshold": 512}, {"mcore": "0.19"}
            ),
        ),
        good=(Example({"cuda_graph_impl": "local"}, {"mcore": "0.19"}),),
    ),
    Rule(
        code="CG413",
        title="Local graphs with no size of inference batch to capture",
        layer="arguments",
        severity="error",
        frameworks=(LM,),
        mcore=(17, None),
        when=lambda f, v: (
            f["graph.impl"] == "local"
            and not (
                f["arguments.inference_dynamic_batching_num_cuda_graphs"] > 0
                or f["arguments.inference_dynamic_batching_num_cuda_graphs"] == -1
            )
        ),
        message="--inference-dynamic-batching-num-cuda-graphs {arguments.inference_dynamic_batching_num_cuda_graphs}",
        mend="give a positive number, or -1 to derive it from the largest number of requests",
        fix=lambda f, v: {"arguments.inference_dynamic_batching_num_cuda_graphs": -1},
        why="The local implementation always serves inference too, one graph a batch size.",
        source=f"{ARGUMENTS} (0.17+)",
        upstream=("inference_dynamic_batching_num_cuda_graphs should be a positive integer or -1",),
        bad=(
            Example(
                {"cuda_graph_impl": "local", "arguments.inference_dynamic_batching_num_cuda_graphs": 0},
                {"mcore": "0.19"},
            ),
        ),
        good=(Example({"cuda_graph_impl": "local"}, {"mcore": "0.19"}),),
    ),
    Rule(
        code="CG414",
        title="Reinforcement-learning graph flags without graphs",
        layer="arguments",
        severity="error",
        frameworks=(LM,),
        mcore=(17, None),
        when=lambda f, v: (
            bool(f["arguments.perform_rl_step"])
            and not f["graph.active"]
            and bool(f["arguments.rl_persist_cuda_graphs"] or f["arguments.rl_training_cuda_graphs"])
        ),
        message="--rl-persist-cuda-graphs or --rl-training-cuda-graphs is set, and no graphs are built",
        mend="set --cuda-graph-impl, or drop the two flags",
        fix=lambda f, v: {"arguments.rl_persist_cuda_graphs": False, "arguments.rl_training_cuda_graphs": False},
        why="The flags only say how graphs are kept between training and rollouts.",
        source=f"{ARGUMENTS} (0.17+)",
        upstream=("is set but no CUDA graphs are being built",),
        bad=(
            Example({"arguments.perform_rl_step": True, "arguments.rl_training_cuda_graphs": True}, {"mcore": "0.19"}),
        ),
        good=(
            Example(
                {
                    "cuda_graph_impl": "local",
                    "arguments.perform_rl_step": True,
                    "arguments.rl_training_cuda_graphs": True,
                },
                {"mcore": "0.19"},
            ),
        ),
    ),
    Rule(
        code="CG415",
        title="Weight resharding with graphs on Blackwell without node priorities",
        layer="arguments",
        severity="error",
        frameworks=(LM,),
        mcore=(19, None),
        when=lambda f, v: (
            (f["gtp_weight_remat_size"] > 1 or f["expert_gtp_weight_remat_size"] > 1)
            and f["graph.active"]
            and v.arch is not None
            and v.arch >= (10, 0)
            and f["env.CUDA_GRAPHS_USE_NODE_PRIORITY"] != "1"
        ),
        message="gtp_weight_remat_size={gtp_weight_remat_size} with graphs, and CUDA_GRAPHS_USE_NODE_PRIORITY is "
        "{env.CUDA_GRAPHS_USE_NODE_PRIORITY}",
        mend="export CUDA_GRAPHS_USE_NODE_PRIORITY=1",
        fix=lambda f, v: {"env.CUDA_GRAPHS_USE_NODE_PRIORITY": "1"},
        why="Inside a graph the priorities of streams are lost unless nodes carry them, and the communication that "
        "gathers "
        "weights would no longer overlap.",
        source=f"{ARGUMENTS} (0.19+)",
        upstream=("GTP requires CUDA_GRAPHS_USE_NODE_PRIORITY=1",),
        bad=(
            Example(
                {**TE, "cuda_graph_modules": ["attn"], "gtp_weight_remat_size": 2}, {"mcore": "0.19", "arch": "b200"}
            ),
        ),
        good=(
            Example(
                {**TE, "cuda_graph_modules": ["attn"], "gtp_weight_remat_size": 2}, {"mcore": "0.19", "arch": "h100"}
            ),
            Example({**TE, "cuda_graph_modules": ["attn"]}, {"mcore": "0.19", "arch": "b200"}),
        ),
    ),
    Rule(
        code="CG416",
        title="Both legacy flags on the command line of 0.14",
        layer="arguments",
        severity="error",
        frameworks=(LM,),
        mcore=(14, 14),
        when=lambda f, v: bool(f["enable_cuda_graph"]) and bool(f["external_cuda_graph"]),
        message="--enable-cuda-graph and --external-cuda-graph are both given",
        mend="keep one of the two",
        fix=lambda f, v: {"enable_cuda_graph": False},
        safe=False,
        why="The two name different implementations.",
        source=f"{ARGUMENTS} (0.14)",
        upstream=("enable_cuda_graph and external_cuda_graph cannot be enabled at the same time.",),
        bad=(Example({"enable_cuda_graph": True, "external_cuda_graph": True}, {"mcore": "0.14"}),),
        good=(Example({"external_cuda_graph": True}, {"mcore": "0.14"}),),
    ),
)
