# SPDX-License-Identifier: Apache-2.0
"""A recipe to try the helpers on: `python helpers/apply_overrides.py templates/example_recipe/recipe.py --diff`."""

from base import pretrain_base


def qwen3_30b_a3b_pretrain_config():
    """Qwen3-30B-A3B, a dropless mixture of experts, on 16 GPUs."""
    cfg = pretrain_base("Qwen/Qwen3-30B-A3B")

    cfg.model.tensor_model_parallel_size = 1
    cfg.model.pipeline_model_parallel_size = 1
    cfg.model.expert_model_parallel_size = 16
    cfg.model.moe_token_dispatcher_type = "alltoall"
    cfg.model.recompute_granularity = None

    # a leftover of an older release, as many recipes have it
    cfg.model.cuda_graph_impl = "none"
    cfg.model.cuda_graph_scope = "full"

    cfg.env_vars = {
        "CUDA_DEVICE_MAX_CONNECTIONS": 1,
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    return cfg
