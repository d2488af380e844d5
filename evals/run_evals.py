#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run agents on the eval cases, grade what they leave, and compare arms.

Usage:
    python evals/run_evals.py --agent reference --arm with_skill
    python evals/run_evals.py --agent 'command:claude -p {prompt} --output-format stream-json --verbose' \\
        --arm with_skill --arm without_skill --cases 'repair-*' --repeat 3 --jobs 2 --output out
    python evals/run_evals.py --agent replay:evals/results/agents --arm with_skill --arm without_skill
    python evals/run_evals.py --grade FOLDER --cases moe-dropless       grade one workspace
    python evals/run_evals.py --prepare FOLDER --arm with_skill         workspaces and tasks, to be worked in elsewhere
    python evals/run_evals.py --collect FOLDER --agent NAME --record evals/results/agents       grade and record those

Arms: with_skill (the packaged skill lies in .agents/skills of the workspace), without_skill, other:DIR (another skill
folder). Every run has a workspace of its own outside the repository: the case's workspace folder, and nothing of the
expectations. Agent specs: see evals/agents.py.

Output: one line a run on stderr, the table of arms on stdout; with --output DIR also
DIR/<arm>/<case>/run-N/grading.json and transcript.json, and DIR/benchmark.json (run_summary, by category, difference
between with_skill and without_skill with a 95% interval over cases); with --record DIR the transcripts and final files
in the form that replay: reads.

Exit codes: 0 every run passed; 1 a run failed its grader; 2 usage, or an agent that cannot be used; 3 upstream
releases missing.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

EVALS = Path(__file__).resolve().parent
sys.path.insert(0, str(EVALS))

import agents  # noqa: E402
import cases as case_files  # noqa: E402
from cases import SKILL, Case, CaseError  # noqa: E402
from graders import Grade, Transcript, changed_files, files_of  # noqa: E402
from upstream import Upstream, UpstreamUnavailable  # noqa: E402

ROOT = EVALS.parent
BOOTSTRAP = 10_000


@dataclass
class Run:
    """One agent on one case."""

    case: Case
    arm: str
    number: int
    transcript: Transcript
    grade: Grade

    def summary(self) -> dict:
        helpers = self.transcript.uses(f"skills/{SKILL}/helpers")
        return {
            "case": self.case.id,
            "category": self.case.category,
            "run": self.number,
            "passed": self.grade.passed,
            "failed_checks": [check.text for check in self.grade.checks if not check.passed],
            "tool_calls": len(self.transcript.actions),
            "tokens": self.transcript.tokens,
            "seconds": round(self.transcript.seconds, 2),
            "helper_commands": len(helpers),
            "stopped": self.transcript.stopped or None,
        }


def package(into: Path) -> Path:
    """The skill as it is installed, in a folder; made once and copied into each workspace."""
    into.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(ROOT / "helpers" / "package_skill.py"), "--install", str(into)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise agents.AgentError(f"the skill cannot be packaged: {done.stderr.strip()}")
    return into / ".agents" / "skills" / SKILL


def prepare(case: Case, skill: Path | None, folder: Path) -> Path:
    """A fresh workspace: the case's files, and the skill where the arm has one."""
    workspace = folder / "workspace"
    shutil.copytree(case.workspace, workspace)
    if skill is not None:
        shutil.copytree(skill, workspace / ".agents" / "skills" / skill.name)
    return workspace


def run_one(
    agent: agents.Agent, case: Case, arm: str, number: int, skill: Path | None, upstream: Upstream, limits, record
) -> Run:
    with tempfile.TemporaryDirectory(prefix="eval-") as scratch:
        workspace = prepare(case, skill, Path(scratch))
        transcript = agent(case, workspace, limits)
        grade = case.grader(upstream)(workspace, transcript)
        if record is not None:
            write_record(record / arm.replace(":", "_") / case.id, case, workspace, transcript, grade)
    return Run(case, arm, number, transcript, grade)


