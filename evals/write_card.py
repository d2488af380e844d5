#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the part of card.yaml that comes from result files and rules: validated versions, measured results, rule index.

Usage:
    python evals/write_card.py            rewrite the generated part in place
    python evals/write_card.py --check    say whether it is up to date

Output: one line. Exit codes: 0 written, or up to date; 1 out of date (--check); 2 card.yaml or a result file cannot be
read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "helpers"), str(ROOT / "evals")]

import result_files  # noqa: E402
from cudagraphs.cli import Parser  # noqa: E402
from cudagraphs.rules import REGISTRY  # noqa: E402
from smoke_summary import command, load, parallel, verdict  # noqa: E402

CARD = ROOT / "card.yaml"
RESULTS = ROOT / "evals" / "results"
ORACLE = ROOT / "tests" / "oracle" / "data"
MARKER = "# Below: written by `python evals/write_card.py` from result files and rules.\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="write_card.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args(argv)
    try:
        old = CARD.read_text(encoding="utf-8")
        written, marker, _ = old.partition(MARKER)
        if not marker:
            raise ValueError(f"the line `{MARKER.strip()}` is missing; put it where the generated part begins")
    except (OSError, ValueError) as error:
        print(f"write_card: {CARD}: {error}", file=sys.stderr)
        return 2
    try:
        new = written + MARKER + generated()
    except result_files.ResultError as error:
        print(f"write_card: {error}", file=sys.stderr)
        return 2
    if arguments.check:
        print("card.yaml is up to date" if new == old else "card.yaml is out of date; run python evals/write_card.py")
        return int(new != old)
    CARD.write_text(new, encoding="utf-8")
    print(f"card.yaml: {new.count(chr(10))} lines")
    return 0


def generated() -> str:
    measured = sorted(measured_results(), key=lambda row: row["file"])
    document = {
        "validated_on": max([row["date"] for row in measured] + [validation_date()]),
        "validated_versions": validated_versions(),
        "measured_results": measured,
        "rule_index": {rule.code: rule.title for rule in REGISTRY},
    }
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120)


def validation_date() -> str:
    recorded = [result_files.load(path, "python tests/oracle/record.py") for path in ORACLE.glob("mcore-*.json.xz")]
    return max((str(document.get("date", ""))[:10] for document in recorded), default="")


def validated_versions() -> list[dict[str, Any]]:
    """Each component's versions with how they were validated."""
    cores = sorted(path.name.removeprefix("mcore-").removesuffix(".json.xz") for path in ORACLE.glob("mcore-*.json.xz"))
    rows = [{"component": "megatron-core", "versions": cores, "how": "oracle", "evidence": "tests/oracle/data"}]
    on_gpu: dict[str, set[str]] = {}
    for path in (RESULTS / "gpu").glob("smoke-*.json"):
        for component, version in load(path)["versions"].items():
            if component in ("megatron-core", "transformer-engine", "torch"):
                on_gpu.setdefault(component, set()).add(version)
    rows += [
        {"component": name, "versions": sorted(found), "how": "gpu-run", "evidence": "evals/results/gpu"}
        for name, found in sorted(on_gpu.items())
    ]
    rows.append({"component": "megatron-bridge", "versions": ["0.6.2"], "how": "execution", "evidence": "tests/test_recipe_corpus.py"})
    rows.append({"component": "megatron-bridge", "versions": ["0.3.1", "0.4.2", "0.5.1"], "how": "reading"})
    rows.append({"component": "nemo-automodel", "versions": ["0.7.0"], "how": "oracle", "evidence": "tests/oracle"})
    return rows


def measured_results() -> Iterator[dict[str, Any]]:
    for path in sorted((RESULTS / "gpu").glob("smoke-*.json")):
        yield from smoke(path, load(path))


def smoke(path: Path, result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row a variant that has a verdict of its own."""
    shape = result["shape"]
    what = f"{result['stack']} {result['model']}, {result['precision']}{parallel(result)}, {shape['layers']} layers, hidden {shape['hidden']}, sequence {shape['sequence']}"
    for variant in result["variants"]:
        if variant["verdict"] == "baseline" or variant["verdict"].startswith("eager against itself"):
            continue
        yield {
            "what": f"{what}: {variant['name']}",
            "result": verdict(result, variant),
            "date": result["date"][:10],
            "machine": result["machine"].get("gpu", "CPU"),
            "versions": ", ".join(f"{k} {v}" for k, v in result["versions"].items() if k in ("torch", "transformer-engine", "megatron-core")),
            "file": str(path.relative_to(ROOT)),
            "command": command(result),
        }


if __name__ == "__main__":
    sys.exit(main())
