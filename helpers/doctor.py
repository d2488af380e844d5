#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One look at the machine: versions, GPUs, the environment variables that matter to CUDA graphs, and what therefore
applies.

Nothing is imported and nothing is changed: versions come from the metadata of installed packages, GPUs from nvidia-smi.
Run it where training runs (inside the container), or give the versions of that place with flags.

Usage:
    python helpers/doctor.py                    what is here
    python helpers/doctor.py --json             the same as one JSON object
    python helpers/doctor.py --mcore 0.18       as if this version were here
    python helpers/doctor.py --framework megatron-lm

Output: one line a fact, one a verdict on the environment; with --json one object with schema_version.

Exit codes:
    0  nothing in the environment stands against graphs
    1  an environment variable breaks some kind of graph in these versions
    2  usage
    3  a fault of this helper
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

# compiled files go to the user's cache: the skill folder may be read-only, and must stay as it was signed
sys.pycache_prefix = sys.pycache_prefix or os.path.expanduser("~/.cache/nemo-cuda-graphs/pycache")

from cudagraphs import cli, report  # noqa: E402
from cudagraphs.rules import REGISTRY, check  # noqa: E402
from cudagraphs.rules.base import BRIDGE, CORE, MEGATRON, Finding  # noqa: E402
from cudagraphs.rules.mends import full_iteration, scopes  # noqa: E402
from cudagraphs.rules.normalize import implementations, scope_names  # noqa: E402
from cudagraphs.settings import Settings  # noqa: E402
from cudagraphs.versions import DISTRIBUTIONS, VersionError, Versions, installed, parse_arch  # noqa: E402

PROGRAM = "doctor"
LABELS = {
    "torch": "PyTorch",
    "te": "Transformer Engine",
    "mcore": "megatron-core",
    "bridge": "Megatron Bridge",
    "automodel": "NeMo AutoModel",
}
# Variables that change whether a capture works or what a graph holds. Rules judge those that they read; the others are
# shown.
VARIABLES = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "NCCL_GRAPH_REGISTER",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "TORCH_NCCL_AVOID_RECORD_STREAMS",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_GRAPH_MIXING_SUPPORT",
    "NCCL_NVLS_ENABLE",
    "CUDA_GRAPHS_USE_NODE_PRIORITY",
    "CUDA_MODULE_LOADING",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
)
QUERY = ("name", "compute_cap", "driver_version", "memory.total")
SMI_LIMIT_S = 20


