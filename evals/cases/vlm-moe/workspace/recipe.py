# SPDX-License-Identifier: Apache-2.0
"""Vision-language MoE."""

from common import pretrain_base


def vlm_config():
    cfg = pretrain_base()
    cfg.model.expert_model_parallel_size = 8
    cfg.model.freeze_vision_model = True
    return cfg
