# SPDX-License-Identifier: Apache-2.0
"""What a fact holds where a run does not name it, and the values worth trying where it is unknown."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from cudagraphs.rules.fields import FIELDS, GONE
from cudagraphs.rules.normalize import implementations
from cudagraphs.versions import NEWEST, parse

NEWEST_MINOR = parse(NEWEST["mcore"])[1]
# The fact that spells a hybrid model's layers out, one letter each, under its newer and older names. M is a Mamba
# layer.
PATTERNS = ("hybrid_layer_pattern", "model.hybrid_layer_pattern", "model.hybrid_override_pattern")
# facts that are taken as they are written: a device is an index or a name, and a rule judges the type of the modules
AS_WRITTEN = ("torch.current_device", "backend.cuda_graph.modules")
# lists of names whose default is None, which says nothing about their type
LISTS_OF_NAMES = ("recompute_modules", "offload_modules")

# What fields of TransformerConfig hold in versions that do not have them yet (or any more), as far as conditions read
# them.
ABSENT = {
    "cuda_graph_impl": "none",
    "cuda_graph_modules": "full",
    "cuda_graph_scope": None,
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "inference_cuda_graph_scope": None,
}

# Defaults outside TransformerConfig. Source: megatron/bridge/training/config.py 0.6.2 and the classes of megatron-core
# 0.19.2 that it derives from (DistributedDataParallelConfig, OptimizerConfig, RNGConfig, RerunStateMachineConfig).
SECTIONS: dict[str, Any] = {
    "ddp.check_for_nan_in_grad": False,
    "ddp.overlap_grad_reduce": False,
    "ddp.overlap_param_gather": False,
    "ddp.use_distributed_optimizer": False,
    "ddp.use_megatron_fsdp": False,
    "ddp.megatron_fsdp_version": 1,
    "ddp.megatron_fsdp_cuda_graph_mode": False,
    "ddp.data_parallel_sharding_strategy": "no_shard",
    "ddp.fp8_param_gather": False,
    "ddp.reuse_grad_buf_for_mxfp8_param_ag": False,
    "optimizer.optimizer_cuda_graph": False,
    "optimizer.overlap_param_gather_with_optimizer_step": False,
    "optimizer.log_num_zeros_in_grad": False,
    "optimizer.optimizer_cpu_offload": False,
    "optimizer.grad_norm_skip_threshold": float("inf"),
    "rng.te_rng_tracker": False,
    "rng.inference_rng_tracker": False,
    "rerun_state_machine.check_for_nan_in_loss": True,
    "rerun_state_machine.check_for_spiky_loss": False,
    "train.rampup_batch_size": None,
    "comm_overlap.delay_wgrad_compute": None,
    "comm_overlap.overlap_moe_expert_parallel_comm": None,
    "comm_overlap.overlap_param_gather_with_optimizer_step": None,
    "checkpoint.load": None,
    "dataset.packed_sequences": False,
    "dataset.enable_offline_packing": False,
    "dataset.enable_in_batch_packing": False,
    "dataset.packing_buffer_size": None,
    "dataset.pad_to_max_length": False,
    "dataset.offline_packing_specs.pad_cu_seqlens": False,
    "model.vision_cuda_graph_impl": "none",
}
# Facts of the reading itself and of command lines beside the recipe: absent means that there is nothing to say.
BESIDE: dict[str, Any] = {
    "history.cuda_graph_impl": [],
    "history.impl_after_finalize": None,
    "harness.cuda_graph_impl": None,
    "harness.cuda_graph_scope": None,
    "arguments.inference_batch_times_seqlen_threshold": -1,
    "arguments.inference_dynamic_batching_num_cuda_graphs": 16,
    "torch.capture": "none",
    "torch.optimizer": None,
    "torch.optimizer_in_graph": False,
    "torch.optimizer_capturable": False,
    "torch.lr_is_tensor": False,
    "torch.fsdp": None,
    "torch.reshard_after_forward": None,
    "torch.checkpoint_in_graph": False,
    "torch.checkpoint_preserve_rng_state": None,
    "torch.dynamic_shapes": False,
    "torch.grad_scaler": False,
    "torch.ddp": False,
    "torch.warmup_iterations": 0,
    "torch.gradient_accumulation": 1,
    "torch.grads_cloned": False,
    "torch.microbatches_in_flight": 1,
    "torch.graph_per_microbatch": False,
    "torch.model_device": None,
    "torch.current_device": 0,
    "torch.params_without_grad": False,
    "deepspeed.zero_stage": 0,
    "deepspeed.enable_cuda_graph": False,
    "automodel.router_replay": False,
    "automodel.score_correction_bias": False,
    "automodel.repeated_mtp_layer": False,
    "automodel.shared_modules": False,
    "arguments.perform_rl_step": False,
    "arguments.rl_persist_cuda_graphs": False,
    "arguments.rl_training_cuda_graphs": False,
}
# Fields that no checkpoint sets: a provider from `AutoBridge.from_hf_pretrained` leaves them at TransformerConfig's
# defaults. Source: the assignments in megatron/bridge/models/**/*_bridge.py and the class bodies of the providers,
# 0.3.1 to 0.6.2.
NOT_FROM_CHECKPOINTS = frozenset(
    "cuda_graph_impl cuda_graph_scope cuda_graph_modules cuda_graph_warmup_steps enable_cuda_graph external_cuda_graph "
    "inference_cuda_graph_scope recompute_granularity recompute_modules moe_layer_recompute cpu_offloading "
    "fine_grained_activation_offloading offload_modules fine_grained_offloading_max_inflight_offloads "
    "moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_input_jitter_eps moe_router_padding_for_fp8 "
    "moe_router_padding_for_quantization moe_paged_stash moe_expert_rank_capacity_factor variable_seq_lengths "
    "overlap_moe_expert_parallel_comm delay_wgrad_compute gtp_weight_remat_size expert_gtp_weight_remat_size "
    "batch_p2p_comm "
    "batch_p2p_sync hybrid_context_parallel use_te_rng_tracker pipeline_model_parallel_size "
    "virtual_pipeline_model_parallel_size expert_model_parallel_size".split()
)
# ... except for this family, whose provider classes recompute by default
RECOMPUTES_BY_CLASS = "sarvam"

# What other frameworks make of the same settings, and their own. Source: megatron/training/arguments.py 0.19.2 (one
# flag for both NaN checks); nemo_automodel/components/models/common/utils.py 0.7.0, where Transformer Engine is
# installed.
BY_FRAMEWORK: dict[str, dict[str, Any]] = {
    "nemo-automodel": {
        "backend.cuda_graph.modules": [],
        "backend.attn": "te",
        "backend.linear": "te",
        "backend.rms_norm": "torch_fp32",
        "backend.fake_balanced_gate": False,
        "backend.te_fp8.recipe.fp8_dpa": False,
        "distributed.pp_size": 1,
        "distributed.activation_checkpointing": False,
    },
    "megatron-lm": {"ddp.check_for_nan_in_grad": True},
}

# Values that stand for everything a fact can hold, as far as any condition asks. A rule that answers the same for all
# of them does not need the fact.
_YES_NO = (False, True)
DOMAINS: dict[str, tuple[Any, ...]] = {
    "enable_cuda_graph": _YES_NO,
    "external_cuda_graph": _YES_NO,
    "inference_cuda_graph_scope": (None, "none", "layer", "block"),
    "cpu_offloading": _YES_NO,
    "recompute_granularity": (None, "selective", "full"),
    "moe_layer_recompute": _YES_NO,
    "attention_dropout": (0.0, 0.1),
    "hidden_dropout": (0.0, 0.1),
    "moe_input_jitter_eps": (None, 0.01),
    "num_moe_experts": (None, 1, 8),
    "moe_layer_freq": (1, 2, [0, 1], [1, 1]),
    "moe_expert_capacity_factor": (None, 1.25),
    "moe_pad_expert_input_to_capacity": _YES_NO,
    "moe_router_padding_for_fp8": _YES_NO,
    "moe_router_padding_for_quantization": _YES_NO,
    "moe_token_dispatcher_type": ("allgather", "alltoall", "flex"),
    "moe_shared_expert_overlap": _YES_NO,
    "moe_shared_expert_intermediate_size": (None, 2048),
    "fine_grained_activation_offloading": _YES_NO,
    "overlap_moe_expert_parallel_comm": _YES_NO,
    "delay_wgrad_compute": _YES_NO,
    "gradient_accumulation_fusion": _YES_NO,
    "add_bias_linear": _YES_NO,
    "add_qkv_bias": _YES_NO,
    "gtp_weight_remat_size": (1, 2),
    "moe_paged_stash": _YES_NO,
    "moe_expert_rank_capacity_factor": (None, 1.5),
    "variable_seq_lengths": _YES_NO,
    "hybrid_context_parallel": _YES_NO,
    "batch_p2p_comm": _YES_NO,
    "batch_p2p_sync": _YES_NO,
    "fp16": _YES_NO,
    "fp8": (None, "e4m3", "hybrid", "mxfp8"),
    "fp4": (None, "e2m1"),
    "cross_entropy_loss_fusion": _YES_NO,
    "cross_entropy_fusion_impl": ("native", "te"),
    "use_te_rng_tracker": _YES_NO,
    "mtp_num_layers": (None, 1, 2),
    "pipeline_model_parallel_size": (1, 2),
    "virtual_pipeline_model_parallel_size": (None, 2),
    "expert_model_parallel_size": (1, 2),
    "expert_gtp_weight_remat_size": (1, 2),
    "fine_grained_offloading_max_inflight_offloads": (None, -1, 1),
    "cuda_graph_warmup_steps": (0, 3),
    "ddp.check_for_nan_in_grad": _YES_NO,
    "ddp.overlap_grad_reduce": _YES_NO,
    "ddp.overlap_param_gather": _YES_NO,
    "ddp.use_megatron_fsdp": _YES_NO,
    "optimizer.optimizer_cuda_graph": _YES_NO,
    "optimizer.overlap_param_gather_with_optimizer_step": _YES_NO,
    "optimizer.log_num_zeros_in_grad": _YES_NO,
    "rng.te_rng_tracker": _YES_NO,
    "rng.inference_rng_tracker": _YES_NO,
    "rerun_state_machine.check_for_nan_in_loss": _YES_NO,
    "rerun_state_machine.check_for_spiky_loss": _YES_NO,
    "dataset.packed_sequences": _YES_NO,
    "dataset.enable_offline_packing": _YES_NO,
    "dataset.enable_in_batch_packing": _YES_NO,
    "dataset.packing_buffer_size": (None, 64),
    "dataset.pad_to_max_length": _YES_NO,
    "dataset.offline_packing_specs.pad_cu_seqlens": _YES_NO,
    "model.vision_cuda_graph_impl": ("none", "transformer_engine"),
    "model.has_mamba": _YES_NO,
    "train.rampup_batch_size": (None, [32, 32, 1000000]),
    "comm_overlap.delay_wgrad_compute": (None, False, True),
    "comm_overlap.overlap_moe_expert_parallel_comm": (None, False, True),
    "comm_overlap.overlap_param_gather_with_optimizer_step": (None, False, True),
    "distributed.pp_size": (None, 1, 2),
}


@cache
def of_config(minor: int) -> dict[str, Any]:
    """Defaults of TransformerConfig in this minor version, `...` where one is not a literal. Do not change it."""
    values = dict(ABSENT)
    if minor < 18:
        # the scopes' field had another name, and another default
        values["cuda_graph_scope"] = "full"
    for name, steps in FIELDS.items():
        value: Any = GONE
        for since, default in steps:
            if since <= minor:
                value = default
        if value is GONE and name not in ABSENT:
            # a version without the field does what the field's first default says
            value = steps[0][1]
        if value is not GONE:
            values[name] = value
    return values


@cache
def field_names(minor: int) -> frozenset[str]:
    """The fields that TransformerConfig takes in this minor version."""
    minor = min(minor, NEWEST_MINOR)
    return frozenset(
        name
        for name, steps in FIELDS.items()
        if [value for since, value in steps if since <= minor][-1:] not in ([], [GONE])
    )


# environment variables of the training processes that rules ask for, and facts of AutoModel that have no default
ENVIRONMENT = (
    "env.CUDA_GRAPHS_USE_NODE_PRIORITY",
    "env.NCCL_GRAPH_REGISTER",
    "env.PYTORCH_ALLOC_CONF",
    "env.PYTORCH_CUDA_ALLOC_CONF",
)
# the sequence length, by the name that a framework has for it; the first that a run sets counts
SEQUENCE_LENGTHS = (
    "seq_length",
    "args.seq_length",
    "model.seq_length",
    "dataset.seq_length",
    "dataset.sequence_length",
)
WITHOUT_DEFAULT = (
    "backend.cuda_graph",
    "backend.dispatcher",
    "model.hf_id",
    "model.provider",
    *PATTERNS,
    *SEQUENCE_LENGTHS,
)


@cache
def fact_names() -> frozenset[str]:
    """Every name that a fact can have: fields of TransformerConfig in any version, and what else rules ask for."""
    elsewhere = (name for table in BY_FRAMEWORK.values() for name in table)
    return frozenset((*FIELDS, *ABSENT, *SECTIONS, *BESIDE, *DOMAINS, *elsewhere, *ENVIRONMENT, *WITHOUT_DEFAULT))


def candidates(name: str, minor: int) -> tuple[Any, ...]:
    """Values to try for an unknown fact, () where no few values stand for all."""
    # any other value is as wrong as one that is none
    return (*implementations(minor), "") if name == "cuda_graph_impl" else DOMAINS.get(name, ())


def default(name: str, minor: int, framework: str = "") -> Any:
    """The upstream default of a fact. Raises KeyError where there is none, or none that is a plain value."""
    if "." not in name:
        value = of_config(min(minor, NEWEST_MINOR))[name]
    elif name.startswith("env."):
        value = None
    elif name in BY_FRAMEWORK.get(framework, ()):
        value = BY_FRAMEWORK[framework][name]
    else:
        value = SECTIONS[name]
    if value is ...:
        raise KeyError(name)
    return value


@cache
def _defaults_of(name: str) -> tuple[Any, ...]:
    """Every default that upstream's versions and frameworks give a fact, as far as they are plain values."""
    values = [value for _, value in FIELDS.get(name, ())] + [
        table[name] for table in (SECTIONS, BESIDE, *BY_FRAMEWORK.values()) if name in table
    ]
    return tuple(value for value in values if value is not ... and value is not GONE)


