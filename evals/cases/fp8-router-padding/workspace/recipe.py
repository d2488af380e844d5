# SPDX-License-Identifier: Apache-2.0
"""FP8 MoE."""

from common import pretrain_base


def fp8_moe_config():
    cfg = pretrain_base()
    cfg.model.expert_model_parallel_size = 8
    cfg.model.moe_router_padding_for_fp8 = True
    return cfg
