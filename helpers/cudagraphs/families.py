# SPDX-License-Identifier: Apache-2.0
"""Families: what kind of model a run trains, from its facts where they are known, else from the names that it goes by.

A recipe that takes its model from a checkpoint (`AutoBridge.from_hf_pretrained(...)`) does not say whether that model
has experts or Mamba layers. The name of the checkpoint, of the provider class, of the recipe function or of the file
usually does; what is inferred from a name says so and never decides a rule, only a recommendation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from cudagraphs.rules.defaults import PATTERNS
from cudagraphs.rules.evaluate import explore
from cudagraphs.settings import Settings

TRAITS = ("moe", "mamba", "gdn", "vlm", "mtp")
# Traits by name, over names in lower case with every run of other characters as one hyphen. A trait holds if any
# pattern of it matches; a name that matches a pattern of DENSE and none of "moe" is a dense model.
NAMES: dict[str, tuple[str, ...]] = {
    "moe": (
        r"\ba\d+b\b",
        r"moe",
        r"mixtral",
        r"deepseek-?v[2-9]",
        r"moonlight",
        r"kimi-?k2",
        r"glm-?4-?[5-9]",
        r"glm-?[5-9]",
        r"gpt-?oss",
        r"olmoe",
        r"minimax",
        r"qwen3-?next",
        r"step-?3",
        r"llama-?4",
        r"dbrx",
        r"mimo-?v2",
        r"bailing",
        r"hy-?v3",
        r"nemotron-?3-(super|ultra)",
        r"nemotron-?3-nano(?!-4b)",
        r"sarvam",
    ),
    "mamba": (
        r"mamba",
        r"nemotron-?h\b",
        r"nemotronh",
        r"nemotron-?3\b",
        r"nemotron-?3-",
        r"nemotron-nano-(9|12)b-?v2",
        r"nemotron-nano-v2",
        r"falcon-?h1",
        r"jamba",
        r"zamba",
        r"hybrid-?(model)?provider",
    ),
    "gdn": (r"qwen3-?next", r"qwen3-?[56]\b", r"qwen3[56](?!\d)", r"gated-?delta"),
    "vlm": (
        r"-vl\b",
        r"\bvl-",
        r"[a-z0-9]vl(model|provider|moe)",
        r"glm-?4-?[5-9]v",
        r"gemma-?3-vl",
        r"gemma-?4-vl",
        r"llava",
        r"kimi-?k2-?5",
        r"omni",
        r"qwen3-?5\b(?!.*text)",
        r"pixtral",
    ),
    "mtp": (r"deepseek-?v[3-9]", r"glm-?4-?[5-9]", r"mimo", r"qwen3-?next"),
}
DENSE = (
    r"llama-?[123]",
    r"llama",
    r"qwen-?2",
    r"qwen3",
    r"gemma",
    r"ministral",
    r"mistral",
    r"exaone",
    r"gpt3",
    r"phi",
    r"nemotron",
    r"falcon",
    r"gptmodelprovider",
    r"qwen2-?5",
)


class Trait(NamedTuple):
    """Whether the model has a trait (None: nothing tells), how that is known, and from what."""

    value: bool | None
    how: str = ""
    reason: str = ""


class Family(NamedTuple):
    moe: Trait
    mamba: Trait
    gdn: Trait
    vlm: Trait
    mtp: Trait

    def describe(self) -> str:
        """ "dense", "MoE", "hybrid MoE with Mamba layers", "vision-language MoE", ..., "model of unknown kind"."""
        if self.moe.value is None and not self.mamba.value:
            return "model of unknown kind"
        parts = ["vision-language"] if self.vlm.value else []
        parts += ["hybrid"] if self.mamba.value else []
        parts.append("MoE" if self.moe.value else "dense model" if self.moe.value is False else "model")
        if self.mamba.value:
            parts.append("with Mamba layers")
        elif self.gdn.value:
            parts.append("with Gated DeltaNet layers")
        if self.mtp.value:
            parts.append("and multi-token prediction")
        return " ".join(parts)


def value_of(settings: Settings, name: str) -> Any:
    """The value of a fact on the default side of every branch, None where it is unknown or absent."""
    answer = explore(settings, lambda reader: (reader[name],))[0].answer
    return answer[0] if answer is not None else None


def infer(settings: Settings) -> Family:
    """The family of the model: known facts first, then names from the most telling one on."""
    names = list(_names(settings))
    return Family(*(_known(settings, trait) or _named(trait, names) for trait in TRAITS))


def _known(settings: Settings, trait: str) -> Trait | None:
    facts = settings.facts
    if trait == "moe":
        leaf = explore(settings, lambda reader: (reader["num_moe_experts"],))[0]
        if leaf.answer is not None:
            experts = leaf.answer[0]
            return Trait(experts is not None and experts > 1, "known", f"num_moe_experts is {experts}")
        parallel = value_of(settings, "expert_model_parallel_size")
        if isinstance(parallel, int) and parallel > 1:
            return Trait(True, "inferred", f"inferred from expert_model_parallel_size={parallel}")
    if trait == "mamba":
        for name in PATTERNS:
            pattern = value_of(settings, name) if name in facts else None
            if isinstance(pattern, str):
                return Trait("M" in pattern, "known", f"{name} is {pattern[:24]}{'...' if len(pattern) > 24 else ''}")
        has = value_of(settings, "model.has_mamba")
        if has is not None:
            return Trait(bool(has), "known", "the model's layers are given")
    if trait == "gdn":
        variant = value_of(settings, "experimental_attention_variant")
        if variant == "gated_delta_net":
            return Trait(True, "known", "experimental_attention_variant is gated_delta_net")
    if trait == "mtp":
        layers = value_of(settings, "mtp_num_layers")
        if isinstance(layers, int):
            return Trait(layers > 0, "known", f"mtp_num_layers is {layers}")
    return None


def _names(settings: Settings) -> Iterator[tuple[str, str]]:
    """(what the name names, the name), the most telling first."""
    for fact, label in (("model.hf_id", "the checkpoint"), ("model.provider", "the model provider")):
        if fact in settings.facts:
            value = value_of(settings, fact)
            if isinstance(value, str) and value not in ("unknown", "AutoBridgeProvider"):
                yield label, value
    if settings.name:
        yield "the recipe's name", settings.name
    if settings.path:
        yield "the file's name", "/".join(settings.path.replace("\\", "/").split("/")[-1:])


def _named(trait: str, names: list[tuple[str, str]]) -> Trait:
    for label, name in names:
        tidy = re.sub(r"[^a-z0-9]+", "-", name.lower())
        if any(re.search(pattern, tidy) for pattern in NAMES[trait]):
            return Trait(True, "inferred", f"inferred from {label}, {name}")
        if any(re.search(pattern, tidy) for pattern in DENSE) or any(
            re.search(pattern, tidy) for patterns in NAMES.values() for pattern in patterns
        ):
            # a name that is known for something else settles the trait: the less telling names are not asked
            return Trait(False, "inferred", f"inferred from {label}, {name}")
    return Trait(None)


def assume(settings: Settings, family: Family) -> Settings:
    """The settings with unknown facts filled in as the family has them, so that rules can judge a recommendation."""
    assumed: dict[str, Any] = {}
    if family.moe.how == "inferred":
        leaf = explore(settings, lambda reader: (reader["num_moe_experts"],))[0]
        if leaf.answer is None:
            assumed["num_moe_experts"] = 8 if family.moe.value else None
    if family.mamba.value is not None and "model.has_mamba" not in settings.facts:
        assumed["model.has_mamba"] = family.mamba.value
    return settings.with_values(assumed, how="inferred") if assumed else settings
