# SPDX-License-Identifier: Apache-2.0
"""MoE with graphs."""

from common import pretrain_base


def moe_config():
    cfg = pretrain_base()
    cfg.model.expert_model_parallel_size = 8
    cfg.model.cuda_graph_impl = "transformer_engine"
    cfg.model.cuda_graph_modules = ["attn", "moe", "moe_router", "moe_preprocess"]
    cfg.model.use_te_rng_tracker = True
    cfg.rng.te_rng_tracker = True
    return cfg
