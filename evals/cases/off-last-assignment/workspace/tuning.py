# SPDX-License-Identifier: Apache-2.0
"""Tuning steps that recipes share."""


def memory_tuning(model):
    """Trade a little speed for memory."""
    model.gradient_accumulation_fusion = False
    model.cross_entropy_loss_fusion = True
    model.cuda_graph_impl = "none"
