# SPDX-License-Identifier: Apache-2.0
"""Dense 8B on 8 GPUs."""

from common import pretrain_base


def llama8b_pretrain_config():
    cfg = pretrain_base()
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.sequence_parallel = True
    cfg.train.global_batch_size = 128
    cfg.checkpoint.save_interval = 500
    # CUDA graphs
    cfg.model.cuda_graph_impl = "transformer_engine"
    cfg.model.cuda_graph_modules = ["attn"]
    cfg.model.cuda_graph_scope = None
    cfg.model.use_te_rng_tracker = True
    cfg.rng.te_rng_tracker = True
    return cfg
