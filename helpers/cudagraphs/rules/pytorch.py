# SPDX-License-Identifier: Apache-2.0
"""CG9xx: graphs in plain PyTorch, Transformer Engine's graphed callables, DeepSpeed and FSDP.

Facts: `torch.capture` is "none", "partial" (single modules) or "full_iteration" (forward, backward and maybe the
optimizer); the other `torch.*` and `deepspeed.*` facts say what is around it.
"""

from __future__ import annotations

from cudagraphs.rules.base import DEEPSPEED, PYTORCH, TE, Example, Facts, Rule

GRAPHS_NOTE = "PyTorch documentation, CUDA semantics, CUDA Graphs"
WHOLE = {"torch.capture": "full_iteration"}
PARTIAL = {"torch.capture": "partial"}


def capturing(f: Facts) -> bool:
    return f["torch.capture"] not in (None, "none")


def whole(f: Facts) -> bool:
    return f["torch.capture"] == "full_iteration"


RULES = (
    Rule(
        code="CG901",
        title="Optimizer that cannot be captured",
        layer="capture",
        severity="error",
        frameworks=(PYTORCH, DEEPSPEED),
        when=lambda f, v: bool(f["torch.optimizer_in_graph"]) and not f["torch.optimizer_capturable"],
        message="{torch.optimizer} is stepped inside a graph, and capturable is {torch.optimizer_capturable}",
        mend="construct the optimizer with capturable=True before the capture, and give the learning rate as a device "
        "tensor",
        fix=lambda f, v: {"torch.optimizer_capturable": True, "torch.lr_is_tensor": True},
        why="Without capturable the optimizer keeps its step count on the host and reads it; under capture it raises.",
        source="torch/optim/adamw.py and its kin; Lightning#18501",
        upstream=(
            "Attempting CUDA graph capture of step() for an instance of",
            "this instance was constructed with capturable=False",
        ),
        bad=(Example({**WHOLE, "torch.optimizer": "AdamW", "torch.optimizer_in_graph": True}),),
        good=(
            Example(
                {
                    **WHOLE,
                    "torch.optimizer": "AdamW",
                    "torch.optimizer_in_graph": True,
                    "torch.optimizer_capturable": True,
                    "torch.lr_is_tensor": True,
                }
            ),
            Example({**WHOLE, "torch.optimizer": "AdamW"}),
        ),
    ),
    Rule(
        code="CG902",
        title="Learning rate frozen into the graph",
        layer="capture",
        severity="runtime",
        frameworks=(PYTORCH, DEEPSPEED),
        when=lambda f, v: (
            bool(f["torch.optimizer_in_graph"])
            and bool(f["torch.optimizer_capturable"])
            and not f["torch.lr_is_tensor"]
        ),
        message="the optimizer is stepped inside a graph with a learning rate that is a Python number",
        mend="give the learning rate as a device tensor, and let the scheduler write into it in place",
        fix=lambda f, v: {"torch.lr_is_tensor": True},
        why="The number is copied into the kernels at capture; a scheduler that changes it later changes nothing.",
        source="torch/optim/optimizer.py (capturable); torch/optim/lr_scheduler.py",
        bad=(Example({**WHOLE, "torch.optimizer_in_graph": True, "torch.optimizer_capturable": True}),),
        good=(
            Example(
                {
                    **WHOLE,
                    "torch.optimizer_in_graph": True,
                    "torch.optimizer_capturable": True,
                    "torch.lr_is_tensor": True,
                }
            ),
        ),
    ),
    Rule(
        code="CG903",
        title="FSDP version 1 inside a captured step",
        layer="capture",
        severity="error",
        frameworks=(PYTORCH,),
        when=lambda f, v: f["torch.fsdp"] == 1 and whole(f),
        message="the whole step is captured, and the model is wrapped in FSDP version 1",
        mend="capture submodules inside the FSDP units, or use FSDP2 with resharding after the forward off",
        fix=lambda f, v: {"torch.capture": "partial"},
        safe=False,
        why="Its hooks free and gather parameters, wait on events and copy through pinned memory; none of that can be "
        "recorded.",
        source="pytorch#127225, pytorch#164264",
        upstream=("operation not permitted when stream is capturing",),
        bad=(Example({**WHOLE, "torch.fsdp": 1}),),
        good=(Example({**PARTIAL, "torch.fsdp": 1}), Example({"torch.fsdp": 1})),
    ),
    Rule(
        code="CG904",
        title="FSDP2 that reshards around what is captured",
        layer="capture",
        severity="runtime",
        frameworks=(PYTORCH,),
        when=lambda f, v: f["torch.fsdp"] == 2 and whole(f) and f["torch.reshard_after_forward"] is not False,
        message="the whole step is captured, and FSDP2 reshards parameters after the forward",
        mend="set reshard_after_forward=False, or capture submodules inside the units",
        fix=lambda f, v: {"torch.reshard_after_forward": False},
        safe=False,
        why="Gathered parameters are new allocations each time; a graph keeps the addresses of its capture.",
        source="torch/distributed/fsdp/_fully_shard; pytorch#164264",
        bad=(Example({**WHOLE, "torch.fsdp": 2}),),
        good=(Example({**WHOLE, "torch.fsdp": 2, "torch.reshard_after_forward": False}),),
    ),
    Rule(
        code="CG905",
        title="ZeRO stage 3 with graphs",
        layer="capture",
        severity="error",
        frameworks=(DEEPSPEED,),
        when=lambda f, v: (capturing(f) or bool(f["deepspeed.enable_cuda_graph"])) and f["deepspeed.zero_stage"] == 3,
        message="deepspeed.zero_stage=3 with CUDA graphs",
        mend="use ZeRO stage 1 or 2, or turn graphs off",
        fix=lambda f, v: {"torch.capture": "none", "deepspeed.enable_cuda_graph": False},
        why="Stage 3 gathers and releases every parameter through host-side bookkeeping in each pass.",
        source="DeepSpeed#6552",
        bad=(Example({**PARTIAL, "deepspeed.zero_stage": 3}),),
        good=(Example({**PARTIAL, "deepspeed.zero_stage": 1}), Example({"deepspeed.zero_stage": 3})),
    ),
    Rule(
        code="CG906",
        title="Activation checkpointing that saves random number state inside a graph",
        layer="capture",
        severity="runtime",
        frameworks=(PYTORCH, DEEPSPEED, TE),
        when=lambda f, v: (
            capturing(f)
            and bool(f["torch.checkpoint_in_graph"])
            and f["torch.checkpoint_preserve_rng_state"] is not False
        ),
        message="activation checkpointing inside what is captured, with preserve_rng_state left on",
        mend="pass preserve_rng_state=False (with dropout 0), or checkpoint outside the graph",
        fix=lambda f, v: {"torch.checkpoint_preserve_rng_state": False},
        safe=False,
        why="Saving and restoring the generator's state copies it to the host, which a capture does not allow.",
        source="torch/utils/checkpoint.py checkpoint(preserve_rng_state)",
        upstream=("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture",),
        bad=(Example({**WHOLE, "torch.checkpoint_in_graph": True}),),
        good=(Example({**WHOLE, "torch.checkpoint_in_graph": True, "torch.checkpoint_preserve_rng_state": False}),),
    ),
    Rule(
        code="CG907",
        title="Shapes or control flow that change from step to step",
        layer="capture",
        severity="runtime",
        frameworks=(PYTORCH, DEEPSPEED, TE),
        when=lambda f, v: capturing(f) and bool(f["torch.dynamic_shapes"]),
        message="the captured part sees different shapes",
        mend="pad to one shape or to a few buckets with a graph each, or leave that part eager",
        why="A graph replays the kernels and shapes of its capture, whatever it is handed.",
        source=GRAPHS_NOTE,
        bad=(Example({**PARTIAL, "torch.dynamic_shapes": True}),),
        good=(Example(PARTIAL), Example({"torch.dynamic_shapes": True})),
    ),
    Rule(
        code="CG908",
        title="Gradient scaler stepped inside a graph",
        layer="capture",
        severity="error",
        frameworks=(PYTORCH, DEEPSPEED),
        when=lambda f, v: bool(f["torch.optimizer_in_graph"]) and bool(f["torch.grad_scaler"]),
        message="a gradient scaler decides on the host whether the captured optimizer steps",
        mend="train in BF16 without a scaler, or keep the optimizer outside the graph and scale there",
        fix=lambda f, v: {"torch.optimizer_in_graph": False},
        why="GradScaler.step reads the overflow flag on the host.",
        source="torch/amp/grad_scaler.py GradScaler.step; " + GRAPHS_NOTE,
        upstream=("operation not permitted when stream is capturing",),
        bad=(
            Example(
                {
                    **WHOLE,
                    "torch.optimizer_in_graph": True,
                    "torch.optimizer_capturable": True,
                    "torch.lr_is_tensor": True,
                    "torch.grad_scaler": True,
                }
            ),
        ),
        good=(Example({**WHOLE, "torch.grad_scaler": True}),),
    ),
    Rule(
        code="CG909",
        title="DDP captured without enough eager iterations",
        layer="capture",
        severity="error",
        frameworks=(PYTORCH,),
        when=lambda f, v: whole(f) and bool(f["torch.ddp"]) and f["torch.warmup_iterations"] < 11,
        message="DDP's whole step is captured after {torch.warmup_iterations} eager iterations",
        mend="run at least 11 eager iterations on a side stream before the capture, and build DDP in that side stream",
        fix=lambda f, v: {"torch.warmup_iterations": 11},
        why="DDP rebuilds its buckets and takes its timings within the first ten iterations.",
        source=GRAPHS_NOTE + " (usage with DistributedDataParallel)",
        bad=(Example({**WHOLE, "torch.ddp": True, "torch.warmup_iterations": 3}),),
        good=(Example({**WHOLE, "torch.ddp": True, "torch.warmup_iterations": 11}), Example({"torch.ddp": True})),
    ),
    Rule(
        code="CG910",
        title="Accumulated gradients in a graph's static buffers",
        layer="reported",
        severity="warning",
        frameworks=(TE, PYTORCH),
        when=lambda f, v: (
            f["torch.capture"] == "partial" and f["torch.gradient_accumulation"] > 1 and not f["torch.grads_cloned"]
        ),
        message="gradients of {torch.gradient_accumulation} microbatches are accumulated from buffers that the graph "
        "reuses",
        mend="compare two or more microbatches a step with eager; clone the returned gradients, or accumulate in the "
        "backward",
        why="A graphed backward returns the same buffers in every replay. Where the first microbatch's gradient is "
        "taken over "
        "without a copy, the second overwrites it.",
        source="pytorch#181723, TransformerEngine PR 2937",
        bad=(Example({**PARTIAL, "torch.gradient_accumulation": 2}),),
        good=(Example(PARTIAL), Example({**PARTIAL, "torch.gradient_accumulation": 2, "torch.grads_cloned": True})),
    ),
    Rule(
        code="CG911",
        title="One graph for several microbatches in flight",
        layer="capture",
        severity="error",
        frameworks=(PYTORCH, TE, DEEPSPEED),
        when=lambda f, v: (
            f["torch.capture"] == "partial"
            and f["torch.microbatches_in_flight"] > 1
            and not f["torch.graph_per_microbatch"]
        ),
        message="{torch.microbatches_in_flight} microbatches are in flight between forward and backward, and each "
        "module has one "
        "graph",
        mend="capture one graph a microbatch in flight (Transformer Engine's make_graphed_callables takes the "
        "schedule as _order), "
        "or run one microbatch at a time",
        why="A second forward through the same graph overwrites the activations that the first one's backward still "
        "needs; "
        "gradients are wrong or NaN. A pipeline without interleaving does exactly that.",
        source="Megatron-LM#422; transformer_engine/pytorch/graph.py make_graphed_callables (_order)",
        bad=(Example({**PARTIAL, "torch.microbatches_in_flight": 4}),),
        good=(
            Example({**PARTIAL, "torch.microbatches_in_flight": 4, "torch.graph_per_microbatch": True}),
            Example(PARTIAL),
        ),
    ),
    Rule(
        code="CG912",
        title="Capture on a device that is not the current one",
        layer="capture",
        severity="runtime",
        frameworks=(PYTORCH, TE),
        when=lambda f, v: (
            capturing(f)
            and f["torch.model_device"] is not None
            and f["torch.model_device"] != f["torch.current_device"]
        ),
        message="the model lies on device {torch.model_device}, and device {torch.current_device} is current",
        mend="call torch.cuda.set_device(...) before warm-up and capture, and make the streams on that device",
        fix=lambda f, v: {"torch.current_device": f["torch.model_device"]},
        why="The capture stream is made on the current device, and work that lands on another device's default stream "
        "breaks the "
        "capture.",
        source="pytorch#87794",
        upstream=("operation not permitted when stream is capturing",),
        bad=(Example({**WHOLE, "torch.model_device": 1}),),
        good=(Example({**WHOLE, "torch.model_device": 1, "torch.current_device": 1}),),
    ),
    Rule(
        code="CG913",
        title="Captured optimizer step over parameters without a gradient",
        layer="capture",
        severity="runtime",
        frameworks=(PYTORCH, DEEPSPEED),
        when=lambda f, v: bool(f["torch.optimizer_in_graph"]) and bool(f["torch.params_without_grad"]),
        message="the optimizer step is captured while some parameters have no gradient: these are never updated again",
        mend="give every trainable parameter a gradient before the capture, and keep the buffers "
        "(zero_grad(set_to_none=False))",
        why="The step skips a parameter without a gradient, and the graph keeps skipping it when the gradient comes "
        "later.",
        source="microsoft/dion PR 108",
        bad=(
            Example(
                {
                    **WHOLE,
                    "torch.optimizer_in_graph": True,
                    "torch.optimizer_capturable": True,
                    "torch.lr_is_tensor": True,
                    "torch.params_without_grad": True,
                }
            ),
        ),
        good=(Example({**WHOLE, "torch.params_without_grad": True}),),
    ),
)
