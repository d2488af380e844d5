# SPDX-License-Identifier: Apache-2.0
"""Dense run."""

from common import pretrain_base


def dense_config():
    cfg = pretrain_base()
    cfg.model.external_cuda_graph = True
    cfg.model.cuda_graph_impl = "transformer_engine"
    cfg.model.cuda_graph_scope = ["attn"]
    cfg.model.use_te_rng_tracker = True
    return cfg
