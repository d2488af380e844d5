# SPDX-License-Identifier: Apache-2.0
"""Full-iteration graph."""

from common import pretrain_base


def fulliter_config():
    cfg = pretrain_base()
    cfg.model.cuda_graph_impl = "full_iteration"
    cfg.rng.te_rng_tracker = True
    return cfg
