#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the GPU result files that the documents quote: each a run of helpers/smoke_capture.py with its own arguments.

Usage:
  python evals/smoke_evidence.py --out evals/results/gpu
  python evals/smoke_evidence.py --out results --only smoke-mcore-dense-launch smoke-drill-sync
  torchrun --nproc-per-node 2 evals/smoke_evidence.py --out evals/results/gpu
  python evals/multi_gpu/share_gpu.py -- evals/smoke_evidence.py --out results --suffix -shared --more "--layers 4"

Runs follow one another and share the imports of their stack; the first run of a stack pays for them, as a user does.
Under torchrun these are the runs for two GPUs. `--suffix TEXT` ends the files' names, for a run in another environment.

Output: one smoke-*.json a run, its table beside it as .txt; a line a run on stdout. `--json` puts one object on stdout
instead.

Exit codes: 0 every run wrote its file, 1 one did not, 2 wrong usage: nothing has run then.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
import smoke_capture  # noqa: E402
from cudagraphs.capture import ranks  # noqa: E402
from cudagraphs.cli import Parser  # noqa: E402

_ROUTED = "transformer_engine:attn+moe_router+moe_preprocess"
_DENSE = ("--variant", "transformer_engine:attn+mlp", "--variant", "local", "--variant", "full_iteration")

RUNS: dict[str, tuple[str, ...]] = {
    "smoke-mcore-dense-launch": ("--stack", "megatron-core", "--sweep"),
    "smoke-mcore-dense-compute": ("--stack", "megatron-core", "--size", "compute", *_DENSE),
    "smoke-mcore-moe-dropless-launch": (
        "--stack",
        "megatron-core",
        "--model",
        "moe-dropless",
        "--sweep",
        "--include-illegal",
    ),
    "smoke-mcore-moe-dropless-routed-launch": (
        "--stack",
        "megatron-core",
        "--model",
        "moe-dropless",
        "--variant",
        _ROUTED,
        "--variant",
        f"local:{_ROUTED.split(':')[1]}",
    ),
    "smoke-mcore-moe-dropless-compute": (
        "--stack",
        "megatron-core",
        "--model",
        "moe-dropless",
        "--size",
        "compute",
        "--variant",
        "transformer_engine:attn",
        "--variant",
        _ROUTED,
    ),
    "smoke-mcore-moe-drop-pad-launch": ("--stack", "megatron-core", "--model", "moe-drop-pad", "--sweep"),
    "smoke-mcore-moe-drop-pad-compute": (
        "--stack",
        "megatron-core",
        "--model",
        "moe-drop-pad",
        "--size",
        "compute",
        "--variant",
        "transformer_engine:attn+moe",
        "--variant",
        "full_iteration",
    ),
    "smoke-mcore-fp8-launch": ("--stack", "megatron-core", "--precision", "fp8-delayed", *_DENSE),
    "smoke-mcore-fp8-compute": ("--stack", "megatron-core", "--precision", "fp8-delayed", "--size", "compute", *_DENSE),
    "smoke-mcore-hybrid-moe-launch": ("--stack", "megatron-core", "--model", "hybrid-moe", "--sweep"),
    "smoke-mcore-hybrid-moe-local": (
        "--stack",
        "megatron-core",
        "--model",
        "hybrid-moe",
        "--rounds",
        "2",
        "--variant",
        "local:attn",
        "--variant",
        "local:moe_router",
        "--variant",
        "local:moe_router+moe_preprocess",
        "--variant",
        "local:attn+moe_router+moe_preprocess",
    ),
    # for other environments: --suffix, with PYTORCH_CUDA_ALLOC_CONF and NCCL_GRAPH_REGISTER set
    "smoke-mcore-dense-scopes-launch": ("--stack", "megatron-core", "--include-illegal", *_DENSE),
    "smoke-mcore-dense-overlap-launch": (
        "--stack",
        "megatron-core",
        "--overlap-grad-reduce",
        "--distributed-optimizer",
        "--overlap-param-gather",
        *_DENSE,
    ),
    "smoke-mcore-dense-long-launch": (
        "--stack",
        "megatron-core",
        "--long",
        "500",
        "--rounds",
        "2",
        "--variant",
        "transformer_engine:attn+mlp",
        "--variant",
        "full_iteration",
    ),
    # a sequence that is no multiple of 128: cuDNN before 9.15.1 must keep its attention out of graphs
    "smoke-mcore-dense-odd-sequence": (
        "--stack",
        "megatron-core",
        "--sequence",
        "320",
        "--rounds",
        "2",
        "--variant",
        "transformer_engine:attn",
        *_DENSE,
    ),
    "smoke-te-odd-sequence": ("--stack", "transformer-engine", "--sequence", "320", "--rounds", "2"),
    "smoke-recipe-moe": ("--stack", "megatron-core", "--recipe", "evals/cases/migrate-04-to-06/workspace/recipe.py"),
    "smoke-te-bf16-launch": ("--stack", "transformer-engine"),
    "smoke-te-fp8-launch": ("--stack", "transformer-engine", "--precision", "fp8-delayed"),
    "smoke-torch-launch": ("--stack", "torch", "--sweep"),
    "smoke-torch-compute": ("--stack", "torch", "--sweep", "--size", "compute"),
    "smoke-mcore-dropout-launch": ("--stack", "megatron-core", "--dropout", "0.1", "--rounds", "2", *_DENSE),
    "smoke-drill-sync": (
        "--stack",
        "megatron-core",
        "--drill",
        "sync",
        "--rounds",
        "2",
        "--variant",
        "transformer_engine:attn",
        "--variant",
        "local",
        "--variant",
        "full_iteration",
    ),
    "smoke-drill-oom": (
        "--stack",
        "megatron-core",
        "--drill",
        "oom",
        "--rounds",
        "2",
        "--variant",
        "transformer_engine:attn",
        "--variant",
        "local",
        "--variant",
        "full_iteration",
    ),
    "smoke-drill-static-grads": (
        "--stack",
        "torch",
        "--drill",
        "static-grads",
        "--rounds",
        "2",
        "--variant",
        "make_graphed_callables",
    ),
}

