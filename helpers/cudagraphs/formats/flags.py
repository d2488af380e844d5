# SPDX-License-Identifier: Apache-2.0
"""What command-line options mean: Megatron-LM's arguments, Bridge's performance harness, and Hydra overrides.

A dialect turns options into facts, and settings into changes of options. Names and value syntax follow the releases:

* Megatron-LM: megatron/training/arguments.py at core_v0.13.0 to core_v0.19.0. From 0.16 most options are generated from
  the fields of TransformerConfig: `--field-name`, `--no-field-name` for a field that is True by default.
* The performance harness: scripts/performance/argument_parser.py and utils/overrides.py of NVIDIA-NeMo/Megatron-Bridge.
* Hydra overrides: megatron/bridge/training/utils/omegaconf_utils.py; `key.path=value`, with `+`, `++` or `~` in front.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cudagraphs.formats.words import Option, Side, Word, by_world, fold
from cudagraphs.rules import defaults
from cudagraphs.rules.base import BRIDGE, LM
from cudagraphs.settings import Choice, Fact, Known, Source, Unknown
from cudagraphs.versions import Versions

HARNESS_SCOPES = ("full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
HARNESS_IMPLS = ("none", "local", "transformer_engine")


@dataclass(frozen=True)
class Change:
    """One change of the options: what is called `names` goes, or the option `name` gets `values` (none for a bare
    flag).

    `override` is true for a Hydra override, whose one value stands behind `=`.
    """

    name: str
    values: tuple[str, ...] = ()
    remove: bool = False
    override: bool = False
    inline: bool = False


class Skip(Exception):
    """A setting that the dialect cannot express; the text is the reason."""


def scalar(text: str) -> Any:
    """A value as Python's literals have it, the text itself otherwise."""
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    if re.fullmatch(r"[+-]?(\d+\.\d*|\.\d+|\d+)([eE][+-]?\d+)?", text):
        return float(text)
    return {"True": True, "False": False, "None": None}.get(text, text)


def pattern(text: str) -> Any:
    """A layer pattern such as `[0]*3+[1]*58`, as Megatron-LM reads it; the text itself where it is none."""
    if re.fullmatch(r"\d+", text):
        return int(text)
    if not re.fullmatch(r"[\s\d,\[\]()*+]+", text):
        return text
    items: list[int] = []
    for term in text.strip().strip("()").split("+"):
        match = re.fullmatch(r"\s*\(?\s*\[([\d,\s]*)\]\s*(?:\*\s*(\d+))?\s*\)?\s*", term)
        if match is None or int(match.group(2) or 1) > 10000:
            return text
        items += [int(number) for number in match.group(1).split(",") if number.strip()] * int(match.group(2) or 1)
    return items


# -- Megatron-LM -----------------------------------------------------------------------------------

