# SPDX-License-Identifier: Apache-2.0
"""Dense 3B, pinned to the container of last summer."""

from common import pretrain_base


def dense3b_config():
    cfg = pretrain_base()
    cfg.model.hidden_size = 3072
    cfg.model.ffn_hidden_size = 8192
    cfg.model.num_attention_heads = 24
    cfg.optimizer.lr = 2e-4
    return cfg
