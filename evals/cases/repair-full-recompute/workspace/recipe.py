# SPDX-License-Identifier: Apache-2.0
"""FP8 dense run."""

from common import pretrain_base


def fp8_config():
    cfg = pretrain_base()
    cfg.model.cuda_graph_impl = "transformer_engine"
    cfg.model.cuda_graph_modules = ["attn", "mlp"]
    cfg.model.use_te_rng_tracker = True
    cfg.rng.te_rng_tracker = True
    cfg.model.recompute_granularity = "full"
    cfg.model.recompute_method = "block"
    cfg.model.recompute_num_layers = 10
    return cfg
