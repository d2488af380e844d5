# SPDX-License-Identifier: Apache-2.0
"""CG8xx: what users report, where the settings alone already tell that it can happen."""

from __future__ import annotations

from math import inf, isfinite

from cudagraphs.rules.base import BRIDGE, Example, Facts, Rule
from cudagraphs.rules.capture import FULL, MOE, NEW, TE, te
from cudagraphs.rules.moe import dense
from cudagraphs.versions import Versions

REUSE = "expandable_segments:True,graph_capture_record_stream_reuse:True"


def _tight_memory(f: Facts, v: Versions) -> bool:
    if not f["graph.full_iteration"] or dense(f) or f["fp8"] is None:
        return False
    setting = (f["env.PYTORCH_CUDA_ALLOC_CONF"] or "") + (f["env.PYTORCH_ALLOC_CONF"] or "")
    return "graph_capture_record_stream_reuse:True" not in setting


RULES = (
    Rule(
        code="CG801",
        title="Transformer Engine that cannot reset graphs",
        layer="reported",
        severity="warning",
        when=lambda f, v: te(f) and v.te is not None and not v.at_least("te", 2, 10),
        message="Transformer Engine before 2.10 has no reset of graphs: they live until the process ends",
        mend="use Transformer Engine 2.10 or newer; delete the graphs through the helper, guarded by "
        "graphs_created(), before the "
        "process groups are destroyed",
        why="Graphs hold NCCL kernels. Destroying the process groups first waits for graphs that are never freed, and "
        "the job "
        "hangs at its end until the scheduler's limit.",
        source="Megatron-Bridge#3595; megatron/core/transformer/cuda_graphs.py TECudaGraphHelper.delete_cuda_graphs",
        bad=(Example({**TE, "cuda_graph_modules": ["attn"]}, {**NEW, "te": "2.9"}),),
        good=(Example({**TE, "cuda_graph_modules": ["attn"]}, NEW),),
    ),
    Rule(
        code="CG802",
        title="FP8 parameter gather in a full-iteration graph",
        layer="reported",
        severity="warning",
        when=lambda f, v: (
            f["graph.full_iteration"]
            and bool(f["ddp.fp8_param_gather"])
            and bool(f["ddp.overlap_param_gather"])
            and bool(f["ddp.reuse_grad_buf_for_mxfp8_param_ag"])
        ),
        message="FP8 parameters are gathered into gradient buffers while a full-iteration graph runs: the first "
        "replay may see "
        "zero gradients",
        mend="compare the very first replay with eager, not only a later one; smoke_capture does",
        why="The buffer that holds the gathered parameters is reused for gradients; at the switch from eager to "
        "replay one of "
        "the two can be stale.",
        source="Megatron-Bridge PR 3076",
        bad=(
            Example(
                {
                    **FULL,
                    "ddp.fp8_param_gather": True,
                    "ddp.overlap_param_gather": True,
                    "ddp.reuse_grad_buf_for_mxfp8_param_ag": True,
                },
                NEW,
            ),
        ),
        good=(Example({**FULL, "ddp.fp8_param_gather": True, "ddp.overlap_param_gather": True}, NEW),),
    ),
    Rule(
        code="CG803",
        title="Full-iteration capture of an FP8 MoE with the default allocator",
        layer="reported",
        severity="warning",
        when=_tight_memory,
        message="a full-iteration graph of an FP8 MoE, and PYTORCH_CUDA_ALLOC_CONF is {env.PYTORCH_CUDA_ALLOC_CONF}",
        mend=f"before torchrun: PYTORCH_CUDA_ALLOC_CONF={REUSE} and NCCL_GRAPH_REGISTER=0; then measure reserved "
        f"memory",
        fix=lambda f, v: {"env.PYTORCH_CUDA_ALLOC_CONF": REUSE, "env.NCCL_GRAPH_REGISTER": "0"},
        safe=False,
        why="Blocks that cross streams inside a capture are not reused until it ends, and a whole iteration of an MoE "
        "has many. "
        "The launcher of the official recipes sets both variables; a run that bypasses it goes out of memory with the "
        "same "
        "settings.",
        source="Megatron-Bridge#4587",
        upstream=("CUDA out of memory",),
        bad=(
            Example(
                {**FULL, **MOE, "moe_expert_rank_capacity_factor": 1.5, "moe_paged_stash": True, "fp8": "e4m3"}, NEW
            ),
        ),
        good=(
            Example(
                {
                    **FULL,
                    **MOE,
                    "moe_expert_rank_capacity_factor": 1.5,
                    "moe_paged_stash": True,
                    "fp8": "e4m3",
                    "env.PYTORCH_CUDA_ALLOC_CONF": REUSE,
                    "env.NCCL_GRAPH_REGISTER": "0",
                },
                NEW,
            ),
        ),
    ),
    Rule(
        code="CG804",
        title="No eager step before the capture",
        layer="reported",
        severity="warning",
        when=lambda f, v: (
            f["graph.active"] and f["cuda_graph_warmup_steps"] <= 0 and not f["fine_grained_activation_offloading"]
        ),
        message="cuda_graph_warmup_steps is {cuda_graph_warmup_steps}",
        mend="set cuda_graph_warmup_steps to 1 or more (3 is the default)",
        fix=lambda f, v: {"cuda_graph_warmup_steps": 3},
        why="The first steps allocate workspaces, build communicators and tune kernels, and none of that can happen "
        "inside a "
        "capture.",
        source="megatron/core/transformer/transformer_config.py TransformerConfig.cuda_graph_warmup_steps",
        upstream=("operation not permitted when stream is capturing",),
        bad=(Example({**TE, "cuda_graph_modules": ["attn"], "cuda_graph_warmup_steps": 0}, NEW),),
        good=(Example({**TE, "cuda_graph_modules": ["attn"]}, NEW),),
    ),
    Rule(
        code="CG805",
        title="Optimizer graph that compares the gradient norm on the host",
        layer="reported",
        severity="error",
        mcore=(18, None),
        when=lambda f, v: (
            bool(f["optimizer.optimizer_cuda_graph"])
            and (v.minor == 18 or isfinite(f["optimizer.grad_norm_skip_threshold"]))
        ),
        message="the optimizer step is captured, and it compares the gradient norm with grad_norm_skip_threshold="
        "{optimizer.grad_norm_skip_threshold} on the host",
        mend="keep the optimizer eager in 0.18; from 0.19 leave grad_norm_skip_threshold at infinity",
        fix=lambda f, v: (
            {"optimizer.optimizer_cuda_graph": False} if v.minor == 18 else {"optimizer.grad_norm_skip_threshold": inf}
        ),
        why="The norm is a tensor on the device where fused kernels are there, and comparing it copies it to the "
        "host. 0.18 "
        "compares whatever the threshold is, 0.19 only with a finite one.",
        source="Megatron-LM#5889; megatron/core/optimizer/optimizer.py ChainedOptimizer.step (0.18, 0.19)",
        upstream=("operation not permitted when stream is capturing",),
        bad=(
            Example({"optimizer.optimizer_cuda_graph": True, "bf16": True}, {**NEW, "mcore": "0.18"}),
            Example(
                {"optimizer.optimizer_cuda_graph": True, "bf16": True, "optimizer.grad_norm_skip_threshold": 10.0}, NEW
            ),
        ),
        good=(Example({"optimizer.optimizer_cuda_graph": True, "bf16": True}, NEW),),
    ),
    Rule(
        code="CG806",
        title="Captured attention under expert-parallel overlap in an interleaved pipeline",
        layer="reported",
        severity="warning",
        mcore=(18, None),
        when=lambda f, v: (
            bool(f["overlap_moe_expert_parallel_comm"])
            and te(f)
            and "attn" in f["graph.modules"]
            and f["pipeline_model_parallel_size"] > 1
        ),
        message="attention is captured while expert-parallel communication overlaps, with "
        "{pipeline_model_parallel_size} pipeline "
        "stages: one user saw gradient norms explode after some eighty steps",
        mend="compare a few hundred steps with eager before trusting it; smoke_capture compares gradients by "
        "parameter group",
        why="The overlapped schedule keeps several microbatches in flight, each with graphs of its own. The report is "
        "open: "
        "without graphs the same run is fine.",
        source="Megatron-LM#5966",
        upstream=("found NaN in local grad norm for bucket",),
        bad=(
            Example(
                {
                    **TE,
                    **MOE,
                    "cuda_graph_modules": ["attn"],
                    "overlap_moe_expert_parallel_comm": True,
                    "expert_model_parallel_size": 8,
                    "pipeline_model_parallel_size": 8,
                    "virtual_pipeline_model_parallel_size": 4,
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
                    "expert_model_parallel_size": 8,
                },
                NEW,
            ),
        ),
    ),
    Rule(
        code="CG807",
        title="Graphs around the alltoall dispatcher at scale",
        layer="reported",
        severity="info",
        frameworks=(BRIDGE,),
        when=lambda f, v: (
            te(f)
            and "moe_preprocess" in f["graph.modules"]
            and f["moe_token_dispatcher_type"] == "alltoall"
            and f["expert_model_parallel_size"] > 1
        ),
        message="users saw runs hang in the token dispatcher right after the capture with the alltoall dispatcher and "
        "these "
        "scopes",
        mend="try a short run at full scale first; with the flex dispatcher (HybridEP or DeepEP) the preparation "
        "stays on the "
        "device",
        why="The report is open: it came with one release and depends on scale, and attention alone hung in one of "
        "the setups.",
        source="Megatron-Bridge#3517",
        bad=(
            Example(
                {
                    **TE,
                    **MOE,
                    "cuda_graph_modules": ["attn", "moe_router", "moe_preprocess"],
                    "expert_model_parallel_size": 4,
                },
                {**NEW, "bridge": "0.6.2"},
            ),
        ),
        good=(
            Example(
                {
                    **TE,
                    **MOE,
                    "moe_token_dispatcher_type": "flex",
                    "cuda_graph_modules": ["attn", "moe_router", "moe_preprocess"],
                    "expert_model_parallel_size": 4,
                },
                {**NEW, "bridge": "0.6.2"},
            ),
        ),
    ),
    Rule(
        code="CG808",
        title="PyTorch that deprecates how generators are registered with graphs",
        layer="reported",
        severity="info",
        torch=((2, 14), None),
        when=lambda f, v: f["graph.active"],
        message="PyTorch 2.14 warns about CUDAGraph.register_generator_state(), which megatron-core and Transformer "
        "Engine call",
        mend="the warning is harmless; a PyTorch that drops the method needs a newer megatron-core",
        why="The tracker that graphs need asserts that the method is there.",
        source="Megatron-LM PR 7348",
        bad=(Example({**TE, "cuda_graph_modules": ["attn"]}, {**NEW, "torch": "2.14"}),),
        good=(Example({**TE, "cuda_graph_modules": ["attn"]}, NEW),),
    ),
)
