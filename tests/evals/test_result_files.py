# SPDX-License-Identifier: Apache-2.0
"""A result file that is odd, and odd arguments: every script that reads results says one line with the file, and 2."""

import copy
import json
import shutil
from pathlib import Path

import benchmark_report
import pytest
import result_files
import smoke_evidence
import smoke_summary
import write_card
from faults import summary as faults_summary

RESULTS = Path(benchmark_report.EVALS) / "results"
# One of each kind, under the name that its section looks for.
KINDS = (
    "agents/benchmark.json",
    "builtin/reference.json",
    "builtin/ablation.json",
    "oracle/agreement.json",
    "corpus/bridge-0.6.2.json",
    "performance/helpers.json",
    "gpu/smoke-torch-launch.json",
    "gpu/partial-bench-bed5414.json",
    "gpu/parallel-shared-bed5414.json",
    "gpu/faults-shared-3d99f05.json",
)
ODD = {
    "empty": b"",
    "blank": b" \n",
    "cut off": b'{"a": ',
    "a list": b"[1]",
    "a number": b"3",
    "not UTF-8": b"\xff\xfe",
    "nested without end": b"[" * 100_000,
    "another schema": b'{"schema_version": 99}',
}


def one_line(capsys, path):
    heard = capsys.readouterr()
    assert heard.out == "" and len(heard.err.splitlines()) == 1, heard.err
    assert str(path) in heard.err and ("write it again with `" in heard.err or "one is written with `" in heard.err)
    return heard.err


def readers(kind):
    """The scripts that read this kind of file, as functions of the file's path."""
    out = []
    if "smoke-" in kind:
        out.append(lambda path: smoke_summary.main([str(path)]))
    if "faults-" in kind:
        out.append(lambda path: faults_summary.main([str(path)]))
    return [*out, lambda path: benchmark_report.main(
        ["--results", str(path.parents[1]), "--output", str(path.parents[2] / "B.md")])]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_an_odd_file_is_one_line(tmp_path, capsys, kind, odd):
    path = tmp_path / "results" / kind
    path.parent.mkdir(parents=True)
    path.write_bytes(odd)
    for read in readers(kind):
        assert read(path) == 2
        one_line(capsys, path)
    assert not (tmp_path / "B.md").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", ["missing", None, 7, "text", [], [1], {"a": 1}], ids=repr)
def test_a_key_that_is_missing_or_odd_is_one_line_or_no_matter(tmp_path, capsys, kind, value):
    """Each key of the file in turn. A key that the reader needs is refused, and there is at least one such key."""
    whole = json.loads((RESULTS / kind).read_text())
    path = tmp_path / "results" / kind
    path.parent.mkdir(parents=True)
    refused = 0
    for key in whole:
        document = copy.copy(whole)
        if value == "missing":
            del document[key]
        else:
            document[key] = value
        path.write_text(json.dumps(document))
        for read in readers(kind):
            code = read(path)
            assert code in (0, 2), key
            if code == 2:
                one_line(capsys, path)
                refused += 1
            capsys.readouterr()
    assert refused or kind in ("oracle/agreement.json", "corpus/bridge-0.6.2.json", "performance/helpers.json") or (
        kind == "gpu/partial-bench-bed5414.json" and value == "missing")  # fmt: skip


def test_a_missing_file_is_one_line(tmp_path, capsys):
    for main in (smoke_summary.main, faults_summary.main):
        for path in (tmp_path / "none.json", tmp_path):
            assert main([str(path)]) == 2
            one_line(capsys, path)


@pytest.mark.parametrize(
    ("main", "arguments", "word"),
    [
        (smoke_summary.main, [], "files"),
        (faults_summary.main, [], "files"),
        (faults_summary.main, ["--what"], "files"),
        (benchmark_report.main, ["--results", __file__], "this is no folder"),
        (benchmark_report.main, ["--output", "missing/B.md"], "a folder that exists"),
        (benchmark_report.main, ["--output", "."], "give a file"),
        (benchmark_report.main, ["x"], "unrecognized"),
        (write_card.main, ["x"], "unrecognized"),
        (smoke_evidence.main, ["--out", "x", "--more", "'"], "No closing quotation"),
        (smoke_evidence.main, ["--out", "x", "--more=--what"], "unrecognized arguments: --what"),
        (smoke_evidence.main, ["--out", "x", "--more=--json y"], "--out says where"),
        (smoke_evidence.main, ["--out", "x", "--more=--help"], "--out says where"),
        (smoke_evidence.main, ["--out", "x", "--rounds", "0"], "0 is not a positive number"),
        (smoke_evidence.main, ["--out", "x", "--suffix", "a/b"], "ends a file's name"),
        (smoke_evidence.main, ["--out", "x", "--only", "smoke-none"], "smoke-none"),
        (smoke_evidence.main, ["--out", __file__], "give a folder that can be written to"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_odd_arguments_are_one_line_and_make_nothing(tmp_path, monkeypatch, capsys, main, arguments, word):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    heard = capsys.readouterr()
    assert heard.out == "" and len(heard.err.splitlines()) == 1 and word in heard.err
    assert list(tmp_path.iterdir()) == []


def test_plots_that_cannot_be_written_are_one_line(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    result = str(RESULTS / "gpu" / "smoke-torch-launch.json")
    assert smoke_summary.main([result, "--plots", str(tmp_path / "file")]) == 2
    assert "give a folder that can be written to" in capsys.readouterr().err


def test_the_card_names_a_result_that_cannot_be_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(write_card, "RESULTS", tmp_path)
    (tmp_path / "gpu").mkdir()
    path = tmp_path / "gpu" / "smoke-x.json"
    before = write_card.CARD.read_bytes()
    whole = json.loads((RESULTS / "gpu" / "smoke-torch-launch.json").read_text())
    del whole["variants"][0]["verdict"]
    for odd in (b"", b"[]", b'{"tool": "smoke_capture"}', json.dumps(whole).encode()):
        path.write_bytes(odd)
        assert write_card.main([]) == 2
        one_line(capsys, path)
    assert write_card.CARD.read_bytes() == before


def test_a_card_without_its_marker_is_left_alone(tmp_path, monkeypatch, capsys):
    card = tmp_path / "card.yaml"
    monkeypatch.setattr(write_card, "CARD", card)
    assert write_card.main([]) == 2
    assert "card.yaml" in capsys.readouterr().err
    card.write_text("name: x\n")
    assert write_card.main([]) == 2 and card.read_text() == "name: x\n"
    assert "the line" in capsys.readouterr().err


def test_a_compressed_file_is_read_and_a_broken_one_named(tmp_path):
    import lzma

    path = tmp_path / "x.json.xz"
    path.write_bytes(lzma.compress(b'{"date": "2026-11-30"}'))
    assert result_files.load(path, "make") == {"date": "2026-11-30"}
    path.write_bytes(b"{}")
    with pytest.raises(result_files.ResultError, match=r"x\.json\.xz: no text.*again with `make`"):
        result_files.load(path, "make")


def test_a_file_of_an_earlier_run_is_not_counted_as_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(smoke_evidence, "RUNS", {"smoke-one": ("--device", "cpu", "--stack", "megatron-core")})
    shutil.copy(RESULTS / "gpu" / "smoke-torch-launch.json", tmp_path / "smoke-one.json")
    assert smoke_evidence.main(["--out", str(tmp_path)]) == 1
    assert "smoke-one: exit 2" in capsys.readouterr().out
