# SPDX-License-Identifier: Apache-2.0
"""MoE that drops tokens over capacity."""

from common import pretrain_base


def moe_capacity_config():
    cfg = pretrain_base()
    cfg.model.expert_model_parallel_size = 8
    cfg.model.moe_expert_capacity_factor = 1.25
    cfg.model.moe_pad_expert_input_to_capacity = False
    cfg.model.moe_token_drop_policy = "probs"
    return cfg
