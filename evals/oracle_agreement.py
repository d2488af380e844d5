#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Count how often our verdict is upstream's, over the recorded answers of the released code, for BENCHMARK.md.

Runs the agreement tests of tests/oracle, which compare every recorded configuration, and keeps their counts.

Usage:
    python evals/oracle_agreement.py [--write evals/results/oracle/agreement.json]

Output: one line a release on stdout; with --write one JSON object with schema_version.

Exit codes: 0 no mismatch; 1 a test failed; 2 usage; 3 the tests printed no counts.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("tests/oracle/test_mcore_agreement.py", "tests/oracle/test_layers_agreement.py")
# what the tests print for each release: "NAME: ... {counts}, N mismatches"
LINE = re.compile(r"^\.?(?P<name>[\w.-]+(?: [\d.]+)?): .*?(?P<counts>\{.*?\}), (?P<mismatches>\d+) mismatches", re.M)


def counts(output: str) -> dict[str, dict[str, int]]:
    """Release -> accepted, rejected, left_out (upstream refuses them without graphs too), mismatches."""
    found = {}
    for match in LINE.finditer(output):
        kinds = ast.literal_eval(match["counts"])
        found[match["name"]] = {
            "accepted": kinds.get("accepted", 0),
            "rejected": kinds.get("rejected", 0),
            "left_out": kinds.get("left out", 0) + kinds.get("baseline_rejected", 0),
            "mismatches": int(match["mismatches"]),
        }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    command = [sys.executable, "-m", "pytest", "-s", *TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    table = counts(done.stdout)
    if not table:
        print(
            f"oracle_agreement: no counts; the tests said: {(done.stdout + done.stderr).strip()[-500:]}",
            file=sys.stderr,
        )
        return 3
    for name, row in table.items():
        print(
            f"{name}: {row['accepted']} accepted, {row['rejected']} rejected, {row['left_out']} left out, "
            f"{row['mismatches']} mismatches"
        )
    if arguments.write:
        total = {
            key: sum(row[key] for row in table.values()) for key in ("accepted", "rejected", "left_out", "mismatches")
        }
        document = {
            "schema_version": 1,
            "command": "python evals/oracle_agreement.py --write evals/results/oracle/agreement.json",
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "total": total,
            "releases": table,
        }
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if done.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
