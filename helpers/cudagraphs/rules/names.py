# SPDX-License-Identifier: Apache-2.0
"""CG0xx: the names of implementations and scopes, and what upstream makes of old ones.

The conditions live in `normalize`, which walks upstream's migrations and notes the code of every check that fails.
"""

from __future__ import annotations

from typing import Any

from cudagraphs.rules import mends
from cudagraphs.rules.base import Condition, Example, Facts, Rule
from cudagraphs.rules.normalize import implementations, scope_names
from cudagraphs.versions import Versions

CONFIG = "megatron/core/transformer/transformer_config.py TransformerConfig.__post_init__"
GRAPH_CONFIG = "megatron/core/transformer/cuda_graph_config.py"


def noted(code: str) -> Condition:
    return lambda f, v: code in f["graph.problems"]


def _field(f: Facts, v: Versions) -> str:
    """The field that the scopes of this run come from."""
    return "cuda_graph_modules" if v.minor >= 18 and mends.known(f, "cuda_graph_scope") is None else "cuda_graph_scope"


def _names(value: Any) -> list[str]:
    """Scope names as the user wrote them, tidied; what is not a string is left out."""
    if isinstance(value, str):
        value = value.split(",")
    items = value if isinstance(value, (list, tuple)) else ()
    # names joined by commas are a common slip on command lines that want spaces
    parts = [part.strip() for item in items if isinstance(item, str) for part in item.split(",")]
    return [part for part in parts if part]


def nearest(name: str, choices: tuple[str, ...]) -> str | None:
    """The one of the choices that the name most likely means, None if none is close."""
    import difflib

    tidy = name.strip().lower().replace("-", "_").replace(" ", "_")
    short = {"te": "transformer_engine", "full": "full_iteration", "attention": "attn", "router": "moe_router"}
    for candidate in (tidy, tidy.replace("_", ""), short.get(tidy, "")):
        for choice in choices:
            if candidate in (choice, choice.replace("_", "")):
                return choice
    return (difflib.get_close_matches(tidy, choices, 1, 0.75) or [None])[0]


def _rename_scopes(f: Facts, v: Versions) -> dict[str, Any]:
    """Keep the names that the version knows or that are close to one; graphs off where nothing is left."""
    choices = (
        (*scope_names(v.minor), "full_iteration", "full_iteration_inference") if v.minor >= 18 else scope_names(v.minor)
    )
    meant = [nearest(name, choices) for name in _names(f[_field(f, v)]) if name != "full"]
    names = list(dict.fromkeys(name for name in meant if name))
    return mends.scopes(f, v, names) if names else mends.off(f, v)


def _without_full(f: Facts, v: Versions) -> dict[str, Any]:
    names = [name for name in _names(f[_field(f, v)]) if name != "full"]
    return mends.scopes(f, v, names)


def _without(f: Facts, v: Versions, gone: str) -> dict[str, Any]:
    names = [name for name in _names(f[_field(f, v)]) if name != gone]
    return mends.scopes(f, v, names)


def _rename_impl(f: Facts, v: Versions) -> dict[str, Any]:
    impl = f["cuda_graph_impl"]
    choices = (*implementations(v.minor), "full_iteration")
    meant = nearest(impl, choices) if isinstance(impl, str) else None
    if meant is None:
        return mends.off(f, v)
    return mends.full_iteration(f, v) if meant == "full_iteration" else {"cuda_graph_impl": meant}


