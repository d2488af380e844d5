# SPDX-License-Identifier: Apache-2.0
"""What the graph fields of TransformerConfig become after upstream's migrations, version by version.

One function an era, each a mirror of `TransformerConfig.__post_init__` (and of Megatron Bridge's clearing of scopes
around it). Where upstream would raise, the code of the rule is noted and the migration goes on as well as it can, so
that everything wrong is reported at once.

Source: megatron/core/transformer/transformer_config.py and cuda_graph_config.py, 0.13.1 to 0.19.2;
megatron/bridge/utils/cuda_graph.py `validate_cuda_graph_configuration`, 0.6.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cudagraphs.rules.base import Member

Get = Callable[[str], Any]
# (implementation, modules, inference scope, codes of the rules that reject the input)
State = tuple[str, tuple[str, ...], "str | None", tuple[str, ...]]

SCOPES_0_16 = ("full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
SCOPES_0_17 = (*SCOPES_0_16, "full_iteration_inference")
MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
INFERENCE_SCOPES = ("none", "layer", "block")
# from 0.18 on
ALLOWED_INFERENCE = {
    "none": ("none",),
    "local": ("layer", "block"),
    "transformer_engine": ("none",),
    "full_iteration": ("none",),
}


def scope_names(minor: int) -> tuple[str, ...]:
    """The names that this megatron-core minor version takes as scopes, without the deprecated "full"."""
    if minor >= 18:
        return MODULES
    if minor >= 16:
        return SCOPES_0_17 if minor == 17 else SCOPES_0_16
    return ("attn", "full_iteration") if minor >= 14 else ("attn",)


def implementations(minor: int) -> tuple[str, ...]:
    """The values of cuda_graph_impl that this minor version takes; before 0.15 there was no such field."""
    if minor >= 18:
        return ("none", "local", "transformer_engine", "full_iteration")
    return ("none", "local", "transformer_engine")


def normalize(minor: int, get: Get, bridge: tuple[int, ...] | None = None) -> State:
    """The state after migration. `get` returns the value of a field, its default included.

    `bridge` is the Megatron Bridge version whose clearing of scopes applies, None without Bridge.
    """
    if minor >= 18:
        return _from_0_18(get, bridge)
    if minor >= 16:
        return _from_0_16(minor, get, bridge)
    if minor == 15:
        return _in_0_15(get)
    return _before_0_15(minor, get)


def _legacy(get: Get, problems: list[str]) -> Any:
    """`cuda_graph_impl` after the legacy flags."""
    impl = get("cuda_graph_impl")
    local, external = get("enable_cuda_graph"), get("external_cuda_graph")
    if local or external:
        if impl != "none":
            problems.append("CG001")
        if local and external:
            problems.append("CG002")
        elif impl == "none":
            impl = "local" if local else "transformer_engine"
    return impl


def _before_0_15(minor: int, get: Get) -> State:
    impl = "local" if get("enable_cuda_graph") else "transformer_engine" if get("external_cuda_graph") else "none"
    return impl, _loose(get("cuda_graph_scope")), None, ()


def _in_0_15(get: Get) -> State:
    problems: list[str] = []
    impl = _legacy(get, problems)
    if impl != "none" and impl not in implementations(15):
        problems.append("CG012")
        impl = "none"
    return impl, _loose(get("cuda_graph_scope")), None, tuple(problems)


def _loose(scope: Any) -> tuple[str, ...]:
    """Scopes of the versions that do not check them: "full" and nothing mean the whole layer."""
    if scope is None or scope == "full" or scope == "":
        return ()
    if isinstance(scope, (list, tuple)):
        return tuple(str(name) for name in scope)
    return (str(scope),)


def _from_0_16(minor: int, get: Get, bridge: tuple[int, ...] | None) -> State:
    problems: list[str] = []
    impl = get("cuda_graph_impl")
    scope = get("cuda_graph_scope")
    if bridge is not None and bridge >= (0, 6) and impl == "none":
        scope = []
    impl = _legacy(get, problems)
    known = SCOPES_0_17 if minor == 17 else SCOPES_0_16
    if scope is None:
        names: list[Any] = []
    elif type(scope) is Member:
        names = [scope]
    elif isinstance(scope, str):
        names = scope.split(",")
    elif isinstance(scope, list):
        names = list(scope)
    else:
        names = []
        problems.append("CG006")
    enums = sum(1 for name in names if type(name) is Member)
    if enums:
        if enums != len(names) or any(name.enum != "CudaGraphScope" for name in names):
            problems.append("CG006")
    elif not all(isinstance(name, str) for name in names):
        problems.append("CG006")
    if "full" in names:
        if names != ["full"] and "CG006" not in problems:
            problems.append("CG004")
        names = [name for name in names if name != "full"]
    elif "CG006" not in problems and not all(name in known for name in names):
        problems.append("CG005")
    modules = [str(name) for name in names if isinstance(name, str) and name in known]
    if impl not in ("none", "local", "transformer_engine"):
        problems.append("CG012")
        impl = "none"
    if impl == "local":
        _expand(modules)
    if bridge is not None and bridge >= (0, 4) and impl == "none":
        modules = []
    return impl, tuple(modules), None, tuple(problems)


def _from_0_18(get: Get, bridge: tuple[int, ...] | None) -> State:
    problems: list[str] = []
    impl = get("cuda_graph_impl")
    scope, given, inference = get("cuda_graph_scope"), get("cuda_graph_modules"), get("inference_cuda_graph_scope")
    if bridge is not None and bridge >= (0, 6) and impl == "none":
        scope, given = None, []
    impl = _legacy(get, problems)
    from_scope = scope is not None
    if from_scope:
        if not (given is None or given == "full" or given == []):
            problems.append("CG003")
        given = scope
    if given is None:
        names: list[Any] = []
    elif isinstance(given, list):
        names = list(given)
    elif type(given) is Member:
        names = [given]
    elif isinstance(given, str):
        names = given.split(",") if given else []
    else:
        names = [given]

    modules: list[str] = []
    deprecated: list[str] = []
    if "full" in names:
        if names != ["full"]:
            problems.append("CG004")
        names = [name for name in names if name != "full"]
    for name in names:
        if type(name) is Member and name.enum == "CudaGraphModule":
            modules.append(str(name))
        elif type(name) is Member and (name.enum != "CudaGraphScope" or not from_scope):
            problems.append("CG006")
        elif not isinstance(name, str):
            problems.append("CG006")
        elif name == "full_iteration" or name == "full_iteration_inference":
            deprecated.append(str(name))
        elif name in MODULES:
            modules.append(str(name))
        else:
            problems.append("CG005")

    asked = inference
    if inference is not None and not (isinstance(inference, str) and inference in INFERENCE_SCOPES):
        problems.append("CG013")
        inference = None
    if deprecated:
        if "full_iteration" in deprecated and "full_iteration_inference" in deprecated:
            problems.append("CG007")
        elif deprecated[0] == "full_iteration":
            if impl not in ("none", "local", "full_iteration"):
                problems.append("CG008")
            if asked is not None and asked != "none":
                problems.append("CG009")
            impl = "full_iteration"
        else:
            if impl not in ("none", "local"):
                problems.append("CG010")
            if asked is not None and asked != "block":
                problems.append("CG011")
            if impl != "none":
                inference = "block"
    if not (isinstance(impl, str) and impl in ALLOWED_INFERENCE):
        problems.append("CG012")
        impl = "none"
    elif inference is not None and inference not in ALLOWED_INFERENCE[impl]:
        # a scope that the migration above already faulted is not faulted twice
        if not any(code in problems for code in ("CG007", "CG008", "CG009", "CG010", "CG011")):
            problems.append("CG014")
    if inference is None:
        inference = "layer" if impl == "local" else "none"
    if impl == "full_iteration" and modules:
        problems.append("CG015")
    if impl == "local":
        _expand(modules)
    if bridge is not None and bridge >= (0, 4) and impl == "none":
        modules = []
    return impl, tuple(modules), str(inference), tuple(dict.fromkeys(problems))


def _expand(modules: list[str]) -> None:
    """The local implementation does not tell the router from the preprocessing: one brings the other."""
    if "moe_router" in modules or "moe_preprocess" in modules:
        for name in ("moe_router", "moe_preprocess"):
            if name not in modules:
                modules.append(name)
