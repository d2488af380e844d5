# SPDX-License-Identifier: Apache-2.0
"""MoE, 30B parameters, 3B active."""

from common import pretrain_base


def moe30b_config():
    cfg = pretrain_base()
    cfg.model.expert_model_parallel_size = 16
    cfg.model.moe_shared_expert_overlap = False
    cfg.model.cuda_graph_impl = "transformer_engine"
    cfg.model.cuda_graph_scope = None
    cfg.model.cuda_graph_modules = ["attn", "moe_router", "moe_preprocess"]
    cfg.model.use_te_rng_tracker = True
    cfg.rng.te_rng_tracker = True
    cfg.env_vars = {
        "CUDA_DEVICE_MAX_CONNECTIONS": 1,
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "NCCL_GRAPH_REGISTER": 0,
    }
    return cfg
