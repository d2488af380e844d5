#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write BENCHMARK.md from the result files under evals/results/.

Every number comes from a file that a command of this repository wrote, and is shown with both. A section without a
file says that it was not run, and the command that would.

Usage:
    python evals/benchmark_report.py                 write BENCHMARK.md
    python evals/benchmark_report.py --check         exit 1 if BENCHMARK.md is not what this would write
    python evals/benchmark_report.py --results DIR --output FILE

Output: the name of the file written.

Exit codes: 0 written, or in step; 1 --check found a difference; 2 wrong usage, or a result file that cannot be read.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

EVALS = Path(__file__).resolve().parent
ROOT = EVALS.parent
sys.path[:0] = [str(EVALS), str(ROOT / "helpers")]

import result_files  # noqa: E402
from cudagraphs.cli import Parser  # noqa: E402
from result_files import ResultError  # noqa: E402

HEAD = """\
# Benchmark

Written by `python evals/benchmark_report.py` from the files under `evals/results/`; edit nothing here. Each section
names its files and the command that writes them.
"""


# For files that no section knows.
MADE_BY = "the command that it names"
# Of a long list of counts, this many are shown; the file has all.
SHOWN_COUNTS = 5


class Results:
    """The result files, and what is missing among them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.missing: list[tuple[str, str]] = []
        self._made_by: dict[Path, str] = {}

    def files(self, pattern: str, what: str, command: str) -> list[Path]:
        """The files that match; where there are none, `what` is noted as not run with the command that would."""
        found = sorted(self.folder.glob(pattern))
        if not found:
            self.missing.append((what, command))
        self._made_by |= dict.fromkeys(found, command)
        return found

    def load(self, path: Path) -> dict[str, Any]:
        """Raises ResultError."""
        return result_files.load(path, self._made_by.get(path, MADE_BY))

    def reading(self, path: Path) -> AbstractContextManager[None]:
        """Around what takes values out of the file's document: missing and odd ones raise ResultError."""
        return result_files.reading(path, self._made_by.get(path, MADE_BY))

    def shown(self, path: Path, renderer: Callable[[Results, Path, dict[str, Any]], str]) -> str:
        """The file's text. Raises ResultError."""
        document = self.load(path)
        with self.reading(path):
            return renderer(self, path, document)

    def name(self, path: Path) -> str:
        return f"evals/results/{path.relative_to(self.folder).as_posix()}"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


def not_run(what: str, command: str) -> str:
    return f"Not run: {what}. `{command}`"


def percent(value: float) -> str:
    return f"{value:.0%}" if value in (0, 1) else f"{value:.1%}"


# -- agent evals -------------------------------------------------------------------------------------------------------


def agent_evals(results: Results) -> str:
    with result_files.reading(EVALS / "evals.json", "git checkout evals/evals.json"):
        cases = json.loads((EVALS / "evals.json").read_text(encoding="utf-8"))["evals"]
        negatives = sum(not entry["should_trigger"] for entry in cases)
    parts = [
        f"{len(cases)} cases, {negatives} of them negatives (tasks near the subject to which the skill does not "
        "apply). Configurations are "
        "graded by the released upstream code, scripts by running them, answers by value; no model grades another."
    ]
    command = "python evals/run_evals.py --collect DIR --agent NAME --record evals/results/agents"
    what = "real agents with and without the skill"
    files = results.files("agents/benchmark.json", what, command)
    parts += ["### Real agents", ""] + (
        [results.shown(files[0], _real_agents), *notes(results, "agents/notes.md")] if files else [not_run(what, command)]
    )
    parts += ["### Built-in agents", "", _built_in(results), "### Ablation", "", _ablation(results)]
    return "\n\n".join(part for part in parts if part)


