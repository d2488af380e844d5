#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The fault matrix in Markdown, from a result file of fault_matrix.py.

Usage: python evals/faults/summary.py evals/results/gpu/faults-*.json
Output: Markdown on stdout, one section a file.
Exit codes: 0; 2 a file that is missing or no whole result of the fault matrix: then nothing is on stdout.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import result_files
from cudagraphs.cli import Parser
from fault_matrix import EXIT_CODES

MADE_BY = "python evals/faults/fault_matrix.py --out FILE"
NOT_JUDGED = ("not made", "not reached", "survived", "failed before the fault", "hang before the fault")
CANNOT_BE_HELPED = ("os_exit", "sigkill")
FORM = {None: "without", "library": "library", "launcher": "launcher"}
MIB = 1 << 20


def summary(result: dict[str, Any]) -> str:
    """Tables with and without the helper: by graphs, by place, by way to fail; what differs; what was not run."""
    if result.get("kind") != "fault-matrix":
        raise ValueError("not a result of fault_matrix.py: its kind is not fault-matrix")
    rows, machine, versions = result["rows"], result["machine"], result["versions"]
    configuration, needs, memory = result["configuration"], result["requirements"], result["device_memory"]
    where = f"{machine.get('gpu', 'CPU')}, {configuration['ranks']} rank{'s' * (configuration['ranks'] > 1)}"
    where += " that share the GPU" if configuration.get("share_gpu") else ""
    stack = ", ".join(f"{name} {version}" for name, version in versions.items())
    each = "each a process a rank" if configuration["ranks"] > 1 else "each a process"
    each += {"spawn": ", fresh interpreters", "torchrun": ", started by torchrun"}.get(configuration["start"], "")
    verdict = "Holds" if needs["hold"] else "Does not hold"
    required = f"no hang, out within {configuration['required_s']:.0f} s, the right exit code, device memory back"
    times = f"slowest {_seconds(needs['slowest_s'])}, median {_seconds(needs['median_s'])}"
    judged = f"{needs['rows_judged']} rows judged, {len(needs['broken'])} broken, {times}"
    lines = [
        f"{where}; {stack}; {result['date'][:10]}. "
        + f"{len(rows)} rows, {each}, {configuration['parallel_rows']} at once, in {result['seconds']:.0f} s.",
        "",
        f"Required with the helper: {required}. {verdict}: {judged}.",
        "",
    ]
    if memory["after_bytes"] is not None:
        before, after = memory["before_bytes"] // MIB, memory["after_bytes"] // MIB
        lines += [f"Device memory in use before the first row and after the last: {before} and {after} MiB.", ""]
    if configuration["ranks"] > 1:
        lines += [*_forms(rows), *_ends(rows)]
    for title, key in (("graphs", "graphs"), ("where", "where"), ("how", "how")):
        lines += [*_table(rows, title, lambda row, key=key: row[key]), ""]
    lines += _differences(rows)
    lines += _other_codes(rows)
    lines += _deleted(rows)
    lines += _unhelped(rows)
    lines += _recaptured(rows)
    lines += _unjudged(rows)
    if result["rows_not_run"]:
        lines.append(
            f"Not run within the budget of {configuration['budget_s']:.0f} s: {len(result['rows_not_run'])} rows."
        )
    return "\n".join(lines).rstrip() + "\n"


