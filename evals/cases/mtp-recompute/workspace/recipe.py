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
    return cfg
