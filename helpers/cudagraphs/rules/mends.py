# SPDX-License-Identifier: Apache-2.0
"""Fixes that rules share: other scopes, fewer scopes, graphs off; each in the field names of the version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any

from cudagraphs.rules.base import Facts, Open, Rule
from cudagraphs.rules.normalize import MODULES, scope_names
from cudagraphs.versions import Versions

Overrides = dict[str, Any]


def known(facts: Facts, name: str, otherwise: Any = None) -> Any:
    """The value of a fact, `otherwise` where it is unknown."""
    try:
        return facts[name]
    except (Open, KeyError):
        return otherwise


def scopes(facts: Facts, versions: Versions, names: Iterable[str]) -> Overrides:
    """The overrides that make `names` the scopes; no names mean the whole layer."""
    names = list(names)
    if versions.minor >= 18:
        overrides: Overrides = {"cuda_graph_modules": names}
        if known(facts, "cuda_graph_scope", "full") is not None:
            overrides["cuda_graph_scope"] = None
        return overrides
    if versions.minor >= 16:
        return {"cuda_graph_scope": names}
    return {"cuda_graph_scope": names[0] if names else "full"}


def full_iteration(facts: Facts, versions: Versions) -> Overrides:
    """The overrides that capture the whole iteration, in the version's way."""
    if versions.minor >= 18:
        overrides = {"cuda_graph_impl": "full_iteration", **scopes(facts, versions, ())}
        if known(facts, "inference_cuda_graph_scope") not in (None, "none"):
            overrides["inference_cuda_graph_scope"] = None
        return overrides
    if versions.minor >= 15:
        return {"cuda_graph_impl": "local", **scopes(facts, versions, ("full_iteration",))}
    return {"enable_cuda_graph": True, "external_cuda_graph": False, **scopes(facts, versions, ("full_iteration",))}


def off(facts: Facts, versions: Versions) -> Overrides:
    """The overrides that turn the graphs of the model off; what is unknown is set too.

    From 0.18 on "full_iteration" among the scopes turns graphs on even where the implementation is "none", and from
    0.16 on the scopes are checked even then, so scopes that are not plainly harmless go too.
    """
    flags = ("enable_cuda_graph", "external_cuda_graph")
    overrides: Overrides = {name: False for name in flags if known(facts, name, True)}
    if versions.minor < 15:
        return overrides
    if known(facts, "cuda_graph_impl") != "none":
        overrides["cuda_graph_impl"] = "none"
    harmless = (None, "full", [])
    if versions.minor >= 18:
        if known(facts, "cuda_graph_scope", ...) not in harmless:
            overrides["cuda_graph_scope"] = None
        if known(facts, "cuda_graph_modules", ...) not in harmless:
            overrides["cuda_graph_modules"] = []
        if known(facts, "inference_cuda_graph_scope", ...) not in (None, "none"):
            overrides["inference_cuda_graph_scope"] = None
    elif versions.minor >= 16 and known(facts, "cuda_graph_scope", ...) not in harmless:
        overrides["cuda_graph_scope"] = []
    return overrides


class Overlay(Mapping[str, Any]):
    """Facts with other scopes, as the conditions of rules see them."""

    def __init__(self, facts: Facts, impl: str, modules: tuple[str, ...]):
        self.facts = facts
        self.own = {
            "graph.impl": impl,
            "graph.modules": modules,
            "graph.active": impl != "none",
            "graph.problems": (),
            "graph.full_iteration": impl == "full_iteration" or (impl == "local" and "full_iteration" in modules),
            "graph.whole_layer": impl in ("local", "transformer_engine") and not modules,
        }

    def __getitem__(self, name: str) -> Any:
        return self.own[name] if name in self.own else self.facts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.facts)

    def __len__(self) -> int:
        return len(self.facts)


def rejected(rules: Iterable[Rule], facts: Facts, versions: Versions) -> bool:
    """Whether one of the rules rejects the facts for certain; what cannot be told counts as accepted."""
    for rule in rules:
        try:
            if rule.when(facts, versions):
                return True
        except (Open, LookupError):
            continue
    return False


def closed(impl: str, modules: tuple[str, ...]) -> bool:
    """Whether upstream leaves these scopes as they are: local brings router and preprocessing together."""
    return impl != "local" or ("moe_router" in modules) == ("moe_preprocess" in modules)


def fewest_changes(facts: Facts, versions: Versions, rules: Iterable[Rule]) -> Overrides:
    """The overrides that keep as many of the captured scopes as the rules accept; graphs off if they accept none.

    A whole layer counts as all scopes that the version names. `rules` are the config-layer rules of the version.
    """
    impl, now = facts["graph.impl"], tuple(dict.fromkeys(facts["graph.modules"]))
    if facts["graph.full_iteration"] or versions.minor < 16:
        return off(facts, versions)
    kept = now or tuple(name for name in MODULES if name in scope_names(versions.minor) and name != "mamba")
    rules = tuple(rules)
    for size in range(len(kept), 0, -1):
        for modules in combinations(kept, size):
            if closed(impl, modules) and not rejected(rules, Overlay(facts, impl, modules), versions):
                return scopes(facts, versions, modules)
    return off(facts, versions)


def narrower(rules_of: Callable[[int], Iterable[Rule]]) -> Callable[[Facts, Versions], Overrides]:
    """The fix that keeps as many scopes as the rules of the version accept."""
    return lambda facts, versions: fewest_changes(facts, versions, rules_of(versions.minor))
