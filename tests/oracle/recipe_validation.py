# SPDX-License-Identifier: Apache-2.0
"""Bridge's own validation of what a recipe function returns, for bridge_recipes.py --validate.

A recipe alone does not say everything that validation looks at: a checkpoint's sizes, paths, the GPU. Those are made up
here so that the graph-off configuration is accepted wherever that is possible; what is found then is due to the graphs.
"""

from __future__ import annotations

import os
import re
import types
from collections.abc import Callable

from oracle import protocol

# Checkpoints of MoE models, found in the lower-case id, and how many experts they get. The number is one that every
# expert parallel size divides.
MOE_CHECKPOINTS = (
    r"-a\d+b|deepseek-|moonlight|kimi|glm-|gpt-oss|qwen3-next|minimax|olmoe|k-exaone|step-3|"
    r"nemotron-3-(nano-30b|super|ultra)"
)
CHECKPOINT_EXPERTS = 512
# Layer counts of the released checkpoints; the first with which the graph-off configuration is accepted is taken.
LAYER_COUNTS = (32, 48, 61, 80, 94, 64, 36, 24, 126, 78, 60, 46, 92, 52, 88, 27, 40, 28, 16, 62, 30)

# GPU named in a recipe function -> (device name, compute capability)
GPUS = {
    "gb300": ("NVIDIA GB300", (10, 3)),
    "gb200": ("NVIDIA GB200", (10, 0)),
    "b300": ("NVIDIA B300", (10, 3)),
    "b200": ("NVIDIA B200", (10, 0)),
    "h100": ("NVIDIA H100", (9, 0)),
}


class FusedAdam:
    """The parameters of Transformer Engine's optimizer that megatron-core looks for (optimizer_config.py)."""

    def __init__(
        self,
        params=None,
        lr=1e-3,
        master_weight_dtype=None,
        exp_avg_dtype=None,
        exp_avg_sq_dtype=None,
        use_decoupled_grad=False,
        store_param_remainders=False,
    ):
        pass


def pretend_gpu(function: str) -> None:
    """Let torch report the GPU that the recipe function's name tells, H100 where it tells none."""
    import torch

    named = re.search(r"_(gb300|gb200|b300|b200|h100)(_|$)", function)
    name, (major, minor) = GPUS[named[1] if named else "h100"]
    properties = types.SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=132)
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.get_device_capability = lambda device=None: (major, minor)
    torch.cuda.get_device_name = lambda device=None: name


def validate(function: Callable, name: str) -> dict:
    """{"verdict", "error", "normalized"} for the configuration that the recipe function returns.

    `runtime_config_update` runs on a fresh configuration, as training would, on as many GPUs as the function's name
    says (or its parallel sizes need). "baseline_rejected": it is refused with graphs off too.
    """
    pretend_gpu(name)
    first_error = None
    for layers in LAYER_COUNTS:
        try:
            _updated(function, name, layers, graphs=False)
            break
        except Exception as error:
            first_error = first_error or error
    else:
        return {"verdict": "baseline_rejected", "error": protocol.error_of(first_error), "normalized": None}
    try:
        model = _updated(function, name, layers, graphs=True)
    except Exception as error:
        return {"verdict": "rejected", "error": protocol.error_of(error), "normalized": None}
    normalized = {
        "impl": model.cuda_graph_impl,
        "modules": [module.name for module in model.cuda_graph_modules],
        "inference_scope": model.inference_cuda_graph_scope.name,
    }
    return {"verdict": "accepted", "error": None, "normalized": normalized}


def _updated(function: Callable, name: str, layers: int, graphs: bool):
    from megatron.bridge.training.config import runtime_config_update

    config = function()
    model = config.model
    _complete(config, layers)
    if not graphs:
        model.cuda_graph_impl, model.cuda_graph_scope, model.cuda_graph_modules = "none", None, []
        model.enable_cuda_graph = model.external_cuda_graph = False
        model.inference_cuda_graph_scope = None
    os.environ["WORLD_SIZE"] = str(_gpus(model, name))
    runtime_config_update(config)
    return model


def _complete(config, layers: int) -> None:
    """Put in what a user and the checkpoint supply."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    model, dataset = config.model, config.dataset
    assigned = vars(model).get("assigned_by_recipe")
    if assigned is not None:
        known = {"num_layers": layers, "moe_grouped_gemm": True, "image_token_index": 1, "init_method_std": 0.02}
        known.update(gated_linear_unit=True, add_bias_linear=False, add_qkv_bias=False)
        known["multi_latent_attention"] = isinstance(model, MLATransformerConfig)
        for name, value in known.items():
            if hasattr(model, name) and name not in assigned:
                setattr(model, name, value)
    if config.peft is not None and config.checkpoint.pretrained_checkpoint is None:
        config.checkpoint.pretrained_checkpoint = os.getcwd()  # it must exist, and is not read
    for name in ("path", "path_to_cache"):
        if hasattr(dataset, name) and not getattr(dataset, name):
            setattr(dataset, name, "data")


def _gpus(model, name: str) -> int:
    named = re.search(r"_(\d+)gpu_", name)
    if named:
        return int(named[1])
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    needed = getattr(model, "expert_model_parallel_size", 1) or 1
    for size in sizes:
        needed *= getattr(model, size, 1) or 1
    return needed
