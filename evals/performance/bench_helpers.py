#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long the command-line helpers take, beside what a user would otherwise run to learn the same.

Three comparisons, each of whole processes, interleaved round by round:
  - apply_overrides.py --diff and validate_constraints.py on the largest recipe file of the released Megatron Bridge
  wheel,
    beside starting Python and importing megatron.core, and beside building one TransformerConfig after that;
  - the same helpers right after installation, with nothing compiled yet;
  - batch mode of validate_constraints.py, beside upstream's own constructor on the same configurations, both with their
    start taken off (the time of the same process on one configuration).

Usage:
    python evals/performance/bench_helpers.py                                   print the table
    python evals/performance/bench_helpers.py --out evals/results/performance/helpers.json [--rounds 11] [--batch 4000]

Needs torch (for upstream's side) and the released wheels, which tests/wheels.py fetches once.

Output: a table on stdout; with --out one JSON object with schema_version, raw samples included.
Exit codes: 0 measured; 2 usage; 3 a wheel or torch is missing, or a process failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import wheels
from oracle import lattice

BRIDGE, MCORE, SEED = "0.6.2", "0.19.2", 20261130
HELPERS = ROOT / "helpers"
ORACLE = ROOT / "tests" / "oracle" / "transformer_config.py"
# Starts Python, imports megatron.core and stops: what must happen before any of upstream's checks can run.
IMPORT_ONLY = """\
import sys
sys.path[:0] = [{tests!r}, {mcore!r}]
from oracle import standins
standins.complete_environment()
standins.install(["triton"], {{"triton": {{"__version__": "3.6.0"}}}})
from megatron.core.transformer.transformer_config import TransformerConfig
"""


class Sample(NamedTuple):
    """One process: wall-clock and CPU seconds, and peak memory in MiB."""

    wall_s: float
    cpu_s: float
    peak_mib: float


class Contender(NamedTuple):
    name: str
    command: list[str]
    stdin: str = ""
    fresh_cache: bool = False


def timed(contender: Contender, environment: dict[str, str]) -> Sample:
    """Run one process and wait for it. Raises RuntimeError where it fails (1, findings, is no failure)."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "stdin"
        source.write_text(contender.stdin)
        if contender.fresh_cache:
            environment = {**environment, "PYTHONPYCACHEPREFIX": scratch}
        with source.open() as stdin, open(os.devnull, "w") as nothing:
            start = time.perf_counter()
            process = subprocess.Popen(
                contender.command, stdin=stdin, stdout=nothing, stderr=subprocess.PIPE, env=environment
            )
            stderr = process.stderr.read()
            _, status, usage = os.wait4(process.pid, 0)
            wall = time.perf_counter() - start
            process.returncode = os.waitstatus_to_exitcode(status)
            process.stderr.close()
    if process.returncode not in (0, 1):
        raise RuntimeError(
            f"{contender.name}: exit code {process.returncode}: {stderr.decode(errors='replace').strip()[-300:]}"
        )
    return Sample(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def interleaved(contenders: Sequence[Contender], rounds: int) -> dict[str, list[Sample]]:
    """Samples by contender; one round before the first is thrown away, so that files are in the page cache and
    compiled."""
    environment = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONPATH")
    }
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
    for number in range(-1, rounds):
        order = list(contenders) if number % 2 else list(reversed(contenders))
        for contender in order:
            sample = timed(contender, environment)
            if number >= 0:
                samples[contender.name].append(sample)
    return samples


def largest_recipe(root: Path) -> tuple[Path, str]:
    """The recipe file with the most lines, and its first recipe function."""
    package = root / "megatron" / "bridge"
    files = [path for folder in ("recipes", "perf_recipes") for path in (package / folder).rglob("*.py")]
    path = max(files, key=lambda each: (len(each.read_bytes().splitlines()), str(each)))
    names = [
        line.split("(")[0].removeprefix("def ") for line in path.read_text().splitlines() if line.startswith("def ")
    ]
    return path, next(name for name in names if name.endswith("_config") and not name.startswith("_"))


def contenders(recipe: Path, function: str, mcore: Path) -> list[Contender]:
    python = sys.executable
    versions = ["--bridge", BRIDGE, "--mcore", MCORE]
    one = json.dumps({"id": 0, "fields": {}}) + "\n"
    apply = [python, str(HELPERS / "apply_overrides.py"), str(recipe), "--function", function, "--diff", *versions]
    validate = [python, str(HELPERS / "validate_constraints.py"), str(recipe)]
    return [
        Contender("start Python", [python, "-c", "pass"]),
        Contender("apply_overrides --diff", apply),
        Contender("validate_constraints", [*validate, "--function", function, *versions]),
        Contender("validate_constraints, every function of the file", [*validate, *versions]),
        Contender("apply_overrides --diff, nothing compiled", apply, fresh_cache=True),
        Contender(
            "import megatron.core", [python, "-c", IMPORT_ONLY.format(tests=str(ROOT / "tests"), mcore=str(mcore))]
        ),
        Contender("import megatron.core and build a TransformerConfig", [python, str(ORACLE), MCORE], one),
    ]


def batch_contenders(count: int) -> list[Contender]:
    requests = list(lattice.random_configurations("0.19", SEED, count))
    many = "".join(json.dumps(request) + "\n" for request in requests)
    one = json.dumps(requests[0]) + "\n"
    ours = [
        sys.executable,
        str(HELPERS / "validate_constraints.py"),
        "--fields-jsonl",
        "-",
        "--mcore",
        MCORE,
        "--te",
        "2.14",
    ]
    upstream = [sys.executable, str(ORACLE), MCORE]
    return [
        Contender("batch mode, one", ours, one),
        Contender("batch mode, all", ours, many),
        Contender("upstream's constructor, one", upstream, one),
        Contender("upstream's constructor, all", upstream, many),
    ]


def machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "cpu": model,
        "cpus": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "system": platform.system(),
    }


def revision() -> str:
    done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def summary(samples: dict[str, list[Sample]]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "wall_s_median": round(statistics.median(s.wall_s for s in each), 4),
            "wall_s_min": round(min(s.wall_s for s in each), 4),
            "cpu_s_median": round(statistics.median(s.cpu_s for s in each), 4),
            "peak_mib": round(max(s.peak_mib for s in each), 1),
        }
        for name, each in samples.items()
    }


def ratios(table: dict[str, dict[str, float]], count: int) -> dict[str, float]:
    """Ratios of CPU seconds, which other work on the machine disturbs least; both sides of each are single-threaded
    work."""

    def cpu(name: str) -> float:
        return table[name]["cpu_s_median"]

    def rate(name: str) -> float:
        return (count - 1) / max(1e-9, cpu(f"{name}, all") - cpu(f"{name}, one"))

    imported = cpu("import megatron.core")
    return {
        "apply_times_faster_than_the_import": round(imported / cpu("apply_overrides --diff"), 2),
        "validate_times_faster_than_the_import": round(imported / cpu("validate_constraints"), 2),
        "apply_wall_times_faster_than_the_import": round(
            table["import megatron.core"]["wall_s_median"] / table["apply_overrides --diff"]["wall_s_median"], 2
        ),
        "batch_configurations_a_second": round(rate("batch mode")),
        "upstream_configurations_a_second": round(rate("upstream's constructor")),
        "batch_times_upstream": round(rate("batch mode") / rate("upstream's constructor"), 2),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--batch", type=int, default=4000, metavar="N", help="configurations in a batch")
    parser.add_argument("--batch-rounds", type=int, default=3)
    args = parser.parse_args(argv)
    if args.rounds < 1 or args.batch < 2 or args.batch_rounds < 1:
        parser.error("rounds and batch must be positive")
    try:
        torch_version = metadata.version("torch")  # not imported: a child's peak memory starts at its parent's
        bridge, mcore = wheels.fetch("megatron-bridge", BRIDGE), wheels.fetch("megatron-core", MCORE)
        recipe, function = largest_recipe(bridge)
        before = machine()
        samples = interleaved(contenders(recipe, function, mcore), args.rounds)
        samples.update(interleaved(batch_contenders(args.batch), args.batch_rounds))
    except (wheels.WheelUnavailable, metadata.PackageNotFoundError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    table = summary(samples)
    found = ratios(table, args.batch)
    for name, row in table.items():
        print(f"{name:52} {row['wall_s_median']:8.3f} s  {row['cpu_s_median']:8.3f} s CPU  {row['peak_mib']:8.1f} MiB")
    for name, ratio in found.items():
        print(f"{name:52} {ratio:8}")
    if args.out:
        document = {
            "schema_version": 1,
            "command": "python evals/performance/bench_helpers.py",
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "revision": revision(),
            "machine": before,
            "versions": {
                "python": platform.python_version(),
                "torch": torch_version,
                "megatron-bridge": BRIDGE,
                "megatron-core": MCORE,
            },
            "configuration": {
                "recipe": recipe.relative_to(bridge).as_posix(),
                "lines": len(recipe.read_bytes().splitlines()),
                "function": function,
                "rounds": args.rounds,
                "batch": args.batch,
                "batch_rounds": args.batch_rounds,
                "seed": SEED,
            },
            "summary": table,
            "ratios": found,
            "samples": {name: [sample._asdict() for sample in each] for name, each in samples.items()},
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