TRUE, FALSE = object(), object()
# option -> (facts, how its values are read): TRUE and FALSE for bare flags, else a function of the texts
LM_OPTIONS: dict[str, tuple[tuple[str, ...], Any]] = {
    "num-experts": (("num_moe_experts",), lambda texts: scalar(texts[0])),
    "disable-bias-linear": (("add_bias_linear",), FALSE),
    "no-gradient-accumulation-fusion": (("gradient_accumulation_fusion",), FALSE),
    "no-check-for-nan-in-loss-and-grad": (
        ("rerun_state_machine.check_for_nan_in_loss", "ddp.check_for_nan_in_grad"),
        FALSE,
    ),
    "te-rng-tracker": (("rng.te_rng_tracker", "use_te_rng_tracker", "model.use_te_rng_tracker"), TRUE),
    "inference-rng-tracker": (("rng.inference_rng_tracker", "inference_rng_tracker"), TRUE),
    "recompute-activations": (("recompute_granularity",), lambda texts: "selective"),
    "fp8-format": (("fp8",), lambda texts: texts[0]),
    "fp4-format": (("fp4",), lambda texts: texts[0]),
    "fp8-param-gather": (("fp8_param", "ddp.fp8_param_gather"), TRUE),
    "fp4-param-gather": (("fp4_param",), TRUE),
    "reuse-grad-buf-for-mxfp8-param-ag": (("ddp.reuse_grad_buf_for_mxfp8_param_ag",), TRUE),
    "overlap-grad-reduce": (("ddp.overlap_grad_reduce",), TRUE),
    "overlap-param-gather": (("ddp.overlap_param_gather",), TRUE),
    "use-distributed-optimizer": (("ddp.use_distributed_optimizer",), TRUE),
    "use-megatron-fsdp": (("ddp.use_megatron_fsdp",), TRUE),
    "use-custom-fsdp": (("ddp.use_megatron_fsdp",), TRUE),
    "data-parallel-sharding-strategy": (("ddp.data_parallel_sharding_strategy",), lambda texts: texts[0]),
    "optimizer-cuda-graph": (("optimizer.optimizer_cuda_graph",), TRUE),
    "optimizer-cpu-offload": (("optimizer.optimizer_cpu_offload",), TRUE),
    "overlap-param-gather-with-optimizer-step": (("optimizer.overlap_param_gather_with_optimizer_step",), TRUE),
    "log-num-zeros-in-grad": (("optimizer.log_num_zeros_in_grad",), TRUE),
    "rampup-batch-size": (("train.rampup_batch_size",), lambda texts: [scalar(text) for text in texts]),
    "step-batch-size-schedule": (("train.rampup_batch_size",), lambda texts: list(texts)),
    "micro-batch-size": (("train.micro_batch_size",), lambda texts: scalar(texts[0])),
    "global-batch-size": (("train.global_batch_size",), lambda texts: scalar(texts[0])),
    "num-virtual-stages-per-pipeline-rank": (("virtual_pipeline_model_parallel_size",), lambda texts: scalar(texts[0])),
    "cpu-offloading-num-layers": (("cpu_offloading",), lambda texts: scalar(texts[0]) != 0),
    "moe-layer-freq": (("moe_layer_freq",), lambda texts: pattern(" ".join(texts))),
    "norm-epsilon": (("layernorm_epsilon",), lambda texts: scalar(texts[0])),
    "swiglu": (("gated_linear_unit",), TRUE),
    "hybrid-layer-pattern": (("hybrid_layer_pattern",), lambda texts: texts[0]),
    "hybrid-override-pattern": (("model.hybrid_override_pattern",), lambda texts: texts[0]),
}
# Fields whose option takes any number of values.
LM_LISTS = frozenset(
    {
        "recompute_modules",
        "offload_modules",
        "cuda_graph_modules",
        "cp_comm_type",
        "hierarchical_context_parallel_sizes",
    }
)
# Fields without an option of their own. Source: the exclusions of _add_network_size_args.
LM_NO_OPTION = frozenset(
    (
        "virtual_pipeline_model_parallel_size params_dtype enable_autocast autocast_dtype tp_comm_overlap_disable_qkv "
        "tp_comm_overlap_disable_fc1 pipeline_dtype variable_seq_lengths batch_p2p_comm batch_p2p_sync "
        "deallocate_pipeline_outputs "
        "cpu_offloading cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering "
        "softmax_scale "
        "gated_linear_unit bias_activation_fusion test_mode memory_efficient_layer_norm fused_single_qkv_rope "
        "fp8_dot_product_attention fp8_multi_head_attention moe_token_dropping cuda_graph_use_single_mempool "
        "cuda_graph_retain_backward_graph disable_parameter_transpose_cache gtp_weight_remat_size "
        "expert_gtp_weight_remat_size"
    ).split()
)
# What a run without the option holds where that is not the default of TransformerConfig or of the sections.
LM_DEFAULTS = {
    "gradient_accumulation_fusion": True,
    "ddp.check_for_nan_in_grad": True,
    "rerun_state_machine.check_for_nan_in_loss": True,
}
# What --use-checkpoint-args takes from the checkpoint over the command line, as far as rules and recommendations ask
# for it.
# Source: load_args_from_checkpoint in megatron/training/checkpointing.py.
FROM_CHECKPOINT = (
    "add_bias_linear",
    "add_qkv_bias",
    "attention_dropout",
    "hidden_dropout",
    "num_moe_experts",
    "moe_layer_freq",
    "mtp_num_layers",
    "moe_shared_expert_intermediate_size",
    "hybrid_layer_pattern",
)
LM_MARKS = frozenset(
    (
        "num-layers hidden-size micro-batch-size tensor-model-parallel-size pipeline-model-parallel-size "
        "use-mcore-models "
        "cuda-graph-impl cuda-graph-scope cuda-graph-modules enable-cuda-graph external-cuda-graph transformer-impl "
        "num-attention-heads seq-length train-iters global-batch-size use-checkpoint-args"
    ).split()
)


