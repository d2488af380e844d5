#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Markdown tables from the result files of helpers/smoke_capture.py.

Usage:
  python evals/smoke_summary.py evals/results/gpu/smoke-*.json
  python evals/smoke_summary.py --plots references/images evals/results/gpu/smoke-*.json

Output: the tables on stdout; `--json` puts one object with the figures behind them there instead. `--plots FOLDER` also
draws each file as FOLDER/NAME.svg.

Exit codes: 0 done, 2 a file that is missing or no whole result of smoke_capture.py, or plots that cannot be written.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "helpers"), str(Path(__file__).resolve().parent)]
import result_files  # noqa: E402
from cudagraphs import rules, versions  # noqa: E402
from cudagraphs.capture import report  # noqa: E402
from cudagraphs.cli import Parser  # noqa: E402
from result_files import ResultError  # noqa: E402

SCHEMA_VERSION = 1
MADE_BY = "python helpers/smoke_capture.py --json FILE"
_MIB = 2**20
# What runs are made with and without.
_ALLOCATION = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "NCCL_GRAPH_REGISTER")
_HEAD = (
    "Variant",
    "Captured",
    "Parity",
    "Step, ms (p10 to p90)",
    "Speedup (95%)",
    "Memory, MiB",
    "Capture, s",
    "Graph launches a step",
    "Cleanup, s",
)


def load(path: Path) -> dict:
    """A whole result, with its file name under `file`. Raises ResultError for one that cannot be shown."""
    result = result_files.load(path, MADE_BY)
    if result.get("tool") != "smoke_capture":
        raise ResultError(f"{path}: not a result of smoke_capture.py; one is written with `{MADE_BY}`")
    with result_files.reading(path, MADE_BY):
        result["file"] = path.name
        if "cudnn" in result["versions"]:  # older results hold the number that torch gives
            result["versions"]["cudnn"] = versions.dotted_cudnn(result["versions"]["cudnn"])
        figures(result)
        _section(result)
        [verdict(result, out) for out in result["variants"]]
    return result


def shared(result: dict) -> bool:
    """Whether ranks shared a GPU. Results that do not say how many GPUs there were are of one rank each."""
    used = result["parallel"]
    return 0 < used.get("gpus", 0) < used["world"]


def times_count(result: dict) -> bool:
    """Whether the times say anything: not where ranks shared a GPU, nor after a single round."""
    return not shared(result) and max((len(out["rounds_ms"]) for out in result["variants"]), default=0) != 1


def figures(result: dict) -> dict:
    """The figures that documents quote from one result, rounded as they are quoted."""
    eager = next(out for out in result["variants"] if out["name"] == "none")
    busy = eager["busy"]
    return {
        "file": result["file"],
        "command": result["command"],
        "date": result["date"],
        "revision": result["revision"],
        "gpu": result["machine"].get("gpu"),
        "versions": result["versions"],
        "model": result["model"],
        "stack": result["stack"],
        "precision": result["precision"],
        "shape": result["shape"],
        "eager_ms": round(eager["timing"]["median"], 2) if eager["timing"] else None,
        "busy_share": round(busy["busy_share"], 3) if busy else None,
        "best_speedup": round(busy["best_speedup"], 2) if busy else None,
        "times_count": times_count(result),
        "seconds": round(result["seconds"]["total"], 1),
        "recommended": result["recommendation"]["variant"],
        "variants": {out["name"]: _figures_of(out) for out in result["variants"] if out["captured"] is not None},
    }


def _figures_of(out: dict) -> dict:
    speed = out["speedup"]
    return {
        "captured": out["captured"],
        "parity": out["parity"]["verdict"] if out["parity"] else None,
        "step_ms": round(out["timing"]["median"], 2) if out["timing"] else None,
        "speedup": round(speed["value"], 2) if speed else None,
        "interval": [round(speed["low"], 2), round(speed["high"], 2)] if speed else None,
        "verdict": speed["verdict"] if speed else None,
        "memory_mib": round(out["memory_cost"] / _MIB) if out["memory_cost"] is not None else None,
        "failure": _cause(out),
        "against_rules": out["against_rules"],
    }


def _cause(out: dict) -> str | None:
    failure = out["failure"]
    if not failure:
        return None
    name = f"{failure['name']} ({failure['code']})" if failure["code"] else failure["kind"]
    return f"{name} in {failure['phase']}"


def summary(results: list[dict]) -> str:
    """One section a result: what ran, how busy the GPU was, and a row a variant. `results` come from `load` or have a
    `file`."""
    return "\n\n".join(_section(result) for result in results) + "\n" if results else ""


def _section(result: dict) -> str:
    quoted = figures(result)
    shape = result["shape"]
    size = f"{shape['layers']} layers, hidden {shape['hidden']}, sequence {shape['sequence']}, "
    size += f"{shape['microbatches']} microbatches"
    if shape["experts"]:
        size += f", {shape['experts']} experts top-{shape['top_k']}"
    lines = [f"### {result['stack']}, {result['model']}, {result['precision']}{parallel(result)}: {size}", ""]
    if not times_count(result):
        lines.append("Parity, replay and exits only: the times of this run say nothing.")
    elif quoted["busy_share"] is not None:
        lines.append(
            f"Eager step {quoted['eager_ms']} ms, GPU busy {quoted['busy_share']:.0%} of it: no graph can give more "
            f"than {quoted['best_speedup']}x. Eager against its own repeat: {_repeat(result)}. Recommended: "
            f"`{quoted['recommended']}`."
        )
    else:
        lines.append(f"Eager gave no figures: {_cause(result['variants'][0]) or 'see the file'}.")
    lines += [
        "",
        "| " + " | ".join(_HEAD) + " |",
        "|" + "---|" * len(_HEAD),
        *(
            "| " + " | ".join(_row(out, times_count(result))) + " |"
            for out in result["variants"]
            if out["captured"] is not None
        ),
    ]
    codes = ", ".join(rule.code for rule in rules.REGISTRY if f"/{result['file']}" in rule.source)
    since = f" (since then: {codes})" if codes else ""
    wrong = [f"- `{out['name']}`: {out['against_rules']}{since}" for out in result["variants"] if out["against_rules"]]
    if wrong:
        lines += ["", *wrong]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items() if number)
    lines += [
        "",
        f"From `{result['file']}`, {result['machine'].get('gpu', 'CPU')}, {result['date'][:10]}, {versions}:",
        f"`{command(result)}`",
    ]
    return "\n".join(lines)


