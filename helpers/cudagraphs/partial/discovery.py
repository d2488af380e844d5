# SPDX-License-Identifier: Apache-2.0
"""Discovery: which submodules become entries, by name pattern, class or predicate, or by NeMo AutoModel's scopes.

AutoModel's scopes (`backend.cuda_graph.modules`, 0.6.0 and 0.7.0, nemo_automodel/components/cuda_graphs/partial.py):
`attn` is a block's `self_attn`; `te_dpa` its parameterless Transformer Engine `fused_attention`; `moe_router` the
`gate.routing_core` of its MoE layer; `moe_preprocess` the fused `hybridep_metadata_processor` of its token dispatcher.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from cudagraphs.partial.errors import PartialGraphError

Select = Any  # a name pattern, a module class, or a predicate (name, module) -> bool


@dataclass(frozen=True)
class Target:
    """A module to capture: its name in messages, and the FSDP2 unit that owns its parameters, if one does."""

    name: str
    module: nn.Module
    owner: nn.Module | None = None
    canonicalize: Callable[[tuple, dict[str, Any]], tuple[tuple, dict[str, Any]]] | None = None


def select_modules(model: nn.Module, select: Select | Iterable[Select]) -> list[Target]:
    """Submodules of `model` that `select` names.

    Args:
        select: a name pattern (`layers.*.mlp`; `*` matches within one part of the dotted name, `**` across parts), a
            module class, a predicate `(name, module) -> bool`, or several of these. A module selected inside another
            selected one is left out, since the outer graph covers it.

    Raises:
        PartialGraphError: where one of the selections matches nothing.
    """
    wanted = [select] if isinstance(select, (str, type)) or callable(select) else list(select)
    if not wanted:
        raise PartialGraphError("select is empty: give a name pattern, a module class or a predicate")
    found: dict[int, tuple[str, nn.Module]] = {}
    for one in wanted:
        matches = [(name, module) for name, module in model.named_modules() if _matches(one, name, module)]
        if not matches:
            raise PartialGraphError(f"select={one!r} matches no submodule of {type(model).__name__}")
        for name, module in matches:
            found.setdefault(id(module), (name or type(module).__name__, module))
    ordered = [found[id(module)] for module in model.modules() if id(module) in found]
    inner = {id(child) for _, module in ordered for child in module.modules() if child is not module}
    return [Target(name, module, _owner(model, module)) for name, module in ordered if id(module) not in inner]


def _matches(select: Select, name: str, module: nn.Module) -> bool:
    if isinstance(select, str):
        return _name_matches(select.split("."), name.split(".") if name else [])
    if isinstance(select, type):
        return isinstance(module, select)
    return bool(select(name, module))


def _name_matches(pattern: list[str], name: list[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_name_matches(pattern[1:], name[skip:]) for skip in range(len(name) + 1))
    return bool(name) and fnmatch.fnmatchcase(name[0], pattern[0]) and _name_matches(pattern[1:], name[1:])


def _fsdp_class() -> type | None:
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:  # torch built without distributed
        return None
    return FSDPModule


def _owner(model: nn.Module, module: nn.Module) -> nn.Module | None:
    """The innermost FSDP2 unit around `module`, which frees and gathers its parameters."""
    fsdp = _fsdp_class()
    if fsdp is None:
        return None
    owner = None
    for candidate in model.modules():  # outer modules come before inner ones
        if isinstance(candidate, fsdp) and any(child is module for child in candidate.modules()):
            owner = candidate
    return owner


# AutoModel's layout


@dataclass(frozen=True)
class Block:
    """One transformer block, as AutoModel lays it out."""

    name: str
    module: nn.Module
    moe: nn.Module | None


def automodel_targets(model: nn.Module) -> list[Target]:
    """Targets for the scopes that `model.backend.cuda_graph.modules` lists, block by block.

    Raises:
        PartialGraphError: for an unknown scope, or one that no block of the model offers.
    """
    scopes = list(model.backend.cuda_graph.modules)
    unknown = sorted(set(scopes) - set(SCOPES))
    if unknown:
        raise PartialGraphError(f"cuda_graph.modules contains {unknown}; known scopes are {sorted(SCOPES)}")
    targets: list[Target] = []
    missing = set(scopes)
    for block in automodel_blocks(model):
        for scope, (find, label, canonicalize) in SCOPES.items():
            module = find(block) if scope in scopes else None
            if module is None:
                continue
            missing.discard(scope)
            _check_scope(scope, block, module)
            if not any(module is target.module for target in targets):
                targets.append(Target(f"{block.name}.{label}", module, _owner(model, module), canonicalize))
    for scope in scopes:
        if scope in missing:
            raise PartialGraphError(f"cuda_graph.modules includes {scope!r}, but no layer exposes a graphable {scope} "
                                    "boundary")
    return targets


def automodel_blocks(model: nn.Module) -> Iterator[Block]:
    """Main and multi-token-prediction blocks (nemo_automodel.shared.model_utils.iter_transformer_and_mtp_blocks)."""
    label = next((kind for kind in _model_types(model) if isinstance(kind, str) and kind), type(model).__name__)
    inner = getattr(model, "model", None)
    text = inner if inner is not None else model
    for attribute in ("language_model", "text_model", "text_decoder"):
        if getattr(text, attribute, None) is not None:
            text = getattr(text, attribute)
            break
    for scope, layers in (("layers", getattr(text, "layers", None)),
                          ("mtp.layers", getattr(getattr(model, "mtp", None), "layers", None))):
        for name, block in layers.named_children() if layers is not None else ():
            block = unwrap_checkpoint(block)
            yield Block(f"{label}.{scope}.{name}", block, _moe(block))


def _model_types(model: nn.Module) -> Iterator[Any]:
    for config in (getattr(model, "config", None), getattr(getattr(model, "model", None), "config", None)):
        for holder in (config, getattr(config, "text_config", None), getattr(config, "llm_config", None)):
            yield getattr(holder, "model_type", None)


def unwrap_checkpoint(module: nn.Module) -> nn.Module:
    while isinstance(getattr(module, "_checkpoint_wrapped_module", None), nn.Module):
        module = module._checkpoint_wrapped_module
    return module


def _moe(block: nn.Module) -> nn.Module | None:
    named = (getattr(block, attribute, None) for attribute in ("moe", "mlp", "mixer"))
    for candidate in (*named, *block.modules()):
        if not isinstance(candidate, nn.Module):
            continue
        candidate = unwrap_checkpoint(candidate)
        if all(isinstance(getattr(candidate, part, None), nn.Module) for part in ("gate", "experts")):
            return candidate
    return None


def _attention(block: Block) -> nn.Module | None:
    attention = getattr(block.module, "self_attn", None)
    return unwrap_checkpoint(attention) if isinstance(attention, nn.Module) else None


def _fused_attention(block: Block) -> nn.Module | None:
    preferred = getattr(_attention(block), "attn_module", None)
    for module in (preferred, *block.module.modules()):
        fused = getattr(module, "fused_attention", None)
        if isinstance(fused, nn.Module):
            return fused
    return None


def _router(block: Block) -> nn.Module | None:
    core = getattr(getattr(block.moe, "gate", None), "routing_core", None)
    return core if isinstance(core, nn.Module) else None


def _preprocess(block: Block) -> nn.Module | None:
    dispatcher = getattr(getattr(block.moe, "experts", None), "token_dispatcher", None)
    processor = getattr(dispatcher, "hybridep_metadata_processor", None)
    return processor if isinstance(processor, nn.Module) and getattr(processor, "permute_fusion", False) else None


def without_fp8_state(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Fused attention in bf16 ignores its FP8 arguments, which are new objects at every call.

    Raises:
        PartialGraphError: where FP8 attention is switched on; that needs Transformer Engine's own capture.
    """
    if kwargs.get("fp8"):
        raise PartialGraphError("te_dpa graphs stand for bf16 attention; this call has fp8=True")
    return args, {key: None if key in ("fp8_meta", "quantizers") else value for key, value in kwargs.items()}


def _check_scope(scope: str, block: Block, module: nn.Module) -> None:
    if scope != "attn" and next(module.parameters(), None) is not None:
        raise PartialGraphError(f"the {scope} boundary of {block.name} must be parameterless")
    if scope == "moe_router":
        for attribute in ("router_replay", "e_score_correction_bias"):
            if getattr(block.moe.gate, attribute, None) is not None:
                raise PartialGraphError(f"{block.name}: a router with {attribute} changes between calls in ways that "
                                        "its arguments do not show")


SCOPES: dict[str, tuple[Callable[[Block], nn.Module | None], str, Any]] = {
    "attn": (_attention, "attention", None),
    "te_dpa": (_fused_attention, "fused_attention", without_fp8_state),
    "moe_router": (_router, "moe_router", None),
    "moe_preprocess": (_preprocess, "moe_preprocess", None),
}