def _table(rows: list[dict[str, Any]], title: str, key: Callable[[dict[str, Any]], str]) -> list[str]:
    out = [
        f"| {title} | rows with / without | hangs with / without | exit code is not the fault's own, with / without | "
        "median seconds from fault to exit, with / without | slowest |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(map(key, rows)):
        with_helper, without = (
            [r for r in rows if key(r) == name and r["helper"] is helper and _judged(r)] for helper in (True, False)
        )
        out.append(
            f"| {name.replace('_', ' ')} | "
            + " | ".join(
                f"{function(with_helper)} / {function(without)}"
                for function in (len, _hangs, _other_code, _median, _slowest)
            )
            + " |"
        )
    return out


def _forms(rows: list[dict[str, Any]]) -> list[str]:
    """One line a way to use the helper: hangs, and how the peers of the failed rank left."""
    out = [
        "| helper | rows with a fault | hangs | exit codes of peers (rows) | slowest peer | slowest row | "
        "live graphs left |",
        "|---|---|---|---|---|---|---|",
    ]
    for form, name in FORM.items():
        part = [r for r in rows if r.get("form") == form and r["how"] != "none" and _judged(r)]
        if not part:
            continue
        codes = Counter(code for r in part for code in r["survivor_codes"])
        shown = ", ".join(f"{_code(code)} ({n})" for code, n in sorted(codes.items(), key=lambda item: str(item[0])))
        peers = [t for r in part if not r["hang"] for t in r["survivor_seconds"]]
        reports = [report for r in part for report in (r["deleted"], *r["survivor_reports"]) if report]
        left = sum(report["live_graphs_after"] for report in reports) if reports else "-"
        slowest_peer = _seconds(max(peers, default=None))
        out.append(f"| {name} | {len(part)} | {_hangs(part)} | {shown} | {slowest_peer} | {_slowest(part)} | {left} |")
    return [*out, ""]


def _code(code: int | None) -> str:
    return "killed here, or not told" if code is None else str(code)


def _ends(rows: list[dict[str, Any]]) -> list[str]:
    """Orderly ends with graphs alive: destroy_process_group() is what the process calls last."""
    part = [r for r in rows if r["how"] == "none" and _judged(r)]
    if not part:
        return []
    out = [
        "destroy_process_group() at an orderly end, with the graphs still referenced:",
        "",
        "| graphs | live graphs a rank | " + " | ".join(FORM.values()) + " |",
        "|---|---|" + "---|" * len(FORM),
    ]
    for name in dict.fromkeys(r["graphs"] for r in part):
        of_kind = {r.get("form"): r for r in part if r["graphs"] == name}
        live = next((r["live_graphs_at_end"] for r in of_kind.values()), None)
        cells = [_end(of_kind[form]) if form in of_kind else "not run" for form in FORM]
        out.append(f"| {name.replace('_', ' ')} | {live} | {' | '.join(cells)} |")
    return [*out, ""]


def _end(row: dict[str, Any]) -> str:
    if not row["hang"]:
        return f"exit {row['exit_code']} after {_seconds(row['seconds_from_fault'])}"
    stack = next((frames for frames in row["hung_in"].values()), [])
    return "hang" + (f" in {stack[0]}" if stack else "")


def _judged(row: dict[str, Any]) -> bool:
    return row["verdict"] not in NOT_JUDGED


def _hangs(rows: list[dict[str, Any]]) -> int:
    return sum(row["hang"] for row in rows)


def _other_code(rows: list[dict[str, Any]]) -> int:
    return sum(not row["hang"] and row["exit_code"] != EXIT_CODES[row["how"]] for row in rows)


def _times(rows: list[dict[str, Any]]) -> list[float]:
    return sorted(r["seconds_from_fault"] for r in rows if r["seconds_from_fault"] is not None and not r["hang"])


def _median(rows: list[dict[str, Any]]) -> str:
    times = _times(rows)
    return _seconds(times[len(times) // 2] if times else None)


def _slowest(rows: list[dict[str, Any]]) -> str:
    times = _times(rows)
    return _seconds(times[-1] if times else None)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _differences(rows: list[dict[str, Any]]) -> list[str]:
    """Pairs of rows whose outcome is not the same with and without the helper."""
    plain = {(r["graphs"], r["where"], r["how"]): r for r in rows if not r["helper"]}
    pairs = [(plain[key], r) for r in rows if r["helper"] and (key := (r["graphs"], r["where"], r["how"])) in plain]
    differing = Counter(
        (b["graphs"], b["where"], _outcome(a), _outcome(b)) for a, b in pairs if _outcome(a) != _outcome(b)
    )
    out = [
        f"Of {len(pairs)} pairs, {len(pairs) - sum(differing.values())} ended the same way with and without the helper."
    ]
    if differing:
        out += ["", "| graphs | where | without | with | pairs |", "|---|---|---|---|---|"]
        out += [
            f"| {g.replace('_', ' ')} | {w.replace('_', ' ')} | {a} | {b} | {n} |"
            for (g, w, a, b), n in sorted(differing.items())
        ]
    return [*out, ""]


def _outcome(row: dict[str, Any]) -> str:
    if row["verdict"] in NOT_JUDGED:
        return row["verdict"] + (f" ({row['reason'].replace('|', ' ')[:90]})" if row["reason"] else "")
    survivors = [code for code in row["survivor_codes"] if code is not None]
    peers = f", peers {', '.join(map(str, survivors))}" if survivors else ""
    return "hang" if row["hang"] else f"exit {row['exit_code']}{peers}"


def _other_codes(rows: list[dict[str, Any]]) -> list[str]:
    """Exit codes that the stack makes of a fault, where they are not the fault's own."""
    part = [r for r in rows if _judged(r) and not r["hang"] and r["exit_code"] != EXIT_CODES[r["how"]]]
    counts = Counter((r["how"], r["exit_code"], r["helper"]) for r in part)
    return [
        f"{how.replace('_', ' ')} ends with {code}, not {EXIT_CODES[how]}: {counts[how, code, True]} rows with and "
        f"{counts[how, code, False]} without the helper.\n"
        for how, code in sorted({(r["how"], r["exit_code"]) for r in part})
    ]


def _deleted(rows: list[dict[str, Any]]) -> list[str]:
    reports = [r["deleted"] for r in rows if r["deleted"]]
    if not reports:
        return []
    found = sum(r["live_graphs_before"] for r in reports)
    left = sum(r["live_graphs_after"] for r in reports)
    failed = sum(len(r["failed"]) for r in reports)
    times = sorted(r["seconds"] for r in reports)
    return [
        f"The helper reported {len(reports)} deletions: {found} live graphs before, {left} after, {failed} failures, "
        f"{times[len(times) // 2] * 1000:.0f} ms each (median; slowest {times[-1] * 1000:.0f} ms).",
        "",
    ]


def _unhelped(rows: list[dict[str, Any]]) -> list[str]:
    part = [r for r in rows if r["how"] in CANNOT_BE_HELPED and not r["survivor_codes"] and _judged(r)]
    if not part:
        return []
    ways = ", ".join(sorted({r["how"].replace("_", " ") for r in part}))
    codes = ", ".join(map(str, sorted({r["exit_code"] for r in part})))
    left = sum(bool(r["memory_left_bytes"]) for r in part)
    reported = sum(bool(r["deleted"]) for r in part)
    return [
        f"What cannot be helped ({ways}): {len(part)} rows, exit codes {codes}, {_hangs(part)} hangs. No code ran, so "
        f"{reported} of them deleted anything; the driver freed the device memory in all but {left}.",
        "",
    ]


def _recaptured(rows: list[dict[str, Any]]) -> list[str]:
    """Captures after a cleanup that failed: after the framework's own (without) or after the helper's (with)."""
    part = [r for r in rows if r["where"] == "evaluation_recaptured"]
    failed = Counter((r["graphs"], r["helper"]) for r in part if r["verdict"] == "not made")
    ran = Counter((r["graphs"], r["helper"]) for r in part)
    return [
        f"{graphs.replace('_', ' ')} could not be captured again in {failed[graphs, False]} of {ran[graphs, False]} rows "
        f"after the framework's own cleanup and in {failed[graphs, True]} of {ran[graphs, True]} after the helper's.\n"
        for graphs in sorted({graphs for graphs, _ in failed})
    ]


def _unjudged(rows: list[dict[str, Any]]) -> list[str]:
    part = Counter((r["graphs"], r["where"], r["helper"], r["reason"] or r["verdict"]) for r in rows if not _judged(r))
    if not part:
        return []
    out = [
        "Rows without a verdict, because the place was not reached:",
        "",
        "| graphs | where | helper | rows | reason |",
        "|---|---|---|---|---|",
    ]
    for (graphs, where, helper, reason), count in sorted(part.items()):
        out.append(
            f"| {graphs.replace('_', ' ')} | {where.replace('_', ' ')} | {'with' if helper else 'without'} | {count} | "
            f"{reason.replace('|', ' ')} |"
        )
    return [*out, ""]


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="summary.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help="result files of fault_matrix.py")
    sections = []
    for path in parser.parse_args(argv).files:
        try:
            document = result_files.load(path, MADE_BY)
            with result_files.reading(path, MADE_BY):
                sections.append(f"### {path.stem}\n\n{summary(document)}")
        except result_files.ResultError as error:
            print(f"summary.py: {error}", file=sys.stderr)
            return 2
    print("\n".join(sections))
    return 0


if __name__ == "__main__":
    sys.exit(main())