class MegatronLM:
    """Megatron-LM's arguments."""

    format, framework, overrides = "megatron-lm", LM, False

    def __init__(self, versions: Versions):
        self.versions = versions
        self.config = defaults.of_config(min(versions.minor, defaults.NEWEST_MINOR))
        self.fields = defaults.field_names(versions.minor)

    def facts(self, options: list[Option]) -> tuple[dict[str, Fact], str]:
        """The facts that the options settle, and why others stay unknown ("" where what is absent holds its
        default).
        """
        entries: dict[str, list[tuple[tuple[Side, ...], Fact]]] = {}
        for option in options:
            for name, fact in self._of(option):
                entries.setdefault(name, []).append((option.guards, fact))
        facts: dict[str, Fact] = {name: Known(value, None, "default") for name, value in LM_DEFAULTS.items()}
        for name, found in entries.items():
            facts[name] = fold(found, facts.get(name) or self._default(name))
        taken = facts.get("args.use_checkpoint_args")
        if isinstance(taken, Known) and taken.value is True:
            for name in FROM_CHECKPOINT:
                facts[name] = Unknown("it comes from the checkpoint (--use-checkpoint-args)", taken.source)
        self._derive(facts, options)
        return facts, ""

    def _default(self, name: str) -> Fact:
        try:
            return Known(defaults.default(name, self.versions.minor), None, "default")
        except KeyError:
            return Known(None, None, "default")

    def _of(self, option: Option) -> list[tuple[str, Fact]]:
        name = option.name.replace("_", "-") if option.name not in LM_OPTIONS else option.name
        source = option.word.source
        if name in LM_OPTIONS:
            facts, kind = LM_OPTIONS[name]
            if kind is TRUE or kind is FALSE:
                return [(fact, Known(kind is TRUE, source)) for fact in facts]
            return [(fact, self._value(option, kind)) for fact in facts]
        field = name.replace("-", "_")
        if field in defaults.FIELDS or field in defaults.ABSENT:
            if not option.values and option.inline is None:
                return [(field, Known(True, source))]
            many = field in LM_LISTS or (field == "cuda_graph_scope" and self.versions.minor >= 16)
            return [(field, self._value(option, _listed if many else _one))]
        for prefix in ("no_", "disable_"):
            if field.startswith(prefix) and isinstance(self.config.get(field[len(prefix) :]), bool):
                return [(field[len(prefix) :], Known(False, source))]
        if not option.values and option.inline is None:
            return [(f"args.{field}", Known(True, source))]
        return [(f"args.{field}", self._value(option, _one))]

    def _value(self, option: Option, convert: Callable[[list[str]], Any]) -> Fact:
        source = (option.values[0] if option.values else option.word).source
        if option.inline is not None:
            return Known(convert([option.inline]), source)
        if not option.values:
            return Unknown(f"--{option.name} has no value", source)
        return by_world([_without(word, option.guards) for word in option.values], convert, source)

    def _derive(self, facts: dict[str, Fact], options: list[Option]) -> None:
        """What validate_args works out from other arguments."""
        stages = next((o for o in reversed(options) if o.name == "num-layers-per-virtual-pipeline-stage"), None)
        if stages is not None:
            facts["virtual_pipeline_model_parallel_size"] = self._virtual(stages, facts)
        impl, own = facts.get("cuda_graph_impl"), facts.get("rng.te_rng_tracker")
        for flag in ("enable_cuda_graph", "external_cuda_graph"):
            legacy = facts.get(flag)
            if isinstance(legacy, Known) and legacy.value and impl is None:
                impl = Known("local" if flag == "enable_cuda_graph" else "transformer_engine", legacy.source)
        on = isinstance(impl, Known) and impl.value not in (None, "none")
        layers = facts.get("transformer_impl") or facts.get("args.transformer_impl")
        te_layers = layers is None or not isinstance(layers, Known) or layers.value != "local"
        if on and own is None and self.versions.minor >= 14 and (te_layers or impl.value == "transformer_engine"):
            # from 0.14 Megatron-LM switches the tracker on by itself
            for name in ("rng.te_rng_tracker", "use_te_rng_tracker", "model.use_te_rng_tracker"):
                facts[name] = Known(True, impl.source, "inferred")

    def _virtual(self, option: Option, facts: dict[str, Fact]) -> Fact:
        numbers = [
            self._value(option, _one),
            facts.get("num_layers"),
            facts.get("pipeline_model_parallel_size") or Known(1),
        ]
        if all(isinstance(n, Known) and isinstance(n.value, int) and n.value > 0 for n in numbers):
            per_stage, layers, stages = (n.value for n in numbers)  # type: ignore[union-attr]
            size = layers // stages // per_stage
            return Known(size if size > 1 else None, option.word.source)
        return Unknown("it follows from --num-layers and the pipeline's size, which are not known", option.word.source)

    # -- writing -----------------------------------------------------------------------------------

    def changes(self, wanted: Mapping[str, Any], facts: Mapping[str, Fact]) -> tuple[list[Change], dict[str, str]]:
        changes: list[Change] = []
        skipped: dict[str, str] = {}
        for fact, value in wanted.items():
            try:
                changes += [change for change in self._changes(fact, value) if change not in changes]
            except Skip as reason:
                skipped[fact] = str(reason)
        return changes, skipped

    def _changes(self, fact: str, value: Any) -> list[Change]:
        bare = fact.removeprefix("model.")
        fact = bare if bare in defaults.FIELDS or bare in defaults.ABSENT else fact
        for option, (facts, kind) in LM_OPTIONS.items():
            if fact in facts and option not in ("recompute-activations", "step-batch-size-schedule", "use-custom-fsdp"):
                return self._known_option(option, fact, kind, value)
        if fact not in self.fields:
            raise Skip(
                f"megatron-core 0.{self.versions.minor} has no {fact}"
                if fact in defaults.FIELDS
                else "Megatron-LM has no argument for it"
            )
        if fact in LM_NO_OPTION:
            raise Skip("Megatron-LM has no argument for it")
        option = fact.replace("_", "-")
        default = self.config.get(fact)
        also = [Change("recompute-activations", remove=True)] if fact == "recompute_granularity" else []
        if isinstance(value, bool):
            if default is True:
                return [Change(f"disable-{option}", remove=True), Change(f"no-{option}", remove=value)]
            return [Change(option, remove=not value)]
        if value is None or value == []:
            return [*also, Change(option, remove=True)]
        if isinstance(value, (list, tuple)):
            if len(value) > 1 and fact == "cuda_graph_scope" and self.versions.minor < 16:
                raise Skip(f"--cuda-graph-scope takes one name in 0.{self.versions.minor}")
            return [*also, Change(option, tuple(str(item) for item in value))]
        return [*also, Change(option, (str(value),))]

    def _known_option(self, option: str, fact: str, kind: Any, value: Any) -> list[Change]:
        if kind is TRUE:
            return [Change(option, remove=not value)]
        if kind is FALSE:
            return [Change(option, remove=bool(value))]
        if option == "cpu-offloading-num-layers":
            if value:
                raise Skip("give --cpu-offloading-num-layers the number of layers")
            return [Change(option, remove=True)]
        if option == "moe-layer-freq" and isinstance(value, list):
            return [Change(option, ("[" + ",".join(map(str, value)) + "]",))]
        removed = [Change("step-batch-size-schedule", remove=True)] if fact == "train.rampup_batch_size" else []
        if value is None:
            return [*removed, Change(option, remove=True)]
        return [
            *removed,
            Change(option, tuple(str(item) for item in value) if isinstance(value, (list, tuple)) else (str(value),)),
        ]


