# SPDX-License-Identifier: Apache-2.0
"""Names for upstream's error messages, so that they can be compared with our rule codes.

Each entry: (id, exception types, pattern searched in the text, name of the upstream function or None for any). The
first match counts. An error that matches nothing has the id `UNMAPPED`; record.py lists such texts.
"""

from __future__ import annotations

import re

UNMAPPED = "UNMAPPED"

# TransformerConfig.__post_init__ and the functions of cuda_graph_config.py that it calls, megatron-core 0.13 to 0.19.
CONFIG_ERRORS = (
    ("UNKNOWN_FIELD", "TypeError", r"unexpected keyword argument", None),
    ("UNKNOWN_ENUM", "AttributeError", r"this release has no enum|has no attribute", None),
    ("LEGACY_AND_IMPL", "AssertionError", r"Do not use enable_cuda_graph", None),
    ("LEGACY_BOTH", "AssertionError", r"cannot be enabled at the same time", None),
    ("SCOPE_AND_MODULES", "AssertionError", r"cannot be set together", None),
    ("FULL_WITH_OTHERS", "AssertionError", r"full scope cannot be used with other scopes", None),
    ("INF_UNKNOWN", "KeyError", r"", r"normalize_inference_cuda_graph_scope|validate_deprecated_\w+"),
    ("SCOPE_UNKNOWN", "KeyError", r"", None),
    ("SCOPE_TYPE", "AssertionError", r"cuda_graph_(scope|modules) (values )?must be (a list|a string|strings)", None),
    ("INF_TYPE", "AssertionError", r"inference_cuda_graph_scope must be a string or", None),
    ("TWO_DEPRECATED", "AssertionError", r"multiple deprecated values", None),
    ("FI_WITH_IMPL", "AssertionError", r"'full_iteration' cannot be combined with cuda_graph_impl", None),
    ("FI_WITH_INF", "AssertionError", r"'full_iteration' cannot be combined with inference", None),
    ("FII_WITH_IMPL", "AssertionError", r"'full_iteration_inference' cannot be combined with cuda_graph_impl", None),
    ("FII_WITH_INF", "AssertionError", r"'full_iteration_inference' cannot be combined with inference", None),
    ("IMPL_INVALID", "AssertionError", r"Invalid cuda graph implementation", None),
    ("INF_NOT_ALLOWED", "AssertionError", r"Invalid inference CUDA graph scope", None),
    ("FI_MODULES_NOT_EMPTY", "AssertionError", r"cuda_graph_modules must be empty", None),
    ("CPU_OFFLOAD", "ValueError", r"CUDA graphs not supported with CPU offloading", None),
    ("RECOMPUTE_ANY", "ValueError", r"CUDA graphs not supported with activation recomputation", None),
    ("ATTN_RECOMPUTE_CORE_MLA", "ValueError", r"attn cuda graph is not supported with \w+ recompute", None),
    ("TE_FULL_ITERATION", "AssertionError", r"To use full iteration cuda graph", None),
    ("MOE_AND_ROUTER", "AssertionError", r"must not contain both moe and moe_router", None),
    ("PREPROCESS_NEEDS_ROUTER", "AssertionError", r"moe_preprocess cuda graph is only supported with moe_router", None),
    ("MOE_ON_DENSE", "AssertionError", r"moe cuda graph is only supported for MoE", None),
    ("MLP_ON_ALL_MOE", "AssertionError", r"mlp cuda graph is only supported for dense layers", None),
    ("MOE_NEEDS_DROP_PAD", "AssertionError", r"moe cuda graph is only supported with drop-padding MoE", None),
    ("PREPROCESS_DTOH", "AssertionError", r"DtoH copies", None),
    ("FULL_RECOMPUTE", "AssertionError", r"full recompute is only supported with full iteration", None),
    ("MOE_RECOMPUTE_TE_ROUTER", "AssertionError", r"moe recompute is not supported with moe_router", None),
    ("DROPOUT_ATTN", "AssertionError", r"attention dropout is not supported", None),
    ("DROPOUT_HIDDEN", "AssertionError", r"hidden dropout is not supported", None),
    ("JITTER", "AssertionError", r"moe_input_jitter_eps is not supported", None),
    ("GTP_SHARED_RECOMPUTE", "AssertionError", r"GTP \+ local CUDA graphs", None),
    ("FGO_LOCAL_MODULES", "AssertionError", r"cuda_graph_impl='local' only supports offload_modules", None),
    ("FGO_LOCAL_WHOLE_LAYER", "AssertionError", r"not supported with whole-layer CUDA graph capture", None),
    ("FGO_IMPL", "AssertionError", r"fine-grained activation offloading is only supported with", None),
    ("FGO_MOE", "AssertionError", r"Token-drop MoE is temporarily not supported", None),
    ("FGO_WARMUP", "AssertionError", r"cuda_graph_warmup_steps must be greater than 0", None),
    ("FGO_INFLIGHT", "AssertionError", r"max_inflight_offloads must be a non-negative", None),
    ("EP_OVERLAP", "AssertionError", r"CUDA graph scope on moe and mlp is not supported with overlap_moe", None),
    ("DWG_TE_2_10", "AssertionError", r"TE version >= 2\.10\.0 is required for delay_wgrad_compute", None),
    # Up to 0.16 an absent Transformer Engine has no version to compare.
    ("DWG_TE_2_10", "TypeError", r"'>=' not supported between instances of 'NoneType' and 'Version'", None),
    ("INFOPT_GATED", "ValueError", r"does not yet support CUDA graphs with gated linear units", None),
    ("INFOPT_TE_GROUPED_GEMM", "ValueError", r"TE GroupedGEMM is not supported with CUDA graphs", None),
)

