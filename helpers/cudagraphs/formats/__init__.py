# SPDX-License-Identifier: Apache-2.0
"""File formats: one module a format, each reading facts with their locations and writing settings back.

`open_recipe` chooses by content. Every format gives an object with the same surface, `Recipe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from cudagraphs.formats.source import SourceError, TextFile
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
        """The runs picked by names or globs, all of them, or the only one. Raises SourceError where that is not decided."""

    def run(self, name: str) -> RunLike:
        """The run with its facts. Raises SourceError where it cannot be read."""

    def edited(self, name: str, overrides: Mapping[str, Any]) -> tuple["Recipe", dict[str, str]]:
        """The recipe with `overrides` (fact name -> value) in effect, and what cannot be written here with the reason.

        Writes nothing to disk: the new bytes are `recipe.file.raw`. Raises SourceError where the values cannot take effect.
        """

    def built_on(self, name: str) -> list[str]:
        """Other runs of this file that a change to `name` changes too."""


def open_recipe(path: Path, versions: Versions, framework: str | None = None, roots: list[Path] = ()) -> Recipe:
    """Open a recipe file by its content; `framework` forces the reading. Raises SourceError for a file in no known format."""
    from cudagraphs.formats.python_recipe import PythonRecipe

    if path.suffix == ".py" or path.is_dir() or not path.exists():
        return PythonRecipe(path, versions, roots)
    raise SourceError(f"{path}: unknown kind of file; give a Python recipe (.py)")
