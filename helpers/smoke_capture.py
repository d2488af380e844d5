#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Does it capture, is it the same training, is it faster, does it exit cleanly: CUDA graphs against eager on this GPU.

Usage:
  python helpers/smoke_capture.py --sweep
  python helpers/smoke_capture.py --model moe-dropless --variant transformer_engine:attn+moe_router+moe_preprocess
  python helpers/smoke_capture.py --recipe recipe.py --json result.json --plot result.svg
  torchrun --nproc-per-node 8 helpers/smoke_capture.py --sweep --tp 2 --ep 4 --model moe-dropless

A variant is IMPL or IMPL:MODULE+MODULE. Each runs in a process of its own; eager runs twice, to know the noise.

Output: a table with a verdict for each variant and a recommendation on stdout, progress on stderr. `--json` puts the
whole result on stdout instead (the table then goes to stderr), `--json FILE` writes it to a file.

Under a launcher each rank checks the arguments, and all leave when one cannot start.

Exit codes: 0 every variant works as the rules say, 1 a variant that the rules allow failed to capture, trained
differently or did not exit, 2 wrong usage or unreadable input, 3 a fault of this tool, 4 no usable GPU or stack.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cudagraphs import versions as known
from cudagraphs.capture import parent, plan, plot, ranks, report, variants
from cudagraphs.capture.gpulock import GpuLock
from cudagraphs.capture.run import Effort, run
from cudagraphs.capture.stacks import imports

if TYPE_CHECKING:
    from cudagraphs.capture import recipe

DISTRIBUTION = {"megatron-core": "mcore", "transformer-engine": "te", "torch": "torch"}
NEEDS = {
    "megatron-core": ("torch", "transformer-engine", "megatron-core"),
    "transformer-engine": ("torch", "transformer-engine"),
    "torch": ("torch",),
}
INSTALL = {
    "torch": "pip install torch (a CUDA build: see pytorch.org)",
    "transformer-engine": "pip install --no-build-isolation transformer_engine[pytorch]",
    "megatron-core": "pip install megatron-core",
}
PRECISIONS = ("bf16", "fp32", "fp8-delayed", "fp8-tensorwise", "fp8-blockwise", "fp8-mxfp8")
# What the other stacks have nothing to do with.
MCORE_ONLY = ("overlap-grad-reduce", "distributed-optimizer", "overlap-param-gather")
DRILLS = ("sync", "oom", "crash", "hang", "static-grads", "default-stream")
GIB = 2**30
Result = TypeVar("Result")


class UsageError(Exception):
    """Arguments that do not go together; exit code 2."""


class Unavailable(Exception):
    """No usable GPU or stack; exit code 4."""


