# SPDX-License-Identifier: Apache-2.0
"""What Megatron Bridge and Megatron-Core code does to a configuration, as far as reading a recipe needs it.

Field names, defaults and effects are those of megatron-bridge 0.3 to 0.6 (`megatron/bridge/training/config.py`,
`training/comm_overlap.py`, `training/mixed_precision.py`, `utils/cuda_graph.py`) and of megatron-core's
`TransformerConfig`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

from cudagraphs.formats.interpreter import Interpreter
from cudagraphs.formats.state import Call, Classes
from cudagraphs.formats.values import (
    ChoiceValue,
    ClassValue,
    External,
    ListValue,
    Object,
    Site,
    Slot,
    UnknownValue,
    choose,
)
from cudagraphs.rules import defaults
from cudagraphs.rules.base import Member
from cudagraphs.settings import Branch, Choice, Fact, Known, Source, Unknown, join
from cudagraphs.versions import Versions

CONTAINER = "ConfigContainer"
# the class name of a provider that AutoBridge fills from a checkpoint's configuration
FROM_CHECKPOINT = "AutoBridgeProvider"
# Sections that ConfigContainer makes by itself, with their classes; the others in SECTIONS are None unless the recipe
# sets them.
SECTION_CLASSES = {
    "rng": "RNGConfig",
    "rerun_state_machine": "RerunStateMachineConfig",
    "ddp": "DistributedDataParallelConfig",
    "validation": "ValidationConfig",
    "dist": "DistributedInitConfig",
    "profiling": "ProfilingConfig",
    "optimizer_config_override_provider": "OptimizerConfigOverrideProvider",
}
NONE_SECTIONS = frozenset(
    {
        "ft",
        "straggler",
        "nvrx_straggler",
        "peft",
        "comm_overlap",
        "mixed_precision",
        "tensor_inspect",
        "inprocess_restart",
    }
)
# Classes that are known by their fields alone: their sources are long and their other fields do not matter here.
CLASS_SECTIONS = {
    "RNGConfig": "rng",
    "RerunStateMachineConfig": "rerun_state_machine",
    "DistributedDataParallelConfig": "ddp",
    "OptimizerConfig": "optimizer",
    "TrainingConfig": "train",
}
OTHER_OPAQUE = frozenset(
    {
        CONTAINER, "ValidationConfig", "SchedulerConfig", "LoggerConfig", "TokenizerConfig", "CheckpointConfig",
        "DistributedInitConfig", "ProfilingConfig", "GPTDatasetConfig", "MockGPTDatasetConfig", "CommOverlapConfig",
        "MixedPrecisionConfig", "LoRA", "DoRA",
    }
)  # fmt: skip
# CommOverlapConfig leaves everything to the automatic choice (None) except tp_comm_overlap, which has no default.
COMM_OVERLAP_FIELDS = frozenset(
    [
        "overlap_p2p_comm",
        "batch_p2p_comm",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "overlap_param_gather_with_optimizer_step",
        "align_param_gather",
        "bucket_size",
        "defer_embedding_wgrad_compute",
        "wgrad_deferral_limit",
        "overlap_moe_expert_parallel_comm",
        "delay_wgrad_compute",
    ]
)
MIXED_PRECISION_FIELDS = {
    "fp8": None, "fp8_recipe": "tensorwise", "fp8_param": None, "fp8_param_gather": False,
    "fp8_dot_product_attention": False, "fp8_multi_head_attention": False, "fp4": None, "fp4_recipe": "nvfp4",
    "fp4_param_gather": False, "fp16": False, "bf16": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False, "first_last_layers_bf16": False, "grad_reduce_in_fp32": True,
}  # fmt: skip
# What the registered names stand for where Bridge's source is not at hand, as far as it differs from the defaults
# above. Source: megatron/bridge/training/mixed_precision.py, 0.6.2.
_FP8 = {"fp8": "hybrid", "fp8_param_gather": True}
_MXFP8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True}
_NVFP4 = {"bf16": True, "fp4": "e2m1", "fp4_param_gather": True}
NAMED_PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16_mixed": {"bf16": True},
    "fp16_mixed": {"fp16": True},
    "bf16_with_fp8_delayed_scaling_mixed": {"bf16": True, **_FP8, "fp8_recipe": "delayed"},
    "fp16_with_fp8_delayed_scaling_mixed": {"fp16": True, **_FP8, "fp8_recipe": "delayed"},
    "bf16_with_mxfp8_mixed": {"bf16": True, **_MXFP8},
    "fp16_with_mxfp8_mixed": {"fp16": True, **_MXFP8},
    "bf16_with_fp8_current_scaling_mixed": {"bf16": True, **_FP8},
    "fp16_with_fp8_current_scaling_mixed": {"fp16": True, **_FP8},
    "nemotron_h_bf16_with_fp8_current_scaling_mixed": {"bf16": True, **_FP8},
    "nanov2_bf16_with_fp8_current_scaling_mixed": {"bf16": True, **_FP8, "fp8_recipe": "blockwise"},
    "bf16_with_fp8_subchannel_scaling_mixed": {"bf16": True, "fp8": "hybrid", "fp8_recipe": "blockwise"},
    "fp16_with_fp8_subchannel_scaling_mixed": {"fp16": True, "fp8": "hybrid", "fp8_recipe": "blockwise"},
    "bf16_with_nvfp4_mixed": _NVFP4,
    "nemotron_3_super_bf16_with_nvfp4_mixed": _NVFP4,
    "nemotron_3_ultra_bf16_with_nvfp4_mixed": _NVFP4,
}
# Transformer configurations of megatron-core itself: what is not set holds the default of the release.
CORE_CONFIGS = frozenset({"TransformerConfig", "MLATransformerConfig", "CoreTransformerConfig"})
# Providers that are known without their source: TransformerConfig's defaults but for these (`...` is decided at run
# time). Source: models/gpt_provider.py and models/mla_provider.py of megatron-bridge 0.3 to 0.6.
PLAIN_PROVIDERS = frozenset({"GPTModelProvider", "MLAModelProvider"})
PLAIN_PROVIDER_DEFAULTS = {
    "attention_softmax_in_fp32": False, "deallocate_pipeline_outputs": True, "masked_softmax_fusion": True,
    "cross_entropy_loss_fusion": True, "gradient_accumulation_fusion": ...,
}  # fmt: skip
# Fields that mixed precision writes onto the model when training starts (update_config_with_precision_overrides).
PRECISION_TO_MODEL = (
    "fp8",
    "fp8_recipe",
    "fp8_param",
    "fp8_dot_product_attention",
    "fp8_multi_head_attention",
    "fp4",
    "fp4_recipe",
)
PRECISION_TO_DDP = ("fp8_param_gather", "reuse_grad_buf_for_mxfp8_param_ag")
# CommOverlapConfig.setup copies these onto the model where they are not None.
OVERLAP_TO_MODEL = ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute")
OVERLAP_TO_DDP = ("overlap_grad_reduce", "overlap_param_gather")


# How a model is run, as against what it is: no checkpoint conversion of megatron-bridge 0.3 to 0.6
# (models/*/*_bridge.py and the mapping in models/conversion/model_bridge.py) sets these fields, so they hold
# TransformerConfig's defaults until a recipe does.
EXECUTION_PREFIXES = (
    "cuda_graph_", "recompute_", "cpu_offloading", "overlap_", "delay_", "tp_comm_", "fp8", "fp4", "gtp_", "offload_",
    "enable_cuda_graph", "external_cuda_graph", "inference_cuda_graph_scope", "fine_grained_activation_offloading",
)  # fmt: skip
EXECUTION_FIELDS = frozenset(
    [
        "use_te_rng_tracker",
        "sequence_parallel",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "moe_expert_capacity_factor",
        "moe_pad_expert_input_to_capacity",
        "moe_layer_recompute",
        "moe_input_jitter_eps",
        "moe_router_padding_for_fp8",
        "moe_router_padding_for_quantization",
        "moe_token_drop_policy",
        "deterministic_mode",
        "hybrid_context_parallel",
    ]
)
# Providers that choose their own recompute modules: sarvam_provider.py in megatron-bridge 0.6.2.
OWN_RECOMPUTE = ("sarvam",)


def is_execution_field(name: str) -> bool:
    return name in EXECUTION_FIELDS or name.startswith(EXECUTION_PREFIXES)


class BridgeClasses(Classes):
    """Defaults of upstream's configuration classes for one set of versions."""

    opaque = frozenset(CLASS_SECTIONS) | OTHER_OPAQUE | CORE_CONFIGS

    def is_config(self, value: Any) -> bool:
        return config_kind(value) != ""

    def __init__(self, versions: Versions):
        self.versions = versions
        self.core = defaults.of_config(min(versions.minor, defaults.NEWEST_MINOR))
        self.core_fields = defaults.field_names(versions.minor)
        self._bodies: dict[ast.ClassDef, dict[str, ast.expr | None]] = {}

    def default(self, interpreter: Interpreter, obj: Object, name: str) -> Any:
        cls = obj.class_name
        if cls == CONTAINER and not obj.open_reason:
            if name == "env_vars":
                return interpreter.new_object("dict", kind="mapping")
            if name in SECTION_CLASSES:
                return interpreter.new_object(SECTION_CLASSES[name])
            if name in NONE_SECTIONS:
                return None
        elif not obj.open_reason or self._from_checkpoint(obj, name):
            found = self._class_default(interpreter, obj, name)
            if found is not None:
                return found[0]
        return UnknownValue(obj.open_reason or self.why_unknown(obj, name))

    def _class_default(self, interpreter: Interpreter, obj: Object, name: str) -> tuple[Any] | None:
        """The default in a tuple, or None where it cannot be told."""
        cls = obj.class_name
        section = CLASS_SECTIONS.get(cls)
        if section is not None and f"{section}.{name}" in defaults.SECTIONS:
            return (defaults.SECTIONS[f"{section}.{name}"],)
        if cls == "CommOverlapConfig" and name in COMM_OVERLAP_FIELDS:
            return (None,)
        if cls == "MixedPrecisionConfig" and name == "fp8_param":
            return (interpreter.attribute(obj, "fp8_param_gather"),)  # its __post_init__ keeps the two in step
        if cls == "MixedPrecisionConfig" and name in MIXED_PRECISION_FIELDS:
            return (MIXED_PRECISION_FIELDS[name],)
        if cls in CORE_CONFIGS or self._from_checkpoint(obj, name):
            return self._core(name)
        if isinstance(obj.class_value, ClassValue):
            return self._from_source(interpreter, obj.class_value, name)
        if cls in PLAIN_PROVIDERS:
            value = PLAIN_PROVIDER_DEFAULTS.get(name, self.core.get(name, ...))
            return None if value is ... else (value,)
        return None

    def why_unknown(self, obj: Object, name: str) -> str:
        if isinstance(obj.class_value, ClassValue) or obj.class_name in PLAIN_PROVIDERS:
            return f"the default of `{obj.class_name}.{name}` is not known"
        return f"the source of `{obj.class_name}` was not found"

    def _from_checkpoint(self, obj: Object, name: str) -> bool:
        """Whether the object is a provider filled from a checkpoint and the field one that no checkpoint sets."""
        if (
            obj.class_name != FROM_CHECKPOINT
            or not obj.open_reason.startswith("it comes from")
            or not is_execution_field(name)
        ):
            return False
        own = name.startswith("recompute_") and any(family in obj.open_reason.lower() for family in OWN_RECOMPUTE)
        return not own

    def _core(self, name: str) -> tuple[Any] | None:
        value = self.core.get(name, ...)
        return None if value is ... else (value,)

    def _from_source(self, interpreter: Interpreter, cls: ClassValue, name: str, depth: int = 0) -> tuple[Any] | None:
        """Look a field's default up in the class's own body, then in its bases, as dataclasses do."""
        frame = interpreter._frame(cls.module, cls.module.tree, {})
        if cls.node not in self._bodies:
            self._bodies[cls.node] = dict(field for field in map(_class_field, cls.node.body) if field[0])
        body = self._bodies[cls.node]
        if name in body:
            value = body[name]
            if value is None:
                return None
            if isinstance(value, ast.Call) and getattr(value.func, "id", getattr(value.func, "attr", "")) == "field":
                for keyword in value.keywords:
                    if keyword.arg == "default":
                        return (interpreter.evaluate(keyword.value, frame),)
                    if keyword.arg == "default_factory":
                        return (
                            interpreter.call(
                                interpreter.evaluate(keyword.value, frame), [], {}, Call(value, frame, {})
                            ),
                        )
                return None
            return (interpreter.evaluate(value, frame),)
        if depth > 12:
            return None
        for base in cls.node.bases:
            parent = interpreter.evaluate(base, frame)
            if isinstance(parent, ClassValue):
                found = self._from_source(interpreter, parent, name, depth + 1)
            elif isinstance(parent, External) and parent.last in CORE_CONFIGS:
                found = self._core(name)
            else:
                found = None
            if found is not None:
                return found
        return None

    def has(self, interpreter: Interpreter, obj: Object, name: str) -> bool | None:
        if name in obj.slots:
            return True
        if is_model(obj):
            # every provider derives from TransformerConfig, whichever checkpoint fills it
            if name in self.core_fields:
                return True
            if name in defaults.FIELDS:
                return False
        if obj.class_name == "CommOverlapConfig":
            return name in COMM_OVERLAP_FIELDS or name == "tp_comm_overlap"
        if obj.open_reason:
            return None
        if obj.class_name in CORE_CONFIGS:
            return name in self.core_fields
        return True if self._class_default(interpreter, obj, name) is not None else None


