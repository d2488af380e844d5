# SPDX-License-Identifier: Apache-2.0
"""Dense run with one graph an iteration."""

from common import pretrain_base


def dense_config():
    cfg = pretrain_base()
    cfg.model.cuda_graph_impl = "full_iteration"
    cfg.model.use_te_rng_tracker = True
    cfg.rng.te_rng_tracker = True
    cfg.rerun_state_machine.check_for_nan_in_loss = False
    cfg.ddp.check_for_nan_in_grad = False
    # Off with the full-iteration graph: the optimizer step, which is outside the graph, would launch the parameter
    # all-gather that the captured forward then waits for (cudaErrorStreamCaptureIsolation).
    cfg.optimizer.overlap_param_gather_with_optimizer_step = False
    return cfg
