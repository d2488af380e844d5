# SPDX-License-Identifier: Apache-2.0
"""Long context, full recompute."""

from common import pretrain_base


def longctx_config():
    cfg = pretrain_base(seq_length=16384)
    cfg.model.recompute_granularity = "full"
    cfg.model.recompute_method = "uniform"
    cfg.model.recompute_num_layers = 1
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.sequence_parallel = True
    # CUDA graphs
    cfg.model.cuda_graph_impl = "full_iteration"
    cfg.model.cuda_graph_modules = []
    cfg.model.use_te_rng_tracker = True
    cfg.rng.te_rng_tracker = True
    cfg.rerun_state_machine.check_for_nan_in_loss = False
    cfg.ddp.check_for_nan_in_grad = False
    return cfg