def _class_field(statement: ast.stmt) -> tuple[str, ast.expr | None]:
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return statement.target.id, statement.value
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id, statement.value
    return "", None


def is_model(obj: Any) -> bool:
    """Whether the object is a model provider or a transformer configuration."""
    if not isinstance(obj, Object) or obj.kind != "instance":
        return False
    name = obj.class_name
    return name in CORE_CONFIGS or name.endswith(("Provider", "ModelConfig", "TransformerConfig", "ModelProvider"))


# -- what upstream functions do ----------------------------------------------------------------------------------------


def intrinsics(versions: Versions) -> dict[str, Any]:
    """Handlers for upstream functions whose effect is known but whose source is not worth following."""
    has_modules = versions.minor >= 18

    def from_pretrained(interpreter: Interpreter, arguments: list[Any], keywords: dict[str, Any], call: Call) -> Object:
        bridge = interpreter.new_object("AutoBridge", open_reason="it is read from the checkpoint")
        model_id = arguments[0] if arguments else keywords.get("path", keywords.get("model_id"))
        bridge.slots["hf_id"] = Slot(model_id)
        return bridge

    def to_provider(interpreter: Interpreter, arguments: list[Any], keywords: dict[str, Any], call: Call) -> Object:
        model_id = arguments[0].slots["hf_id"].value if arguments and "hf_id" in arguments[0].slots else None
        where = f"the checkpoint {model_id}" if isinstance(model_id, str) else "the checkpoint"
        provider = interpreter.new_object(FROM_CHECKPOINT, open_reason=f"it comes from the configuration of {where}")
        provider.slots["__hf_id__"] = Slot(
            model_id if model_id is not None else UnknownValue("the model's name is not known")
        )
        provider.call, provider.module, provider.frame = call.node, call.frame.module, call.frame.number
        return provider

    def set_modules(interpreter: Interpreter, arguments: list[Any], keywords: dict[str, Any], call: Call) -> None:
        config = arguments[0] if arguments else keywords.get("config")
        given = arguments[1] if len(arguments) > 1 else keywords.get("modules")
        node = call.node.args[1] if len(call.node.args) > 1 else None
        names = given.items if isinstance(given, ListValue) else given
        if isinstance(names, str):
            names = [] if names in ("", "full") else names.split(",")
        if isinstance(names, list):
            names = interpreter.new_list([item.last if isinstance(item, External) else item for item in names])
        site = Site(call.frame.module, call.node, node, call.frame.number, call.frame.nesting > 0)
        interpreter.set_attribute(config, "cuda_graph_modules" if has_modules else "cuda_graph_scope", names, site)
        if has_modules:
            cleared = Site(call.frame.module, call.node, None, call.frame.number, call.frame.nesting > 0)
            interpreter.set_attribute(config, "cuda_graph_scope", None, cleared)

    def clear_modules(interpreter: Interpreter, arguments: list[Any], keywords: dict[str, Any], call: Call) -> None:
        set_modules(interpreter, [arguments[0], interpreter.new_list([])], {}, call)

    def set_full_iteration(
        interpreter: Interpreter, arguments: list[Any], keywords: dict[str, Any], call: Call
    ) -> None:
        site = Site(call.frame.module, call.node, None, call.frame.number, call.frame.nesting > 0)
        interpreter.set_attribute(arguments[0], "cuda_graph_impl", "full_iteration" if has_modules else "local", site)
        set_modules(
            interpreter, [arguments[0], interpreter.new_list([] if has_modules else ["full_iteration"])], {}, call
        )

    def get_precision(interpreter: Interpreter, arguments: list[Any], keywords: dict[str, Any], call: Call) -> Any:
        return mixed_precision(interpreter, arguments[0] if arguments else keywords.get("name"))

    def nothing(interpreter: Interpreter, arguments: list[Any], keywords: dict[str, Any], call: Call) -> None:
        return None

    def on_gpu(interpreter: Interpreter, arguments: list[Any], keywords: dict[str, Any], call: Call) -> bool:
        # what is read is what happens in training, and that has a GPU
        return True

    return {
        "AutoBridge.from_hf_pretrained": from_pretrained,
        "megatron.bridge.AutoBridge": from_pretrained,
        "megatron.bridge.AutoBridge.from_hf_pretrained": from_pretrained,
        "megatron.bridge.AutoBridge.from_hf_config": from_pretrained,
        "from_hf_pretrained": from_pretrained,
        "AutoBridge.to_megatron_provider": to_provider,
        "set_cuda_graph_modules": set_modules,
        "clear_cuda_graph_modules": clear_modules,
        "set_full_iteration_cuda_graph": set_full_iteration,
        "get_mixed_precision_config": get_precision,
        "get_rank_safe": lambda *_: 0,
        "warn_deprecated_model": nothing,
        "torch.cuda.is_available": on_gpu,
        "typing.cast": lambda interpreter, arguments, keywords, call: arguments[1],
    }


