# SPDX-License-Identifier: Apache-2.0
"""MoE with multi-token prediction."""

from common import pretrain_base


def mtp_config():
    cfg = pretrain_base()
    cfg.model.expert_model_parallel_size = 8
    cfg.model.mtp_num_layers = 1
    cfg.model.mtp_loss_scaling_factor = 0.1
    cfg.model.recompute_granularity = "selective"
    cfg.model.recompute_modules = ["moe", "layernorm"]

    # With "moe" recomputed (and dropless routing), moe_router, moe_preprocess and moe cannot be
    # captured, which leaves attention. Do not leave cuda_graph_modules unset or empty: that means
    # the whole layer, MoE included, and config validation does not catch it.
    cfg.model.cuda_graph_impl = "transformer_engine"
    cfg.model.cuda_graph_modules = ["attn"]
    # CUDA graphs require the TE RNG tracker.
    cfg.model.use_te_rng_tracker = cfg.rng.te_rng_tracker = True
    return cfg
