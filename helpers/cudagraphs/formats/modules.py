# SPDX-License-Identifier: Apache-2.0
"""Finds and parses the source of modules that a recipe imports, without importing anything."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from cudagraphs.formats.source import SourceError, TextFile, load, parse_python
from cudagraphs.formats.values import Module

# Libraries whose functions do not change a training configuration and whose sources are too large to follow.
NOT_FOLLOWED = frozenset(
    [
        "torch",
        "numpy",
        "transformers",
        "omegaconf",
        "hydra",
        "nemo_run",
        "transformer_engine",
        "datasets",
        "huggingface_hub",
        "triton",
        "yaml",
        "jinja2",
        "pytest",
        "wandb",
        "tqdm",
        "pydantic",
        "typing_extensions",
        "modelopt",
        "apex",
        "flash_attn",
        "einops",
    ]
)
HELPERS = Path(__file__).resolve().parents[2]


class Modules:
    """The modules around one recipe file, parsed on demand and kept.

    A dotted name is looked for beside the recipe, in the folders above it that make up its package, in the given extra
    roots, then where the running Python would import it from.
    """

    def __init__(self, recipe: Path, roots: list[Path] = ()):
        self.recipe = recipe
        self.roots = list(dict.fromkeys([*_package_roots(recipe), *roots, *_import_roots()]))
        self._parsed: dict[str, Module | None] = {}
        self.failed: dict[str, str] = {}

    def copy(self) -> Modules:
        """The same modules around another version of the recipe's own text."""
        other = Modules.__new__(Modules)
        other.recipe, other.roots = self.recipe, self.roots
        other._parsed, other.failed = dict(self._parsed), dict(self.failed)
        return other

    def main(self, file: TextFile, tree: ast.Module) -> Module:
        """The recipe's own module, under its package name where its folder is a package."""
        name = _dotted_name(self.recipe)
        module = _module(name, str(self.recipe), file, tree, is_package=self.recipe.name == "__init__.py")
        self._parsed[name] = module
        return module

    def find(self, name: str) -> Module | None:
        """The parsed module, or None if its source is not at hand or is not to be followed."""
        if name not in self._parsed:
            self._parsed[name] = self._load(name)
        return self._parsed[name]

    def _load(self, name: str) -> Module | None:
        top = name.partition(".")[0]
        if top in NOT_FOLLOWED or (top in sys.stdlib_module_names and top != "base"):
            return None
        relative = name.replace(".", os.sep)
        for root in self.roots:
            for found, is_package in (
                (f"{root}{os.sep}{relative}.py", False),
                (os.path.join(root, relative, "__init__.py"), True),
            ):
                if os.path.isfile(found):
                    state = os.stat(found)
                    try:
                        return _parsed_module(name, found, is_package, state.st_mtime_ns, state.st_size)
                    except SourceError as error:
                        self.failed[name] = str(error)
                        return None
        return None


@lru_cache(maxsize=256)
def _parsed_module(name: str, path: str, is_package: bool, modified_ns: int, size: int) -> Module:
    """The parsed file; one process that works on many recipes parses what they share once. Raises SourceError."""
    file = load(Path(path))
    return _module(name, _label(Path(path)), file, parse_python(file), is_package)


def _module(name: str, label: str, file: TextFile, tree: ast.Module, is_package: bool) -> Module:
    package = name if is_package else name.rpartition(".")[0]
    module = Module(name, label, file, tree, package)
    for statement in _global_statements(tree.body):
        for bound in _bound_names(statement):
            module.definitions[bound] = statement
    return module


def _global_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that bind global names; of a `try` the body, of an `if` both sides (`TYPE_CHECKING` first, so the
    other wins)."""
    for statement in body:
        if isinstance(statement, ast.If):
            yield from _global_statements(statement.body)
            yield from _global_statements(statement.orelse)
        elif isinstance(statement, ast.Try):
            for handler in statement.handlers:
                yield from _global_statements(handler.body)
            yield from _global_statements(statement.body)
        elif isinstance(statement, ast.With):
            yield from _global_statements(statement.body)
        else:
            yield statement


def _bound_names(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        for alias in statement.names:
            yield alias.asname or (
                alias.name if isinstance(statement, ast.ImportFrom) else alias.name.partition(".")[0]
            )
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            yield from (
                node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            )
    elif (
        isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None
    ):
        yield statement.target.id


def _package_roots(recipe: Path) -> list[Path]:
    """The recipe's own folder, then every folder above it up to the first that is no package, then that folder's
    parents."""
    folder = recipe.resolve().parent
    roots = [folder]
    parents = [folder, *folder.parents]
    for parent in parents:
        if (
            (parent / "megatron" / "bridge").is_dir()
            or (parent.parent / "__init__.py").is_file()
            or (parent / "__init__.py").is_file()
        ):
            roots.append(parent)
            roots.append(parent.parent)
    return [root for root in roots if str(root) != root.anchor]


def _import_roots() -> list[Path]:
    return [Path(entry) for entry in sys.path if entry and Path(entry) != HELPERS and os.path.isdir(entry)]


def _dotted_name(recipe: Path) -> str:
    path = recipe.resolve()
    parts = [] if path.name == "__init__.py" else [path.stem]
    folder = path.parent
    # `megatron` is a namespace package: it has no __init__.py of its own
    while (folder / "__init__.py").is_file() or (folder.name == "megatron" and (folder / "bridge").is_dir()):
        parts.append(folder.name)
        folder = folder.parent
    return ".".join(reversed(parts)) or "recipe"


def _label(path: Path) -> str:
    """The path as a report shows it: relative where the working directory holds it, else from the package's name on."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        parts = path.parts
        for marker in ("site-packages", "dist-packages"):
            if marker in parts:
                return "/".join(parts[parts.index(marker) + 1 :])
        if "megatron" in parts:
            return "/".join(parts[parts.index("megatron") :])
        return str(path)
