# SPDX-License-Identifier: Apache-2.0
"""Dense run with graphs, or so we think."""

from common import pretrain_base
from tuning import memory_tuning


def dense_config():
    cfg = pretrain_base()
    cfg.model.cuda_graph_modules = ["attn", "mlp"]
    cfg.model.use_te_rng_tracker = True
    cfg.rng.te_rng_tracker = True
    memory_tuning(cfg.model)
    # After memory_tuning, which sets cuda_graph_impl to "none" (tuning.py:9).
    cfg.model.cuda_graph_impl = "transformer_engine"
    return cfg
