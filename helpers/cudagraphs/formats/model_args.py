# SPDX-License-Identifier: Apache-2.0
"""YAML files with a MODEL_ARGS block of Megatron-LM arguments and an ENV_VARS block, as its functional tests have.

Source: tests/functional_tests/shell_test_utils/_run_training.sh of NVIDIA/Megatron-LM: `true` makes a bare option, a
value in square brackets is several words, one in parentheses or with spaces is one word, and `${NAME}` comes from the
environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from cudagraphs.formats.flags import Change, MegatronLM
from cudagraphs.formats.selecting import in_effect, pick
from cudagraphs.formats.source import SourceError, TextFile
from cudagraphs.formats.words import Option, Word
from cudagraphs.formats.yaml_file import YamlFile, yaml_text
from cudagraphs.settings import Known, Settings, Unknown
from cudagraphs.versions import Versions

BLOCK = re.compile(r"MODEL_ARGS(_\d+)?")


@dataclass
class ModelArgsRun:
    """One block of arguments."""

    name: str
    settings: Settings
    options: list[Option]


class ModelArgs:
    """A MODEL_ARGS file; each MODEL_ARGS block is a run."""

    format = "megatron-lm, MODEL_ARGS"

    def __init__(self, path: Path, versions: Versions, document: YamlFile | None = None):
        self.path, self.versions = path, replace(versions, bridge=None)
        self.document = document or YamlFile(path)
        self.dialect = MegatronLM(versions)

    @property
    def file(self) -> TextFile:
        return self.document.file

    def candidates(self) -> list[str]:
        entries = self.document.entries(self.document.root)
        return [
            name
            for name, (_, value) in entries.items()
            if BLOCK.fullmatch(name) and isinstance(value, yaml.MappingNode)
        ]

    def select(self, patterns: list[str], everything: bool = False) -> list[str]:
        return pick(self.path, self.candidates(), patterns, everything, "MODEL_ARGS block")

    def built_on(self, name: str) -> list[str]:
        return []

    def run(self, name: str) -> ModelArgsRun:
        options = [
            self._option(key, value)
            for key, value in self.document.entries(self.document.node([name])).values()
            if isinstance(key, yaml.ScalarNode) and key.value.startswith("--")
        ]
        facts, _ = self.dialect.facts(options)
        for variable, (_, node) in self.document.entries(self.document.node(["ENV_VARS"])).items():
            text = node.value if isinstance(node, yaml.ScalarNode) else ""
            source = self.document.source(node)
            facts[f"env.{variable}"] = (
                Unknown("it comes from the environment", source) if "${" in text else Known(text, source)
            )
        return ModelArgsRun(name, Settings("megatron-lm", self.versions, facts, name, str(self.path)), options)

    def _option(self, key: yaml.Node, node: yaml.Node) -> Option:
        source = self.document.source(node)
        word = Word(key.value, self.document.source(key))
        if isinstance(node, yaml.SequenceNode):
            texts = [str(item.value) for item in node.value]
        elif isinstance(node, yaml.ScalarNode):
            texts = self._words(node)
        else:
            texts = []
        values = [
            Word(None, source, reason=f"{text} comes from the environment")
            if re.search(r"\$\{?\w", text)
            else Word(text, source)
            for text in texts
        ]
        return Option(key.value.lstrip("-"), word, values)

    def _words(self, node: yaml.ScalarNode) -> list[str]:
        text = " ".join(node.value.split())
        if node.tag.endswith(":null") or (text == "true"):
            return []
        if re.fullmatch(r"\[[^\]]+\]", text):
            return text[1:-1].split()
        return [text]

    def edited(self, name: str, overrides: Mapping[str, Any]) -> tuple["ModelArgs", dict[str, str]]:
        """The file with `overrides` in effect in one block. Raises SourceError where that cannot be done."""
        run = self.run(name)
        wanted = {k: v for k, v in overrides.items() if not in_effect(run.settings, k, v)}
        variables = {k[4:]: wanted.pop(k) for k in list(wanted) if k.startswith("env.")}
        changes, skipped = self.dialect.changes(wanted, run.settings.facts)
        document = self.document
        for change in changes:
            document = self._apply(document, name, change)
        for variable, value in variables.items():
            path = ["ENV_VARS", variable]
            document = (
                document.without(path)
                if value is None
                else document.with_value(path, _loaded(str(value)), _env_text(str(value)))
            )
        recipe = ModelArgs(self.path, self.versions, document)
        after = recipe.run(name).settings
        stuck = [k for k, v in overrides.items() if k not in skipped and not in_effect(after, k, v)]
        if stuck:
            raise SourceError(f"{self.path}: {name}: cannot make {', '.join(stuck)} take effect; set it by hand")
        return recipe, skipped

    def _apply(self, document: YamlFile, block: str, change: Change) -> YamlFile:
        wanted = change.name.replace("-", "_")
        same = [
            key
            for key in document.entries(document.node([block]))
            if key.lstrip("-").replace("-", "_") == wanted and key.startswith("--")
        ]
        if change.remove:
            for key in same:
                document = document.without([block, key])
            return document
        key = same[-1] if same else f"--{change.name}"
        value, text = _value_text(change.values)
        return document.with_value([block, key], value, text)


def _value_text(values: tuple[str, ...]) -> tuple[Any, str]:
    """The loaded value of an option's words, and how it is written."""
    if not values:
        return True, "true"
    if len(values) > 1:
        text = "[" + " ".join(values) + "]"
        return text, f'"{text}"'
    value = values[0]
    if value.startswith("["):
        # square brackets would be taken off and their content split
        return f"({value})", f"({value})"
    return _loaded(value), value if isinstance(_loaded(value), (int, float)) else yaml_text(value)


def _loaded(text: str) -> Any:
    """What YAML makes of a plain number, the text itself for anything else."""
    return yaml.safe_load(text) if re.fullmatch(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?", text) else text


def _env_text(value: str) -> str:
    return value if isinstance(_loaded(value), (int, float)) else yaml_text(value)
