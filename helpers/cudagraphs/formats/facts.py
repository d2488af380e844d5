# SPDX-License-Identifier: Apache-2.0
"""Neutral facts of a run, as JSON or YAML: for plain PyTorch, Transformer Engine, DeepSpeed, or a run told in words.

    {"framework": "pytorch", "facts": {"torch.capture": "partial"}, "env": {"NCCL_GRAPH_REGISTER": "0"}}

Keys: `framework` (one of the names that --framework takes; needed), `name`, `versions` (component to version, below
what flags give), `facts` (fact name to value, nested or dotted), `env`, `complete` (false: what is not named is
unknown, not the default). Everything else at the top is a fact too. `impl`, `modules` and `inference_scope` are taken
as the graph settings under the names of the version. A name that no rule asks for is refused, so that a misspelt fact
does not pass for one that is left at its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from cudagraphs.formats.selecting import in_effect, pick
from cudagraphs.formats.source import SourceError, TextFile
from cudagraphs.formats.yaml_file import YamlFile
from cudagraphs.rules import defaults
from cudagraphs.rules.base import AUTOMODEL, MEGATRON
from cudagraphs.settings import Fact, Known, Settings
from cudagraphs.versions import DISTRIBUTIONS, VersionError, Versions, parse

FRAMEWORKS = (
    "megatron-bridge",
    "megatron-lm",
    "megatron-core",
    "nemo-automodel",
    "transformer-engine",
    "pytorch",
    "deepspeed",
)
KEYS = ("framework", "name", "versions", "facts", "env", "complete")
CAPTURES = ("none", "partial", "full_iteration")
NEUTRAL = ("impl", "modules", "inference_scope")


@dataclass
class FactsRun:
    name: str
    settings: Settings


class FactsFile:
    """A file of neutral facts; it describes one run."""

    format = "facts"

    def __init__(self, path: Path, versions: Versions, document: YamlFile | None = None, framework: str | None = None):
        self.path = path
        self.document = document or YamlFile(path)
        data = self.document.data
        if not isinstance(data, dict):
            raise SourceError(
                f'{path}: holds no facts; give a JSON object or a YAML mapping, for example {{"framework": "pytorch"}}'
            )
        self.framework = framework or data.get("framework")
        if self.framework not in FRAMEWORKS:
            if self.framework is None:
                raise SourceError(
                    f"{path}: names no framework; add a line such as framework: pytorch, with one of "
                    f"{', '.join(FRAMEWORKS)}"
                )
            raise SourceError(
                f"{self._where('framework')}: framework {self.framework!r} is not one of {', '.join(FRAMEWORKS)}"
            )
        for key in ("facts", "env", "versions"):
            if not isinstance(data.get(key, {}), dict):
                raise SourceError(f"{self._where(key)}: {key} must be a mapping")
        if not isinstance(data.get("complete", True), bool):
            raise SourceError(f"{self._where('complete')}: complete must be true or false")
        self.name = str(data.get("name", "facts"))
        self.versions = self._versions(versions, data.get("versions", {}))
        if self.framework != "megatron-bridge":
            self.versions = replace(self.versions, bridge=None)
        self._check_names()

    def _check_names(self) -> None:
        """Raises SourceError for the first fact that no rule asks for, or whose value rules would not recognize."""
        names = defaults.fact_names()
        for path, node in self.places().items():
            fact = self._fact_name(path)
            if fact == "torch.capture" and self.document.construct(node) not in (None, *CAPTURES):
                raise SourceError(
                    f"{self.document.source(node)}: {path} {self.document.construct(node)!r} is not one of "
                    f"{', '.join(CAPTURES)}"
                )
            if fact in names:
                continue
            near = self._near(path, fact)
            if near is None and (fact.startswith("env.") or (self.framework == AUTOMODEL and "." in fact)):
                continue  # an environment may hold anything, and AutoModel checks the paths of its YAML itself
            place = self._path(path)
            parent = self.document.entries(self.document.node(place[:-1]))
            key = parent[place[-1]][0] if place[-1] in parent else node
            hint = f"did you mean {near}? Correct" if near else "correct"
            raise SourceError(
                f"{self.document.source(key)}: {path}: no rule asks for a fact of this name; {hint} the name, or "
                "remove the line"
            )

    def _near(self, path: str, fact: str) -> str | None:
        """The name that is meant, None where none is near."""
        import difflib

        if fact.startswith("env."):
            # PYTORCH_HIP_ALLOC_CONF is as near as 0.9 to another variable, two letters swapped are nearer
            variables = [name.removeprefix("env.") for name in defaults.ENVIRONMENT]
            near = difflib.get_close_matches(fact.removeprefix("env."), variables, 1, 0.93)
            return f"env.{near[0]}" if near else None
        names = (*sorted(defaults.fact_names()), *KEYS, *(NEUTRAL if self.framework in MEGATRON else ()))
        near = difflib.get_close_matches(fact, names, 1, 0.75)
        return (near or difflib.get_close_matches(path.partition(".")[0], KEYS, 1, 0.75) or [None])[0]

    def _where(self, key: str) -> str:
        node = self.document.node([key])
        return str(self.document.source(node)) if node is not None else str(self.path)

    def _versions(self, versions: Versions, named: Mapping[str, Any]) -> Versions:
        """Versions that flags give win over the file's, and those over installed ones."""
        given = {component for component, how in versions.how if how in ("given", "given as absent")}
        numbers: dict[str, Any] = {}
        for component, text in named.items():
            if component not in DISTRIBUTIONS:
                raise SourceError(
                    f"{self._where('versions')}: unknown component {component!r}; there are {', '.join(DISTRIBUTIONS)}"
                )
            if component in given:
                continue
            try:
                numbers[component] = None if text is None or str(text) == "none" else parse(str(text))
            except VersionError as error:
                raise SourceError(f"{self._where('versions')}: {error}") from None
        how = tuple((name, "named in the file" if name in numbers else origin) for name, origin in versions.how)
        return replace(versions, **numbers, how=how)

    @property
    def file(self) -> TextFile:
        return self.document.file

    def candidates(self) -> list[str]:
        return [self.name]

    def select(self, patterns: list[str], everything: bool = False) -> list[str]:
        return pick(self.path, self.candidates(), patterns, everything, "description of a run")

    def built_on(self, name: str) -> list[str]:
        return []

    def run(self, name: str) -> FactsRun:
        facts: dict[str, Fact] = {}
        for path, node in self.places().items():
            value = self.document.construct(node)
            fact = self._fact_name(path)
            if fact.startswith("env."):
                value = None if value is None else str(int(value) if isinstance(value, bool) else value)
            facts[fact] = Known(value, self.document.source(node), "given")
        complete = bool(self.document.data.get("complete", True))
        reason = "" if complete else "the facts are not complete"
        return FactsRun(name, Settings(self.framework, self.versions, facts, name, str(self.path), complete, reason))

    def places(self) -> dict[str, yaml.Node]:
        """The node of every fact by its name in the file."""
        document, found = self.document, {}
        for key, (_, node) in document.entries(document.root).items():
            if key == "facts":
                found.update(document.leaves(node))
            elif key == "env":
                found.update({f"env.{name}": value for name, (_, value) in document.entries(node).items()})
            elif key not in KEYS:
                found.update(
                    document.leaves(node, f"{key}.")
                    if isinstance(node, yaml.MappingNode) and node.value
                    else {key: node}
                )
        return found

    def _fact_name(self, path: str) -> str:
        if self.framework not in MEGATRON:
            return path
        bare = path.removeprefix("model.")
        if bare in defaults.FIELDS or bare in defaults.ABSENT:
            return bare
        modules = "cuda_graph_modules" if self.versions.minor >= 18 else "cuda_graph_scope"
        return dict(zip(NEUTRAL, ("cuda_graph_impl", modules, "inference_cuda_graph_scope"))).get(path, path)

    def edited(self, name: str, overrides: Mapping[str, Any]) -> tuple["FactsFile", dict[str, str]]:
        """The facts with others in effect: changed where they stand, new ones under `facts`."""
        settings, document = self.run(name).settings, self.document
        places = {self._fact_name(path): path for path in self.places()}
        for fact, value in overrides.items():
            if in_effect(settings, fact, value):
                continue
            path = places.get(fact)
            document = document.with_value(self._path(path) if path else self._new(fact), value)
        return FactsFile(self.path, self.versions, document, self.framework), {}

    def _path(self, fact: str) -> list[str]:
        """Where in the file a fact stands."""
        head = ["facts"] if self.document.node(["facts"]) is not None else []
        for start in (head, []):
            for path in ([*start, fact], [*start, *fact.split(".")]):
                if self.document.node(path) is not None:
                    return path
        return self._new(fact)

    def _new(self, fact: str) -> list[str]:
        return ["env", fact[4:]] if fact.startswith("env.") else ["facts", fact]


def open_facts(path: Path, versions: Versions, framework: str | None = None) -> FactsFile:
    """A facts file. Raises SourceError for one that cannot be read, or that names no framework."""
    return FactsFile(path, versions, framework=framework)
