# SPDX-License-Identifier: Apache-2.0
"""Dense run, written for Bridge 0.6."""

from common import pretrain_base


def dense_config():
    cfg = pretrain_base()
    cfg.model.cuda_graph_impl = "transformer_engine"
    cfg.model.cuda_graph_scope = ["attn", "mlp"]
    cfg.model.cuda_graph_warmup_steps = 3
    cfg.model.use_te_rng_tracker = True
    cfg.rng.te_rng_tracker = True
    return cfg
