# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet with experts."""

from common import pretrain_base


def gdn_config():
    cfg = pretrain_base()
    cfg.model.expert_model_parallel_size = 8
    cfg.model.recompute_granularity = None
    cfg.scheduler.lr_warmup_iters = 100
    return cfg