def _one(texts: list[str]) -> Any:
    return scalar(texts[0]) if len(texts) == 1 else [scalar(text) for text in texts]


def _listed(texts: list[str]) -> list[str]:
    return list(texts)


def _without(word: Word, guards: tuple[Side, ...]) -> Word:
    from dataclasses import replace

    return replace(word, guards=tuple(side for side in word.guards if side not in guards))


# -- Hydra overrides and the performance harness ---------------------------------------------------


def hydra_value(text: str) -> Any:
    """The value of a Hydra override. Texts that are no plain YAML stay as they are."""
    import yaml

    if text == "":
        return ""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return scalar(value) if isinstance(value, str) and text[:1] not in "\"'" else value


def hydra_text(value: Any) -> str:
    """A value as a Hydra override takes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(hydra_text(item) for item in value) + "]"
    text = str(value)
    if isinstance(value, str) and not re.fullmatch(r"[\w./:@%+-]+", text):
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return text


def override_fact(path: str) -> str:
    """The fact that a dotted path of the configuration sets."""
    section, _, name = path.partition(".")
    if section == "env_vars":
        return f"env.{name}"
    if section == "model" and (name in defaults.FIELDS or name in defaults.ABSENT):
        return name
    return path


def override_path(fact: str, versions: Versions) -> str:
    """The dotted path that sets a fact. Raises Skip where the version has no such field."""
    if fact.startswith("env."):
        return f"env_vars.{fact[4:]}"
    if "." in fact:
        return fact
    if fact not in defaults.field_names(versions.minor):
        raise Skip(f"megatron-core 0.{versions.minor} has no {fact}")
    return f"model.{fact}"


class Hydra:
    """A list of Hydra overrides on top of a recipe that is not read."""

    format, framework, overrides = "hydra", BRIDGE, True

    def __init__(self, versions: Versions):
        self.versions = versions

    def facts(self, options: list[Option]) -> tuple[dict[str, Fact], str]:
        entries = override_entries(options)
        facts = {name: fold(found, _BELOW) for name, found in entries.items()}
        _copied(facts)
        recipe = next(
            (o.values[0].text for o in options if o.name in ("recipe", "model_recipe_name") and o.values), None
        )
        return facts, f"the recipe {recipe or 'below the overrides'} is not read"

    def changes(self, wanted: Mapping[str, Any], facts: Mapping[str, Fact]) -> tuple[list[Change], dict[str, str]]:
        changes, skipped = [], {}
        for fact, value in wanted.items():
            try:
                path = override_path(fact, self.versions)
                if fact.startswith("env."):
                    raise Skip("set it in the environment of the launch")
                changes.append(Change(path, (hydra_text(value),), override=True))
            except Skip as reason:
                skipped[fact] = str(reason)
        return changes, skipped


_BELOW = Unknown("the recipe below the overrides is not read")


def override_entries(options: list[Option]) -> dict[str, list[tuple[tuple[Side, ...], Fact]]]:
    entries: dict[str, list[tuple[tuple[Side, ...], Fact]]] = {}
    for option in options:
        if option.override is None:
            continue
        fact: Fact = _BELOW if option.override == "~" else Known(hydra_value(option.inline or ""), option.word.source)
        name = override_fact(option.name)
        if name.startswith("env.") and isinstance(fact, Known):
            fact = Known(str(fact.value), fact.source)
        entries.setdefault(name, []).append((option.guards, fact))
    return entries


def _copied(facts: dict[str, Fact]) -> None:
    """What Bridge copies from one section to another when training starts."""
    from cudagraphs.formats import bridge

    for name in (*bridge.OVERLAP_TO_MODEL, *bridge.OVERLAP_TO_DDP):
        user = facts.get(f"comm_overlap.{name}")
        if isinstance(user, Known) and user.value is not None:
            facts[name if name in bridge.OVERLAP_TO_MODEL else f"ddp.{name}"] = user
    for left, right in (("use_te_rng_tracker", "rng.te_rng_tracker"),):
        for one, other in ((left, right), (right, left)):
            fact = facts.get(one)
            if isinstance(fact, Known) and fact.value is True and other not in facts:
                facts[other] = Known(True, fact.source, "inferred")
    tracker = facts.get("use_te_rng_tracker")
    if tracker is not None:
        facts.setdefault("model.use_te_rng_tracker", tracker)


def _flag(texts: list[str]) -> bool:
    return texts[0].lower() in ("true", "1", "t", "yes", "y")


def _csv(texts: list[str]) -> list[str]:
    return [part for text in texts for part in text.split(",")]


# option -> (fact, how its value is read)
HARNESS_OPTIONS: dict[str, tuple[str, Callable[[list[str]], Any]]] = {
    "use_megatron_fsdp": ("ddp.use_megatron_fsdp", _flag),
    "moe_a2a_overlap": ("comm_overlap.overlap_moe_expert_parallel_comm", _flag),
    "recompute_modules": ("recompute_modules", _csv),
    "recompute_num_layers": ("recompute_num_layers", _one),
    "tensor_model_parallel_size": ("tensor_model_parallel_size", _one),
    "pipeline_model_parallel_size": ("pipeline_model_parallel_size", _one),
    "context_parallel_size": ("context_parallel_size", _one),
    "virtual_pipeline_model_parallel_size": ("virtual_pipeline_model_parallel_size", _one),
    "expert_model_parallel_size": ("expert_model_parallel_size", _one),
    "expert_tensor_parallel_size": ("expert_tensor_parallel_size", _one),
    "num_moe_experts": ("num_moe_experts", _one),
    "num_layers": ("num_layers", _one),
    "micro_batch_size": ("train.micro_batch_size", _one),
    "global_batch_size": ("train.global_batch_size", _one),
    "moe_flex_dispatcher_backend": ("moe_flex_dispatcher_backend", _one),
    "model_family_name": ("harness.model_family_name", _one),
    "model_recipe_name": ("harness.model_recipe_name", _one),
    "compute_dtype": ("harness.compute_dtype", _one),
    "gpu": ("harness.gpu", _one),
}
HARNESS_SHORT = {
    "m": "model_family_name",
    "mr": "model_recipe_name",
    "g": "gpu",
    "c": "compute_dtype",
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "et": "expert_tensor_parallel_size",
    "mb": "micro_batch_size",
    "gb": "global_batch_size",
    "rl": "recompute_num_layers",
    "ol": "activation_offload_layers",
    "ce": "custom_env_vars",
    "E": "env",
}
HARNESS_MARKS = frozenset(
    {
        "cuda_graph_impl",
        "cuda_graph_scope",
        "model_recipe_name",
        "model_family_name",
        "compute_dtype",
        "moe_a2a_overlap",
    }
)


class Harness:
    """The command line of Bridge's performance scripts, with Hydra overrides behind the options."""

    format, framework, overrides = "performance-harness", BRIDGE, True

    def __init__(self, versions: Versions):
        self.versions = versions

    def facts(self, options: list[Option]) -> tuple[dict[str, Fact], str]:
        found: dict[str, Fact] = {}
        lm = MegatronLM(self.versions)
        for option in options:
            name = HARNESS_SHORT.get(option.name, option.name)
            if name in HARNESS_OPTIONS and option.override is None:
                fact, convert = HARNESS_OPTIONS[name]
                found[fact] = fold([(option.guards, lm._value(option, convert))], found.get(fact, _BELOW))
        graph = {
            name: lm._value(option, convert)
            for name, convert in (("cuda_graph_impl", _one), ("cuda_graph_scope", _csv))
            for option in options
            if option.name == name
        }
        found.update({f"harness.{name}": fact for name, fact in graph.items()})
        self._graph_facts(found, graph.get("cuda_graph_impl"), graph.get("cuda_graph_scope"))
        self._other_facts(found, options, lm)
        for name, entries in override_entries(options).items():
            found[name] = fold(entries, found.get(name, _BELOW))
        _copied(found)
        recipe = found.get("harness.model_recipe_name")
        return found, f"the recipe {recipe.value if isinstance(recipe, Known) else 'of the command'} is not read"

    def _graph_facts(self, found: dict[str, Fact], impl: Fact | None, scope: Fact | None) -> None:
        """What `_set_cuda_graph_overrides` makes of the two options."""
        if impl is None and scope is None:
            return
        has_modules = self.versions.minor >= 18
        field = "cuda_graph_modules" if has_modules else "cuda_graph_scope"
        if impl is not None:
            found["cuda_graph_impl"] = impl
        for name in ("rng.te_rng_tracker", "use_te_rng_tracker", "model.use_te_rng_tracker"):
            if isinstance(impl, Known):
                found[name] = Known(impl.value != "none", impl.source, "inferred")
        if isinstance(impl, Known) and impl.value == "none":
            # the scopes are cleared, whatever the command or the recipe says
            found[field] = Known([], impl.source, "inferred")
            if has_modules:
                found["cuda_graph_scope"] = Known(None, impl.source, "inferred")
            return
        if not isinstance(scope, Known):
            if scope is not None:
                found[field] = scope
            return
        if scope.value == ["full_iteration"] and not (isinstance(impl, Known) and impl.value == "transformer_engine"):
            found["cuda_graph_impl"] = Known("full_iteration" if has_modules else "local", scope.source)
            found[field] = Known([] if has_modules else ["full_iteration"], scope.source)
            found["rerun_state_machine.check_for_nan_in_loss"] = Known(False, scope.source, "inferred")
        else:
            found[field] = Known(list(scope.value), scope.source)
        if has_modules:
            found["cuda_graph_scope"] = Known(None, scope.source, "inferred")

    def _other_facts(self, found: dict[str, Fact], options: list[Option], lm: MegatronLM) -> None:
        for option in options:
            name = HARNESS_SHORT.get(option.name, option.name)
            source = option.word.source
            if name == "recompute_num_layers":
                found["recompute_granularity"] = Known("full", source)
            elif name == "recompute_modules":
                found["recompute_granularity"] = Known("selective", source)
            elif name == "activation_offload_layers":
                layers = lm._value(option, _one)
                if isinstance(layers, Known) and isinstance(layers.value, int) and layers.value > 0:
                    found["cpu_offloading"] = Known(True, source)
            elif name == "use_tokendrop" and isinstance(lm._value(option, _flag), Known):
                drops = bool(lm._value(option, _flag).value)  # type: ignore[union-attr]
                found["moe_expert_capacity_factor"] = Known(1.0 if drops else -1.0, source)
                found["moe_pad_expert_input_to_capacity"] = Known(drops, source)
            elif name in ("custom_env_vars", "env"):
                texts = [option.inline] if option.inline is not None else [word.text or "" for word in option.values]
                for text in texts:
                    for pair in text.split(",") if name == "custom_env_vars" else [text]:
                        key, equals, value = pair.partition("=")
                        if equals:
                            found[f"env.{key}"] = Known(value, source)
        overlap = found.get("comm_overlap.overlap_moe_expert_parallel_comm")
        if isinstance(overlap, Known) and overlap.value is True:
            found.setdefault("comm_overlap.delay_wgrad_compute", Known(True, overlap.source, "inferred"))

    def changes(self, wanted: Mapping[str, Any], facts: Mapping[str, Fact]) -> tuple[list[Change], dict[str, str]]:
        wanted, skipped = dict(wanted), {}
        changes = self._graph_changes(wanted, facts, skipped)
        environment = {fact[4:]: str(wanted.pop(fact)) for fact in list(wanted) if fact.startswith("env.")}
        for name, value in environment.items():
            skipped[f"env.{name}"] = "set it in the environment of the launch, or with --custom_env_vars"
        more, reasons = Hydra(self.versions).changes(wanted, facts)
        return [*changes, *more], {**skipped, **reasons}

    def _graph_changes(
        self, wanted: dict[str, Any], facts: Mapping[str, Fact], skipped: dict[str, str]
    ) -> list[Change]:
        """Take the graph settings out of `wanted`, as far as the two options express them."""
        field = "cuda_graph_modules" if self.versions.minor >= 18 else "cuda_graph_scope"
        if not {"cuda_graph_impl", field} & set(wanted):
            return []
        known = {name: fact.value for name, fact in facts.items() if isinstance(fact, Known)}
        impl = wanted.pop("cuda_graph_impl", known.get("cuda_graph_impl"))
        modules = wanted.pop(field, known.get(field))
        if self.versions.minor >= 18 and wanted.get("cuda_graph_scope", ...) is None:
            wanted.pop("cuda_graph_scope")
        if impl == "none":
            return [Change("cuda_graph_impl", ("none",)), Change("cuda_graph_scope", remove=True)]
        if impl == "full_iteration" or modules == ["full_iteration"]:
            return [Change("cuda_graph_impl", ("local",)), Change("cuda_graph_scope", ("full_iteration",))]
        changes = [Change("cuda_graph_impl", (str(impl),))] if impl is not None else []
        if modules and all(name in HARNESS_SCOPES for name in modules):
            return [*changes, Change("cuda_graph_scope", (",".join(map(str, modules)),))]
        if modules is not None:
            skipped[field] = (
                "the performance scripts have no scope for the whole layer: --cuda_graph_scope needs a name"
            )
        return changes


def choose(options: list[Option]) -> type[MegatronLM] | type[Hydra] | type[Harness] | None:
    """The dialect that the options are written in, None where nothing tells."""
    names = {option.name for option in options if option.override is None}
    dotted = [option for option in options if option.override is not None]
    if names & HARNESS_MARKS:
        return Harness
    if names & LM_MARKS:
        return MegatronLM
    return Hydra if dotted else None


def is_known(fact: Fact | None) -> bool:
    return isinstance(fact, Known) or (isinstance(fact, Choice) and is_known(fact.if_true) and is_known(fact.if_false))


__all__ = ["Change", "Harness", "Hydra", "MegatronLM", "Source", "choose", "hydra_text", "hydra_value", "scalar"]