# -- configuration object -> facts -------------------------------------------------------------------------------------


def config_kind(value: Any) -> str:
    """ "container" for a Bridge ConfigContainer, "model" for a bare provider or TransformerConfig, "" for anything
    else.

    A base recipe whose source is not at hand returns an object of unknown class; it counts as a container once the
    recipe has set a section on it.
    """
    if isinstance(value, ChoiceValue):
        return config_kind(value.if_true) or config_kind(value.if_false)
    if not isinstance(value, Object) or value.kind != "instance":
        return ""
    if value.class_name == CONTAINER:
        return "container"
    if is_model(value):
        return "model"
    if not value.class_name and value.open_reason:
        return "container"
    if {"model", "train"} & set(value.slots):
        return "container"
    return ""


def facts_of(interpreter: Interpreter, config: Any, classes: BridgeClasses) -> dict[str, Fact]:
    """Every fact that the configuration settles, by fact name; see `cudagraphs.settings` for the names."""
    if isinstance(config, ChoiceValue):
        return _both_sides(config, classes, lambda side: facts_of(interpreter, side, classes))
    if not isinstance(config, Object):
        return {}
    if config_kind(config) == "model":
        return _model_facts(interpreter, config, classes)
    model = interpreter.attribute(config, "model")
    facts = _model_facts(interpreter, model, classes)
    if isinstance(model, UnknownValue):
        facts["model"] = Unknown(model.reason)
    for name in dict.fromkeys([*config.slots, *SECTION_CLASSES, *NONE_SECTIONS]):
        if name in ("model", "env_vars") or not isinstance(name, str):
            continue
        value = interpreter.attribute(config, name)
        facts.update(_section_facts(interpreter, name, value, config.slots.get(name), classes))
    _environment(facts, interpreter, config)
    _precision(facts, interpreter, config, classes)
    _overlap(facts)
    _packing(facts)
    return facts


