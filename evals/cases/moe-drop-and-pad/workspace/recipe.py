# SPDX-License-Identifier: Apache-2.0
"""MoE with fixed expert capacity."""

from common import pretrain_base


def moe_capacity_config():
    cfg = pretrain_base()
    cfg.model.expert_model_parallel_size = 8
    cfg.model.moe_expert_capacity_factor = 1.0
    cfg.model.moe_pad_expert_input_to_capacity = True
    cfg.model.moe_router_load_balancing_type = "aux_loss"
    return cfg
