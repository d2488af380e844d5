# SPDX-License-Identifier: Apache-2.0
"""Dense 8B on 8 GPUs."""

from common import pretrain_base


def llama8b_pretrain_config():
    cfg = pretrain_base()
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.sequence_parallel = True
    cfg.train.global_batch_size = 128
    cfg.checkpoint.save_interval = 500

    # CUDA graphs, per layer through Transformer Engine, attention only. Graphs need TE's RNG
    # tracker, which the model and the RNG setup each have their own switch for.
    cfg.model.cuda_graph_impl = "transformer_engine"
    cfg.model.use_te_rng_tracker = True
    cfg.rng.te_rng_tracker = True
    # common.py sets cuda_graph_scope="full", the whole layer. Where megatron-core has
    # cuda_graph_modules, cuda_graph_scope is its deprecated spelling and must not be set as well.
    if hasattr(cfg.model, "cuda_graph_modules"):
        cfg.model.cuda_graph_scope = None
        cfg.model.cuda_graph_modules = ["attn"]
    else:
        cfg.model.cuda_graph_scope = ["attn"]
    return cfg
