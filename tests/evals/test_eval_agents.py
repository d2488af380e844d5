# SPDX-License-Identifier: Apache-2.0
"""The built-in agents on all cases: the reference passes, nothing and every mutant fails, recorded runs keep their grades."""

import json
from concurrent.futures import ThreadPoolExecutor

import agents
import cases
import pytest
import run_evals

ALL = cases.load()
RECORDED = sorted((cases.EVALS / "results" / "agents").glob("*/*/transcript.json"))
LIMITS = agents.Limits(seconds=60)
# Each mutant on this many of the cases that it must fail, spread over their list.
CASES_A_MUTANT = 3


def runs(spec, chosen, upstream, skill):
    agent = agents.make(spec, "with_skill")
    with ThreadPoolExecutor(2) as pool:
        done = pool.map(
            lambda case: run_evals.run_one(agent, case, "with_skill", 1, skill, upstream, LIMITS, None), chosen
        )
        return {run.case.id: run for run in done}


@pytest.fixture(scope="module")
def reference_runs(upstream, skill):
    return runs("reference", ALL, upstream, skill)


@pytest.fixture(scope="module")
def null_runs(upstream, skill):
    return runs("null", ALL, upstream, skill)


@pytest.mark.wheels
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
def test_the_reference_passes(case, reference_runs):
    run = reference_runs[case.id]
    assert run.grade.passed, (
        run.summary()["failed_checks"],
        [action["output"][-300:] for action in run.transcript.actions],
    )


@pytest.mark.wheels
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
def test_doing_nothing_fails(case, null_runs):
    assert not null_runs[case.id].grade.passed


@pytest.mark.wheels
@pytest.mark.parametrize("name", agents.MUTANTS)
def test_a_mutant_is_noticed(name, upstream, skill):
    must_fail = [case for case in ALL if agents.MUTANTS[name][1](case)]
    assert must_fail
    chosen = must_fail[:: max(1, len(must_fail) // CASES_A_MUTANT)][:CASES_A_MUTANT]
    unnoticed = [case for case, run in runs(f"mutant:{name}", chosen, upstream, skill).items() if run.grade.passed]
    assert not unnoticed


@pytest.mark.wheels
@pytest.mark.parametrize("file", RECORDED, ids=lambda file: f"{file.parent.parent.name}/{file.parent.name}")
def test_a_recorded_run_keeps_its_grade(file, upstream, skill):
    record = json.loads(file.read_text(encoding="utf-8"))
    case = cases.load(record["case"])[0]
    arm = file.parent.parent.name
    agent = agents.make(f"replay:{file.parent.parent.parent}", arm)
    run = run_evals.run_one(agent, case, arm, 1, skill if arm == "with_skill" else None, upstream, LIMITS, None)
    assert run.grade.passed == record["grade"]["passed"], run.summary()["failed_checks"]


def test_records_are_scrubbed():
    for file in RECORDED:
        text = file.read_text(encoding="utf-8")
        for path in ("/root", "/tmp/", "/work/", "/home/"):
            assert path not in text, f"{file}: {path}"


def test_the_reference_knows_only_what_the_skill_shows(tmp_path):
    skill_folder = tmp_path / agents.SKILL_FOLDER
    skill_folder.mkdir(parents=True)
    (skill_folder / "SKILL.md").write_text("Run `python helpers/apply_overrides.py RECIPE --diff`.", encoding="utf-8")
    known = agents.skill_text(skill_folder)
    assert agents.missing_knowledge({"run": "python helpers/apply_overrides.py recipe.py --diff"}, known) == ""
    assert agents.missing_knowledge({"run": "python helpers/apply_overrides.py recipe.py --off"}, known) == "--off"
    assert agents.missing_knowledge({"run": "python helpers/doctor.py"}, known) == "helpers/doctor.py"
    assert agents.missing_knowledge({"needs": "graphs are off"}, known) == "graphs are off"
    assert agents.missing_knowledge({"answer": {}}, None) == ""
    assert agents.missing_knowledge({"launcher": "run.sh"}, None) != ""


BAD_SPECS = ["", "oracle", "mutant:nice", "replay:/nowhere", "command:", "openai:"]


@pytest.mark.parametrize("spec", BAD_SPECS)
def test_a_bad_spec_is_refused(spec):
    with pytest.raises(agents.AgentError):
        agents.make(spec, "with_skill")
