# SPDX-License-Identifier: Apache-2.0
"""Every recipe of the released megatron-bridge wheel: read, edited, run. recipe_corpus.py does the work and can be run
alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import recipe_corpus
import wheels

pytestmark = pytest.mark.wheels
# Recipes that ship with graphs which a rule rejects, with the proof that it is upstream that is at fault.
SHIPPED_FAULTS = json.loads((Path(__file__).parent / "data" / "shipped_faults.json").read_text(encoding="utf-8"))[
    "faults"
]
FILES, FUNCTIONS = 301, 776


@pytest.fixture(scope="module")
def corpus() -> recipe_corpus.Corpus:
    wheels.fetch_or_skip("megatron-bridge", recipe_corpus.BRIDGE)
    wheels.fetch_or_skip("megatron-core", recipe_corpus.MCORE)
    pytest.importorskip("torch")
    found = recipe_corpus.run()
    print(json.dumps(found.summary(), indent=2))
    return found


def test_every_file_and_function_is_looked_at(corpus):
    summary = corpus.summary()
    assert (summary["files"], summary["functions"]) == (FILES, FUNCTIONS)


def test_nine_in_ten_functions_can_be_executed(corpus):
    assert corpus.summary()["executed"] >= 0.9 * FUNCTIONS


def test_every_recipe_is_read_and_almost_every_fact_is_known(corpus):
    summary = corpus.summary()
    # what is not read builds a dataset or an adapter, or needs an argument: execution gives no ConfigContainer either
    for result in corpus.results:
        for name in result.unread:
            row = corpus.executed.get((result.path, name), {"status": "missing"})
            assert row["status"] != "ok" or row["returned"] != "ConfigContainer", f"{result.path}:{name} is not read"
    assert summary["facts"]["share_known"] >= 0.98


def test_reading_agrees_with_execution(corpus):
    assert [line for result in corpus.results for line in result.differences] == []
    assert corpus.summary()["facts_compared_with_execution"] > 50_000


def test_edits_parse_touch_only_graph_settings_and_are_stable(corpus):
    """That a second run changes nothing and that --off leaves nothing active is checked in `recipe_corpus._apply`."""
    assert [line for result in corpus.results for line in result.problems] == []


def test_executed_settings_are_as_intended_and_all_others_as_before(corpus):
    lines = {line for result in corpus.results for line in (*result.problems, *result.differences)}
    assert [line for line in corpus.problems if line not in lines] == []


@pytest.mark.parametrize("variant", [*recipe_corpus.VARIANTS, "default, off", "full_iteration, off"])
def test_every_variant_was_applied_and_run(corpus, variant):
    counts = corpus.summary()["variants"][variant]
    assert counts["executed_and_as_intended"] >= 0.9 * counts["recipes"]
    assert counts["graphs_on_after"] + counts["graphs_off_after"] == counts["recipes"]
    if variant.endswith("off"):
        assert counts["graphs_on_after"] == 0


def test_local_is_refused_as_bridge_refuses_it(corpus):
    assert corpus.summary()["local_refused"] == corpus.summary()["recipes"]


def test_shipped_recipes_with_graphs_validate_or_the_fault_is_proven(corpus):
    summary = corpus.summary()
    assert summary["shipped_with_graphs_on"] > 200
    assert summary["shipped_with_findings"] == {fault["recipe"]: fault["codes"] for fault in SHIPPED_FAULTS}


@pytest.mark.parametrize("fault", SHIPPED_FAULTS, ids=lambda fault: fault["recipe"].rpartition(":")[2])
def test_the_fault_of_a_shipped_recipe_is_upstreams(corpus, fault):
    script = Path(recipe_corpus.__file__).parent / "oracle" / "finalize_twice.py"
    done = subprocess.run([sys.executable, str(script), fault["recipe"]], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["errors"] == [None, fault["second_finalize"]]