def _section_facts(
    interpreter: Interpreter, section: str, value: Any, slot: Slot | None, classes: BridgeClasses
) -> dict[str, Fact]:
    """The facts of one section of the container: what is set on it, and the defaults of what rules ask for."""
    if isinstance(value, ChoiceValue) and any(True for _ in _objects(value)):
        return _both_sides(value, classes, lambda side: _section_facts(interpreter, section, side, None, classes))
    if value is None and section == "comm_overlap":
        # no section leaves every choice to upstream, as None in each of its fields does
        unset = {name: Known(None, None, "default") for name in defaults.SECTIONS if name.startswith("comm_overlap.")}
        return {section: _fact(slot or Slot(value)), **unset}
    if not isinstance(value, Object):
        return {section: _fact(slot or Slot(value))}
    facts: dict[str, Fact] = {}
    if value.kind == "instance":
        _flatten(facts, section, value)
    if section != "dataset":
        for name in defaults.SECTIONS:
            owner, _, field = name.partition(".")
            if owner == section and name not in facts:
                default = classes.default(interpreter, value, field)
                facts[name] = (
                    Unknown(default.reason)
                    if isinstance(default, UnknownValue)
                    else Known(_plain(default), None, "default")
                )
    return facts


def _both_sides(
    value: ChoiceValue, classes: BridgeClasses, facts_of_side: Callable[[Any], dict[str, Fact]]
) -> dict[str, Fact]:
    """The facts of an object that is one of two, by a branch."""
    if_true, if_false = facts_of_side(value.if_true), facts_of_side(value.if_false)
    joined = {}
    for name in {**if_true, **if_false}:
        sides = []
        for facts in (if_true, if_false):
            default = classes.core.get(name, ...)
            absent = Unknown("it is set on one side only") if default is ... else Known(default, None, "default")
            sides.append(facts.get(name, absent))
        joined[name] = join(value.branch, *sides)
    return joined