WRONG_USAGE = (UsageError, variants.VariantError, known.VersionError, ranks.RanksError)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="smoke_capture.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # the command that a result records has the names in full
    )
    what = parser.add_argument_group("what to run")
    what.add_argument(
        "--stack", choices=("auto", *variants.IMPLS), default="auto", help="auto takes the richest installed"
    )
    what.add_argument("--model", choices=sorted({m for group in variants.MODELS.values() for m in group}), default=None)
    what.add_argument("--recipe", type=Path, help="take model, shape, implementation and scopes from this recipe")
    what.add_argument("--function", help="the function in the recipe's file, where it has several")
    what.add_argument("--variant", action="append", default=[], metavar="IMPL[:MODULE+MODULE]", help="may be repeated")
    what.add_argument("--sweep", action="store_true", help="every variant worth a try that the rules call legal")
    what.add_argument("--include-illegal", action="store_true", help="with --sweep: also those that the rules refuse")
    what.add_argument("--precision", choices=PRECISIONS, default="bf16")
    what.add_argument("--dropout", type=float, default=0.0, metavar="P", help="adds the check that dropout draws anew")
    shape = parser.add_argument_group("shape")
    shape.add_argument(
        "--size", choices=tuple(plan.SIZES), default="launch", help="launch-bound or compute-bound preset"
    )
    for name in (
        "layers",
        "hidden",
        "heads",
        "ffn",
        "sequence",
        "microbatch",
        "microbatches",
        "vocabulary",
        "experts",
        "top-k",
    ):
        shape.add_argument(f"--{name}", type=_positive)
    shape.add_argument(
        "--max-layers", type=_positive, default=8, help="a recipe's model is cut to this many (default 8)"
    )
    effort = parser.add_argument_group("effort")
    effort.add_argument(
        "--steps", type=_positive, default=20, help="training steps compared after the capture (default 20)"
    )
    effort.add_argument("--long", type=int, default=0, metavar="N", help="N more steps, for slow divergence")
    effort.add_argument("--rounds", type=_positive, default=6, help="timing rounds, each variant in turn (default 6)")
    effort.add_argument("--seed", type=int, default=1234)
    parallel = parser.add_argument_group("several GPUs, under torchrun")
    for name in ("tp", "pp", "ep"):
        parallel.add_argument(f"--{name}", type=_positive, default=1)
    parallel.add_argument("--vpp", type=_positive, default=1, help="model chunks a pipeline stage: interleaved schedule")
    parallel.add_argument("--overlap-grad-reduce", action="store_true", help="megatron-core's DDP option")
    parallel.add_argument("--distributed-optimizer", action="store_true", help="megatron-core's, sharded over the data ranks")
    parallel.add_argument("--overlap-param-gather", action="store_true", help="with --distributed-optimizer")
    process = parser.add_argument_group("processes")
    process.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run of the torch stack")
    process.add_argument("--jobs", type=_positive, help="processes on the GPU at once (default: what fits)")
    process.add_argument("--start", choices=("fork", "spawn"), default="fork", help="fork: import the stack once")
    process.add_argument(
        "--phase-limit", type=float, default=180.0, metavar="S", help="seconds for one phase (default 180)"
    )
    process.add_argument("--exit-limit", type=float, default=15.0, metavar="S", help="seconds for leaving (default 15)")
    process.add_argument("--memory-limit", type=float, metavar="GIB", help="GPU memory that each variant may use")
    process.add_argument("--drill", choices=DRILLS, help="break the variants on purpose, to see the report")
    output = parser.add_argument_group("output")
    output.add_argument("--json", nargs="?", const="-", metavar="FILE")
    output.add_argument("--plot", type=Path, metavar="FILE", help="PNG or SVG, by its suffix")
    output.add_argument("--revision", help="what to record as revision where there is no git checkout")
    output.add_argument("--quiet", action="store_true", help="no progress")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _stack(wanted: str, device: str) -> tuple[str, dict[str, str | None]]:
    """The stack to run and the installed versions. Raises Unavailable with what to install."""
    found = {name: known.installed(DISTRIBUTION[name]) for name in ("megatron-core", "transformer-engine", "torch")}
    if wanted == "auto":
        wanted = next(
            (name for name, needs in NEEDS.items() if device == "cuda" and all(found[need] for need in needs)), "torch"
        )
    missing = [need for need in NEEDS[wanted] if not found[need]]
    if missing:
        raise Unavailable(f"{wanted} needs {', '.join(missing)}: " + "; ".join(INSTALL[need] for need in missing))
    return wanted, {name: found[name] for name in NEEDS[wanted]}