@cache
def _kind(name: str) -> Callable[[Any], Any] | None:
    """How conditions take a fact whose type they rely on; None for a fact that they only compare or test for truth.

    A fact is a number, or a list of names, if each of its defaults and of the values worth trying is one, or None.
    """
    if name.startswith("env."):
        return lambda value: value if value is None else str(value)
    values = (*_defaults_of(name), *DOMAINS.get(name, ()))
    types = {type(value) for value in values}
    if name in AS_WRITTEN:
        return None
    if types & {int, float} and types <= {int, float, type(None)}:
        return (lambda value: None if value is None else _number(value)) if type(None) in types else _number
    if name in PATTERNS:
        return _text
    if name in LISTS_OF_NAMES:
        return _names
    if types == {list}:
        return lambda value: [] if value is None else _names(value)
    return None


def _number(value: Any) -> int | float:
    if isinstance(value, (int, float)):
        return value
    if not isinstance(value, str):
        raise ValueError(value)
    try:
        return int(value)
    except ValueError:
        return float(value)


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise ValueError(value)


def _names(value: Any) -> Any:
    if value is None or isinstance(value, (str, list, tuple)):
        return value
    raise ValueError(value)


def as_read(name: str, value: Any) -> Any:
    """The value of a fact as conditions take it: "2" in a launch script or in quotes is the number 2.

    Raises:
        ValueError: the value is not of the fact's type ("$PP", or None for a size that is never None), so that nothing
            is known about the fact.
    """
    convert = _kind(name)
    return value if convert is None else convert(value)
