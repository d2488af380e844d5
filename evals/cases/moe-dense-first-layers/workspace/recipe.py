# SPDX-License-Identifier: Apache-2.0
"""Three dense layers, then experts."""

from common import pretrain_base


def mixed_config():
    cfg = pretrain_base()
    cfg.model.num_layers = 27
    cfg.model.moe_layer_freq = [0] * 3 + [1] * 24
    cfg.model.expert_model_parallel_size = 8
    return cfg
