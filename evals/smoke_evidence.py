#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the GPU result files that the documents quote: each a run of helpers/smoke_capture.py with its own arguments.

Usage:
  python evals/smoke_evidence.py --out evals/results/gpu
  python evals/smoke_evidence.py --out /tmp/results --only smoke-mcore-dense-launch smoke-drill-sync

Runs share the GPU while they prepare and measure alone (gpulock), except those listed in ALONE, which nothing else may slow down.

Output: one smoke-*.json a run, its table beside it as .txt; a line a run on stdout. `--json` puts one object on stdout instead.

Exit codes: 0 every run wrote its file, 1 one did not, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SMOKE = Path(__file__).resolve().parents[1] / "helpers" / "smoke_capture.py"
_ROUTED = "transformer_engine:attn+moe_router+moe_preprocess"
_DENSE = ("--variant", "transformer_engine:attn+mlp", "--variant", "local", "--variant", "full_iteration")

RUNS: dict[str, tuple[str, ...]] = {
    "smoke-mcore-dense-launch": ("--stack", "megatron-core", "--sweep"),
    "smoke-mcore-dense-compute": ("--stack", "megatron-core", "--size", "compute", *_DENSE),
    "smoke-mcore-moe-dropless-launch": ("--stack", "megatron-core", "--model", "moe-dropless", "--sweep", "--include-illegal"),
    "smoke-mcore-moe-dropless-compute": (
        "--stack", "megatron-core", "--model", "moe-dropless", "--size", "compute", "--variant", "transformer_engine:attn",
        "--variant", _ROUTED,
    ),
    "smoke-mcore-moe-drop-pad-launch": ("--stack", "megatron-core", "--model", "moe-drop-pad", "--sweep"),
    "smoke-mcore-moe-drop-pad-compute": (
        "--stack", "megatron-core", "--model", "moe-drop-pad", "--size", "compute", "--variant", "transformer_engine:attn+moe",
        "--variant", "full_iteration",
    ),
    "smoke-mcore-fp8-launch": ("--stack", "megatron-core", "--precision", "fp8-delayed", *_DENSE),
    "smoke-mcore-fp8-compute": ("--stack", "megatron-core", "--precision", "fp8-delayed", "--size", "compute", *_DENSE),
    "smoke-mcore-hybrid-moe-launch": ("--stack", "megatron-core", "--model", "hybrid-moe", "--sweep"),
    "smoke-te-bf16-launch": ("--stack", "transformer-engine",),
    "smoke-te-fp8-launch": ("--stack", "transformer-engine", "--precision", "fp8-delayed"),
    "smoke-torch-launch": ("--stack", "torch", "--sweep"),
    "smoke-torch-compute": ("--stack", "torch", "--sweep", "--size", "compute"),
    "smoke-mcore-dropout-launch": ("--stack", "megatron-core", "--dropout", "0.1", "--rounds", "2", *_DENSE),
    "smoke-drill-sync": (
        "--stack", "megatron-core", "--drill", "sync", "--rounds", "2", "--variant", "transformer_engine:attn",
        "--variant", "local", "--variant", "full_iteration",
    ),
    "smoke-drill-oom": (
        "--stack", "megatron-core", "--drill", "oom", "--rounds", "2", "--variant", "transformer_engine:attn",
        "--variant", "local", "--variant", "full_iteration",
    ),
    "smoke-drill-static-grads": ("--stack", "torch", "--drill", "static-grads", "--rounds", "2", "--variant", "make_graphed_callables"),
}
# Its wall time is itself a result (from start to verdict in under 90 s).
ALONE = ("smoke-mcore-dense-launch",)


def _run(name: str, out: Path, limit_s: float, extra: Sequence[str]) -> dict:
    target = out / f"{name}.json"
    command = [sys.executable, str(SMOKE), *RUNS[name], *extra, "--json", str(target)]
    begin = time.monotonic()
    with open(out / f"{name}.txt", "w") as table, open(out / f"{name}.log", "w") as log:
        try:
            code = subprocess.run(command, stdout=table, stderr=log, timeout=limit_s).returncode
        except subprocess.TimeoutExpired:
            code = None
    return {"run": name, "exit_code": code, "seconds": round(time.monotonic() - begin, 1), "written": target.exists()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=sorted(RUNS), metavar="RUN", default=list(RUNS))
    parser.add_argument("--at-once", type=int, default=3, help="runs that may prepare at once (default 3)")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one run (default 300)")
    parser.add_argument("--revision", help="passed on to smoke_capture.py")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    extra = ("--revision", args.revision) if args.revision else ()
    done = [_run(name, args.out, args.limit, extra) for name in args.only if name in ALONE]
    with ThreadPoolExecutor(args.at_once) as pool:
        rest = [name for name in args.only if name not in ALONE]
        done += pool.map(lambda name: _run(name, args.out, args.limit, extra), rest)
    if args.json:
        print(json.dumps({"schema_version": 1, "runs": done}))
    else:
        for one in done:
            print(f"{one['run']}: exit {one['exit_code']}, {one['seconds']} s" + ("" if one["written"] else ", NO RESULT"))
    return 0 if all(one["written"] for one in done) else 1


if __name__ == "__main__":
    sys.exit(main())
