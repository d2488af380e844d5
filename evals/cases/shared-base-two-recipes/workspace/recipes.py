# SPDX-License-Identifier: Apache-2.0
"""Production and debug runs of the 8B model."""

from common import pretrain_base


def prod_8b_config():
    cfg = pretrain_base()
    cfg.train.train_iters = 100000
    cfg.checkpoint.save_interval = 2000
    return cfg


def debug_8b_config():
    cfg = pretrain_base()
    cfg.model.num_layers = 4
    cfg.train.train_iters = 20
    return cfg
