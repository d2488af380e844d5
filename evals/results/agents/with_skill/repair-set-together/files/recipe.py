# SPDX-License-Identifier: Apache-2.0
"""Dense run with graphs."""

from common import pretrain_base


def dense_config():
    cfg = pretrain_base()
    cfg.model.cuda_graph_impl = "transformer_engine"
    cfg.model.cuda_graph_modules = ["attn", "mlp"]
    cfg.model.cuda_graph_scope = None
    cfg.rng.te_rng_tracker = True
    return cfg
