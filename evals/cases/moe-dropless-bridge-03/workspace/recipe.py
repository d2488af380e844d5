# SPDX-License-Identifier: Apache-2.0
"""MoE 16B on one node."""

from common import pretrain_base


def moe16b_config():
    cfg = pretrain_base()
    cfg.model.expert_model_parallel_size = 8
    cfg.model.num_layers = 16
    cfg.train.train_iters = 5000
    return cfg
