# SPDX-License-Identifier: Apache-2.0
"""Megatron Bridge configurations as YAML or JSON: the dump that a run writes when it starts, and files of overrides.

A dump (`ConfigContainer.to_yaml`, `logger.save_config_filepath`, `run_config.yaml` in a checkpoint) names the class of
every section in `_target_`, so what it does not hold has the default. A file of overrides holds some keys only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cudagraphs.formats import bridge
from cudagraphs.formats.flags import Skip, override_fact, override_path
from cudagraphs.formats.selecting import in_effect, pick
from cudagraphs.formats.source import SourceError, TextFile
from cudagraphs.formats.yaml_file import YamlFile
from cudagraphs.rules import defaults
from cudagraphs.rules.base import Member
from cudagraphs.settings import Fact, Known, Settings, Unknown
from cudagraphs.versions import Versions

RUN = "config"
SECTIONS = frozenset(
    "model train ddp optimizer scheduler dataset tokenizer logger checkpoint rng dist mixed_precision comm_overlap "
    "peft validation "
    "rerun_state_machine profiling env_vars inprocess_restart".split()
)


@dataclass
class BridgeYamlRun:
    name: str
    settings: Settings


class BridgeYaml:
    """A configuration dump, or a YAML file of overrides (`dump` tells them apart)."""

    def __init__(self, path: Path, versions: Versions, document: YamlFile | None = None):
        self.path, self.versions = path, versions
        self.document = document or YamlFile(path)
        model = self.document.data.get("model") if isinstance(self.document.data, dict) else None
        self.dump = isinstance(model, dict) and "_target_" in model

    @property
    def file(self) -> TextFile:
        return self.document.file

    @property
    def format(self) -> str:
        return "megatron-bridge, configuration dump" if self.dump else "megatron-bridge, YAML overrides"

    def candidates(self) -> list[str]:
        return [RUN] if isinstance(self.document.root, yaml.MappingNode) else []

    def select(self, patterns: list[str], everything: bool = False) -> list[str]:
        return pick(self.path, self.candidates(), patterns, everything, "Bridge configuration")

    def built_on(self, name: str) -> list[str]:
        return []

    def run(self, name: str) -> BridgeYamlRun:
        facts: dict[str, Fact] = {}
        document = self.document
        for section, (_, node) in document.entries(document.root).items():
            if not isinstance(node, yaml.MappingNode):
                facts[section] = Known(document.construct(node), document.source(node))
                continue
            for field, (_, value) in document.entries(node).items():
                self._take(facts, f"{section}.{field}", value)
            if self.dump:
                facts.setdefault(section, Known({"object": self._class(node)}, document.source(node)))
        if self.dump:
            facts["model.provider"] = Known(self._class(document.node(["model"])), None)
            self._run_time(facts)
        bridge._overlap(facts)
        if self.dump or any(name.startswith("dataset.") for name in facts):
            bridge._packing(facts)
        reason = "" if self.dump else "the recipe below these overrides is not read"
        settings = Settings(
            "megatron-bridge", self.versions, facts, name, str(self.path), complete=self.dump, incomplete_reason=reason
        )
        return BridgeYamlRun(name, settings)

    def _class(self, node: yaml.Node | None) -> str:
        target = self.document.entries(node).get("_target_")
        return str(target[1].value).rpartition(".")[2] if target else "unknown"

    def _take(self, facts: dict[str, Fact], path: str, node: yaml.Node, depth: int = 0) -> None:
        if path.endswith(("._target_", "._call_")):
            return
        source = self.document.source(node)
        if isinstance(node, yaml.MappingNode) and node.value:
            member = self._member(node)
            if member is None:
                facts.setdefault(path, Known({"object": self._class(node)}, source))
                for name, (_, value) in self.document.entries(node).items():
                    if depth < 8:
                        self._take(facts, f"{path}.{name}", value, depth + 1)
                return
            value: Any = member
        elif isinstance(node, yaml.SequenceNode):
            value = [
                self._member(item) if self._member(item) is not None else self.document.construct(item)
                for item in node.value
            ]
        else:
            value = self.document.construct(node)
        name = override_fact(path)
        if name.startswith("env."):
            value = str(value)
        elif isinstance(value, str) and "${" in value:
            facts[name] = Unknown(f"{value} is only known when the file is loaded", source)
            return
        facts[name] = Known(value, source)

    def _member(self, node: yaml.Node) -> Any:
        """The enum member that a mapping stands for, None where it stands for none."""
        entries = self.document.entries(node)
        if "_target_" not in entries or not ("_name_" in entries or "_args_" in entries and len(entries) == 3):
            return None
        enum = str(entries["_target_"][1].value).rpartition(".")[2]
        if "_name_" not in entries:
            return None
        name = str(entries["_name_"][1].value)
        return Member(name, enum) if "CudaGraph" in enum else name

    def _run_time(self, facts: dict[str, Fact]) -> None:
        """Names under which rules know what a dump has in another place."""
        tracker = facts.get("use_te_rng_tracker")
        if tracker is not None:
            facts.setdefault("model.use_te_rng_tracker", tracker)
        for target in bridge.PRECISION_TO_DDP:
            fact = facts.get(f"ddp.{target}")
            if fact is not None:
                facts.setdefault(target, fact)

    def edited(self, name: str, overrides: Mapping[str, Any]) -> tuple["BridgeYaml", dict[str, str]]:
        """The overrides with more of them in effect. Raises SourceError for a dump: it is a record of what ran."""
        settings = self.run(name).settings
        wanted = {fact: value for fact, value in overrides.items() if not in_effect(settings, fact, value)}
        if not wanted:
            return self, {}
        if self.dump:
            raise SourceError(
                f"{self.path}: is the configuration that a run wrote down; change the recipe or the overrides that "
                f"it came from, "
                f"to {', '.join(f'{fact}={value!r}' for fact, value in wanted.items())}"
            )
        document, skipped = self.document, {}
        for fact, value in wanted.items():
            try:
                document = document.with_value(override_path(fact, self.versions).split("."), value)
            except Skip as reason:
                skipped[fact] = str(reason)
        recipe = BridgeYaml(self.path, self.versions, document)
        after = recipe.run(name).settings
        stuck = [fact for fact, value in overrides.items() if fact not in skipped and not in_effect(after, fact, value)]
        if stuck:
            raise SourceError(f"{self.path}: cannot make {', '.join(stuck)} take effect; set it by hand")
        return recipe, skipped


def looks_like(data: Any) -> bool:
    """Whether loaded YAML is a Bridge configuration, whole or in part."""
    if not isinstance(data, dict) or not data:
        return False
    if str(data.get("_target_", "")).endswith("ConfigContainer"):
        return True
    sections = [name for name in data if name in SECTIONS and isinstance(data[name], dict)]
    known = (
        [field for field in (data.get("model") or {}) if field in defaults.FIELDS]
        if isinstance(data.get("model"), dict)
        else []
    )
    return bool(sections) and (bool(known) or "ddp" in data or "train" in data)
