# SPDX-License-Identifier: Apache-2.0
"""Every rule's own examples: the bad ones break it, the good ones do not."""

import pytest

from cudagraphs import rules, versions
from cudagraphs.rules.base import Example, Rule
from cudagraphs.settings import Known, Settings


def settings_of(example: Example, rule: Rule) -> Settings:
    framework = example.framework or rule.frameworks[-1]
    resolved = versions.resolve(framework, **{"te": "2.20", "torch": "2.11", **example.versions})
    return Settings(framework, resolved, {name: Known(value) for name, value in example.facts.items()})


def cases(kind: str) -> list:
    return [
        pytest.param(rule, example, id=f"{rule.code}-{kind}-{number}")
        for rule in rules.REGISTRY
        for number, example in enumerate(getattr(rule, kind))
    ]


@pytest.mark.parametrize("rule,example", cases("bad"))
def test_bad_example_breaks_the_rule(rule, example):
    settings = settings_of(example, rule)
    assert rule.holds_for(settings.framework, settings.versions), "the example's versions lie outside the rule's"
    found = [finding for finding in rules.check(settings, [rule]) if not finding.needs]
    assert [finding.code for finding in found] == [rule.code]
    assert "unknown" not in found[0].message


@pytest.mark.parametrize("rule,example", cases("good"))
def test_good_example_keeps_the_rule(rule, example):
    settings = settings_of(example, rule)
    assert rules.check(settings, [rule]) == []


@pytest.mark.parametrize("rule,example", cases("bad"))
def test_fix_removes_the_finding(rule, example):
    settings = settings_of(example, rule)
    (finding,) = rules.check(settings, [rule])
    if rule.fix is None:
        assert finding.fix is None and finding.mend
    else:
        assert finding.fix is not None
        assert rules.check(settings.with_values(finding.fix), [rule]) == []
