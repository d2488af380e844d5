# SPDX-License-Identifier: Apache-2.0
"""Long context, full recompute."""

import dataclasses

from common import pretrain_base


def _enable_full_iteration_cuda_graph(cfg):
    """One CUDA graph over the forward and backward of a whole step (the optimizer stays outside).

    It is the only kind that full recompute goes with: per-layer graphs ("local" without a scope,
    "transformer_engine") are refused with recompute_granularity="full".
    """
    # Newer megatron-core has it as an implementation of its own, older as a scope of "local".
    impl_type = next((str(f.type) for f in dataclasses.fields(cfg.model) if f.name == "cuda_graph_impl"), "")
    if "full_iteration" in impl_type:
        cfg.model.cuda_graph_impl = "full_iteration"
    else:
        cfg.model.cuda_graph_impl = "local"
        cfg.model.cuda_graph_scope = ["full_iteration"]

    # Graph-safe RNG; recompute saves and restores RNG states inside the captured region.
    cfg.model.use_te_rng_tracker = True
    cfg.rng.te_rng_tracker = True

    # Both checks read a value back on the host during forward/backward, which capture does not allow.
    cfg.rerun_state_machine.check_for_nan_in_loss = False
    cfg.ddp.check_for_nan_in_grad = False


def longctx_config():
    cfg = pretrain_base(seq_length=16384)
    cfg.model.recompute_granularity = "full"
    cfg.model.recompute_method = "uniform"
    cfg.model.recompute_num_layers = 1
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.sequence_parallel = True
    _enable_full_iteration_cuda_graph(cfg)
    return cfg
