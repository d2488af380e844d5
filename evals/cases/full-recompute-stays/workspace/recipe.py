# SPDX-License-Identifier: Apache-2.0
"""Long context, full recompute."""

from common import pretrain_base


def longctx_config():
    cfg = pretrain_base(seq_length=16384)
    cfg.model.recompute_granularity = "full"
    cfg.model.recompute_method = "uniform"
    cfg.model.recompute_num_layers = 1
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.sequence_parallel = True
    return cfg