def parallel(result: dict) -> str:
    """What several GPUs do, and what the environment and the options set; empty where there is nothing to say."""
    used = result["parallel"]
    sizes = {"tensor": "TP", "pipeline": "PP", "virtual": "VPP", "expert": "EP"}
    options = ("overlap_grad_reduce", "distributed_optimizer", "overlap_param_gather")
    parts = []
    if used["world"] > 1:
        several = f"{used['world']} ranks that share {used['gpus']} GPU" if shared(result) else f"{used['world']} GPUs"
        parts.append(several)
    parts += [f"{short}{used[name]}" for name, short in sizes.items() if used.get(name, 1) > 1]
    parts += [name for name in options if used.get(name)]
    parts += [f"{name}={value}" for name, value in sorted(result["environment"].items()) if name in _ALLOCATION]
    return "".join(f", {part}" for part in parts)


def command(result: dict) -> str:
    """The command with its environment and launcher, each option once."""
    used, words = result["parallel"], shlex.split(result["command"])
    text = shlex.join([*words[:2], *report.recorded(words[2:])])
    if shared(result):
        text = text.replace("python ", f"python evals/multi_gpu/share_gpu.py --ranks {used['world']} -- ", 1)
    elif used["world"] > 1:
        text = text.replace("python ", f"torchrun --nproc-per-node {used['world']} ", 1)
    return "".join(
        f"{name}={value} " for name, value in sorted(result["environment"].items()) if name in _ALLOCATION
    ) + text


def verdict(result: dict, out: dict) -> str:
    """The verdict of a variant, without its speed where the times say nothing."""
    if times_count(result) or not out["speedup"]:
        return out["verdict"]
    parts = out["verdict"].split(", ")
    return ", ".join(part for part in parts if not re.match(r"(faster|slower|neutral) [\d.]+x \[[\d.]+$|[\d.]+\]$", part))


def _repeat(result: dict) -> str:
    twin = next((out for out in result["variants"] if out["name"] == "none (repeat)"), None)
    if twin is None or not twin["speedup"]:
        return "not measured"
    speed = twin["speedup"]
    numbers = (
        ""
        if not twin["parity"]
        else ", equal to the last bit"
        if twin["parity"]["bitwise"]
        else (f", gradients {twin['parity']['gradients']:.1e} apart")
    )
    return f"{speed['value']:.2f}x [{speed['low']:.2f}, {speed['high']:.2f}]{numbers}"


def _parity(out: dict) -> str:
    """The verdict; of each rank where there are several and they differ."""
    if not out["parity"]:
        return ""
    verdicts = [one["parity"]["verdict"] if one["parity"] else "none" for one in out.get("ranks") or ()]
    return out["parity"]["verdict"] if len(set(verdicts)) < 2 else ", ".join(verdicts) + " (by rank)"


def _row(out: dict, times: bool) -> tuple[str, ...]:
    steps, speed, cleanup = out["timing"] if times else None, out["speedup"] if times else None, out["cleanup"]
    launches = out["replay"]["profiler_launches"]
    return (
        f"`{out['name']}`",
        "yes" if out["captured"] else f"no: {_cause(out) or 'nothing was replayed'}",
        _parity(out),
        f"{steps['median']:.2f} ({steps['p10']:.2f} to {steps['p90']:.2f})" if steps else "",
        f"**{speed['verdict']}** {speed['value']:.2f}x ({speed['low']:.2f} to {speed['high']:.2f})" if speed else "",
        f"{out['memory_cost'] / _MIB:+.0f}" if out["memory_cost"] is not None else "",
        f"{out['capture_s']:.1f}" if out["captures"] else "",
        f"{launches:.0f}" if launches is not None else "",
        f"{cleanup['total_s']:.1f}" if cleanup else "",
    )


def _draw(results: list[dict], folder: Path) -> None:
    from cudagraphs.capture import plot

    folder.mkdir(parents=True, exist_ok=True)
    for result in results:
        with result_files.reading(folder / result["file"], MADE_BY):
            plot.draw(result, folder / f"{Path(result['file']).stem}.svg")


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="smoke_summary.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="needs matplotlib")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        results = [load(path) for path in args.files]
        if args.plots:
            _draw(results, args.plots)
    except ResultError as error:
        print(f"smoke_summary.py: {error}", file=sys.stderr)
        return 2
    except ImportError:
        print("smoke_summary.py: --plots needs matplotlib (pip install matplotlib)", file=sys.stderr)
        return 2
    except OSError as error:
        why = f"{error.strerror or error}; give a folder that can be written to"
        print(f"smoke_summary.py: --plots {args.plots}: {why}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"schema_version": SCHEMA_VERSION, "results": [figures(result) for result in results]}))
    else:
        print(summary(results), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
