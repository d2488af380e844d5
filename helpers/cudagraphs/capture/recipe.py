# SPDX-License-Identifier: Apache-2.0
"""What a smoke run takes from a recipe: its shape, its graph settings, and the fields that decide what can be
captured."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from cudagraphs import versions
from cudagraphs.capture.variants import MODULES, Variant
from cudagraphs.formats import open_recipe
from cudagraphs.formats.source import SourceError
from cudagraphs.rules import graph_state
from cudagraphs.rules.defaults import SEQUENCE_LENGTHS
from cudagraphs.settings import Known, Settings

# Fields that a smoke run passes on as they are: they change what is captured and need nothing but one node.
PASSED_ON = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "normalization",
    "qk_layernorm",
    "add_bias_linear",
    "add_qkv_bias",
    "gated_linear_unit",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_overlap",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_router_score_function",
    "moe_router_dtype",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_router_topk",
    "kv_channels",
)
_SHAPE = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "ffn_hidden_size",
    "moe_ffn_hidden_size",
    "num_moe_experts",
    "moe_router_topk",
    "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "is_hybrid_model",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
)
# Facts that live elsewhere in some frameworks, under the name that the shape uses.
_ELSEWHERE = {
    "seq_length": SEQUENCE_LENGTHS,
    "micro_batch_size": ("train.micro_batch_size", "micro_batch_size"),
    "vocab_size": ("vocab_size", "model.vocab_size"),
    "hybrid_layer_pattern": (
        "hybrid_layer_pattern",
        "hybrid_override_pattern",
        "model.hybrid_layer_pattern",
        "model.hybrid_override_pattern",
    ),
}


class RecipeError(ValueError):
    """A recipe that cannot be read, or has several functions to choose from; the text says what to do."""


@dataclass(frozen=True)
class Read:
    """Plain values of the recipe. `variant` is None where graphs are off or undecided; `notes` say what was left
    out."""

    values: dict
    config: dict
    variant: Variant | None
    notes: list[str] = field(default_factory=list)


def read(path: Path, function: str | None) -> Read:
    """Reads the recipe without running it. Raises RecipeError with what to mend."""
    try:
        recipe = open_recipe(path, versions.resolve())
        names = recipe.select([function] if function else [])
        if len(names) != 1:
            raise RecipeError(f"{path}: {len(names)} runs match; give one of {', '.join(names)} with --function")
        settings = recipe.run(names[0]).settings
    except (SourceError, OSError) as error:
        raise RecipeError(str(error)) from error
    return from_settings(settings)


def from_settings(settings: Settings) -> Read:
    """The values of a run as it is called without arguments; what only run time decides stays unknown."""
    world = settings.worlds()[0]
    known = {name: fact.value for name, fact in world.facts.items() if isinstance(fact, Known)}
    values = {name: known[name] for name in _SHAPE if known.get(name) is not None}
    for name, places in _ELSEWHERE.items():
        for place in places:
            if isinstance(known.get(place), (int, str)):
                values.setdefault(name, known[place])
    values = {name: value for name, value in values.items() if isinstance(value, (int, float, str))}
    config = {name: known[name] for name in PASSED_ON if known.get(name) is not None}
    notes = []
    for name in ("attention_dropout", "hidden_dropout"):
        if known.get(name):
            notes.append(
                f"{name} {known[name]} -> 0 (losses can only be compared without; --dropout adds a check of its own)"
            )
    if known.get("multi_latent_attention"):
        notes.append("multi_latent_attention True -> False (this tool builds plain attention)")
    if known.get("moe_layer_freq") not in (None, 1):
        notes.append(f"moe_layer_freq {known['moe_layer_freq']} -> 1 (every layer is a mixture of experts here)")
    dispatcher = known.get("moe_token_dispatcher_type")
    if dispatcher not in (None, "alltoall", "allgather"):
        notes.append(f"moe_token_dispatcher_type {dispatcher} -> alltoall (needs packages of its own)")
    elif dispatcher == "allgather":
        config["moe_token_dispatcher_type"] = dispatcher
    return Read(values, config, _variant(settings, notes), notes)


def _variant(settings: Settings, notes: list[str]) -> Variant | None:
    state = graph_state(settings)
    if state.impl in (None, "none"):
        notes.append(
            "graphs are off in the recipe: the variants worth a try are run instead"
            if state.impl == "none"
            else "the recipe's graph implementation is not decided: variants worth a try run"
        )
        return None
    modules = tuple(name for name in MODULES["megatron-core"] if name in (state.modules or ()))
    if state.impl == "local" and "full_iteration" in (state.modules or ()):
        return Variant("full_iteration")
    return Variant(state.impl, modules)