def _shape(args: argparse.Namespace, model: str) -> plan.Shape:
    given = {
        name: getattr(args, name)
        for name in (
            "layers",
            "hidden",
            "heads",
            "ffn",
            "sequence",
            "microbatch",
            "microbatches",
            "vocabulary",
            "experts",
            "top_k",
        )
        if getattr(args, name) is not None
    }
    base = plan.shape(args.size, model)
    if "heads" in given:
        given["kv_heads"] = given["heads"]
    elif "hidden" in given:
        given["heads"] = given["kv_heads"] = max(1, given["hidden"] // 64)
    out = replace(base, **given)
    if out.hidden % out.heads:
        raise UsageError(f"--hidden {out.hidden} does not divide by --heads {out.heads}")
    return out


def _check(args: argparse.Namespace, world: int) -> tuple[str, dict[str, str | None], recipe.Read | None]:
    """(stack, installed versions, the recipe) once the arguments go together.

    Nothing in here depends on the rank or the machine: every rank finds the same fault before it waits for another.
    """
    if args.device == "cpu" and args.stack not in ("auto", "torch"):
        raise UsageError("--device cpu runs the torch stack only")
    if args.device == "cpu" and args.drill in ("sync", "oom", "default-stream"):
        raise UsageError(f"--drill {args.drill} needs a GPU")
    if args.plot and args.plot.suffix not in (".png", ".svg"):
        raise UsageError(f"--plot {args.plot}: a plot is written as .png or .svg")
    stack, found = _stack(args.stack, args.device)
    if args.recipe and stack != "megatron-core":
        raise UsageError(f"--recipe needs --stack megatron-core, and {stack} is what is there")
    model = args.model or "dense"
    if not args.recipe and model not in variants.MODELS[stack]:
        raise UsageError(f"--stack {stack} has no model {model}; it has {', '.join(variants.MODELS[stack])}")
    if args.precision.startswith("fp8") and stack == "torch":
        raise UsageError("--precision fp8 needs --stack transformer-engine or megatron-core")
    if args.precision == "fp32" and stack != "torch":
        raise UsageError("--precision fp32 needs --stack torch")
    group = args.tp * args.pp
    if world % group or (world // args.pp) % args.ep:
        raise UsageError(f"{world} processes do not divide by --tp {args.tp} --pp {args.pp} --ep {args.ep}")
    if stack != "megatron-core" and (group > 1 or args.ep > 1):
        raise UsageError(f"--tp, --pp and --ep need --stack megatron-core; {stack} runs data parallel only")
    given = [f"--{name}" for name in MCORE_ONLY if getattr(args, name.replace("-", "_"))]
    given += ["--vpp"] * (args.vpp > 1)
    if stack != "megatron-core" and given:
        raise UsageError(f"{' and '.join(given)}: only with --stack megatron-core, and this is {stack}")
    if args.overlap_param_gather and not (args.distributed_optimizer and args.overlap_grad_reduce):
        raise UsageError("--overlap-param-gather needs --distributed-optimizer and --overlap-grad-reduce")
    for text in args.variant:
        variants.parse(text, stack)
    if args.recipe:
        return stack, found, _read(args)
    _check_virtual(args, _shape(args, model))
    return stack, found, None


def _read(args: argparse.Namespace) -> recipe.Read:
    from cudagraphs.capture import recipe  # needs PyYAML, which a GPU machine may lack

    try:
        return recipe.read(args.recipe, args.function)
    except recipe.RecipeError as error:
        raise UsageError(str(error)) from error


def _check_virtual(args: argparse.Namespace, shape: plan.Shape) -> None:
    if args.vpp > 1 and (args.pp == 1 or shape.layers % (args.pp * args.vpp) or shape.microbatches % args.pp):
        raise UsageError(
            f"--vpp {args.vpp} needs --pp of at least 2, layers ({shape.layers}) that divide by --pp times --vpp, and "
            f"microbatches ({shape.microbatches}) that divide by --pp"
        )


def _check_output(args: argparse.Namespace) -> None:
    """The files that come last, before anything is captured for them."""
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path is None or path == "-":
            continue
        path = Path(path)
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "no regular file"
            raise UsageError(f"{option} {path}: this is {kind}; give the name of a file")
        if not path.parent.is_dir():
            raise UsageError(f"{option} {path}: there is no folder {path.parent}; make it or give another file")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise UsageError(f"{option} {path}: the folder {path.parent} cannot be written to; give another file")
    if args.plot and find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib (pip install matplotlib)")


def _agreed(here: ranks.Ranks, tag: str, work: Callable[[], Result]) -> Result:
    """What `work` returns, where it raises on no rank. Else every rank raises: none waits for one that has left."""
    out, own, told = None, None, None
    try:
        out = work()
    except WRONG_USAGE as error:
        own, told = error, ("usage", str(error))
    except Unavailable as error:
        own, told = error, ("unavailable", str(error))
    except Exception as error:
        own, told = error, ("fault", f"{type(error).__name__}: {error}")
    found = here.agree(tag, told)
    if not any(found):
        return out
    here.leave()
    if own is not None:
        raise own
    rank, (kind, text) = next((rank, told) for rank, told in enumerate(found) if told)
    raise {"usage": UsageError, "unavailable": Unavailable, "fault": RuntimeError}[kind](f"rank {rank}: {text}")


def _recipe(args: argparse.Namespace, read: recipe.Read, limit_bytes: int):
    """(model, shape, changes, variant or None, further config fields) of the recipe, scaled to fit `limit_bytes`."""
    shape, notes = plan.shape_from_recipe(read.values)
    shape = replace(shape, microbatches=args.microbatches or plan.Shape().microbatches)
    divisors = {"tensor": args.tp, "pipeline": args.pp, "expert": args.ep}
    scaled, changes = plan.scale(shape, limit_bytes, args.max_layers, divisors)
    for field, size in (("tensor", args.tp), ("pipeline", args.pp), ("expert", args.ep)):
        asked = read.values.get(f"{field}_model_parallel_size") or 1
        if asked != size:
            changes.append(f"{field}_model_parallel_size {asked} -> {size} (--{field[0]}p sets it)")
    config = dict(read.config)
    if (config.get("recompute_num_layers") or 0) > scaled.layers:
        changes.append(f"recompute_num_layers {config['recompute_num_layers']} -> {scaled.layers}")
        config["recompute_num_layers"] = scaled.layers
    _check_virtual(args, scaled)
    return plan.model_of(read.values), scaled, notes + changes + read.notes, read.variant, config


def _setup(
    args: argparse.Namespace, read: recipe.Read | None, here: ranks.Ranks, stack: str, found: dict, machine: dict
) -> tuple[dict, dict, list]:
    """(setup common to all jobs, rules by variant name, variants to run). `read` is the recipe where there is one."""
    changes: list[str] = []
    wanted = None
    extra: dict = {}
    if read is not None:
        model, shape, changes, wanted, extra = _recipe(args, read, int(0.8 * machine["free_bytes"] / 3))
    else:
        model = args.model or "dense"
        shape = _shape(args, model)
    parallel = {"tensor": args.tp, "pipeline": args.pp, "virtual": args.vpp, "expert": args.ep}
    pattern = plan.hybrid_pattern(model, shape.layers, known_package("mamba-ssm"))
    if pattern and "M" not in pattern and model == "hybrid":
        changes.append("no Mamba layers: mamba-ssm is not installed (pip install mamba-ssm causal-conv1d)")
    setup = {
        "stack": stack,
        "model": model,
        "shape": plan.as_dict(shape),
        "precision": args.precision,
        "dropout": args.dropout,
        "seed": args.seed,
        "device": args.device,
        "rank": here.rank,
        "world": here.world,
        "local_rank": here.local_rank,
        "data_rank": here.rank % (here.world // args.pp) // args.tp,
        "rendezvous": here.rendezvous,
        "parallel": parallel,
        "data_parallel": {
            "overlap_grad_reduce": args.overlap_grad_reduce,
            "distributed_optimizer": args.distributed_optimizer,
            "overlap_param_gather": args.overlap_param_gather,
        },
        "pattern": pattern,
        "versions": found,
        "changes": changes,
        "memory_limit": int(args.memory_limit * GIB) if args.memory_limit else None,
        "config": plan.config_fields(model, shape, args.precision, args.dropout, parallel, pattern, extra),
    }
    chosen = _variants(args, stack, model, pattern, wanted)
    rules = {variant.name: variants.legal(setup, variant, _graph_environment()) for variant in chosen}
    return setup, rules, chosen


def known_package(name: str) -> bool:
    """Whether a distribution is installed."""
    from importlib import metadata

    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _variants(
    args, stack: str, model: str, pattern: str | None, of_recipe: variants.Variant | None
) -> list[variants.Variant]:
    chosen = [variants.parse(text, stack) for text in args.variant]
    if of_recipe is not None:
        chosen.append(of_recipe)
    if args.sweep or not chosen:
        chosen += variants.candidates(stack, model, pattern)
    return [variant for variant in dict.fromkeys(chosen) if variant.impl != "none"]


def _jobs(
    setup: dict, chosen: list[variants.Variant], rules: dict, args, stack: str
) -> tuple[dict[str, dict], dict[str, dict]]:
    """(jobs by name with eager and its repeat first, skipped variants with their rules)."""
    minor = int(setup["versions"]["megatron-core"].split(".")[1]) if stack == "megatron-core" else 0
    asked = {variants.parse(text, stack) for text in args.variant}
    jobs, skipped = {}, {}
    for name in (variants.EAGER.name, variants.REPEAT):
        jobs[name] = plan.job(setup, variants.EAGER, name=name)
    for variant in chosen:
        if rules[variant.name]["verdict"] == "illegal" and not args.include_illegal and variant not in asked:
            skipped[variant.name] = rules[variant.name]
        else:
            jobs[variant.name] = plan.job(setup, variant, drill=args.drill)
    for job in jobs.values():
        job["graph"] = variants.fields(variants.Variant(job["impl"], tuple(job["modules"])), minor)
    return jobs, skipped


def _launcher(args, stack: str, logs: Path, progress):
    """(launcher, machine). Falls back to fresh processes where forked ones cannot use the GPU."""
    try:
        forked = parent.ForkLauncher(logs, imports(stack))
    except parent.StartError as error:
        raise Unavailable(str(error)) from error
    progress(f"{stack} imported in {forked.seconds:.1f} s")
    if args.device == "cpu":
        machine = {"free_bytes": 4 * GIB}
    else:
        machine = forked.probe()
        if "initialization error" in machine.get("error", ""):
            # Something in the stack initialized CUDA at import: only fresh processes can use the GPU.
            forked.close()
            progress("forked processes cannot use the GPU here; starting fresh ones")
            return parent.SpawnLauncher(logs), _fresh_probe(machine)
        if not machine["devices"]:
            forked.close()
            raise Unavailable(
                f"no usable GPU: {machine.get('error', 'none found')}; see nvidia-smi, and that torch is a CUDA build"
            )
    if args.start == "spawn":
        forked.close()
        return parent.SpawnLauncher(logs), machine
    return forked, machine


def _fresh_probe(machine: dict) -> dict:
    code = "import json; from cudagraphs.capture.forkserver import probe; print(json.dumps(probe()))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(parent.HELPERS), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise Unavailable(f"no usable GPU: {machine['error']}; {done.stderr[-500:]}") from None


def _machine(probe: dict, args) -> dict:
    out = {"cpu_count": os.cpu_count(), "cpu": platform.machine()}
    if args.device == "cpu":
        return out
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.split("\n")[0].strip()
    except (OSError, subprocess.TimeoutExpired):
        driver = None
    return {
        **out,
        "gpu": probe["gpu"],
        "driver": driver,
        "capability": probe["capability"],
        "memory_bytes": probe["memory_bytes"],
        "multiprocessors": probe["multiprocessors"],
    }


def _revision(given: str | None) -> str | None:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return given
    return given or (done.stdout.strip() if done.returncode == 0 else None)


def _progress(quiet: bool, here: ranks.Ranks, begin: float):
    def progress(text: str) -> None:
        if not quiet and here.rank == 0:
            print(f"[{time.monotonic() - begin:6.1f} s] {text}", file=sys.stderr, flush=True)

    return progress


class Launchers:
    """One launcher a stack, started when first asked for, so that several runs in one process import a stack once."""

    def __init__(self):
        self.runs = 0
        self._logs = parent.temporary_logs()
        self._started: dict[str, tuple] = {}

    def of(self, args: argparse.Namespace, stack: str, progress) -> tuple:
        """(launcher, the GPU as probed when it started)."""
        if stack not in self._started:
            self._started[stack] = _launcher(args, stack, Path(self._logs.name), progress)
        return self._started[stack]

    def close(self) -> None:
        for launcher, _ in self._started.values():
            launcher.close()
        self._logs.cleanup()


def smoke(args: argparse.Namespace, argv: Sequence[str], launchers: Launchers) -> tuple[dict, int]:
    """Runs everything and returns the result and the exit code. Raises those of WRONG_USAGE, and Unavailable."""
    begin = time.monotonic()
    launchers.runs += 1
    stack, found, read = _check(args, ranks.world_size())
    here = ranks.from_environment(args.phase_limit * 2, launchers.runs)
    progress = _progress(args.quiet, here, begin)
    # Rank 0 writes; the folder may be on its machine only.
    _agreed(here, "output", lambda: _check_output(args) if here.rank == 0 else None)

    def prepare():
        launcher, probe = launchers.of(args, stack, progress)
        setup, rules, chosen = _setup(args, read, here, stack, found, probe)
        return launcher, probe, setup, rules, *_jobs(setup, chosen, rules, args, stack)

    launcher, probe, setup, rules, jobs, skipped = _agreed(here, "start", prepare)
    shape = plan.Shape(**setup["shape"])
    limits = {"default": args.phase_limit, "exit": args.exit_limit}
    # Several ranks keep step with each other instead: a lock a rank could leave two runs waiting for one another.
    lock = GpuLock(probe.get("uuid") if here.world == 1 else None)
    session = parent.Session(launcher, limits, here, progress, variants.rules_for, lock)
    together = args.jobs or plan.at_once(shape, len(jobs), probe["free_bytes"], here.world)
    if together < 3 and here.world == 1:
        # Eager, its repeat and a variant do not fit together; the repeat can be done without.
        jobs.pop(variants.REPEAT)
        progress("not enough memory to run eager twice: the noise stays unknown")
    effort = Effort(args.steps, args.long, args.rounds, together, args.dropout > 0)
    outcomes = run(session, jobs, effort, here, progress)
    lock.close()
    results = report.assess(outcomes, jobs, rules, args.exit_limit)
    report.join_ranks(results, here.agree("verdicts", report.summary(results)))
    gpus = len(set(here.agree("gpu", probe.get("uuid"))) - {None})
    here.leave()
    versions = {"python": platform.python_version(), **found}
    versions |= {name: probe[name] for name in ("torch_cuda", "cudnn", "nccl") if name in probe}
    result = {
        "schema_version": report.SCHEMA_VERSION,
        "tool": "smoke_capture",
        "command": shlex.join(["python", "helpers/smoke_capture.py", *report.recorded(argv)]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "revision": _revision(args.revision),
        "seed": args.seed,
        "machine": _machine(probe, args),
        "versions": versions,
        "stack": stack,
        "model": setup["model"],
        "precision": args.precision,
        "dropout": args.dropout,
        "shape": setup["shape"],
        "config": setup["config"],
        "pattern": setup["pattern"],
        "parallel": {**setup["parallel"], **setup["data_parallel"], "world": here.world, "gpus": gpus},
        "changes": setup["changes"],
        "environment": _graph_environment(),
        "variants": results,
        "skipped": skipped,
        "recommendation": report.recommend(results, here.world, gpus),
        "seconds": {"total": time.monotonic() - begin, "phases": session.seconds},
        "processes_at_once": effort.jobs,
    }
    return result, report.exit_code(results)


def _graph_environment() -> dict[str, str]:
    """The variables that graphs depend on, where they are set."""
    names = (
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
        "NCCL_GRAPH_REGISTER",
        "NCCL_HOSTID",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "NVTE_FUSED_ATTN",
        "NVTE_FLASH_ATTN",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        "CUDA_LAUNCH_BLOCKING",
    )
    return {name: os.environ[name] for name in names if name in os.environ}


def _write(path: Path, text: str) -> None:
    """Atomic: a reader sees the old file or the whole new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def main(argv: Sequence[str] | None = None, launchers: Launchers | None = None) -> int:
    """A caller that runs several times in one process may give `launchers`, and closes them itself."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = _arguments().parse_args(argv)
    own = launchers or Launchers()
    try:
        result, code = smoke(args, argv, own)
    except WRONG_USAGE as error:
        print(f"smoke_capture.py: {error}", file=sys.stderr)
        return 2
    except Unavailable as error:
        print(f"smoke_capture.py: {error}", file=sys.stderr)
        return 4
    except KeyboardInterrupt:
        print("smoke_capture.py: interrupted; every process was stopped", file=sys.stderr)
        return 3
    except Exception:
        traceback.print_exc()
        print("smoke_capture.py: this is a fault of the tool, not of the variants", file=sys.stderr)
        return 3
    finally:
        if launchers is None:
            own.close()
    if int(os.environ.get("RANK", "0")):
        return code
    table = report.table(result)
    if args.json == "-":
        print(json.dumps(result))
        print(table, file=sys.stderr)
    else:
        print(table)
        if args.json and not _kept(result, Path(args.json)):
            return 3
    if args.plot:
        try:
            plot.draw(result, args.plot)
        except OSError as error:
            print(f"smoke_capture.py: --plot {args.plot}: {error.strerror or error}", file=sys.stderr)
            return 3
    return code


def _kept(result: dict, path: Path) -> bool:
    """Writes the result; onto stdout where the file can no longer be written (a full disk), for a run may be long."""
    text = json.dumps(result)
    try:
        _write(path, text + "\n")
    except OSError as error:
        print(f"smoke_capture.py: --json {path}: {error.strerror or error}; it follows on stdout", file=sys.stderr)
        print(text)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
