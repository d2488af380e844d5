# SPDX-License-Identifier: Apache-2.0
"""BENCHMARK.md is what the result files say, tells what was not run, and is in step with them."""

import copy
import json

import benchmark_report
import pytest

BENCHMARK = {
    "agent": "general coding agent, 2026-11",
    "date": "2026-11-30",
    "run_summary": {
        "with_skill": {"cases": 2, "runs": 2, "pass_rate": {"mean": 1.0}, "tool_calls": {"mean": 4.0}, "time_seconds": {"mean": 61.0}, "tokens": {"mean": None}},
        "without_skill": {"cases": 2, "runs": 2, "pass_rate": {"mean": 0.5}, "tool_calls": {"mean": 9.5}, "time_seconds": {"mean": 90.0}, "tokens": {"mean": 1200}},
        "delta": {"cases": 2, "pass_rate": 0.5, "low": 0.0, "high": 1.0},
    },
    "runs": [
        {"configuration": "with_skill", "case": "a", "passed": True, "failed_checks": [], "tool_calls": 4, "seconds": 60.0},
        {"configuration": "without_skill", "case": "a", "passed": False, "failed_checks": ["captures ['attn']"], "tool_calls": 9, "seconds": 91.0},
        {"configuration": "with_skill", "case": "b", "passed": True, "failed_checks": [], "tool_calls": 4, "seconds": 62.0},
    ],
}  # fmt: skip


def put(folder, name, document):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")


def test_without_files_every_section_says_so(tmp_path):
    text = benchmark_report.report(tmp_path)
    for title, _ in benchmark_report.SECTIONS:
        assert f"## {title}\n" in text
    assert text.count("Not run: ") >= 8
    missing = text[text.index("## What was not run") :]
    for command in (
        "run_evals.py --collect",
        "recipe_corpus.py",
        "smoke_capture.py",
        "fault_matrix.py",
        "bench_helpers.py",
        "ablation.py",
    ):
        assert command in missing


def test_real_agents_are_shown_case_by_case(tmp_path):
    put(tmp_path, "agents/benchmark.json", BENCHMARK)
    text = benchmark_report.report(tmp_path)
    assert "| with_skill | 2 | 2 | 100% | 4.0 | 61 s | not known |" in text
    assert "| without_skill | 2 | 2 | 50.0% | 9.5 | 90 s | 1200 |" in text
    assert "+50.0 points, 95% interval +0.0 to +100.0" in text
    assert "these runs show no difference" in text
    assert "| a | pass, 4, 60 | **fail** (captures ['attn']), 9, 91 |" in text
    assert "| b | pass, 4, 62 | not run |" in text
    assert "Of 1 cases in both arms the agent with the skill took less time in 1, and fewer actions in 1." in text


def test_a_clear_difference_is_not_called_none(tmp_path):
    summary = {**BENCHMARK["run_summary"], "delta": {"cases": 2, "pass_rate": -0.5, "low": -0.9, "high": -0.1}}
    put(tmp_path, "agents/benchmark.json", {**BENCHMARK, "run_summary": summary})
    text = benchmark_report.report(tmp_path)
    assert "-50.0 points, 95% interval -90.0 to -10.0" in text and "no difference" not in text


def test_other_files_become_tables_with_their_source(tmp_path):
    put(tmp_path, "oracle/x.json", {
        "schema_version": 1, "command": "python x.py", "date": "2026-11-30", "mismatches": 0, "kinds": {"a": 39096},
        "versions": {"0.19": {"judged": 26871, "rejected": 9.5}}, "list": [{"n": 1, "m": None}]})  # fmt: skip
    text = benchmark_report.report(tmp_path)
    assert "| mismatches | 0 |" in text and "| kinds: a | 39,096 |" in text
    assert "| versions | judged | rejected |" in text and "| 0.19 | 26,871 | 9.5 |" in text
    assert "From `evals/results/oracle/x.json`, 2026-11-30: `python x.py`" in text


def test_long_lists_of_counts_are_shortened(tmp_path):
    put(
        tmp_path,
        "corpus/x.json",
        {"because": {f"reason {number}": number for number in range(20)}, "few": {"a": 1, "b": 2}},
    )
    text = benchmark_report.report(tmp_path)
    assert "| because: reason 19 | 19 |" in text and "reason 14" not in text
    assert "| because: 15 others together | 105 |" in text and "| few: a | 1 |" in text


