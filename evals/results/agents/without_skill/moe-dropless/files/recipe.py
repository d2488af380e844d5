# SPDX-License-Identifier: Apache-2.0
"""MoE, 30B parameters, 3B active."""

from common import pretrain_base

# Dropless: what each expert receives changes every step, so dispatch, expert GEMMs and combine
# stay eager. These are the parts of a layer with static shapes; moe_preprocess needs moe_router.
CUDA_GRAPH_CAPTURE = ["attn", "moe_router", "moe_preprocess"]


def _set_cuda_graph_capture(model, parts):
    # The field has been renamed between megatron-core releases. Assigning to the wrong name is
    # silently accepted and leaves the default (empty = whole layer), so take the one that exists.
    for name in ("cuda_graph_modules", "cuda_graph_scope"):
        if hasattr(model, name):
            setattr(model, name, list(parts))
            return
    raise AttributeError(f"{type(model).__name__} has neither cuda_graph_modules nor cuda_graph_scope")


def moe30b_config():
    cfg = pretrain_base()
    cfg.model.expert_model_parallel_size = 16
    cfg.model.moe_shared_expert_overlap = False
    cfg.model.cuda_graph_impl = "transformer_engine"
    _set_cuda_graph_capture(cfg.model, CUDA_GRAPH_CAPTURE)
    # Graph capture needs the graph-safe RNG tracker, on both the model and the RNG config.
    cfg.model.use_te_rng_tracker = True
    cfg.rng.te_rng_tracker = True
    cfg.env_vars = {
        "CUDA_DEVICE_MAX_CONNECTIONS": 1,
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        # Required with CUDA graphs + expandable_segments (else illegal memory access).
        "NCCL_GRAPH_REGISTER": "0",
    }
    return cfg
