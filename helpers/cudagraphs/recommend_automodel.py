# SPDX-License-Identifier: Apache-2.0
"""Recommend scopes for a NeMo AutoModel recipe: `backend.cuda_graph.modules` and the backends that they need.

Source of the conditions: nemo_automodel/components/models/common/utils.py BackendConfig and
nemo_automodel/components/cuda_graphs/partial.py PartialCudaGraphManager.from_model_parts, 0.6.0 and 0.7.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cudagraphs import families
from cudagraphs.recommend import Recommendation
from cudagraphs.rules.evaluate import explore
from cudagraphs.settings import Settings

SCOPES = ("attn", "te_dpa", "moe_router", "moe_preprocess")
MODULES = "backend.cuda_graph.modules"


def recommend_automodel(
    settings: Settings,
    preset: str | None = None,
    impl: str | None = None,
    scopes: Sequence[str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Recommendation:
    """The modules to capture for one AutoModel run.

    By default the narrow attention scope (te_dpa), which asks for nothing but `attn: te`, and the router of a mixture
    of experts; "narrow" leaves attention out where there are experts, "widest" takes whole attention, whose linear and
    norm backends must be PyTorch's. `refused` says what stands against it.
    """
    if extra:
        settings = settings.with_values(extra)
    if impl == "none":
        return Recommendation("none", (), {MODULES: [], **(extra or {})}, {}, ["graphs off, as asked for"], [])
    family = families.infer(settings)
    reasons = [f"{family.describe()}: {family.moe.reason or 'nothing in the recipe tells'}"]

    def known(name: str) -> Any:
        answer = explore(settings, lambda reader: (reader[name],))[0].answer
        return answer[0] if answer is not None else None

    refused = ""
    if impl not in (None, "transformer_engine"):
        refused = f"AutoModel captures with Transformer Engine only, not {impl}"
    elif settings.versions.te is None:
        refused = "AutoModel's graphs need Transformer Engine, which is absent"
    elif isinstance(known("distributed.pp_size"), int) and known("distributed.pp_size") > 1:
        stages = known("distributed.pp_size")
        refused = f"distributed.pp_size is {stages}: the graphs need one model root without pipeline stages"
    checkpointing = bool(known("distributed.activation_checkpointing"))
    modules = (
        list(scopes) if scopes is not None else _default(preset, bool(family.moe.value), known, checkpointing, reasons)
    )
    if not refused and checkpointing and any(name != "te_dpa" for name in modules):
        refused = "distributed.activation_checkpointing is on: only te_dpa goes with it"
    if refused:
        return Recommendation("transformer_engine", tuple(modules), {}, {}, reasons, [], refused)
    overrides: dict[str, Any] = {MODULES: modules}
    attention = [name for name in ("attn", "te_dpa") if name in modules]
    if attention:
        overrides["backend.attn"] = "te"
        now = known("backend.attn")
        if now != "te":
            instead = f" instead of {now}" if now else ""
            reasons.append(
                f"backend.attn: te{instead}, because {attention[0]} captures Transformer Engine's attention"
            )
    if "attn" in modules:
        overrides.update({"backend.linear": "torch", "backend.rms_norm": "torch", "backend.rope_fusion": False})
        reasons.append(
            "attn: the whole attention module; its linear and norm backends must be PyTorch's, without fused RoPE"
        )
    if "te_dpa" in modules:
        reasons.append("te_dpa: the attention core alone; the linear and norm backends stay as they are")
    if "moe_router" in modules:
        reasons.append("moe_router: the router has static shapes and launches many small kernels")
        if known("backend.fake_balanced_gate"):
            overrides["backend.fake_balanced_gate"] = False
    if "moe_preprocess" in modules:
        overrides["backend.dispatcher"] = "hybridep"
        reasons.append("moe_preprocess: the preparation of the hybridep dispatcher, the only one that it is captured for")
    steps = [
        "capture follows the first optimizer step: watch the manager's replay and fallback counts in the log",
        "a model without a custom implementation has no module to capture, and the run stops with an error",
    ]
    return Recommendation("transformer_engine", tuple(modules), {**overrides, **(extra or {})}, {}, reasons, steps)


def _default(preset: str | None, moe: bool, known: Any, checkpointing: bool, reasons: list[str]) -> list[str]:
    if checkpointing:
        reasons.append("activation checkpointing goes with te_dpa only")
        return ["te_dpa"]
    router = ["moe_router"] if moe and not known("backend.fake_balanced_gate") else []
    if moe and not router:
        reasons.append("backend.fake_balanced_gate is on: there is no learned router to capture")
    if router and known("backend.dispatcher") == "hybridep":
        router.append("moe_preprocess")
    if preset == "narrow" and router:
        return router
    return ["attn" if preset == "widest" else "te_dpa", *router]
