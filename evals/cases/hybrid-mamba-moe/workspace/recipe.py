# SPDX-License-Identifier: Apache-2.0
"""Hybrid model with Mamba layers and experts."""

from common import pretrain_base


def hybrid_config():
    cfg = pretrain_base()
    cfg.model.expert_model_parallel_size = 8
    cfg.model.cuda_graph_scope = "full"
    cfg.train.global_batch_size = 256
    return cfg
