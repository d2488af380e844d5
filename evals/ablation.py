#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What each part of the skill is good for: take it away, and see which cases the reference agent then fails.

A part is a rule (removed from the registry), a template (its file removed) or a section of SKILL.md (its text removed,
together with the pages that only it names). The reference agent knows a command, or a sentence to act by, only from
that text.

Usage:
    python evals/ablation.py [--write evals/results/builtin/ablation.json] [--only 'rule *'] [--jobs N]

Output: one line a part on stdout; with --write one JSON object with schema_version.

Exit codes: 0 done; 1 a case fails without any ablation; 2 usage; 3 upstream releases missing.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

EVALS = Path(__file__).resolve().parent
sys.path.insert(0, str(EVALS))

import agents  # noqa: E402
import cases as case_files  # noqa: E402
import run_evals  # noqa: E402
from cases import Case  # noqa: E402
from graders import files_of  # noqa: E402
from upstream import Upstream, UpstreamUnavailable  # noqa: E402

LIMITS = agents.Limits(seconds=120)
# Rules that decide a recommendation or a mend of some case; the others only report.
RULES = (
    "CG003", "CG101", "CG103", "CG105", "CG106", "CG201", "CG204", "CG205", "CG206", "CG301", "CG405",
)  # fmt: skip
TEMPLATES = ("torchrun_launch.sh.j2",)
SECTIONS = (
    "Instructions",
    "Available Scripts",
    "What fits which model",
    "Examples",
    "Troubleshooting",
    "Prerequisites",
)


def without_rule(code: str) -> Callable[[Path], None]:
    def ablate(skill: Path) -> None:
        path = skill / "helpers" / "cudagraphs" / "rules" / "registry.py"
        text = path.read_text(encoding="utf-8")
        old = "REGISTRY = Registry()\n"
        if old not in text:
            raise ValueError(f"{path.name} has no line {old!r}")
        dropped = (
            "class _Ablated(Registry):\n    def add(self, *rules):\n"
            f"        super().add(*(rule for rule in rules if rule.code != {code!r}))\n\n\nREGISTRY = _Ablated()\n"
        )
        path.write_text(text.replace(old, dropped), encoding="utf-8")

    return ablate


def without_template(name: str) -> Callable[[Path], None]:
    return lambda skill: (skill / "templates" / name).unlink()


def without_section(title: str) -> Callable[[Path], None]:
    """Take out a `##` or `###` section with all below it."""

    def ablate(skill: Path) -> None:
        path = skill / "SKILL.md"
        text = path.read_text(encoding="utf-8")
        found = re.search(rf"^(#+) {re.escape(title)}$", text, re.M)
        if not found:
            raise ValueError(f"SKILL.md has no section {title!r}")
        following = re.compile(rf"^#{{1,{len(found.group(1))}}} ", re.M).search(text, found.end())
        path.write_text(text[: found.start()] + (text[following.start() :] if following else ""), encoding="utf-8")

    return ablate


def parts() -> dict[str, Callable[[Path], None]]:
    found = {f"rule {code}": without_rule(code) for code in RULES}
    found.update({f"template {name}": without_template(name) for name in TEMPLATES})
    found.update({f"SKILL.md section {title}": without_section(title) for title in SECTIONS})
    return found


def result(case: Case, skill: Path, folder: Path) -> tuple[Path, dict[str, bytes], object]:
    """The reference's workspace, its files, and its transcript."""
    workspace = run_evals.prepare(case, skill, folder)
    transcript = agents.reference(case, workspace, LIMITS)
    return workspace, {name: (workspace / name).read_bytes() for name in files_of(workspace)}, transcript


def untouched(case: Case, part: str, before: str, after: str) -> bool:
    """Whether a part cannot matter to a case: the text shows all that it did, and no helper is run that could differ."""
    shown = [agents.missing_knowledge(step, text) for text in (before, after) for step in case.reference]
    same_text = shown[: len(case.reference)] == shown[len(case.reference) :]
    return same_text and (part.startswith("SKILL.md") or not any("run" in step for step in case.reference))


def run(
    names: Sequence[str], chosen: list[Case], jobs: int, upstream: Upstream, show: Callable[[str], None]
) -> tuple[dict[str, list[str]], list[str]]:
    """For each part the cases that fail without it; and the cases that fail as it is.

    What cannot differ is not done again: cases that a part does not touch are left out, and a case whose final files
    are the same as with the whole skill has the same grade.
    """
    table: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="ablation-") as scratch, ThreadPoolExecutor(jobs) as pool:
        skill = run_evals.package(Path(scratch, "whole"))

        def attempt(tree: Path, case: Case, same_as: dict | None) -> tuple[dict, bool]:
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                workspace, files, transcript = result(case, tree, Path(folder))
                if files == same_as:
                    return files, True
                return files, case.grader(upstream)(workspace, transcript).passed

        done = pool.map(lambda case: attempt(skill, case, None), chosen)
        whole = {case.id: found for case, found in zip(chosen, done)}
        broken = [case_id for case_id, (_, passed) in whole.items() if not passed]
        text = agents.skill_text(skill)
        for number, (name, ablate) in enumerate(parts().items()):
            if name not in names:
                continue
            tree = Path(scratch, f"part-{number}", skill.name)
            shutil.copytree(skill, tree)
            ablate(tree)
            left = agents.skill_text(tree)
            touched = [case for case in chosen if case.id not in broken and not untouched(case, name, text, left)]
            done = pool.map(lambda case: attempt(tree, case, whole[case.id][0])[1], touched)
            table[name] = [case.id for case, passed in zip(touched, done) if not passed]
            show(f"{name}: {', '.join(table[name]) or 'no case'}")
            shutil.rmtree(tree.parent)
    return table, broken


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--only", default="*", metavar="GLOB", help="parts by name")
    parser.add_argument("--cases", default="*", metavar="GLOB", help="case ids; negatives are left out")
    parser.add_argument("--jobs", type=int, default=2, metavar="N")
    arguments = parser.parse_args(argv)
    names = fnmatch.filter(parts(), arguments.only)
    if not names:
        parser.error(f"no part matches {arguments.only!r}; there are {', '.join(parts())}")
    chosen = [case for case in case_files.load(arguments.cases) if not case.negative]
    try:
        with Upstream() as upstream:
            table, broken = run(names, chosen, arguments.jobs, upstream, lambda line: print(line, flush=True))
    except UpstreamUnavailable as error:
        print(f"ablation: {error}", file=sys.stderr)
        return 3
    if arguments.write:
        document = {
            "schema_version": 1,
            "command": "python evals/ablation.py",
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "cases": len(chosen),
            "failing_with_the_whole_skill": broken,
            "parts": table,
        }
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for case_id in broken:
        print(f"fails with the whole skill: {case_id}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