def write_record(folder: Path, case: Case, workspace: Path, transcript: Transcript, grade: Grade, **facts) -> None:
    """Prompt, actions, final files and grade of one run, for replay."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    changed = changed_files(case.workspace, workspace)
    here = files_of(workspace)
    for name in sorted(changed & here):
        (folder / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(workspace / name, folder / "files" / name)
    actions = [
        {key: agents.scrub(str(value), workspace) for key, value in action.items()} for action in transcript.actions
    ]
    document = {
        "case": case.id, "prompt": case.prompt, **facts, "actions": actions,
        "final_message": agents.scrub(transcript.final_message, workspace), "seconds": transcript.seconds or None,
        "tokens": transcript.tokens, "stopped": transcript.stopped, "deleted": sorted(changed - here),
        "grade": grade.as_json(),
    }  # fmt: skip
    (folder / "transcript.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


# -- numbers -----------------------------------------------------------------------------------------------------------


def arm_summary(runs: list[Run]) -> dict:
    categories = sorted({run.case.category for run in runs})
    rows = [run.summary() for run in runs]
    tokens = [row["tokens"] for row in rows if row["tokens"]]
    return {
        "runs": len(runs),
        "cases": len({run.case.id for run in runs}),
        "pass_rate": {"mean": rate(runs), "stddev": statistics.pstdev([float(run.grade.passed) for run in runs])},
        "by_category": {name: rate([run for run in runs if run.case.category == name]) for name in categories},
        "tool_calls": {"mean": statistics.mean(row["tool_calls"] for row in rows)},
        "time_seconds": {"mean": statistics.mean(row["seconds"] for row in rows)},
        "tokens": {"mean": statistics.mean(tokens) if tokens else None},
    }


def rate(runs: list[Run]) -> float:
    return sum(run.grade.passed for run in runs) / len(runs)


def difference(first: list[Run], second: list[Run], seed: int = 0) -> dict | None:
    """Pass rate of the first arm minus that of the second over the cases that both ran; 95% bootstrap interval."""
    rates = []
    for case_id in sorted({run.case.id for run in first} & {run.case.id for run in second}):
        pair = [[run for run in arm if run.case.id == case_id] for arm in (first, second)]
        rates.append(rate(pair[0]) - rate(pair[1]))
    if not rates:
        return None
    draw = random.Random(seed)
    means = sorted(statistics.mean(draw.choices(rates, k=len(rates))) for _ in range(BOOTSTRAP))
    low, high = means[int(0.025 * BOOTSTRAP)], means[int(0.975 * BOOTSTRAP) - 1]
    return {"cases": len(rates), "pass_rate": statistics.mean(rates), "low": low, "high": high}


def benchmark(runs: list[Run], agent: str, repeat: int) -> dict:
    arms = list(dict.fromkeys(run.arm for run in runs))
    by_arm = {arm: [run for run in runs if run.arm == arm] for arm in arms}
    summary = {arm: arm_summary(by_arm[arm]) for arm in arms}
    if "with_skill" in by_arm and "without_skill" in by_arm:
        summary["delta"] = difference(by_arm["with_skill"], by_arm["without_skill"])
    return {
        "schema_version": 1,
        "skill_name": SKILL,
        "agent": agent,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "repeat": repeat,
        "run_summary": summary,
        "runs": [{"configuration": run.arm, **run.summary()} for run in runs],
    }


def table(document: dict) -> str:
    lines = [f"{'arm':24} {'runs':>5} {'passed':>7} {'tool calls':>11} {'seconds':>8} {'tokens':>9}"]
    for arm, row in document["run_summary"].items():
        if arm == "delta":
            if row:
                lines.append(
                    f"difference in pass rate over {row['cases']} cases: {row['pass_rate']:+.1%} "
                    f"[{row['low']:+.1%}, {row['high']:+.1%}]"
                )
            continue
        tokens = f"{row['tokens']['mean']:9.0f}" if row["tokens"]["mean"] else "        -"
        lines.append(
            f"{arm:24} {row['runs']:5} {row['pass_rate']['mean']:7.1%} {row['tool_calls']['mean']:11.1f} "
            f"{row['time_seconds']['mean']:8.1f} {tokens}"
        )
    return "\n".join(lines)


# -- the command -------------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run_evals.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agent", metavar="SPEC", help="see evals/agents.py")
    parser.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="ARM",
        help="with_skill (default), without_skill, other:DIR; repeatable",
    )
    parser.add_argument("--cases", default="*", metavar="GLOB", help="case ids")
    parser.add_argument("--repeat", type=int, default=1, metavar="N")
    parser.add_argument("--jobs", type=int, default=1, metavar="N")
    parser.add_argument(
        "--time-limit", type=float, default=600.0, metavar="S", help="seconds for one run (default 600)"
    )
    parser.add_argument(
        "--turns", type=int, default=60, metavar="N", help="model calls for one run of an endpoint (default 60)"
    )
    parser.add_argument("--output", type=Path, metavar="DIR")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="only what benchmark.json holds")
    parser.add_argument("--record", type=Path, metavar="DIR", help="keep transcripts and final files for replay")
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="only write workspaces and tasks")
    parser.add_argument(
        "--collect", type=Path, metavar="DIR", help="grade the workspaces of --prepare after agents worked there"
    )
    parser.add_argument(
        "--grade", type=Path, metavar="DIR", help="grade a workspace of the one case that --cases names"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    try:
        chosen = case_files.load(arguments.cases)
        if not chosen:
            raise agents.AgentError(f"no case matches {arguments.cases!r}; `python evals/cases.py` lists them")
        for arm in arguments.arm:
            if arm not in ("with_skill", "without_skill") and not (arm.startswith("other:") and Path(arm[6:]).is_dir()):
                raise agents.AgentError(f"--arm {arm}: with_skill, without_skill, or other:DIR with an existing folder")
        if arguments.collect:
            return collect(arguments, chosen)
        if arguments.grade:
            return grade_folder(chosen, arguments.grade)
        return run_all(arguments, chosen, arguments.arm or ["with_skill"])
    except (CaseError, agents.AgentError) as error:
        print(f"run_evals: {error}", file=sys.stderr)
        return 2
    except UpstreamUnavailable as error:
        print(f"run_evals: {error}", file=sys.stderr)
        return 3


def grade_folder(chosen: list[Case], folder: Path) -> int:
    if len(chosen) != 1 or not folder.is_dir():
        raise agents.AgentError("--grade DIR wants an existing folder, and one case by --cases")
    file = folder.parent / "transcript.json"
    transcript = Transcript(**json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else Transcript()
    with Upstream() as upstream:
        grade = chosen[0].grader(upstream)(folder, transcript)
    print(json.dumps(grade.as_json(), indent=1))
    return 0 if grade.passed else 1


def run_all(arguments: argparse.Namespace, chosen: list[Case], arms: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="eval-skill-") as scratch, Upstream() as upstream:
        skills = {arm: skill_of(arm, Path(scratch)) for arm in arms}
        if arguments.prepare:
            return write_workspaces(arguments.prepare, chosen, skills)
        if not arguments.agent:
            raise agents.AgentError("--agent is needed; evals/agents.py lists the specs")
        limits = agents.Limits(arguments.time_limit, arguments.turns)
        jobs = [(arm, case, number) for number in range(1, arguments.repeat + 1) for arm in arms for case in chosen]

        def work(job: tuple[str, Case, int]) -> Run | None:
            arm, case, number = job
            agent = agents.make(arguments.agent, arm)
            try:
                run = run_one(agent, case, arm, number, skills[arm], upstream, limits, arguments.record)
            except agents.AgentError as error:
                if arguments.agent.startswith("replay:"):
                    return None  # not every case was recorded
                raise error
            state = "pass" if run.grade.passed else f"FAIL {'; '.join(run.summary()['failed_checks'])}"
            print(f"{arm} {case.id} run {number}: {state}", file=sys.stderr, flush=True)
            return run

        with ThreadPoolExecutor(arguments.jobs) as pool:
            runs = [run for run in pool.map(work, jobs) if run is not None]
    if not runs:
        raise agents.AgentError("nothing was run: no recorded run matches")
    document = benchmark(runs, arguments.agent, arguments.repeat)
    if arguments.output:
        write_output(arguments.output, runs, document)
    if arguments.summary:
        arguments.summary.parent.mkdir(parents=True, exist_ok=True)
        arguments.summary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(table(document))
    return 0 if all(run.grade.passed for run in runs) else 1


def skill_of(arm: str, scratch: Path) -> Path | None:
    if arm == "without_skill":
        return None
    return package(scratch / "skill") if arm == "with_skill" else Path(arm[6:]).resolve()


TASK = """\
You work in the folder {workspace} and nowhere else: look at no file outside it, and use no web search. `{python}` has
PyYAML and Jinja2 where you need Python. First run `date +%s > {folder}/started`, as the last thing
`date +%s > {folder}/ended`.
{skills}
The task, as the user wrote it:

{prompt}

When you are done, write {folder}/transcript.json: {{"actions": [{{"tool": "shell" or "edit" or "read", "input": "<the
command, or the file>", "output": "<what came of it, in a line>"}}, one for each command, edit and read in order],
"final_message": "<your answer to the user>"}}.
"""
SKILLS = """\
Skills of this project (read the SKILL.md of one before you start, if it fits the task):
- {name} ({path}/SKILL.md): {description}
"""


def write_workspaces(target: Path, chosen: list[Case], skills: dict[str, Path | None]) -> int:
    """DIR/<case>/<arm>/workspace and task.txt, which holds all that an agent is to be told."""
    for arm, skill in skills.items():
        for case in chosen:
            folder = (target / case.id / arm.replace(":", "_")).resolve()
            folder.mkdir(parents=True)
            workspace = prepare(case, skill, folder)
            listed = ""
            if skill is not None:
                text = (skill / "SKILL.md").read_text(encoding="utf-8")
                description = next(line for line in text.splitlines() if line.startswith("description: "))[13:]
                path = workspace / ".agents" / "skills" / skill.name
                listed = SKILLS.format(name=skill.name, path=path, description=description)
            task = TASK.format(
                workspace=workspace, folder=folder, python=sys.executable, skills=listed, prompt=case.prompt
            )
            (folder / "task.txt").write_text(task, encoding="utf-8")
            print(folder / "task.txt")
    return 0


def collect(arguments: argparse.Namespace, chosen: list[Case]) -> int:
    """Grade DIR/<case>/<arm>/workspace and keep the record. Arms without a file `ended` are left out."""
    runs = []
    with Upstream() as upstream:
        for case in chosen:
            for folder in sorted(
                path for path in (arguments.collect / case.id).glob("*") if (path / "ended").is_file()
            ):
                workspace = (folder / "workspace").resolve()
                transcript = worked(folder)
                grade = case.grader(upstream)(workspace, transcript)
                runs.append(Run(case, folder.name, 1, transcript, grade))
                state = "pass" if grade.passed else "FAIL " + "; ".join(runs[-1].summary()["failed_checks"])
                print(f"{folder.name} {case.id}: {state}")
                if arguments.record:
                    date = datetime.fromtimestamp(float((folder / "started").read_text()), timezone.utc).strftime(
                        "%Y-%m-%d"
                    )
                    target = arguments.record / folder.name / case.id
                    write_record(
                        target, case, workspace, transcript, grade, agent=arguments.agent, arm=folder.name, date=date
                    )
    if not runs:
        raise agents.AgentError(f"{arguments.collect}: no finished run of these cases")
    document = benchmark(runs, arguments.agent or "agent", 1)
    if arguments.record:
        (arguments.record / "benchmark.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(table(document))
    return 0


def worked(folder: Path) -> Transcript:
    """The transcript that an agent wrote in DIR/<case>/<arm>, and the seconds between its two time stamps."""
    started, ended = (float((folder / name).read_text()) for name in ("started", "ended"))
    try:
        written = json.loads((folder / "transcript.json").read_text(encoding="utf-8"))
        actions = [
            action if isinstance(action, dict) else {"tool": "", "input": str(action)} for action in written["actions"]
        ]
        return Transcript(actions, str(written.get("final_message", "")), ended - started)
    except (OSError, ValueError, KeyError, TypeError):
        return Transcript([], "", ended - started, stopped="no readable transcript.json")


def write_output(target: Path, runs: list[Run], document: dict) -> None:
    for run in runs:
        folder = target / run.arm.replace(":", "_") / run.case.id / f"run-{run.number}"
        folder.mkdir(parents=True, exist_ok=True)
        grading = {**run.grade.as_json(), "execution_metrics": run.summary()}
        (folder / "grading.json").write_text(json.dumps(grading, indent=1) + "\n", encoding="utf-8")
        (folder / "transcript.json").write_text(json.dumps(asdict(run.transcript), indent=1) + "\n", encoding="utf-8")
    (target / "benchmark.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