def test_performance_files(tmp_path):
    put(tmp_path, "performance/helpers.json", {
        "command": "python bench.py", "date": "2026-11-30T10:00:00Z", "machine": {"cpus": 2}, "versions": {"python": "3.12"},
        "summary": {"apply": {"wall_s_median": 0.2031, "peak_mib": 41.0}}, "ratios": {"import / apply": 20.123}, "samples": {}})  # fmt: skip
    text = benchmark_report.report(tmp_path)
    assert "| apply | 0.2031 | 41 |" in text and "| ratios: import / apply | 20.12 |" in text


def test_the_newest_run_of_the_partial_manager_is_shown(tmp_path):
    for name, date, value in (("a", "2026-11-30", 41.0), ("b", "2026-11-29", 99.0)):
        cases = {"router": {"ours": {"host_microseconds": {"forward": {"median": value}, "step": {"median": 2.0}}}}}
        put(tmp_path, f"gpu/partial-bench-{name}.json", {"command": "python b.py", "date": date, "cases": cases})
    outcomes = {f"test_{number}": "failure" if number == 3 else "passed" for number in range(9)}
    put(
        tmp_path,
        "gpu/partial-tests-a.json",
        {"date": "2026-11-30", "seed": 1, "outcomes": outcomes, "versions": {"torch": "2.11"}},
    )
    text = benchmark_report.report(tmp_path)
    assert "| router | ours | 41 | 2 |" in text and "99" not in text
    assert "`evals/results/gpu/partial-bench-b.json` (2026-11-29)" in text
    assert "| passed | 8 |  |" in text and "| failure | 1 | `test_3` |" in text and "Versions: torch 2.11." in text


def test_ablation(tmp_path):
    put(tmp_path, "builtin/ablation.json", {"command": "python evals/ablation.py", "date": "2026-11-30", "cases": 51,
                                            "parts": {"rule CG106": ["fp8"], "rule CG003": []}})  # fmt: skip
    text = benchmark_report.report(tmp_path)
    assert "| rule CG106 | 1 | fp8 |" in text and "| rule CG003 | 0 | none |" in text


PARALLEL = json.loads((benchmark_report.EVALS / "results" / "gpu" / "parallel-shared-bed5414.json").read_text())


def section(text, title):
    return text.partition(f"### {title}")[2].partition("\n###")[0]


def of_parallel(tmp_path, change=lambda document: None):
    """What the report says of a result of partial_parallel.py that `change` has changed."""
    document = copy.deepcopy(PARALLEL)
    change(document)
    put(tmp_path, "gpu/parallel-x.json", document)
    return section(benchmark_report.report(tmp_path), "Partial graphs under data and pipeline parallelism")


def test_ranks_that_share_a_gpu_are_shown_without_times(tmp_path):
    text = of_parallel(tmp_path)
    assert "2 ranks that share one GPU" in text and "times say nothing" in text and "7 of 7 modes hold" in text
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(PARALLEL["variants"])
    assert "| `ddp` | gradient_as_bucket_view False | bitwise, 260 tensors | 64 | 0 | 32 | yes |" in rows
    assert "rank 0: bitwise, 120 tensors; rank 1: bitwise, 140 tensors | 32 | 0 | 16 | yes |" in rows[-1]
    assert " ms" not in text
    for variant in PARALLEL["variants"].values():
        for row in variant["ranks"]:
            assert not any(f"{time:.2f}" in text for time in row["median_step_milliseconds"].values())
    assert "--output evals/results/gpu/parallel-x.json" in text, "the command writes the file that it is shown for"


def test_ranks_with_a_gpu_each_are_shown_with_times(tmp_path):
    text = of_parallel(tmp_path, lambda document: document["machine"].update(gpus=2))
    assert "each with a GPU of its own" in text and "say nothing" not in text
    times = [row["median_step_milliseconds"] for row in PARALLEL["variants"]["ddp"]["ranks"]]
    shown = ["; ".join(f"rank {rank}: {time[kind]:.2f}" for rank, time in enumerate(times)) for kind in times[0]]
    assert f"| {' | '.join(shown)} |" in text