def _objects(value: Any) -> Iterator[Object]:
    if isinstance(value, ChoiceValue):
        yield from _objects(value.if_false)
        yield from _objects(value.if_true)
    elif isinstance(value, Object):
        yield value


def _model_facts(interpreter: Interpreter, model: Any, classes: BridgeClasses) -> dict[str, Fact]:
    if isinstance(model, ChoiceValue):
        return _both_sides(model, classes, lambda side: _model_facts(interpreter, side, classes))
    if not isinstance(model, Object):
        return {}
    facts: dict[str, Fact] = {}
    facts["model.provider"] = Known(model.class_name or "unknown", None, "assigned")
    for name, slot in model.slots.items():
        if name == "__hf_id__":
            facts["model.hf_id"] = _fact(slot)
        elif isinstance(name, str) and not name.startswith("_"):
            key = name if name in defaults.FIELDS else f"model.{name}"
            if isinstance(slot.value, Object):
                _flatten(facts, key, slot.value)
            else:
                facts[key] = _fact(slot)
            if name == "cuda_graph_impl" and slot.earlier:
                facts["history.cuda_graph_impl"] = _history(slot)
    # where the class is known, what the recipe leaves alone holds the class's default, which may differ from
    # TransformerConfig's
    for name in classes.core_fields:
        if name in facts or model.open_reason and not classes._from_checkpoint(model, name):
            continue
        found = classes._class_default(interpreter, model, name)
        if found is None and model.class_name not in CORE_CONFIGS:
            facts[name] = Unknown(classes.why_unknown(model, name))
        elif found is not None and isinstance(found[0], UnknownValue):
            facts[name] = Unknown(found[0].reason)
        elif found is not None and isinstance(found[0], ChoiceValue):
            facts[name] = _fact(Slot(found[0]))
        elif found is not None and not isinstance(found[0], Object):
            facts[name] = Known(_plain(found[0]), None, "default")
    return facts


