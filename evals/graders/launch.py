# SPDX-License-Identifier: Apache-2.0
"""Grades a launch script by running it with a recorder in place of the launcher, and by asking Megatron-LM about what
it starts.

Parameters of the case:
    script, arguments               what to run
    impl, require, allow            as in graders/recipe.py
    flags, no_flags                 options that must, or must not, be on the final command line
    environment                     {NAME: [allowed values]} at the launch
    may_change                      options that may differ from the original script, beside the graph options
    checks                          further points, as in graders/outcome.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from graders import Grade, only_changed, outcome

RUN_LIMIT_S = 20
LAUNCHERS = ("torchrun", "python", "python3", "srun", "mpirun")
GRAPH_OPTIONS = (
    "--cuda-graph-impl", "--cuda-graph-scope", "--cuda-graph-modules", "--cuda-graph-warmup-steps", "--te-rng-tracker",
    "--no-check-for-nan-in-loss-and-grad", "--enable-cuda-graph", "--external-cuda-graph",
    "--inference-cuda-graph-scope",
    "--cuda-graph-use-single-mempool",
)  # fmt: skip
RECORDER = """#!{python}
import json, os, sys
json.dump({{"argv": sys.argv, "env": dict(os.environ)}}, open({record!r}, "w"))
"""


def grade(workspace, transcript, *, case, upstream) -> Grade:
    result = Grade()
    wanted = case.parameters
    only_changed(result, case.workspace, workspace, wanted.get("may_edit", [wanted["script"]]))
    outcome.apply(result, workspace, transcript, wanted.get("checks", []))
    after = launched(workspace, wanted["script"], wanted.get("arguments", []))
    if not result.add(
        f"{wanted['script']} starts the training program",
        after is not None,
        "it does" if after else "no launcher was called",
    ):
        return result
    argv, env = options(after["argv"]), after["env"]
    named = {
        name: env[name]
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "NCCL_GRAPH_REGISTER", "CUDA_DEVICE_MAX_CONNECTIONS")
        if name in env
    }
    named["WORLD_SIZE"] = str(wanted.get("world_size", 8))
    answer = upstream.command_line(case.versions, argv, named)
    error = answer["error"]
    if not result.add(
        f"Megatron-LM {case.versions['mcore']} accepts the command line", answer["verdict"] == "accepted",
        f"{answer['stage']}: {error['text']}" if error else "accepted",
    ):  # fmt: skip
        return result
    state = answer["normalized"]
    impl, scopes = state["impl"], set(state["modules"])
    if impl == "local" and "full_iteration" in scopes:
        impl, scopes = "full_iteration", scopes - {"full_iteration"}
    result.add(f"the implementation is {wanted['impl']}", impl == wanted["impl"], state)
    require = set(wanted.get("require", []))
    allowed = require | set(wanted.get("allow", []))
    if require or "allow" in wanted:
        result.add(
            f"captures {sorted(require)} and nothing beyond {sorted(allowed)}",
            require <= scopes <= allowed,
            sorted(scopes),
        )
    if impl != "none":
        result.add("a graph-safe RNG tracker is on", state["te_rng_tracker"], state["te_rng_tracker"])
    for flag in wanted.get("flags", []):
        result.add(f"{flag} is given", flag in argv, " ".join(argv)[-200:])
    for flag in wanted.get("no_flags", []):
        result.add(f"{flag} is not given", flag not in argv, " ".join(argv)[-200:])
    for name, values in wanted.get("environment", {}).items():
        result.add(
            f"{name} is {' or '.join(map(str, values))}",
            env.get(name) in [str(value) for value in values],
            env.get(name),
        )
    before = launched(case.workspace, wanted["script"], wanted.get("arguments", []))
    if before is None:  # the script is the agent's own
        return result
    free = (*GRAPH_OPTIONS, *wanted.get("may_change", []))
    old, new = (grouped(options(run["argv"]), free) for run in (before, after))
    result.add("no other option was changed", old == new, sorted(old ^ new)[:6] or "none was")
    return result


def launched(workspace: Path, script: str, arguments: list[str]) -> dict | None:
    """argv and environment of the launcher call that a script makes, or None."""
    with tempfile.TemporaryDirectory() as scratch:
        record = str(Path(scratch, "record.json"))
        for name in LAUNCHERS:
            stub = Path(scratch, name)
            stub.write_text(RECORDER.format(python=sys.executable, record=record), encoding="utf-8")
            stub.chmod(0o755)
        env = {"PATH": f"{scratch}:{os.environ['PATH']}", "HOME": scratch, "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
        try:
            subprocess.run(
                ["bash", script, *arguments], cwd=workspace, env=env, capture_output=True, timeout=RUN_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return None
        return json.loads(Path(record).read_text(encoding="utf-8")) if Path(record).is_file() else None


def options(argv: list[str]) -> list[str]:
    """What follows the training program's name."""
    for position, word in enumerate(argv[1:], 1):
        if word.endswith(".py") and "delete_graphs" not in word:
            return argv[position + 1 :]
    return argv[1:]


def grouped(argv: list[str], free: tuple[str, ...]) -> set[tuple[str, ...]]:
    """Options with their values, without those in `free`."""
    groups: list[list[str]] = []
    for word in argv:
        if word.startswith("--") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return {tuple(group) for group in groups if group[0] not in free}
