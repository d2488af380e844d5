# SPDX-License-Identifier: Apache-2.0
"""Dense run, graphs since 2025."""

from common import pretrain_base


def dense_config():
    cfg = pretrain_base()
    cfg.model.cuda_graph_impl = "local"
    cfg.model.cuda_graph_modules = ["attn"]
    cfg.model.use_te_rng_tracker = True
    return cfg
