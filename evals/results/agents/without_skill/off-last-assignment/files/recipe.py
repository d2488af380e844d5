# SPDX-License-Identifier: Apache-2.0
"""Dense run with graphs, or so we think."""

from common import pretrain_base
from tuning import memory_tuning


def dense_config():
    cfg = pretrain_base()
    # Before the graph settings: memory_tuning sets cuda_graph_impl to "none".
    memory_tuning(cfg.model)
    cfg.model.cuda_graph_impl = "transformer_engine"
    cfg.model.cuda_graph_modules = ["attn", "mlp"]
    cfg.model.use_te_rng_tracker = True
    cfg.rng.te_rng_tracker = True
    return cfg