def _real_agents(results: Results, path: Path, document: dict[str, Any]) -> str:
    summary = dict(document["run_summary"])
    delta = summary.pop("delta", None)
    rows = [
        (arm, row["cases"], row["runs"], percent(row["pass_rate"]["mean"]), f"{row['tool_calls']['mean']:.1f}",
         f"{row['time_seconds']['mean']:.0f} s",
         f"{row['tokens']['mean']:.0f}" if row["tokens"]["mean"] else "not known")
        for arm, row in summary.items()
    ]  # fmt: skip
    text = (
        f"Agent: {document['agent']}; recorded {document['date']}; one fresh agent a run. Actions are as the agents noted "
        "them (one note may hold several commands); times are wall clock on a shared machine.\n\n"
    )
    text += table(("arm", "cases", "runs", "passed", "tool calls (mean)", "time (mean)", "tokens (mean)"), rows)
    if delta:
        text += (
            f"\n\nDifference in pass rate, with minus without, over the {delta['cases']} cases that both arms ran: "
            f"{delta['pass_rate'] * 100:+.1f} points, 95% interval {delta['low'] * 100:+.1f} to "
            f"{delta['high'] * 100:+.1f} (bootstrap over cases). "
        )
        if delta["low"] <= 0 <= delta["high"]:
            text += "The interval holds zero: these runs show no difference in pass rate."
    arms = list(summary)
    cases = sorted({row["case"] for row in document["runs"]})
    found = {(row["configuration"], row["case"]): row for row in document["runs"]}
    pairs = [[found.get((arm, case)) for arm in ("with_skill", "without_skill")] for case in cases]
    pairs = [pair for pair in pairs if all(pair)]
    faster = sum(with_skill["seconds"] < without["seconds"] for with_skill, without in pairs)
    fewer = sum(with_skill["tool_calls"] < without["tool_calls"] for with_skill, without in pairs)
    text += f"\n\nOf {len(pairs)} cases in both arms the agent with the skill took less time in {faster}, and fewer actions in {fewer}."
    text += "\n\n" + table(
        ("case", *(f"{arm}: result, calls, seconds" for arm in arms)),
        [(case, *(_outcome(found.get((arm, case))) for arm in arms)) for case in cases],
    )
    return text + f"\n\nFrom `{results.name(path)}`; transcripts, final files and grades lie beside it."


def _outcome(row: dict | None) -> str:
    if row is None:
        return "not run"
    state = "pass" if row["passed"] else f"**fail** ({'; '.join(row['failed_checks'])})".replace("|", "/")
    return f"{state}, {row['tool_calls']}, {row['seconds']:.0f}"


def _built_in(results: Results) -> str:
    rows = []
    for agent in ("reference", "null"):
        command = f"python evals/run_evals.py --agent {agent} --summary evals/results/builtin/{agent}.json"
        for path in results.files(f"builtin/{agent}.json", f"the {agent} agent on all cases", command):
            document = results.load(path)
            with results.reading(path):
                row = document["run_summary"]["with_skill"]
                failed = [run["case"] for run in document["runs"] if not run["passed"]]
                shown = ", ".join(failed) if 0 < len(failed) <= 8 else f"{len(failed)} cases"
                passed, date = percent(row["pass_rate"]["mean"]), document["date"]
                rows.append((agent, row["cases"], passed, shown, date, f"`{results.name(path)}`"))
    if not rows:
        return not_run(
            "the reference and null agents",
            "python evals/run_evals.py --agent reference --summary evals/results/builtin/reference.json",
        )
    text = (
        "The reference runs the commands that SKILL.md shows and must pass all; null does nothing and must fail all. "
        "That and the "
        "mutants, which spoil the reference's work in one way each, are tests.\n\n"
    )
    return text + table(("agent", "cases", "passed", "failed", "date", "file"), rows)


def _ablation(results: Results) -> str:
    command = "python evals/ablation.py --write evals/results/builtin/ablation.json"
    files = results.files("builtin/ablation.json", "ablation", command)
    return results.shown(files[0], _taken_away) if files else not_run("ablation", command)


def _taken_away(results: Results, path: Path, document: dict[str, Any]) -> str:
    rows = [(part, len(failed), ", ".join(failed) or "none") for part, failed in document["parts"].items()]
    text = (
        f"Cases (of {document['cases']} that are no negatives) that the reference fails once a part of the skill is "
        "taken away. A part on which no case rests is not shown to be useless: the cases do not reach it, or it repeats "
        "what another part says.\n\n"
    )
    return (
        text
        + table(("taken away", "cases", "which"), rows)
        + f"\n\nFrom `{results.name(path)}`, {document['date']}: `{document['command']}`"
    )


# -- agreement, corpus, performance ------------------------------------------------------------------------------------


def differential(results: Results) -> str:
    command = "python evals/oracle_agreement.py --write evals/results/oracle/agreement.json"
    files = results.files("oracle/*.json", "differential agreement with upstream", command)
    return "\n\n".join(results.shown(path, plain) for path in files) or not_run(
        "differential agreement with upstream", command
    )