def test_a_mode_that_goes_wrong_is_shown_by_rank(tmp_path):
    def change(document):
        document["variants"]["ddp"]["good"] = document["variants"]["fsdp2-keep"]["good"] = False
        document["variants"]["ddp"]["ranks"][1] = {"rank": 1, "error": "ValueError: a | b\nmore", "stage": "step 2"}
        document["variants"]["fsdp2-keep"]["ranks"][0] |= {"bitwise_equal": False, "unequal_tensors": 3}
        document["variants"]["ddp-merged"]["ranks"][0]["counters"] |= {"fallback": 2, "reasons": {"in flight": 2}}

    text = of_parallel(tmp_path, change)
    assert "rank 0: bitwise, 260 tensors; rank 1: **failed**: ValueError: a / b | rank 0: 64; rank 1: - |" in text
    assert "rank 0: **differs** in 3 of 260 tensors; rank 1: bitwise, 260 tensors" in text
    assert "| rank 0: 2 (in flight 2); rank 1: 0 |" in text and text.count("| **no** |") == 2 and "5 of 7 modes" in text


TWO_GPUS = {
    "smoke": "torchrun --nproc-per-node 2 evals/smoke_evidence.py --out evals/results/gpu",
    "parallel": "python3 evals/multi_gpu/partial_parallel.py --output evals/results/gpu/parallel-2gpu.json",
    "faults": "python evals/faults/fault_matrix.py --ranks 2 --out evals/results/gpu/faults-2gpu.json",
}


def test_runs_on_two_gpus_are_missing_until_ranks_have_one_each(tmp_path):
    """Files whose ranks shared a GPU do not count; the same files do once they say that there were two."""
    gpu = benchmark_report.EVALS / "results" / "gpu"

    def missing():
        return benchmark_report.report(tmp_path).partition("## What was not run")[2]

    assert all(command in missing() for command in TWO_GPUS.values())
    sharing = {
        "smoke": ("smoke-2gpu-pp2-shared.json", lambda document: document["parallel"].update(gpus=2)),
        "parallel": ("parallel-shared-bed5414.json", lambda document: document["machine"].update(gpus=2)),
        "faults": ("faults-shared-3d99f05.json", lambda document: document["configuration"].update(share_gpu=False)),
    }
    for kind, (name, alone) in sharing.items():
        document = json.loads((gpu / name).read_text())
        put(tmp_path, f"gpu/{name}", document)
        assert TWO_GPUS[kind] in missing()
        alone(document)
        put(tmp_path, f"gpu/{name}", document)
        assert TWO_GPUS[kind] not in missing()
    assert not any(command in missing() for command in TWO_GPUS.values())
    one_rank = json.loads((gpu / "faults-h200.json").read_text())
    (tmp_path / "gpu" / "faults-shared-3d99f05.json").unlink()
    put(tmp_path, "gpu/faults-h200.json", one_rank)
    assert TWO_GPUS["faults"] in missing()


def test_rows_of_ranks_that_share_a_gpu_are_to_be_run_as_such(tmp_path):
    name = "faults-shared-3d99f05.json"
    put(tmp_path, f"gpu/{name}", json.loads((benchmark_report.EVALS / "results" / "gpu" / name).read_text()))
    missing = benchmark_report.report(tmp_path).partition("## What was not run")[2]
    row = next(line for line in missing.splitlines() if "faults-shared-3d99f05.json" in line)
    assert "--share-gpu --out evals/results/gpu/faults-NAME.json`" in row


def test_a_broken_file_is_named(tmp_path, capsys):
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "benchmark.json").write_text("{", encoding="utf-8")
    assert benchmark_report.main(["--results", str(tmp_path), "--output", str(tmp_path / "B.md")]) == 2
    assert "benchmark.json" in capsys.readouterr().err
    assert not (tmp_path / "B.md").exists()


def test_write_and_check(tmp_path, capsys):
    arguments = ["--results", str(tmp_path / "results"), "--output", str(tmp_path / "B.md")]
    assert benchmark_report.main([*arguments, "--check"]) == 1
    assert benchmark_report.main(arguments) == 0
    assert benchmark_report.main([*arguments, "--check"]) == 0
    put(tmp_path / "results", "agents/benchmark.json", BENCHMARK)
    assert benchmark_report.main([*arguments, "--check"]) == 1


def test_the_repository_is_in_step():
    assert benchmark_report.main(["--check"]) == 0, "run python evals/benchmark_report.py"


@pytest.mark.parametrize(
    "path", sorted((benchmark_report.EVALS / "results").rglob("*.json")), ids=lambda path: path.name
)
def test_result_files_are_read(path):
    assert json.loads(path.read_text(encoding="utf-8"))
