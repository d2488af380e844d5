# SPDX-License-Identifier: Apache-2.0
"""Expert-parallel overlap."""

from common import pretrain_base


def overlap_config():
    cfg = pretrain_base()
    cfg.model.expert_model_parallel_size = 16
    cfg.model.moe_layer_freq = [0] + [1] * 23
    cfg.model.overlap_moe_expert_parallel_comm = True
    cfg.model.moe_shared_expert_overlap = False
    return cfg
