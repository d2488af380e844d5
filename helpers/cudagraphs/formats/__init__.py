# SPDX-License-Identifier: Apache-2.0
"""File formats: one module a format, each reading facts with their locations and writing settings back.

`open_recipe` chooses by content. Every format gives an object with the same surface, `Recipe`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from cudagraphs.formats.source import SourceError, TextFile, load
from cudagraphs.formats.words import OPTION, OVERRIDE
from cudagraphs.settings import Settings
from cudagraphs.versions import Versions


class RunLike(Protocol):
    """One run that a file configures. `settings` holds its facts."""

    name: str
    settings: Settings


class Recipe(Protocol):
    """A file that configures one or more training runs.

    Attributes: `format` (a short name), `path`, `versions`, `file` (the text, `file.raw` its bytes).
    """

    format: str
    path: Path
    file: TextFile

    def candidates(self) -> list[str]:
        """The runs that the file configures, in file order."""

    def select(self, patterns: list[str], everything: bool = False) -> list[str]:
        """The runs picked by names or globs, all of them, or the only one.

        Raises SourceError where that is not decided.
        """

    def run(self, name: str) -> RunLike:
        """The run with its facts. Raises SourceError where it cannot be read."""

    def edited(self, name: str, overrides: Mapping[str, Any]) -> tuple["Recipe", dict[str, str]]:
        """The recipe with `overrides` (fact name -> value) in effect, and what cannot be written here with the reason.

        Writes nothing to disk: the new bytes are `recipe.file.raw`. Raises SourceError where the values cannot take
        effect."""

    def built_on(self, name: str) -> list[str]:
        """Other runs of this file that a change to `name` changes too."""


def open_recipe(path: Path, versions: Versions, framework: str | None = None, roots: list[Path] = ()) -> Recipe:
    """Open a recipe file by its content.

    `framework` forces the reading. Raises SourceError for a file in no known format.
    """
    from cudagraphs.formats.python_recipe import PythonRecipe

    if path.suffix == ".py" or path.is_dir() or not path.exists():
        return PythonRecipe(path, versions, roots)
    file = load(path)
    if path.suffix in (".yaml", ".yml", ".json"):
        return _yaml_recipe(path, file, versions, framework)
    if path.suffix in (".sh", ".bash", ".sbatch", ".slurm", ".zsh") or file.text.startswith("#!"):
        return _script(path, file, versions, framework)
    return _by_text(path, file, versions, framework, roots)


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """A command line at its first `--`: what stands in front, and the arguments behind, None where there is no `--`."""
    if "--" not in argv:
        return list(argv), None
    at = list(argv).index("--")
    return list(argv[:at]), list(argv[at + 1 :])


def open_input(
    path: Path | None,
    facts: Path | None,
    given: Sequence[str] | None,
    versions: Versions,
    framework: str | None,
    roots: list[Path],
) -> Recipe:
    """The recipe of a command line that names a file, a facts file, or arguments behind `--`.

    Raises SourceError where none of them is given, or more than one.
    """
    named = [
        what
        for what, value in (("a recipe", path), ("--facts", facts), ("arguments behind --", given))
        if value is not None
    ]
    if len(named) != 1:
        raise SourceError(
            f"give one of a recipe file, --facts FILE and -- ARGUMENTS, not {' and '.join(named) or 'none'}"
        )
    if facts is not None:
        from cudagraphs.formats.facts import open_facts

        return open_facts(facts, versions, framework)
    if given is not None:
        from cudagraphs.formats.arguments import from_argv

        return from_argv(given, versions, framework)
    assert path is not None
    return open_recipe(path, versions, framework, roots)


def _yaml_recipe(path: Path, file: TextFile, versions: Versions, framework: str | None) -> Recipe:
    from cudagraphs.formats import automodel, bridge_yaml
    from cudagraphs.formats.facts import FactsFile
    from cudagraphs.formats.model_args import BLOCK, ModelArgs
    from cudagraphs.formats.yaml_file import YamlFile

    document = YamlFile(path, file)
    data = document.data
    keys = data if isinstance(data, dict) else {}
    if framework == "nemo-automodel":
        return automodel.AutoModelRecipe(path, versions, document)
    if any(BLOCK.fullmatch(str(key)) for key in keys) and framework in (None, "megatron-lm", "megatron-core"):
        return ModelArgs(path, versions, document)
    if "framework" in keys:
        return FactsFile(path, versions, document, framework)
    if framework == "megatron-bridge" or (
        framework is None and bridge_yaml.looks_like(data) and not automodel.looks_like(data)
    ):
        return bridge_yaml.BridgeYaml(path, versions, document)
    if framework is None and automodel.looks_like(data):
        return automodel.AutoModelRecipe(path, versions, document)
    raise SourceError(
        f"{path}: no known kind of YAML (a MODEL_ARGS block, a Bridge configuration, an AutoModel recipe, or facts "
        f"with a "
        "framework key); say which with --framework"
    )


def version_names(recipe: Recipe, name: str) -> tuple[Recipe, dict[str, str]]:
    """The recipe with graph settings under the names of its version, and what was renamed (old name -> new name).

    Formats whose reading already goes by the version's names have nothing to rename.
    """
    renamed = getattr(recipe, "with_version_names", None)
    return (recipe, {}) if renamed is None else renamed(name)


def _script(path: Path, file: TextFile, versions: Versions, framework: str | None) -> Recipe:
    from cudagraphs.formats.arguments import LaunchScript

    script = LaunchScript(path, versions, framework, file)
    if not script.commands:
        raise SourceError(
            f"{path}: no training command found: no program is given Megatron-LM arguments (--num-layers 2), "
            f"performance script "
            "arguments (--cuda_graph_impl) or overrides (model.cuda_graph_impl=...)"
        )
    return script


def _by_text(path: Path, file: TextFile, versions: Versions, framework: str | None, roots: list[Path]) -> Recipe:
    """A file whose name tells nothing: a list of arguments or overrides, or Python."""
    from cudagraphs.formats.arguments import LaunchScript
    from cudagraphs.formats.python_recipe import PythonRecipe

    words = [line.split("#")[0].strip() for line in file.text.splitlines() if line.split("#")[0].strip()]
    words = [word.lstrip("'\"") for word in words]
    if words and all(OPTION.match(word) or OVERRIDE.match(word) for word in words):
        recipe = LaunchScript(path, versions, framework, file, listed=True)
        if recipe.commands:
            return recipe
    try:
        python = PythonRecipe(path, versions, roots, file)
    except SourceError:
        python = None
    if python is not None and python.candidates():
        return python
    script = LaunchScript(path, versions, framework, file)
    if script.commands:
        return script
    raise SourceError(
        f"{path}: unknown kind of file; give a Python recipe (.py), a launch script (.sh), YAML or JSON, or a list "
        f"of arguments"
    )