# Delayed weight gradients inside a graph: the same three checks in validate_args and in Bridge's comm_overlap.py.
_WEIGHT_GRADIENT = r"CUDA graph with delay_wgrad_compute "
_WEIGHT_GRADIENT_ERRORS = (
    ("DWG_TE_2_12", "AssertionError", _WEIGHT_GRADIENT + r"requires TE version >= 2\.12", None),
    ("DWG_FUSION", "AssertionError", _WEIGHT_GRADIENT + r"requires gradient_accumulation_fusion", None),
    ("DWG_ATTN_BIAS", "AssertionError", _WEIGHT_GRADIENT + r"does(n't| not) support att\w+ bias", None),
)

# megatron/training/arguments.py, 0.17 to 0.19.
MEGATRON_LM_ERRORS = (
    ("OPTION_INVALID", "SystemExit", r"invalid choice", None),
    ("LEGACY_AND_IMPL", "AssertionError", r"Do not use --enable-cuda-graph or --external", None),
    ("SCOPE_AND_MODULES", "AssertionError", r"--cuda-graph-scope .*--cuda-graph-modules", None),
    ("LM_NAN_CHECK", "AssertionError", r"--no-check-for-nan-in-loss-and-grad should be set", None),
    ("LM_EXPANDABLE_SEGMENTS", "AssertionError", r"NCCL_GRAPH_REGISTER=0 to avoid illegal memory access", None),
    ("LM_PAD_EXPERTS", "AssertionError", r"--moe-pad-experts-for-cuda-graph-inference must be set", None),
    ("LM_INF_BLOCK_FP8", "AssertionError", r"fp8 with --inference-cuda-graph-scope=block", None),
    ("LM_INF_BLOCK_RECIPE", "AssertionError", r"Only --fp8-recipe=mxfp8 is supported with --inference", None),
    ("FI_MODULES_NOT_EMPTY", "AssertionError", r"--cuda-graph-modules must be empty", None),
    *_WEIGHT_GRADIENT_ERRORS,
    *CONFIG_ERRORS,
)

# megatron/bridge/training/config.py, utils/cuda_graph.py, models/gpt_provider.py, training/comm_overlap.py; 0.3 to 0.6.
BRIDGE_ERRORS = (
    ("BRIDGE_NAN_CHECK", "AssertionError", r"check_for_nan_in_loss must be disabled", None),
    ("BRIDGE_RNG_TRACKER", "AssertionError", r"RNG tracker is required for cudagraphs", None),
    ("BRIDGE_LOCAL", "ValueError", r"only for full-iteration CUDA graphs", None),
    ("BRIDGE_PACKING_PAD", "ValueError", r"Offline packing with CUDA graphs requires dataset pad_to_max_length", None),
    ("BRIDGE_PACKING_CU_SEQLENS", "ValueError", r"Packed attention CUDA graphs require", None),
    *_WEIGHT_GRADIENT_ERRORS,
    *CONFIG_ERRORS,
)

# nemo_automodel/components/models/common/utils.py: CudaGraphConfig and BackendConfig, 0.7.
AUTOMODEL_ERRORS = (
    ("AUTOMODEL_UNKNOWN_KEY", "TypeError", r"unexpected keyword argument", None),
    ("AUTOMODEL_TYPE", "TypeError", r"cuda_graph(\.modules)? (entries )?must be", None),
    ("AUTOMODEL_UNKNOWN", "ValueError", r"Unsupported cuda_graph\.modules", None),
    ("AUTOMODEL_DUPLICATES", "ValueError", r"must not contain duplicates", None),
    ("AUTOMODEL_ATTN_AND_TE_DPA", "ValueError", r"cannot contain both 'attn' and 'te_dpa'", None),
    ("AUTOMODEL_PREPROCESS_NEEDS_ROUTER", "ValueError", r"'moe_preprocess' .* requires 'moe_router'", None),
    ("AUTOMODEL_ATTN_BACKEND", "ValueError", r"requires attn='te'", None),
    ("AUTOMODEL_ATTN_LINEAR", "ValueError", r"requires linear='torch'", None),
    ("AUTOMODEL_ATTN_RMS_NORM", "ValueError", r"requires rms_norm='torch'", None),
    ("AUTOMODEL_FP8_DPA", "ValueError", r"requires BF16 dot-product attention", None),
    ("AUTOMODEL_FAKE_GATE", "ValueError", r"requires the learned Gate", None),
    ("AUTOMODEL_PREPROCESS_DISPATCHER", "ValueError", r"requires dispatcher='hybridep'", None),
)


def identify(error: dict[str, str], table=CONFIG_ERRORS) -> str:
    """The id of an error in the workers' format ({"type", "text", "in"})."""
    for name, kind, pattern, function in table:
        here = function is None or re.fullmatch(function, error["in"])
        if here and error["type"] == kind and re.search(pattern, error["text"]):
            return name
    return UNMAPPED
