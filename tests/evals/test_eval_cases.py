# SPDX-License-Identifier: Apache-2.0
"""The cases themselves: enough of them, complete, hidden from the agent, and in step with what is generated from them."""

import json
from collections import Counter

import cases
import pytest
import run_evals
from cases import CATEGORIES, EVALS, SKILL, CaseError

ALL = cases.load()


def test_there_are_enough_of_every_kind():
    kinds = Counter(case.category for case in ALL)
    assert len(ALL) >= 40
    assert kinds["negative"] >= 12
    assert set(kinds) == set(CATEGORIES)


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
def test_a_case_is_complete(case):
    assert case.expectations and case.reference and case.title
    assert len(case.prompt.split()) >= 12
    assert any(case.workspace.iterdir())
    if case.negative:
        assert case.expected_script is None
    for path in case.workspace.rglob("*"):
        assert path.is_dir() or path.stat().st_size < 20_000


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
def test_the_agent_cannot_read_the_expectations(case, skill, tmp_path):
    workspace = run_evals.prepare(case, skill, tmp_path)
    names = [path.name for path in workspace.rglob("*")]
    assert not {"case.yaml", "evals.json", "graders", "evals", "tests"} & set(names)
    own = [path for path in case.workspace.rglob("*") if path.is_file()]
    assert sorted(path.relative_to(case.workspace) for path in own) == sorted(
        path.relative_to(workspace) for path in workspace.rglob("*") if path.is_file() and ".agents" not in path.parts
    )


def test_generated_files_are_in_step():
    for path, text in cases.generated(ALL).items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python evals/cases.py --write"


def test_evals_json_has_the_union_form():
    document = json.loads((EVALS / "evals.json").read_text(encoding="utf-8"))
    assert document["skill_name"] == SKILL
    keys = {
        "id",
        "name",
        "prompt",
        "expected_output",
        "files",
        "assertions",
        "expectations",
        "expected_skill",
        "expected_script",
    }
    for number, entry in enumerate(document["evals"], 1):
        assert set(entry) == keys | {"should_trigger", "grader"}
        assert entry["id"] == number
        assert entry["expected_skill"] == (SKILL if entry["should_trigger"] else None)
        assert all((EVALS.parent / name).is_file() for name in [*entry["files"], entry["grader"]])


def test_trigger_evals_are_balanced():
    entries = json.loads((EVALS / "trigger_evals.json").read_text(encoding="utf-8"))
    assert len(entries) == 20
    assert sum(entry["should_trigger"] for entry in entries) == 10


BAD_CASES = [
    pytest.param("category: nonsense", "category nonsense", id="unknown category"),
    pytest.param("grader: judge", "grader judge", id="unknown grader"),
    pytest.param("colour: blue", "key colour is unknown", id="unknown key"),
]


@pytest.mark.parametrize("line, message", BAD_CASES)
def test_a_bad_case_is_named(line, message, tmp_path):
    good = (ALL[0].folder / "case.yaml").read_text(encoding="utf-8")
    key = line.partition(":")[0]
    lines = [old for old in good.splitlines() if not old.startswith(f"{key}:")]
    (tmp_path / "workspace").mkdir()
    (tmp_path / "case.yaml").write_text("\n".join([*lines, line]), encoding="utf-8")
    with pytest.raises(CaseError, match=message):
        cases.load_one(tmp_path)


def test_a_missing_key_is_named(tmp_path):
    (tmp_path / "case.yaml").write_text("title: x\n", encoding="utf-8")
    with pytest.raises(CaseError, match="is missing"):
        cases.load_one(tmp_path)
