# SPDX-License-Identifier: Apache-2.0
"""Regularised dense run."""

from common import pretrain_base


def dropout_config():
    cfg = pretrain_base()
    cfg.model.attention_dropout = 0.1
    cfg.model.recompute_granularity = "selective"
    cfg.model.recompute_modules = ["core_attn"]
    return cfg
