# SPDX-License-Identifier: Apache-2.0
"""The tables that documents quote come from result files, and every result file in the repository can be read."""

import copy
import json
from pathlib import Path

import pytest

import smoke_evidence
import smoke_summary

FILES = sorted((Path(__file__).parents[1] / "evals" / "results" / "gpu").glob("smoke-*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_result_file_gives_a_table_with_its_own_figures(path):
    result = smoke_summary.load(path)
    text = smoke_summary.summary([result])
    assert f"From `{path.name}`" in text and smoke_summary.command(result) in text
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == sum(out["captured"] is not None for out in result["variants"])
    for out in result["variants"]:
        if out["captured"] and out["timing"] and smoke_summary.times_count(result):
            assert f"{out['timing']['median']:.2f}" in text and f"{out['speedup']['value']:.2f}x" in text


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_file_was_made_by_a_run_that_the_repository_knows(path):
    known = {**smoke_evidence.RUNS, **smoke_evidence.RUNS_OF_TWO}
    # --suffix follows the name of the run
    assert any(path.stem == name or path.stem.startswith(f"{name}-") for name in known)
    result = json.loads(path.read_text())
    assert result["revision"] and result["seed"] is not None and result["machine"]["gpu"]
    for out in result["variants"]:
        # one round says whether it is the same training, and nothing about speed
        assert len(out["rounds_ms"]) >= (2 if smoke_summary.times_count(result) else 1) or out["failure"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_medians_follow_from_the_raw_times(path):
    from statistics import median

    for out in json.loads(path.read_text())["variants"]:
        if out["timing"]:
            assert out["timing"]["median"] == pytest.approx(median([step for one in out["rounds_ms"] for step in one]))


def test_a_failed_variant_shows_its_cause_and_no_figures():
    result = copy.deepcopy(smoke_summary.load(FILES[0]))
    out = result["variants"][-1]
    out |= {
        "captured": False,
        "timing": None,
        "speedup": None,
        "parity": None,
        "cleanup": None,
        "memory_cost": None,
        "captures": 0,
        "failure": {"kind": "capture", "phase": "capture", "name": "cudaErrorCapturedEvent", "code": 907},
        "against_rules": "odd",
    }
    out["replay"]["profiler_launches"] = None
    text = smoke_summary.summary([result])
    assert "| no: cudaErrorCapturedEvent (907) in capture |" in text and "odd" in text
    assert (
        smoke_summary.figures(result)["variants"][out["name"]]["failure"] == "cudaErrorCapturedEvent (907) in capture"
    )


def test_nothing_gives_nothing():
    assert smoke_summary.summary([]) == ""


def test_the_command_line_prints_tables_or_figures(capsys):
    names = [str(path) for path in FILES]
    assert smoke_summary.main(names) == 0
    assert capsys.readouterr().out.count("### ") == len(names)
    assert smoke_summary.main([*names, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["results"]) == len(names)


@pytest.mark.parametrize("text", ["{", "[]", '{"tool": "other"}', '{"tool": "smoke_capture", "schema_version": 99}'])
def test_another_file_is_refused_by_name(tmp_path, text, capsys):
    path = tmp_path / "x.json"
    path.write_text(text)
    assert smoke_summary.main([str(path)]) == 2
    assert "x.json" in capsys.readouterr().err


def test_evidence_runs_are_complete_commands():
    import smoke_capture

    for name, arguments in smoke_evidence.RUNS.items():
        args = smoke_capture._arguments().parse_args(list(arguments))
        assert name.startswith("smoke-") and args.stack != "auto"


def test_evidence_writes_a_file_and_a_table_for_each_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    tiny = (
        "--device",
        "cpu",
        "--precision",
        "fp32",
        "--layers",
        "1",
        "--hidden",
        "32",
        "--ffn",
        "64",
        "--sequence",
        "16",
        "--vocabulary",
        "64",
        "--steps",
        "2",
        "--quiet",
        "--variant",
        "full_iteration",
    )
    monkeypatch.setattr(smoke_evidence, "RUNS", {"smoke-one": tiny, "smoke-two": (*tiny, "--seed", "5")})
    assert smoke_evidence.main(["--out", str(tmp_path), "--rounds", "1", "--only", "smoke-one", "smoke-two"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "smoke-one.json",
        "smoke-one.txt",
        "smoke-two.json",
        "smoke-two.txt",
    ]
    assert json.loads((tmp_path / "smoke-two.json").read_text())["seed"] == 5
    assert "smoke-two: exit 0" in capsys.readouterr().out


def test_evidence_records_each_option_once_as_it_counted(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    tiny = "--device cpu --precision fp32 --layers 1 --hidden 32 --ffn 64 --sequence 16 --vocabulary 64 --quiet"
    words = (*tiny.split(), "--steps", "2", "--rounds", "4", "--variant", "full_iteration", "--seed", "9")
    monkeypatch.setattr(smoke_evidence, "RUNS", {"smoke-one": words})
    assert smoke_evidence.main(["--out", str(tmp_path), "--rounds", "2", "--more", "--rounds 1 --seed 5"]) == 0
    result = json.loads((tmp_path / "smoke-one.json").read_text())
    recorded = result["command"]
    assert recorded.count("--rounds") == recorded.count("--seed") == 1
    assert "--rounds 1 " in recorded and recorded.endswith("--seed 5") and result["seed"] == 5
    assert all(len(out["rounds_ms"]) == 1 for out in result["variants"])


def test_older_results_are_shown_with_each_option_once_and_one_form_of_the_cudnn_version():
    results = [smoke_summary.load(path) for path in FILES]
    assert any(result["command"].count("--rounds") > 1 for result in results)
    assert any(json.loads(path.read_text())["versions"]["cudnn"] == 91900 for path in FILES)
    for result in results:
        words = smoke_summary.command(result).split()
        options = [word for word in words if word.startswith("--") and word != "--variant"]
        assert len(set(options) - {"--"}) == len([word for word in options if word != "--"])
        assert ", cudnn 9." in smoke_summary.summary([result])
        assert str(smoke_summary.figures(result)["versions"]["cudnn"]).startswith("9.")
