# SPDX-License-Identifier: Apache-2.0
"""The names that the cleanup relies on, in the source of every released megatron-core minor."""

import ast
from pathlib import Path

import pytest
import wheels
from delete_graphs_fakes import ABSENT, MEGATRON

VERSIONS = {int(version.split(".")[1]): version for version in wheels.versions("megatron-core")}


def source(folder: Path, module: str) -> dict[str, ast.stmt] | None:
    """Top-level classes and functions of a module, None where the wheel has no such module."""
    path = folder / (module.replace(".", "/") + ".py")
    if not path.exists():
        return None
    return {
        node.name: node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    }


def names_of(node: ast.stmt) -> set[str]:
    """Methods, class attributes and attributes of self."""
    found = {n.name for n in ast.walk(node) if isinstance(n, ast.FunctionDef)}
    for assign in ast.walk(node):
        for target in getattr(assign, "targets", None) or [getattr(assign, "target", None)]:
            if isinstance(target, ast.Name):
                found.add(target.id)
            elif isinstance(target, ast.Attribute):
                found.add(target.attr)
    return found


@pytest.mark.wheels
@pytest.mark.parametrize("minor", MEGATRON)
def test_names_are_there(minor):
    folder = wheels.fetch_or_skip("megatron-core", VERSIONS[minor])
    for module, expected in MEGATRON[minor].items():
        defined = source(folder, module)
        assert defined is not None, f"megatron-core {VERSIONS[minor]} has no {module}"
        for name, attributes in expected.items():
            assert name in defined, f"megatron-core {VERSIONS[minor]}: {module} has no {name}"
            assert set(attributes) <= names_of(defined[name]), f"megatron-core {VERSIONS[minor]}: {module}.{name}"


@pytest.mark.wheels
@pytest.mark.parametrize("minor", ABSENT)
def test_names_that_came_later_are_not(minor):
    folder = wheels.fetch_or_skip("megatron-core", VERSIONS[minor])
    for module, name in ABSENT[minor]:
        defined = source(folder, module)
        assert (defined is None) if name is None else (name not in (defined or {}))