def _history(slot: Slot) -> Fact:
    """The values that the recipe function itself gave before, and the one that wins: a base that it changes on purpose
    is left out."""
    own = [earlier.value for earlier in slot.earlier if earlier.site is not None and earlier.site.frame == 0]
    return Known([_plain(value) for value in [*own, slot.value]], slot.site.source if slot.site is not None else None)


def _flatten(facts: dict[str, Fact], prefix: str, obj: Object) -> None:
    for name, slot in obj.slots.items():
        if isinstance(name, str) and not name.startswith("__"):
            if isinstance(slot.value, Object):
                _flatten(facts, f"{prefix}.{name}", slot.value)
            else:
                facts[f"{prefix}.{name}"] = _fact(slot)
    if obj.kind == "instance":
        facts.setdefault(prefix, Known({"object": obj.class_name}, None, "assigned"))


def _environment(facts: dict[str, Fact], interpreter: Interpreter, config: Object) -> None:
    variables = interpreter.attribute(config, "env_vars")
    if isinstance(variables, Object) and variables.kind == "mapping":
        for name, slot in variables.slots.items():
            if isinstance(slot.value, (bool, int, float)):
                slot = Slot(str(int(slot.value)) if isinstance(slot.value, bool) else str(slot.value), slot.site)
            facts[f"env.{name}"] = _fact(slot)