_SCOPED, _FULL = ("--variant", "transformer_engine:attn+mlp"), ("--variant", "full_iteration")
_LOCAL = ("--variant", "local")

# With two GPUs, launch-bound: kinds of parallelism, eager against scopes and the full iteration.
_PARALLEL: dict[str, tuple[str, ...]] = {
    "smoke-2gpu-tp2": ("--tp", "2", *_SCOPED, *_LOCAL, *_FULL),
    "smoke-2gpu-pp2": ("--pp", "2", "--microbatches", "4", *_SCOPED, *_LOCAL, *_FULL),
    "smoke-2gpu-pp2-interleaved": ("--pp", "2", "--vpp", "2", "--microbatches", "4", *_SCOPED, *_LOCAL, *_FULL),
    "smoke-2gpu-ep2-dropless": ("--ep", "2", "--model", "moe-dropless", "--variant", _ROUTED),
    "smoke-2gpu-ep2-drop-pad": (
        "--ep",
        "2",
        "--model",
        "moe-drop-pad",
        "--variant",
        "transformer_engine:attn+moe",
        *_FULL,
    ),
    "smoke-2gpu-dp2-overlap": (
        "--overlap-grad-reduce",
        "--distributed-optimizer",
        "--overlap-param-gather",
        *_SCOPED,
        *_LOCAL,
        *_FULL,
    ),
}
RUNS_OF_TWO = {name: ("--stack", "megatron-core", *words) for name, words in _PARALLEL.items()}


