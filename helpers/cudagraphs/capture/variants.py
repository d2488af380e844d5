# SPDX-License-Identifier: Apache-2.0
"""Variants of a run: an implementation with its scopes, which of them are worth a try, and what our rules say of each.

This is the only module of `capture` that knows the rules package.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cudagraphs import rules, versions
from cudagraphs.settings import Known, Settings

# Implementations a stack offers. megatron-core: TransformerConfig.cuda_graph_impl (0.18 and newer; `fields` writes
# older names). transformer-engine and torch: make_graphed_callables of that package; torch also captures a whole
# iteration by hand.
IMPLS = {
    "megatron-core": ("none", "local", "transformer_engine", "full_iteration"),
    "transformer-engine": ("none", "make_graphed_callables"),
    "torch": ("none", "make_graphed_callables", "full_iteration"),
}
# Scopes that the stack's implementations know. An empty scope means the whole layer (or the whole iteration without
# optimizer).
MODULES = {
    "megatron-core": ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"),
    "transformer-engine": (),
    "torch": ("attn", "mlp", "optimizer"),
}
MODELS = {
    "megatron-core": ("dense", "moe-dropless", "moe-drop-pad", "hybrid", "hybrid-moe"),
    "transformer-engine": ("dense",),
    "torch": ("dense",),
}


class VariantError(ValueError):
    """A variant text that names no known implementation or scope."""


@dataclass(frozen=True)
class Variant:
    """One way to run: `impl` with `modules`. Written as `impl` or `impl:module+module`."""

    impl: str
    modules: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.impl + (":" + "+".join(self.modules) if self.modules else "")


EAGER = Variant("none")
# Eager once more, in a process of its own: what differs between the two is noise, in the numbers and in the clock.
REPEAT = "none (repeat)"


def parse(text: str, stack: str) -> Variant:
    """`"transformer_engine:attn+mlp"` as a Variant of the stack. Raises VariantError with the known names."""
    impl, _, rest = text.partition(":")
    modules = tuple(part for part in rest.split("+") if part)
    if impl not in IMPLS[stack]:
        raise VariantError(f"{text!r}: {stack} has no implementation {impl!r}; it has {', '.join(IMPLS[stack])}")
    for module in modules:
        if module not in MODULES[stack]:
            known = ", ".join(MODULES[stack]) or "none: leave the scope out"
            raise VariantError(f"{text!r}: {stack} has no scope {module!r}; it has {known}")
    return Variant(impl, modules)


def candidates(stack: str, model: str, pattern: str | None = None) -> list[Variant]:
    """Every variant worth a try for the model, legal or not, cheapest scope first. `pattern` is a hybrid's layer
    pattern."""
    if stack == "transformer-engine":
        return [Variant("make_graphed_callables")]
    if stack == "torch":
        return [
            Variant("make_graphed_callables", ("attn",)),
            Variant("make_graphed_callables"),
            Variant("full_iteration"),
            Variant("full_iteration", ("optimizer",)),
        ]
    routed = ("moe_router", "moe_preprocess")
    scopes: dict[str, list[tuple[str, ...]]] = {
        "dense": [("attn",), ("attn", "mlp"), ()],
        "moe-dropless": [("attn",), routed, ("attn", *routed), ("attn", "moe"), ()],
        "moe-drop-pad": [("attn",), ("attn", *routed), ("moe",), ("attn", "moe"), ()],
        "hybrid": [("attn",), ("attn", "mlp"), ("mamba",), ("attn", "mlp", "mamba"), ()],
        "hybrid-moe": [("attn",), ("attn", *routed)],
    }
    chosen = [modules for modules in scopes[model] if "mamba" not in modules or "M" in (pattern or "")]
    out = [Variant("transformer_engine", modules) for modules in chosen]
    if "moe" in model:
        out.append(Variant("local", ("attn", *routed)))
    return [*out, Variant("local"), Variant("full_iteration")]


def fields(variant: Variant, mcore_minor: int) -> dict:
    """The variant as TransformerConfig fields of megatron-core 0.`mcore_minor`.

    0.18 has `cuda_graph_modules` and the implementation full_iteration; 0.16 and 0.17 have `cuda_graph_scope` as a
    list, with full_iteration as a scope of local; 0.15 has one scope as a text.
    Source: megatron/core/transformer/transformer_config.py of 0.15.3, 0.16.1, 0.17.1, 0.18.2 and 0.19.2.
    """
    if variant.impl == "none":
        return {"cuda_graph_impl": "none"}
    if mcore_minor >= 18:
        return {"cuda_graph_impl": variant.impl, "cuda_graph_modules": list(variant.modules)}
    impl, scope = variant.impl, list(variant.modules)
    if impl == "full_iteration":
        impl, scope = "local", ["full_iteration"]
    if mcore_minor >= 16:
        return {"cuda_graph_impl": impl, "cuda_graph_scope": scope}
    return {"cuda_graph_impl": impl, "cuda_graph_scope": ",".join(scope) or "full"}


def legal(setup: dict, variant: Variant, environment: Mapping[str, str]) -> dict:
    """What the rules say of a variant: `{"verdict": "legal" or "illegal", "codes": [...], "titles": {code: title}}`.

    Errors and runtime findings make it illegal. The rules see the whole configuration that will run and the environment
    variables of the processes. Stacks other than megatron-core have no scopes to judge and are legal.
    """
    if variant.impl == "none" or setup["stack"] != "megatron-core":
        return {"verdict": "legal", "codes": [], "titles": {}}
    found = setup["versions"]
    numbers = versions.resolve(
        "megatron-core",
        mcore=found["megatron-core"],
        te=found["transformer-engine"],
        torch=found["torch"].split("+")[0],
    )
    values = setup["config"] | fields(variant, numbers.minor)
    # What the trainer of this stack always sets (stacks/megatron.py).
    values |= {
        "rng.te_rng_tracker": True,
        # rules tell plain GPT layers from those of hybrid models, with Mamba layers or without, by this fact
        "model.has_mamba": setup["model"].startswith("hybrid"),
        "ddp.overlap_grad_reduce": setup["data_parallel"]["overlap_grad_reduce"],
        "ddp.use_distributed_optimizer": setup["data_parallel"]["distributed_optimizer"],
        "ddp.overlap_param_gather": setup["data_parallel"]["overlap_param_gather"],
        "ddp.check_for_nan_in_grad": False,
        "ddp.grad_reduce_in_fp32": True,
    }
    values |= {f"env.{name}": value for name, value in environment.items()}
    settings = Settings("megatron-core", numbers, {name: Known(value, None, "given") for name, value in values.items()})
    broken = [found for found in rules.check(settings) if found.severity in ("error", "runtime") and not found.needs]
    return {
        "verdict": "illegal" if broken else "legal",
        "codes": sorted({found.code for found in broken}),
        "titles": {found.code: rules.REGISTRY[found.code].title for found in broken},
    }


def rules_for(message: str) -> tuple[str, ...]:
    """Codes of the rules one of whose upstream messages occurs in an assert's text; empty where none does.

    Messages of one or two words are too common to tell anything.
    """
    text = _plain(message)
    return tuple(
        rule.code
        for rule in rules.REGISTRY
        if any(_plain(fragment) in text for fragment in rule.upstream if len(fragment.split()) > 2)
    )


def _plain(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9_]+", text.lower()))
