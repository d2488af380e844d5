# SPDX-License-Identifier: Apache-2.0
"""Dense run, for Bridge 0.4.2 / megatron-core 0.17.1 (ported from Bridge 0.6)."""

from common import pretrain_base


def dense_config():
    cfg = pretrain_base()
    cfg.model.cuda_graph_impl = "transformer_engine"
    # Bridge 0.6 calls this cuda_graph_modules. mcore 0.17 has no such field: it would accept the
    # assignment, ignore it, and leave the scope at "full" (the whole layer).
    cfg.model.cuda_graph_scope = ["attn", "mlp"]
    cfg.model.cuda_graph_warmup_steps = 3
    cfg.model.use_te_rng_tracker = True
    cfg.rng.te_rng_tracker = True
    return cfg
