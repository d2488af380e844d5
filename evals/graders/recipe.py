# SPDX-License-Identifier: Apache-2.0
"""Grades a recipe by running it in the released Megatron Bridge or megatron-core and by the graphs that come out.

Parameters of the case:
    file, function, world_size      what to run
    impl                            the implementation that upstream must end with, or a list of such
    require, allow                  scopes that must be there, and further ones that may be
    settings                        {setting: [allowed values]}, as the recipe leaves them
    may_change                      globs of settings that may differ from the original recipe, beside the graph
    settings same_functions                  {file: [functions]} that must still give what they gave: other recipes on
    the same base environment                     false where the launch, not the recipe, owns the environment
    may_edit                        globs of files that may be edited (default: `file`)
    checks                          further points, as in graders/outcome.py
"""

from __future__ import annotations

import fnmatch

from graders import Grade, only_changed, outcome

# What turning graphs on may touch without being told: the graph settings, what capture needs, and the NaN checks.
GRAPH_SETTINGS = (
    "*cuda_graph*", "*.use_te_rng_tracker", "rng.te_rng_tracker", "env_vars.NCCL_GRAPH_REGISTER",
    "env_vars.TORCH_NCCL_AVOID_RECORD_STREAMS", "env_vars.PYTORCH_CUDA_ALLOC_CONF", "model.use_single_mempool",
    "env_vars",
)  # fmt: skip
# Full iteration also asks for these (Bridge: check_for_nan_in_loss; the gradient check runs inside the captured
# region).
FULL_ITERATION_SETTINGS = ("rerun_state_machine.check_for_nan_in_loss", "ddp.check_for_nan_in_grad")


def grade(workspace, transcript, *, case, upstream) -> Grade:
    result = Grade()
    wanted = case.parameters
    where = (wanted["file"], wanted["function"], wanted.get("world_size", 8))
    only_changed(result, case.workspace, workspace, wanted.get("may_edit", [wanted["file"]]))
    outcome.apply(result, workspace, transcript, wanted.get("checks", []))
    before = upstream.recipe(case.versions, case.workspace, *where)
    after = upstream.recipe(case.versions, workspace, *where)
    release = (
        f"Bridge {case.versions['bridge']}"
        if case.versions.get("bridge")
        else f"megatron-core {case.versions['mcore']}"
    )
    error = after.get("error")
    if not result.add(
        f"{release} accepts the configuration", after["verdict"] == "accepted",
        f"{error['type']}: {error['text']}" if error else "accepted",
    ):  # fmt: skip
        return result
    impls = wanted["impl"] if isinstance(wanted["impl"], list) else [wanted["impl"]]
    state = f"{after['impl']} {after['modules']}"
    result.add(f"the implementation is {' or '.join(impls)}", effective_impl(after) in impls, state)
    scopes, require = set(after["modules"]) - {"full_iteration"}, set(wanted.get("require", []))
    if require or "allow" in wanted:
        allowed = require | set(wanted.get("allow", []))
        result.add(f"captures {sorted(require) or 'no more than asked'}", require <= scopes, state)
        result.add(
            f"captures nothing beyond {sorted(allowed)}", bool(scopes) == bool(allowed) and scopes <= allowed, state
        )
    settings = after["settings"]
    for name, values in wanted.get("settings", {}).items():
        result.add(
            f"{name} is {' or '.join(map(repr, values))}", settings.get(name) in values, repr(settings.get(name))
        )
    if effective_impl(after) != "none":
        capture_needs(result, settings, wanted, bridge=bool(case.versions.get("bridge")))
    allowed = [*GRAPH_SETTINGS, *wanted.get("may_change", [])]
    if effective_impl(after) == "full_iteration":
        allowed += FULL_ITERATION_SETTINGS
    if before.get("settings"):
        result.add(*unchanged("no other setting was changed", before["settings"], settings, allowed))
    for file, functions in wanted.get("same_functions", {}).items():
        for function in functions:
            old = upstream.recipe(case.versions, case.workspace, file, function, where[2])
            new = upstream.recipe(case.versions, workspace, file, function, where[2])
            result.add(
                *unchanged(f"{function} in {file} is as it was", old.get("settings", {}), new.get("settings", {}), [])
            )
    return result


def effective_impl(answer: dict) -> str:
    """Up to megatron-core 0.17 a full-iteration graph is impl "local" with that scope."""
    if answer["impl"] == "local" and "full_iteration" in answer["modules"]:
        return "full_iteration"
    return answer["impl"]


def capture_needs(result: Grade, settings: dict, wanted: dict, bridge: bool) -> None:
    """What is asserted at capture only, so that no configuration class can tell.

    Source: megatron/core/transformer/cuda_graphs.py, TECudaGraphHelper and CudaGraphManager, 0.16 to 0.18: the RNG
    tracker must be a graph-safe one; expandable segments need NCCL_GRAPH_REGISTER=0.
    """
    if bridge:
        trackers = (settings.get("model.use_te_rng_tracker"), settings.get("rng.te_rng_tracker"))
        result.add("the Transformer Engine RNG tracker is on", any(trackers), f"model, rng: {trackers}")
    allocator = str(settings.get("env_vars.PYTORCH_CUDA_ALLOC_CONF", ""))
    if wanted.get("environment", True) and "expandable_segments:True" in allocator:
        register = settings.get("env_vars.NCCL_GRAPH_REGISTER")
        result.add(
            "expandable segments go with NCCL_GRAPH_REGISTER=0", str(register) == "0", f"NCCL_GRAPH_REGISTER={register}"
        )


def unchanged(text: str, before: dict, after: dict, allowed: list[str]) -> tuple[str, bool, str]:
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    names = [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in allowed)]
    seen = ", ".join(f"{name}: {before.get(name)!r} -> {after.get(name)!r}" for name in names[:5])
    return text, bool(after) and not names, seen or ("the same" if after else "it does not run")