def _run(
    name: str, words: Sequence[str], target: Path, launchers: smoke_capture.Launchers, extra: Sequence[str]
) -> dict:
    begin = time.monotonic()
    # Of several ranks the first one reports; the others print nothing.
    table_path = os.devnull if int(os.environ.get("RANK", "0")) else target.with_suffix(".txt")
    before = _state(target)
    with open(table_path, "w") as table, redirect_stdout(table):
        code = smoke_capture.main([*words, *extra, "--json", str(target)], launchers)
    written = _state(target) not in (None, before)  # a file of an earlier run does not count
    return {"run": name, "exit_code": code, "seconds": round(time.monotonic() - begin, 1), "written": written}


def _state(path: Path) -> tuple[int, int] | None:
    """What changes when a file is replaced; None without a file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _refused(words: Sequence[str]) -> str | None:
    """What smoke_capture.py says to arguments that it does not take, None for those that it does."""
    heard = io.StringIO()
    try:
        with redirect_stderr(heard), redirect_stdout(heard):
            smoke_capture._arguments().parse_args(list(words))
    except SystemExit:
        return heard.getvalue().strip().splitlines()[-1]
    return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="smoke_evidence.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    try:
        world = ranks.world_size()
    except ranks.RanksError as error:
        parser.error(str(error))
    rank = int(os.environ["RANK"]) if world > 1 else 0
    runs = RUNS if world == 1 else RUNS_OF_TWO
    parser.add_argument("--only", nargs="+", choices=sorted(runs), metavar="RUN", default=list(runs))
    parser.add_argument("--suffix", default="", help="ends the names of the files")
    parser.add_argument("--rounds", type=int, help="timing rounds of every run, where fewer are enough")
    parser.add_argument("--more", default="", metavar="WORDS", help="further arguments of every run, as one text")
    parser.add_argument("--revision", help="passed on to smoke_capture.py")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if world not in (1, 2):
        parser.error(f"there are runs for one GPU and for two, not for {world}")
    if args.suffix != Path(args.suffix).name and args.suffix:
        parser.error(f"--suffix {args.suffix}: this ends a file's name and has no folder in it; --out names the folder")
    args.out = args.out.resolve()
    extra = ("--revision", args.revision) if args.revision else ()
    if args.rounds is not None:
        extra += ("--rounds", str(args.rounds))
    try:
        more = shlex.split(args.more)
    except ValueError as error:
        parser.error(f"--more {args.more}: {error}")
    if {word.partition("=")[0] for word in more} & {"--json", "--plot", "-h", "--help"}:
        parser.error(f"--more {args.more}: --out says where results go")
    extra += tuple(more)
    for name in args.only:
        refusal = _refused([*runs[name], *extra])
        if refusal:
            parser.error(f"--rounds, --more: {refusal}")
    os.chdir(Path(__file__).resolve().parents[1])  # recipes are named from the project's root
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {args.out}: {error.strerror or error}; give a folder that can be written to")
    if not os.access(args.out, os.W_OK | os.X_OK):
        parser.error(f"--out {args.out}: this folder cannot be written to; give another one")
    launchers = smoke_capture.Launchers()
    done = []
    try:
        for name in args.only:
            target = args.out / f"{name}{args.suffix}.json"
            done.append(_run(name, runs[name], target, launchers, extra))
            if rank == 0:
                print(_line(done[-1]), file=sys.stderr if args.json else sys.stdout, flush=True)
            if done[-1]["exit_code"] == 3:  # interrupted, or a fault of the tool that the next run would meet too
                break
    finally:
        launchers.close()
    if args.json and rank == 0:
        print(json.dumps({"schema_version": 1, "runs": done}))
    complete = len(done) == len(args.only)
    return 0 if complete and (rank or all(one["written"] for one in done)) else 1


def _line(one: dict) -> str:
    return f"{one['run']}: exit {one['exit_code']}, {one['seconds']} s" + ("" if one["written"] else ", NO RESULT")


if __name__ == "__main__":
    sys.exit(main())