def mixed_precision(interpreter: Interpreter, value: Any) -> Any:
    """The configuration object that a mixed precision's name stands for, as upstream's `get_mixed_precision_config`
    gives it."""
    if isinstance(value, ChoiceValue):
        sides = (mixed_precision(interpreter, side) for side in (value.if_true, value.if_false))
        return choose(value.branch, *sides)
    if isinstance(value, UnknownValue) and isinstance(value.default, str):
        at_default = Branch(
            f"{value.reason.removeprefix('it comes from ')} is left at its default", Source("", 0), True
        )
        return choose(at_default, mixed_precision(interpreter, value.default), UnknownValue(value.reason))
    if not isinstance(value, str):
        return value
    frame = interpreter.frames[0]
    factory = interpreter.imported("megatron.bridge.training.mixed_precision", value.replace("-", "_"), frame.module)
    if isinstance(factory, External):
        known = NAMED_PRECISIONS.get(value.replace("-", "_"))
        if known is None:
            return UnknownValue(f"the source of the mixed precision {value!r} was not found")
        precision = interpreter.new_object("MixedPrecisionConfig")
        precision.slots.update({field: Slot(setting) for field, setting in known.items()})
        return precision
    name = ast.Name(value, lineno=1, col_offset=0)
    return interpreter.call(factory, [], {}, Call(ast.Call(name, [], [], lineno=1, col_offset=0), frame, {}))


def _precision(facts: dict[str, Fact], interpreter: Interpreter, config: Object, classes: BridgeClasses) -> None:
    """Mixed precision is copied onto the model and the DDP configuration when training starts."""
    given = interpreter.attribute(config, "mixed_precision")
    name = given.default if isinstance(given, UnknownValue) and given.has_default else given
    if isinstance(name, str):
        facts["mixed_precision.name"] = facts.get("mixed_precision", Known(name))
    facts.update(_precision_facts(interpreter, mixed_precision(interpreter, given), classes))
    for target in PRECISION_TO_DDP:
        if f"ddp.{target}" in facts:
            facts[target] = facts[f"ddp.{target}"]