RULES = (
    Rule(
        code="CG001",
        title="A legacy flag together with cuda_graph_impl",
        layer="config",
        severity="error",
        mcore=(15, None),
        when=noted("CG001"),
        message="enable_cuda_graph or external_cuda_graph is set although cuda_graph_impl is {cuda_graph_impl}",
        mend="set enable_cuda_graph and external_cuda_graph to False and keep cuda_graph_impl",
        fix=lambda f, v: {name: False for name in ("enable_cuda_graph", "external_cuda_graph") if f[name]},
        why="The flags are old names for cuda_graph_impl: enable_cuda_graph means local, external_cuda_graph means "
        "transformer_engine. Upstream refuses to choose between an old name and a new one.",
        source=CONFIG,
        upstream=("Do not use enable_cuda_graph or external_cuda_graph with cuda_graph_impl.",),
        bad=(Example({"enable_cuda_graph": True, "cuda_graph_impl": "local"}, {"mcore": "0.19"}),),
        good=(Example({"external_cuda_graph": True}, {"mcore": "0.19"}),),
    ),
    Rule(
        code="CG002",
        title="Both legacy flags",
        layer="config",
        severity="error",
        mcore=(15, None),
        when=noted("CG002"),
        message="enable_cuda_graph and external_cuda_graph are both set, and they name different implementations",
        mend="keep one; better, set cuda_graph_impl and leave both flags False",
        fix=lambda f, v: {"enable_cuda_graph": False},
        safe=False,
        why="enable_cuda_graph asks for the local implementation and external_cuda_graph for Transformer Engine's; "
        "only one "
        "can own the graphs.",
        source=CONFIG,
        upstream=("enable_cuda_graph and external_cuda_graph cannot be enabled at the same time.",),
        bad=(Example({"enable_cuda_graph": True, "external_cuda_graph": True}, {"mcore": "0.17"}),),
        good=(Example({"enable_cuda_graph": True}, {"mcore": "0.17"}),),
    ),
    Rule(
        code="CG003",
        title="Old and new scope field together",
        layer="config",
        severity="error",
        mcore=(18, None),
        when=noted("CG003"),
        message="cuda_graph_scope is {cuda_graph_scope} and cuda_graph_modules is {cuda_graph_modules}",
        mend="also set cuda_graph_scope to None; it is often set by a base recipe",
        fix=lambda f, v: {"cuda_graph_scope": None},
        why="From 0.18 cuda_graph_scope is only the old name of cuda_graph_modules. A base recipe that sets the old "
        "name "
        '(often to "full") and a recipe on top that sets the new one make a configuration that upstream rejects.',
        source=CONFIG,
        upstream=("cuda_graph_scope and cuda_graph_modules cannot be set together.",),
        bad=(
            Example(
                {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "full", "cuda_graph_modules": ["attn"]},
                {"mcore": "0.19"},
            ),
        ),
        good=(
            Example(
                {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": None, "cuda_graph_modules": ["attn"]},
                {"mcore": "0.19"},
            ),
        ),
    ),
    Rule(
        code="CG004",
        title='"full" together with other scopes',
        layer="config",
        severity="error",
        mcore=(16, None),
        when=noted("CG004"),
        message='"full" stands beside other scopes',
        mend='remove "full": keep the other names, or give an empty list for the whole layer',
        fix=_without_full,
        why='"full" is the old name for the whole layer, so nothing can stand beside it.',
        source=f"{CONFIG} (0.16, 0.17); {GRAPH_CONFIG} normalize_cuda_graph_modules (0.18+)",
        upstream=("full scope cannot be used with other scopes.",),
        bad=(
            Example({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["full", "attn"]}, {"mcore": "0.17"}),
            Example({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "full,attn"}, {"mcore": "0.19"}),
        ),
        good=(Example({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "full"}, {"mcore": "0.19"}),),
    ),
    Rule(
        code="CG005",
        title="Unknown scope",
        layer="config",
        severity="error",
        mcore=(16, None),
        when=noted("CG005"),
        message="a scope is not among the names of this version: scope {cuda_graph_scope}, modules "
        "{cuda_graph_modules}",
        mend="use names of the version (attn, mlp, moe, moe_router, moe_preprocess, mamba), without spaces after "
        "commas",
        fix=_rename_scopes,
        why="Upstream looks each name up in an enum and stops with a bare KeyError. A comma-separated string keeps "
        "its spaces, "
        'so "attn, mlp" asks for a scope named " mlp"; up to 0.17 an empty string asks for a scope with no name.',
        source=f"{CONFIG} (0.16, 0.17); {GRAPH_CONFIG} normalize_cuda_graph_modules (0.18+)",
        upstream=("KeyError",),
        bad=(
            Example({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn, mlp"}, {"mcore": "0.17"}),
            Example({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attention"]}, {"mcore": "0.19"}),
        ),
        good=(Example({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn,mlp"}, {"mcore": "0.17"}),),
    ),
    Rule(
        code="CG006",
        title="Scopes of a wrong type",
        layer="config",
        severity="error",
        mcore=(16, None),
        when=noted("CG006"),
        message="the scopes are not a string or a list of names: scope {cuda_graph_scope}, modules "
        "{cuda_graph_modules}",
        mend='give a list of plain names, for example ["attn"]',
        fix=_rename_scopes,
        why="Up to 0.17 the list must hold strings only or CudaGraphScope members only. From 0.18 strings and "
        "CudaGraphModule "
        "members may be mixed, but members of the old CudaGraphScope are refused inside cuda_graph_modules.",
        source=f"{CONFIG} (0.16, 0.17); {GRAPH_CONFIG} normalize_cuda_graph_modules (0.18+)",
        upstream=(
            "must be a list of CudaGraph",
            "must be strings or CudaGraphModule enums",
            "must be a string that can be",
        ),
        bad=(
            Example({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": 3}, {"mcore": "0.17"}),
            Example({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn", 2]}, {"mcore": "0.19"}),
        ),
        good=(Example({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]}, {"mcore": "0.19"}),),
    ),
    Rule(
        code="CG007",
        title="Two deprecated scopes",
        layer="config",
        severity="error",
        mcore=(18, None),
        when=noted("CG007"),
        message="full_iteration and full_iteration_inference both stand among the scopes",
        mend='set cuda_graph_impl="full_iteration" for training, or the local implementation with '
        'inference_cuda_graph_scope="block" for inference',
        fix=lambda f, v: _without(f, v, "full_iteration_inference"),
        why="Each of the two names is migrated to other fields, and the two results exclude each other.",
        source=f"{GRAPH_CONFIG} validate_deprecated_cuda_graph_modules_migration_inputs",
        upstream=("cuda_graph_modules cannot contain multiple deprecated values at the same time",),
        bad=(
            Example(
                {"cuda_graph_impl": "local", "cuda_graph_modules": ["full_iteration", "full_iteration_inference"]},
                {"mcore": "0.18"},
            ),
        ),
        good=(Example({"cuda_graph_impl": "local", "cuda_graph_modules": ["full_iteration"]}, {"mcore": "0.18"}),),
    ),
    Rule(
        code="CG008",
        title="Scope full_iteration with another implementation",
        layer="config",
        severity="error",
        mcore=(18, None),
        when=noted("CG008"),
        message="the scope full_iteration does not go with cuda_graph_impl={cuda_graph_impl}",
        mend='set cuda_graph_impl="full_iteration" and empty the scopes; or drop full_iteration from the scopes',
        fix=mends.full_iteration,
        why='From 0.18 the scope full_iteration is migrated to cuda_graph_impl="full_iteration"; that is refused where '
        "Transformer Engine is asked for at the same time.",
        source=f"{GRAPH_CONFIG} validate_deprecated_cuda_graph_modules_migration_inputs",
        upstream=("cuda_graph_modules='full_iteration' cannot be combined with cuda_graph_impl=",),
        bad=(
            Example(
                {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["full_iteration"]}, {"mcore": "0.19"}
            ),
        ),
        good=(Example({"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []}, {"mcore": "0.19"}),),
    ),
    Rule(
        code="CG009",
        title="Scope full_iteration with an inference scope",
        layer="config",
        severity="error",
        mcore=(18, None),
        when=noted("CG009"),
        message="the scope full_iteration does not go with inference_cuda_graph_scope={inference_cuda_graph_scope}",
        mend="leave inference_cuda_graph_scope unset",
        fix=lambda f, v: {"inference_cuda_graph_scope": None},
        why="Full-iteration capture has no inference graphs of its own.",
        source=f"{GRAPH_CONFIG} validate_deprecated_cuda_graph_modules_migration_inputs",
        upstream=("cuda_graph_modules='full_iteration' cannot be combined with inference_cuda_graph_scope=",),
        bad=(
            Example(
                {
                    "cuda_graph_impl": "local",
                    "cuda_graph_modules": ["full_iteration"],
                    "inference_cuda_graph_scope": "layer",
                },
                {"mcore": "0.19"},
            ),
        ),
        good=(Example({"cuda_graph_impl": "local", "cuda_graph_modules": ["full_iteration"]}, {"mcore": "0.19"}),),
    ),
    Rule(
        code="CG010",
        title="Scope full_iteration_inference with another implementation",
        layer="config",
        severity="error",
        mcore=(18, None),
        when=noted("CG010"),
        message="the scope full_iteration_inference does not go with cuda_graph_impl={cuda_graph_impl}",
        mend='drop full_iteration_inference from the scopes; inference graphs need cuda_graph_impl="local"',
        fix=lambda f, v: _without(f, v, "full_iteration_inference"),
        why='The name is migrated to inference_cuda_graph_scope="block", which only the local implementation has.',
        source=f"{GRAPH_CONFIG} validate_deprecated_cuda_graph_modules_migration_inputs",
        upstream=("cuda_graph_modules='full_iteration_inference' cannot be combined with cuda_graph_impl=",),
        bad=(
            Example(
                {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["full_iteration_inference"]},
                {"mcore": "0.18"},
            ),
        ),
        good=(
            Example(
                {"cuda_graph_impl": "local", "cuda_graph_modules": ["full_iteration_inference"]}, {"mcore": "0.18"}
            ),
        ),
    ),
    Rule(
        code="CG011",
        title="Scope full_iteration_inference with another inference scope",
        layer="config",
        severity="error",
        mcore=(18, None),
        when=noted("CG011"),
        message="the scope full_iteration_inference does not go with "
        "inference_cuda_graph_scope={inference_cuda_graph_scope}",
        mend='drop the old name from the scopes and set inference_cuda_graph_scope="block" with the local '
        "implementation",
        fix=lambda f, v: {
            **_without(f, v, "full_iteration_inference"),
            "inference_cuda_graph_scope": "block" if f["graph.impl"] == "local" else None,
        },
        why='The name means inference_cuda_graph_scope="block"; another value beside it contradicts it.',
        source=f"{GRAPH_CONFIG} validate_deprecated_cuda_graph_modules_migration_inputs",
        upstream=("cuda_graph_modules='full_iteration_inference' cannot be combined with inference_cuda_graph_scope=",),
        bad=(
            Example(
                {
                    "cuda_graph_impl": "local",
                    "cuda_graph_modules": ["full_iteration_inference"],
                    "inference_cuda_graph_scope": "layer",
                },
                {"mcore": "0.18"},
            ),
        ),
        good=(
            Example(
                {
                    "cuda_graph_impl": "local",
                    "cuda_graph_modules": ["full_iteration_inference"],
                    "inference_cuda_graph_scope": "block",
                },
                {"mcore": "0.18"},
            ),
        ),
    ),
    Rule(
        code="CG012",
        title="Unknown implementation",
        layer="config",
        severity="error",
        mcore=(15, None),
        when=noted("CG012"),
        message="cuda_graph_impl={cuda_graph_impl} is not an implementation of this version",
        mend="use none, local or transformer_engine; full_iteration is an implementation from 0.18, and up to 0.17 it "
        "is "
        "local with the scope full_iteration",
        fix=_rename_impl,
        why="Upstream keeps a fixed list of implementations, and it grew in 0.18.",
        source=CONFIG,
        upstream=("Invalid cuda graph implementation",),
        bad=(
            Example({"cuda_graph_impl": "full_iteration"}, {"mcore": "0.17"}),
            Example({"cuda_graph_impl": "te"}, {"mcore": "0.19"}),
        ),
        good=(Example({"cuda_graph_impl": "full_iteration"}, {"mcore": "0.18"}),),
    ),
    Rule(
        code="CG013",
        title="Unknown inference scope",
        layer="config",
        severity="error",
        mcore=(18, None),
        when=noted("CG013"),
        message="inference_cuda_graph_scope={inference_cuda_graph_scope} is not a name of this version",
        mend="leave it unset, or use none, layer or block",
        fix=lambda f, v: {"inference_cuda_graph_scope": None},
        why="Upstream looks the name up in an enum and stops with a bare KeyError.",
        source=f"{GRAPH_CONFIG} normalize_inference_cuda_graph_scope",
        upstream=("inference_cuda_graph_scope must be a string or", "KeyError"),
        bad=(Example({"cuda_graph_impl": "local", "inference_cuda_graph_scope": "full"}, {"mcore": "0.19"}),),
        good=(Example({"cuda_graph_impl": "local", "inference_cuda_graph_scope": "block"}, {"mcore": "0.19"}),),
    ),
    Rule(
        code="CG014",
        title="Inference scope that the implementation does not have",
        layer="config",
        severity="error",
        mcore=(18, None),
        when=noted("CG014"),
        message="inference_cuda_graph_scope={inference_cuda_graph_scope} does not go with the implementation "
        "{graph.impl}",
        mend="leave inference_cuda_graph_scope unset; local takes layer or block, every other implementation takes "
        "none",
        fix=lambda f, v: {"inference_cuda_graph_scope": None},
        why="Only the local implementation captures inference, and it always does.",
        source=f"{CONFIG}; {GRAPH_CONFIG} ALLOWED_INFERENCE_SCOPES",
        upstream=("Invalid inference CUDA graph scope",),
        bad=(
            Example(
                {"cuda_graph_impl": "transformer_engine", "inference_cuda_graph_scope": "block"}, {"mcore": "0.19"}
            ),
            Example({"cuda_graph_impl": "local", "inference_cuda_graph_scope": "none"}, {"mcore": "0.18"}),
        ),
        good=(Example({"cuda_graph_impl": "local", "inference_cuda_graph_scope": "layer"}, {"mcore": "0.19"}),),
    ),
    Rule(
        code="CG015",
        title="Full-iteration capture with scopes",
        layer="config",
        severity="error",
        mcore=(18, None),
        when=noted("CG015"),
        message="full-iteration capture takes no scopes, and {graph.modules} are set",
        mend="empty cuda_graph_modules (and set cuda_graph_scope to None), or use transformer_engine with these scopes",
        fix=lambda f, v: {"cuda_graph_impl": "full_iteration", **mends.scopes(f, v, ())},
        why="The whole iteration is one graph, so there is nothing to choose inside it.",
        source=CONFIG,
        upstream=('cuda_graph_modules must be empty when cuda_graph_impl="full_iteration"',),
        bad=(Example({"cuda_graph_impl": "full_iteration", "cuda_graph_modules": ["attn"]}, {"mcore": "0.19"}),),
        good=(Example({"cuda_graph_impl": "full_iteration"}, {"mcore": "0.19"}),),
    ),
    Rule(
        code="CG016",
        title="A graph field that this version does not have",
        layer="config",
        severity="error",
        when=lambda f, v: bool(f["graph.foreign"]),
        message="megatron-core 0.{version.minor} has no field named {graph.foreign}",
        mend="use the names of the version: cuda_graph_modules from 0.18, cuda_graph_scope before; cuda_graph_impl "
        "from 0.15, "
        "enable_cuda_graph or external_cuda_graph before; inference_cuda_graph_scope from 0.18",
        why="As a keyword argument an unknown field is a TypeError; as an attribute of a configuration that exists it "
        "is worse, "
        "because nothing reads it and nothing complains.",
        source="megatron/core/transformer/transformer_config.py TransformerConfig",
        upstream=("got an unexpected keyword argument",),
        bad=(
            Example({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]}, {"mcore": "0.17"}),
            Example({"cuda_graph_impl": "local"}, {"mcore": "0.14"}),
        ),
        good=(Example({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn"]}, {"mcore": "0.17"}),),
    ),
    Rule(
        code="CG017",
        title="A scope that turns graphs on although the implementation is none",
        layer="config",
        severity="warning",
        mcore=(18, None),
        when=lambda f, v: (
            f["graph.impl"] == "full_iteration"
            and f["cuda_graph_impl"] == "none"
            and not f["enable_cuda_graph"]
            and not f["external_cuda_graph"]
        ),
        message="cuda_graph_impl is none, and the scope full_iteration switches it to full_iteration",
        mend='set cuda_graph_impl="full_iteration" and empty the scopes if that is meant; else empty the scopes',
        fix=lambda f, v: mends.full_iteration(f, v),
        why="From 0.18 the old scope is migrated to the implementation of that name, whatever the implementation was; "
        "up "
        "to 0.17, and in Bridge from 0.6, none stays none.",
        source=f"{GRAPH_CONFIG} get_deprecated_cuda_graph_modules_migration",
        bad=(Example({"cuda_graph_modules": ["full_iteration"]}, {"mcore": "0.18"}),),
        good=(
            Example({"cuda_graph_impl": "full_iteration"}, {"mcore": "0.18"}),
            Example({"cuda_graph_scope": ["full_iteration"]}, {"mcore": "0.17"}),
        ),
    ),
    Rule(
        code="CG018",
        title="A memory pool setting without effect",
        layer="config",
        severity="info",
        mcore=(18, None),
        when=lambda f, v: (
            f["cuda_graph_use_single_mempool"] is False and f["graph.active"] and not f["graph.full_iteration"]
        ),
        message="cuda_graph_use_single_mempool=False does nothing for the implementation {graph.impl}",
        mend="remove the setting; from 0.18 it says whether the graphs of full iterations share one pool",
        why="Up to 0.17 the field spoke of the local implementation's graphs of layers, and its default was False. "
        "0.18 gave "
        "it another meaning and another default.",
        source="megatron/core/transformer/transformer_config.py TransformerConfig.cuda_graph_use_single_mempool",
        bad=(
            Example(
                {"cuda_graph_impl": "transformer_engine", "cuda_graph_use_single_mempool": False}, {"mcore": "0.18"}
            ),
        ),
        good=(
            Example({"cuda_graph_impl": "full_iteration", "cuda_graph_use_single_mempool": False}, {"mcore": "0.18"}),
            Example(
                {"cuda_graph_impl": "transformer_engine", "cuda_graph_use_single_mempool": False}, {"mcore": "0.17"}
            ),
        ),
    ),
)