def build_parser() -> argparse.ArgumentParser:
    parser = cli.Parser(prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--framework",
        choices=MEGATRON,
        help="whose rules; by default Bridge's where it is installed, else megatron-core's",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    cli.add_version_flags(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    cli.utf8_streams()
    arguments = cli.arguments_of(build_parser(), argv)
    return arguments if isinstance(arguments, int) else cli.run(PROGRAM, lambda: look(arguments, os.environ))


def look(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    has_bridge = installed("bridge") is not None or arguments.bridge is not None
    framework = arguments.framework or (BRIDGE if has_bridge else CORE)
    versions = cli.versions_from(arguments, framework)
    gpus, gpu_reason = find_gpus()
    if versions.arch is None and gpus:
        versions = replace(versions, arch=gpus[0]["arch"])
    here = {name: environment[name] for name in VARIABLES if name in environment}
    verdicts = judge_environment(framework, versions, here)
    document = {
        "schema_version": report.SCHEMA_VERSION,
        "helper": PROGRAM,
        "python": platform.python_version(),
        "framework": framework,
        "installed": {component: installed(component) for component in DISTRIBUTIONS},
        "judged_by": {
            component: {"version": _dotted(getattr(versions, component)), "how": how} for component, how in versions.how
        },
        "gpus": [{**gpu, "arch": _dotted(gpu["arch"])} for gpu in gpus],
        "gpu_reason": gpu_reason,
        "environment": here,
        "verdicts": verdicts,
        "names": names(versions),
        "rules": [rule.code for rule in REGISTRY if rule.holds_for(framework, versions)],
    }
    if arguments.json:
        cli.print_json(document)
    else:
        show(document, versions)
    return cli.FINDINGS if any(verdict["severity"] in ("error", "runtime") for verdict in verdicts) else cli.CLEAN


def find_gpus() -> tuple[list[dict[str, Any]], str]:
    """The GPUs that the driver reports, and why there are none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_LIMIT_S)
    except FileNotFoundError:
        return [], "nvidia-smi is not here"
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi does not answer ({type(error).__name__})"
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        return [], f"nvidia-smi: {said[0] if said else f'exit code {done.returncode}'}"
    gpus = []
    for line in done.stdout.strip().splitlines():
        fields = [part.strip() for part in line.split(",")]
        if len(fields) == len(QUERY):
            gpus.append(
                {"name": fields[0], "arch": _arch(fields[1]), "driver": fields[2], "memory_mib": _number(fields[3])}
            )
    return gpus, "" if gpus else "the driver reports no GPU"


def _arch(text: str) -> tuple[int, ...] | None:
    try:
        return parse_arch(text)
    except VersionError:
        return None


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def judge_environment(framework: str, versions: Versions, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """What the rules say to the environment, for each kind of graph.

    Findings that an empty environment does not have.
    """
    verdicts: dict[str, dict[str, Any]] = {}
    for kind, facts in kinds(versions).items():
        bare = Settings(framework, versions).with_values(facts)
        without = {finding.code for finding in check(bare) if not finding.needs}
        for finding in check(bare.with_values({f"env.{name}": value for name, value in environment.items()})):
            if finding.code not in without and not finding.needs:
                entry = verdicts.setdefault(finding.code, _verdict(finding))
                entry["graphs"].append(kind)
    return list(verdicts.values())


def kinds(versions: Versions) -> dict[str, dict[str, Any]]:
    """The kinds of graph that these versions have, as settings."""
    whole = full_iteration({}, versions)
    if versions.minor < 15:
        found = {
            "transformer_engine": {"external_cuda_graph": True, **scopes({}, versions, ["attn"])},
            "local": {"enable_cuda_graph": True},
        }
    else:
        found = {
            "transformer_engine": {"cuda_graph_impl": "transformer_engine", **scopes({}, versions, ["attn"])},
            "local": {"cuda_graph_impl": "local"},
        }
    if versions.minor >= 14:
        found["full_iteration"] = whole
    tracker = {
        "use_te_rng_tracker": True,
        "rng.te_rng_tracker": True,
        "rerun_state_machine.check_for_nan_in_loss": False,
    }
    return {kind: {**facts, **tracker} for kind, facts in found.items()}


def _verdict(finding: Finding) -> dict[str, Any]:
    return {
        "code": finding.code,
        "severity": finding.severity,
        "message": finding.message,
        "mend": finding.mend,
        "graphs": [],
    }


def names(versions: Versions) -> dict[str, Any]:
    """The names that the version takes."""
    minor = versions.minor
    field = "cuda_graph_modules" if minor >= 18 else "cuda_graph_scope"
    switch = "cuda_graph_impl" if minor >= 15 else "enable_cuda_graph / external_cuda_graph"
    return {
        "implementation": switch,
        "implementations": list(implementations(minor)) if minor >= 15 else ["local", "transformer_engine"],
        "scopes_field": field,
        "scopes": list(scope_names(minor)),
    }


def show(document: Mapping[str, Any], versions: Versions) -> None:
    print(f"Python {document['python']}")
    for component, label in LABELS.items():
        have = document["installed"][component]
        judged = document["judged_by"].get(component)
        note = (
            ""
            if have or judged is None or judged["version"] is None
            else f"; judged by {judged['version']} ({judged['how']})"
        )
        print(f"{label}: {have or 'not installed'}{note}")
    for gpu in document["gpus"]:
        print(
            f"GPU: {gpu['name']}, compute capability {gpu['arch'] or 'unknown'}, driver {gpu['driver']}, "
            f"{gpu['memory_mib']} MiB"
        )
    if document["gpu_reason"]:
        print(f"GPU: none ({document['gpu_reason']})")
    for name, value in document["environment"].items():
        print(f"{name}={value}")
    if not document["environment"]:
        print("environment: none of the variables that matter to graphs is set")
    for verdict in document["verdicts"]:
        print(f"  {verdict['code']} {verdict['severity']} for {', '.join(verdict['graphs'])}: {verdict['message']}")
        print(f"      mend: {verdict['mend']}")
    found = document["names"]
    print(
        f"names in megatron-core 0.{versions.minor}: {found['implementation']} "
        f"({', '.join(found['implementations'])}), "
        f"{found['scopes_field']} ({', '.join(found['scopes'])})"
    )
    print(f"rules of {document['framework']} that apply: {len(document['rules'])}")


def _dotted(number: Any) -> str | None:
    return ".".join(map(str, number)) if number is not None else None


if __name__ == "__main__":
    sys.exit(main())