def _precision_facts(interpreter: Interpreter, precision: Any, classes: BridgeClasses) -> dict[str, Fact]:
    if isinstance(precision, ChoiceValue):
        return _both_sides(precision, classes, lambda side: _precision_facts(interpreter, side, classes))
    facts: dict[str, Fact] = {}
    for name in (*PRECISION_TO_MODEL, *PRECISION_TO_DDP):
        target = name if name in PRECISION_TO_MODEL else f"ddp.{name}"
        if isinstance(precision, Object):
            facts[target] = _fact(precision.slots.get(name) or Slot(interpreter.attribute(precision, name)))
        elif precision is not None:
            reason = precision.reason if isinstance(precision, UnknownValue) else "the mixed precision is not followed"
            facts[target] = Unknown(reason)
    return facts


def _overlap(facts: dict[str, Fact]) -> None:
    """`CommOverlapConfig` wins over the model's and the DDP configuration's own fields where it is not None."""
    for name in (*OVERLAP_TO_MODEL, *OVERLAP_TO_DDP, "overlap_param_gather_with_optimizer_step"):
        user = facts.get(f"comm_overlap.{name}")
        target = name if name in OVERLAP_TO_MODEL else f"ddp.{name}" if name in OVERLAP_TO_DDP else f"optimizer.{name}"
        if user is not None:
            facts[target] = _override(user, facts.get(target))


def _override(user: Fact, own: Fact | None) -> Fact:
    if isinstance(user, Choice):
        return join(user.branch, _override(user.if_true, own), _override(user.if_false, own))
    if isinstance(user, Known) and user.value is None:
        return own if own is not None else Known(False, None, "default")
    return user


def _packing(facts: dict[str, Fact]) -> None:
    """One fact for packed sequences, whichever of the ways Bridge has for them."""
    offline, in_batch = facts.get("dataset.enable_offline_packing"), facts.get("dataset.enable_in_batch_packing")
    specs = facts.get("dataset.offline_packing_specs") or facts.get("dataset.packed_sequence_specs")
    states = [fact for fact in (offline, in_batch) if fact is not None]
    on = [fact for fact in states if isinstance(fact, Known) and fact.value is True]
    if on:
        facts["dataset.packed_sequences"] = Known(True, on[0].source)
    elif specs is not None and isinstance(specs, Known) and specs.value is not None:
        facts["dataset.packed_sequences"] = Known(True, specs.source)
    elif all(isinstance(fact, Known) for fact in states):
        facts["dataset.packed_sequences"] = Known(False, states[0].source if states else None)
    else:
        facts["dataset.packed_sequences"] = Unknown("packing depends on values that are not known")
    nested = facts.get("dataset.dataset_kwargs.pad_to_max_length")
    if nested is not None and isinstance(nested, Known) and nested.value is True:
        facts["dataset.pad_to_max_length"] = nested


def _fact(slot: Slot, value: Any = ...) -> Fact:
    value = slot.value if value is ... else value
    source = slot.site.source if slot.site is not None else None
    if isinstance(value, ChoiceValue):
        return join(value.branch, _fact(slot, value.if_true), _fact(slot, value.if_false))
    if isinstance(value, UnknownValue):
        unknown = Unknown(value.reason, source)
        if not value.has_default:
            return unknown
        # both sides are told apart: what the recipe holds when it is called without arguments, and that callers can
        # change it
        branch = Branch(
            f"{value.reason.removeprefix('it comes from ')} is left at its default", source or Source("", 0), True
        )
        return Choice(branch, Known(_plain(value.default), source), unknown)
    if isinstance(value, ListValue):
        items = [_plain(item) for item in value.items]
        unknown = next((item for item in value.items if isinstance(item, (UnknownValue, ChoiceValue))), None)
        if unknown is not None:
            return Unknown("some elements are not known", source)
        return Known(items, source)
    if isinstance(value, Object):
        return Known({"object": value.class_name}, source)
    return Known(_plain(value), source)


def _plain(value: Any) -> Any:
    if isinstance(value, External):
        owner, _, member = value.name.rpartition(".")
        enum = owner.rpartition(".")[2]
        if "CudaGraph" in enum:
            return Member(member, enum)
        return value.name
    if isinstance(value, ListValue):
        return [_plain(item) for item in value.items]
    if isinstance(value, (tuple, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, Object):
        return {"object": value.class_name}
    return value
