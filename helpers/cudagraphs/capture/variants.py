# SPDX-License-Identifier: Apache-2.0
"""Variants of a run: an implementation with its scopes, which of them are worth a try, and what our rules say of each.

This is the only module of `capture` that knows the rules package.
"""

from __future__ import annotations

from dataclasses import dataclass

# Implementations a stack offers. megatron-core: TransformerConfig.cuda_graph_impl (0.18 and newer; `fields` writes older names).
# transformer-engine and torch: make_graphed_callables of that package; torch also captures a whole iteration by hand.
IMPLS = {
    "megatron-core": ("none", "local", "transformer_engine", "full_iteration"),
    "transformer-engine": ("none", "make_graphed_callables"),
    "torch": ("none", "make_graphed_callables", "full_iteration"),
}
# Scopes that the stack's implementations know. An empty scope means the whole layer (or the whole iteration without optimizer).
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
    """Every variant worth a try for the model, legal or not, cheapest scope first. `pattern` is a hybrid's layer pattern."""
    if stack == "transformer-engine":
        return [Variant("make_graphed_callables")]
    if stack == "torch":
        return [
            Variant("make_graphed_callables", ("attn",)), Variant("make_graphed_callables"),
            Variant("full_iteration"), Variant("full_iteration", ("optimizer",)),
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

    0.18 has `cuda_graph_modules` and the implementation full_iteration; 0.16 and 0.17 have `cuda_graph_scope` as a list, with
    full_iteration as a scope of local; 0.15 has one scope as a text.
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


def legal(job: dict, variant: Variant) -> dict:
    """What the rules say of a variant: `{"verdict": "legal"|"illegal"|"unknown", "codes": [...], "how": text}`.

    Error and runtime findings make it illegal. Stacks without rules of ours (torch, transformer-engine) are legal as listed.
    """
    if variant.impl == "none" or job["stack"] != "megatron-core":
        return {"verdict": "legal", "codes": [], "how": "no rule applies"}
    try:
        from cudagraphs.rules import config
    except ImportError:
        return {"verdict": "unknown", "codes": [], "how": "the rules package is not installed"}
    minor = int(job["versions"]["megatron-core"].split(".")[1])
    answer = config.verdict(
        {**job["config"], **fields(variant, minor)}, job["versions"]["megatron-core"], job["versions"].get("transformer-engine")
    )
    verdict = "illegal" if answer["codes"] else "legal"
    return {"verdict": verdict, "codes": list(answer["codes"]), "how": "rules of this pack"}


def rules_for(message: str) -> tuple[str, ...]:
    """Codes of the rules whose upstream message occurs in the text of an assert; empty where none does."""
    return ()
