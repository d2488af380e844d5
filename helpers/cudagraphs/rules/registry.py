# SPDX-License-Identifier: Apache-2.0
"""The rules by code, filled in by the package's `__init__`; fixes look the config-layer rules of a version up here."""

from __future__ import annotations

from functools import cache

from cudagraphs.rules.base import CORE, Registry, Rule
from cudagraphs.versions import Versions

REGISTRY = Registry()


@cache
def config_rules(minor: int) -> tuple[Rule, ...]:
    """The config-layer rules of a minor version whose conditions go beyond names (`normalize` judges those)."""
    versions = Versions(mcore=(0, minor))
    return tuple(
        rule for rule in REGISTRY if rule.layer == "config" and rule.code >= "CG1" and rule.holds_for(CORE, versions)
    )
