# SPDX-License-Identifier: Apache-2.0
"""Dense run that lives on CPU offloading."""

from common import pretrain_base


def offload_config():
    cfg = pretrain_base()
    cfg.model.cpu_offloading = True
    cfg.model.cpu_offloading_num_layers = 16
    cfg.model.tensor_model_parallel_size = 8
    return cfg
