# SPDX-License-Identifier: Apache-2.0
"""NeMo AutoModel recipes: YAML whose `model.backend.cuda_graph.modules` names the scopes.

Facts are the file's dotted paths; what stands under `model.backend` is also known without the `model.` in front
(`backend.cuda_graph.modules`), with the defaults of BackendConfig on a machine that has a GPU.
Source: nemo_automodel/components/models/common/utils.py BackendConfig, 0.6.0 and 0.7.0.
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
from cudagraphs.settings import Fact, Known, Settings, Unknown
from cudagraphs.versions import Versions

RUN = "model"
MODULES = "backend.cuda_graph.modules"
_LIBRARIES = "it depends on which communication libraries are installed"


@dataclass
class AutoModelRun:
    name: str
    settings: Settings


class AutoModelRecipe:
    """An AutoModel YAML file; it configures one run."""

    format = "nemo-automodel"

    def __init__(self, path: Path, versions: Versions, document: YamlFile | None = None):
        self.path, self.versions = path, replace(versions, bridge=None)
        self.document = document or YamlFile(path)

    @property
    def file(self) -> TextFile:
        return self.document.file

    def candidates(self) -> list[str]:
        return [RUN] if isinstance(self.document.root, yaml.MappingNode) else []

    def select(self, patterns: list[str], everything: bool = False) -> list[str]:
        return pick(self.path, self.candidates(), patterns, everything, "AutoModel configuration")

    def built_on(self, name: str) -> list[str]:
        return []

    def run(self, name: str) -> AutoModelRun:
        document = self.document
        facts: dict[str, Fact] = {}
        for path, node in document.leaves(document.root):
            facts[path] = self._fact(node)
        for path in [path for path in facts if path.startswith("model.backend")]:
            facts[path.removeprefix("model.")] = facts[path]
        name_or_path = facts.get("model.pretrained_model_name_or_path") or facts.get(
            "model.config.pretrained_model_name_or_path"
        )
        if name_or_path is not None:
            facts["model.hf_id"] = name_or_path
        facts["num_moe_experts"] = Unknown("it comes from the checkpoint")
        for path, value in self._defaults().items():
            facts.setdefault(path, value)
        return AutoModelRun(name, Settings("nemo-automodel", self.versions, facts, name, str(self.path)))

    def _fact(self, node: yaml.Node) -> Fact:
        source = self.document.source(node)
        if isinstance(node, yaml.ScalarNode) and "${" in node.value:
            return Unknown(f"{node.value} is only known when the recipe is loaded", source)
        return Known(self.document.construct(node), source)

    def _defaults(self) -> dict[str, Fact]:
        te = self.versions.te is not None
        values: dict[str, Any] = {
            "backend.attn": "te" if te else "sdpa",
            "backend.linear": "te" if te else "torch",
            "backend.rms_norm": "torch_fp32",
            "backend.fake_balanced_gate": False,
            MODULES: [],
            "distributed.pp_size": 1,
            "distributed.activation_checkpointing": False,
        }
        facts: dict[str, Fact] = {name: Known(value, None, "default") for name, value in values.items()}
        facts["backend.dispatcher"] = Unknown(_LIBRARIES)
        return facts

    def edited(self, name: str, overrides: Mapping[str, Any]) -> tuple["AutoModelRecipe", dict[str, str]]:
        """The file with `overrides` in effect. Raises SourceError where the file's structure does not allow it."""
        before = self.run(name).settings
        document, skipped = self.document, {}
        for fact, value in overrides.items():
            if in_effect(before, fact, value):
                continue
            if fact.startswith("env."):
                skipped[fact] = "the recipe has no environment block"
                continue
            path = ["model", *fact.split(".")] if fact.startswith("backend.") else fact.split(".")
            document = document.without(path) if value is None else document.with_value(path, value)
        recipe = AutoModelRecipe(self.path, self.versions, document)
        after = recipe.run(name).settings
        stuck = [
            fact
            for fact, value in overrides.items()
            if fact not in skipped and value is not None and not in_effect(after, fact, value)
        ]
        if stuck:
            raise SourceError(f"{self.path}: cannot make {', '.join(stuck)} take effect; set it by hand")
        return recipe, skipped


def looks_like(data: Any) -> bool:
    """Whether loaded YAML is an AutoModel recipe."""
    if not isinstance(data, dict):
        return False
    model = data.get("model")
    if "nemo_automodel" in str(data.get("recipe", "")) or "step_scheduler" in data:
        return True
    if isinstance(model, dict):
        return "automodel" in str(model.get("_target_", "")).lower() or isinstance(model.get("backend"), dict)
    return False
