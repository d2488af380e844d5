# SPDX-License-Identifier: Apache-2.0
"""Dense run with batch-size ramp-up."""

from common import pretrain_base


def rampup_config():
    cfg = pretrain_base()
    cfg.train.rampup_batch_size = [16, 16, 5000000]
    cfg.train.global_batch_size = 128
    return cfg