def corpus(results: Results) -> str:
    command = "python tests/recipe_corpus.py --write evals/results/corpus/bridge-0.6.2.json"
    files = results.files("corpus/*.json", "recipe corpus", command)
    return "\n\n".join(results.shown(path, plain) for path in files) or not_run("the recipe corpus", command)


def plain(results: Results, path: Path, document: dict[str, Any]) -> str:
    """A result file as tables: single values first, then every mapping; lists of records as rows."""
    parts, single = [], []
    for key, value in document.items():
        label = key.replace("_", " ")
        if key in ("schema_version", "command", "date", "revision", "samples", "machine", "seed"):
            continue
        if key == "versions" and isinstance(value, dict) and not any(isinstance(item, dict) for item in value.values()):
            parts.insert(0, "Versions: " + ", ".join(f"{name} {item}" for name, item in value.items() if item) + ".")
            continue
        if isinstance(value, dict) and len(value) > 8 and all(isinstance(item, str) for item in value.values()):
            parts.append(by_value(label, value))
            continue
        if isinstance(value, dict) and value and all(isinstance(item, dict) for item in value.values()):
            columns = list(dict.fromkeys(column for item in value.values() for column in item))
            head = (label, *(column.replace("_", " ") for column in columns))
            parts.append(
                table(head, [(name, *(cell(item.get(column)) for column in columns)) for name, item in value.items()])
            )
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            columns = list(dict.fromkeys(column for item in value for column in item))
            parts.append(
                f"{label}:\n\n"
                + table(
                    [column.replace("_", " ") for column in columns],
                    [[cell(item.get(column)) for column in columns] for item in value],
                )
            )
        elif isinstance(value, dict):
            single += [(f"{label}: {name}", cell(item)) for name, item in shortened(value).items()]
        else:
            single.append((label, cell(value)))
    if single:
        parts.insert(0, table(("", ""), single))
    return "\n\n".join([*parts, source(results, path, document)])


def shortened(counts: dict[str, Any]) -> dict[str, Any]:
    """A long list of counts as its largest and the sum of the others; anything else as it is."""
    if len(counts) <= SHOWN_COUNTS + 3 or not all(isinstance(value, int) for value in counts.values()):
        return counts
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    rest = ordered[SHOWN_COUNTS:]
    return {**dict(ordered[:SHOWN_COUNTS]), f"{len(rest)} others together": sum(value for _, value in rest)}


def by_value(label: str, outcomes: dict[str, str]) -> str:
    """Many names with few outcomes: a row an outcome; names are given where the outcome is not `passed`."""
    rows = []
    for outcome in dict.fromkeys(outcomes.values()):
        names = [name for name, value in outcomes.items() if value == outcome]
        rows.append((outcome, len(names), "" if outcome == "passed" else ", ".join(f"`{name}`" for name in names)))
    return table((label, "count", "which"), rows)


def cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(cell(item) for item in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {cell(item)}" for name, item in value.items()) or "none"
    return str(value).replace("|", "/")


def source(results: Results, path: Path, document: dict) -> str:
    date = f", {document['date'][:10]}" if document.get("date") else ""
    command = f": `{command_of(results, path, document)}`" if document.get("command") else ""
    return f"From `{results.name(path)}`{date}{command}"


def command_of(results: Results, path: Path, document: dict) -> str:
    """The recorded command, writing the file that it is shown for: files are moved to where they lie after a run."""
    words = shlex.split(document["command"])
    for at, word in enumerate(words[:-1]):
        if word in ("--out", "--output", "--tests-out", "--write", "--summary"):
            words[at + 1] = results.name(path)
    return shlex.join(words)


def performance(results: Results) -> str:
    command = "python evals/performance/bench_helpers.py --out evals/results/performance/helpers.json"
    files = results.files("performance/*.json", "performance of the helpers", command)
    shown = [results.shown(path, _costs_of_helpers) for path in files]
    return "\n\n".join(shown) or not_run("performance of the helpers", command)


def _costs_of_helpers(results: Results, path: Path, document: dict[str, Any]) -> str:
    machine = ", ".join(
        f"{name} {value}" for name, value in document.get("machine", {}).items() if not isinstance(value, dict)
    )
    versions = ", ".join(f"{name} {value}" for name, value in document.get("versions", {}).items() if value)
    parts = [f"### {path.stem}\n\nMachine: {machine}. Versions: {versions}."]
    if "cases" in document:
        parts.append(_call_costs(document))
    else:
        kept = {key: value for key, value in document.items() if key in ("configuration", "ratios")}
        rows = [
            (f"{key}: {name.replace('_', ' ')}", cell(value))
            for key, values in kept.items()
            for name, value in values.items()
            if name != "seed"
        ]
        shown = document.get("summary", {})
        if shown:
            columns = list(dict.fromkeys(column for row in shown.values() for column in row))
            parts.append(
                table(
                    ("whole process", *(column.replace("_", " ") for column in columns)),
                    [(name, *(cell(row.get(column)) for column in columns)) for name, row in shown.items()],
                )
            )
        parts.append(table(("", ""), rows))
    return "\n\n".join([*parts, source(results, path, document)])


def _call_costs(document: dict) -> str:
    """The result of bench_partial_graphs.py."""
    rows = []
    for kind, peers in document["cases"].items():
        for name, found in peers.items():
            times = found.get("host_microseconds")
            if times is None:
                rows.append((kind, name, found.get("error", "not measured"), ""))
            else:
                rows.append((kind, name, *(cell(times[way]["median"]) for way in ("forward", "step"))))
    text = table(("module", "captured by", "forward, host us", "forward and backward, host us"), rows)
    over = document.get("ours_over", {})
    if over:
        text += "\n\nOurs over a peer, the median of the ratios within a round:\n\n" + table(
            ("module", "peer", "forward", "forward and backward", "aim"),
            [(kind, peer, cell(found["forward"]), cell(found["step"]), cell(found["aim"]))
             for kind, peers in over.items() for peer, found in peers.items()],
        )  # fmt: skip
    gained = document.get("gained_microseconds", {})
    if gained:
        text += "\n\nWhat each technique gains, host us:\n\n" + table(
            ("module", "technique", "forward", "forward and backward"),
            [(kind, name, cell(found["forward"]), cell(found["step"]))
             for kind, names in gained.items() for name, found in names.items()],
        )  # fmt: skip
    memory = document.get("memory_of_24_entries", {})
    if memory:
        text += "\n\n" + table(
            ("24 entries", "reserved MiB", "allocated MiB"),
            [(name, *(cell(row[key] / 2**20) if key in row else row.get("error", "") for key in ("reserved_bytes",
            "allocated_bytes")))
             for name, row in memory.items()],
        )  # fmt: skip
    return text


def notes(results: Results, name: str) -> list[str]:
    """What a reader must know of result files to read them right, from a Markdown file beside them."""
    path = results.folder / name
    return [path.read_text(encoding="utf-8").strip()] if path.is_file() else []


# -- GPU evidence ------------------------------------------------------------------------------------------------------


def gpu_evidence(results: Results) -> str:
    parts = [
        "### Smoke captures",
        *_smoke_captures(results),
        "### Partial graph manager",
        *_partial_manager(results),
        "### Partial graphs under data and pipeline parallelism",
        *_parallel(results),
        "### Fault matrix: how processes with graphs end",
        *_fault_matrix(results),
    ]
    known = {"smoke", "partial", "parallel", "faults"}
    for path in sorted(results.folder.glob("gpu/*.json")):
        if path.stem.partition("-")[0] not in known:
            parts += [f"### {path.stem}", results.shown(path, plain)]
    return "\n\n".join(parts)


def _smoke_captures(results: Results) -> list[str]:
    command = "python helpers/smoke_capture.py --sweep --json evals/results/gpu/smoke-NAME.json"
    files = results.files("gpu/smoke-*.json", "smoke captures", command)
    module = _module(EVALS / "smoke_summary.py")
    found = [module.load(path) for path in files]
    if not any(one["parallel"]["world"] > 1 and not module.shared(one) for one in found):
        results.missing.append((
            "smoke captures on two GPUs, one a rank",
            "torchrun --nproc-per-node 2 evals/smoke_evidence.py --out evals/results/gpu",
        ))  # fmt: skip
    if not found:
        return [not_run("smoke captures", command)]
    return [("\n" + module.summary(found).strip()).replace("\n### ", "\n#### ").strip()]


def _partial_manager(results: Results) -> list[str]:
    command = "python evals/performance/bench_partial_graphs.py --out evals/results/gpu/partial-NAME.json"
    files = results.files("gpu/partial-*.json", "cost and memory of the partial graph manager", command)
    parts = notes(results, "gpu/partial-notes.md")
    kinds: dict[bool, list[tuple[Path, dict]]] = {}
    for path in files:
        document = results.load(path)
        kinds.setdefault("cases" in document, []).append((path, document))
    for costs, found in kinds.items():
        *older, (path, document) = sorted(found, key=lambda item: (str(item[1].get("date", "")), item[0].name))
        with results.reading(path):
            shown = f"{_call_costs(document)}\n\n{source(results, path, document)}" if costs else None
            parts.append(shown or plain(results, path, document))
        if older:
            listed = ", ".join(f"`{results.name(file)}` ({str(run.get('date', ''))[:10]})" for file, run in older)
            parts.append(f"Older runs, kept for comparison: {listed}.")
    return parts if files else [*parts, not_run("cost and memory of the partial graph manager", command)]


def _parallel(results: Results) -> list[str]:
    two_gpus = "python3 evals/multi_gpu/partial_parallel.py --output evals/results/gpu/parallel-2gpu.json"
    module = _module(EVALS / "multi_gpu" / "parallel_summary.py")
    parts, alone = [], False
    for path in sorted(results.folder.glob("gpu/parallel-*.json")):
        document = result_files.load(path, two_gpus)
        with result_files.reading(path, two_gpus):
            alone = alone or module.on_gpus_of_their_own(document)
            parts += [module.summary(document), source(results, path, document)]
    if not alone:
        results.missing.append(("partial graphs under data and pipeline parallelism on two GPUs, one a rank", two_gpus))
    return parts or [not_run("partial graphs under data and pipeline parallelism", two_gpus)]


def _fault_matrix(results: Results) -> list[str]:
    command = "python evals/faults/fault_matrix.py --device cuda --out evals/results/gpu/faults-NAME.json"
    files = results.files("gpu/faults-*.json", "fault matrix", command)
    parts, alone = notes(results, "gpu/faults-notes.md"), False
    module = _module(EVALS / "faults" / "summary.py")
    for path in files:
        document = results.load(path)
        with results.reading(path):
            parts += [module.summary(document).strip(), source(results, path, document)]
            configuration = document["configuration"]
            alone = alone or (
                configuration["ranks"] > 1 and document["machine"].get("gpu") and not configuration.get("share_gpu")
            )
            if document["rows_not_run"]:
                again = command_of(results, path, document)
                if configuration.get("share_gpu") and "--share-gpu" not in again:  # older files do not record it
                    again += " --share-gpu"
                again += " --out evals/results/gpu/faults-NAME.json"
                results.missing.append(
                    (f"{len(document['rows_not_run'])} rows of the fault matrix ({path.name})", again)
                )
    if not alone:
        results.missing.append((
            "the fault matrix on two GPUs, one a rank",
            "python evals/faults/fault_matrix.py --ranks 2 --out evals/results/gpu/faults-2gpu.json",
        ))  # fmt: skip
    return parts if files else [*parts, not_run("the fault matrix", command)]


def _module(path: Path) -> Any:
    name = f"benchmark_{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


SECTIONS = (
    ("Agent evals", agent_evals),
    ("Differential agreement with upstream", differential),
    ("Recipe corpus", corpus),
    ("GPU evidence", gpu_evidence),
    ("Performance of the helpers", performance),
)


def report(folder: Path) -> str:
    """The text of BENCHMARK.md. Raises ResultError."""
    results = Results(folder)
    parts = [HEAD]
    for title, section in SECTIONS:
        parts.append(f"## {title}\n\n{section(results)}\n")
    rows = [(what, f"`{command}`") for what, command in results.missing]
    body = table(("not run", "the command that would"), rows) if rows else "Nothing is missing."
    parts.append(f"## What was not run\n\n{body}\n")
    return "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="benchmark_report.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=EVALS / "results", metavar="DIR")
    parser.add_argument("--output", type=Path, default=ROOT / "BENCHMARK.md", metavar="FILE")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.results.exists() and not arguments.results.is_dir():
        parser.error(f"--results {arguments.results}: this is no folder")
    if arguments.output.is_dir() or not arguments.output.parent.is_dir():
        parser.error(f"--output {arguments.output}: give a file in a folder that exists")
    try:
        text = report(arguments.results)
    except ResultError as error:
        print(f"benchmark_report: {error}", file=sys.stderr)
        return 2
    if arguments.check:
        same = arguments.output.is_file() and arguments.output.read_text(encoding="utf-8") == text
        print("in step" if same else f"{arguments.output.name}: not what `python evals/benchmark_report.py` writes")
        return 0 if same else 1
    try:
        arguments.output.write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"benchmark_report: --output {arguments.output}: {error.strerror or error}", file=sys.stderr)
        return 2
    print(arguments.output.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
