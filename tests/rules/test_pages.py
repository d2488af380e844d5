# SPDX-License-Identifier: Apache-2.0
"""The reference pages are what the rules say, and an upstream message leads to its rule."""

import re
from pathlib import Path

import pytest

from cudagraphs import rules
from cudagraphs.rules import base, pages

COMMITTED = Path(__file__).parents[2] / "references" / "rules"


def test_the_committed_pages_are_up_to_date(tmp_path):
    written = pages.write(tmp_path)
    assert [path.name for path in written] == sorted(path.name for path in COMMITTED.iterdir())
    for path in written:
        assert path.read_text(encoding="utf-8") == (COMMITTED / path.name).read_text(encoding="utf-8"), (
            f"{path.name} is stale: run python helpers/validate_constraints.py --write-pages references"
        )


def test_pages_of_rules_that_are_gone_are_removed(tmp_path):
    (tmp_path / "CG999.md").write_text("old", encoding="utf-8")
    (tmp_path / "notes.md").write_text("mine", encoding="utf-8")
    pages.write(tmp_path)
    assert not (tmp_path / "CG999.md").exists() and (tmp_path / "notes.md").exists()


@pytest.mark.parametrize("rule", rules.REGISTRY, ids=lambda rule: rule.code)
def test_a_rule_is_complete(rule):
    assert re.fullmatch(r"CG\d{3}", rule.code) and rule.code[2] in rules.TOPICS
    assert rule in rules.TOPICS[rule.code[2]][1].RULES
    assert rule.layer in base.LAYERS and rule.severity in base.SEVERITIES
    for text in (rule.title, rule.message, rule.mend, rule.why, rule.source):
        assert text and "  " not in text and not text.startswith(" ")
    assert not rule.title.endswith(".") and not rule.message.endswith(".") and not rule.mend.endswith(".")
    assert rule.why.endswith(".")
    assert rule.bad and rule.good
    if rule.severity == "error" and rule.layer in ("config", "arguments", "automodel"):
        assert rule.upstream, "users search for upstream's text"


@pytest.mark.parametrize("rule", rules.REGISTRY, ids=lambda rule: rule.code)
def test_explain_finds_a_rule_by_code_and_by_upstreams_text(rule):
    assert rules.explain(rule.code.lower()) == [rule]
    for message in rule.upstream:
        if len(message.split()) > 3:
            found = rules.explain(f"AssertionError: {message.upper()}\n")
            assert rule in found and len(found) <= 12, message


def test_explain_finds_by_a_piece_and_by_most_words():
    assert [r.code for r in rules.explain("full recompute is only supported")] == ["CG204"]
    assert "CG204" in [r.code for r in rules.explain("full recomputation only supported with full iteration graph")]
    assert rules.explain("nothing of the sort, zebra") == []
    assert rules.explain("") == []
