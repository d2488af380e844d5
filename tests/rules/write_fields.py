#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write helpers/cudagraphs/rules/fields.py: the fields of TransformerConfig and their defaults in every minor version.

Reads the class bodies of `ModelParallelConfig` and `TransformerConfig` in the pinned megatron-core wheels (see
tests/wheels.py) with `ast`; nothing of megatron-core is imported.

Usage:
    python tests/rules/write_fields.py            rewrite the file
    python tests/rules/write_fields.py --check    exit 1 if the file is not what the wheels say

Output: the number of fields on stdout.
Exit codes: 0 written or equal; 1 --check found a difference; 2 usage; 3 a wheel cannot be had.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import wheels  # noqa: E402

TARGET = ROOT / "helpers" / "cudagraphs" / "rules" / "fields.py"
SOURCES = {
    "ModelParallelConfig": "megatron/core/model_parallel_config.py",
    "TransformerConfig": "megatron/core/transformer/transformer_config.py",
}
HEADER = '''# SPDX-License-Identifier: Apache-2.0
"""Fields of megatron-core's TransformerConfig (with ModelParallelConfig) and their defaults. Do not edit.

Written by tests/rules/write_fields.py from the class bodies in the released wheels
{releases}.
`FIELDS[name]` is a tuple of (minor, default): the default from that megatron-core minor version on. `...` stands for a
default that is not a literal, `GONE` for a field that the minor version no longer has.
"""

GONE = "<gone>"
FIELDS = {{
'''


def literal(node: ast.expr | None) -> object:
    """The value of a default: a literal, or what `field(default=...)` or `field(default_factory=list)` gives."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("field"):
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if "default" in keywords:
            return literal(keywords["default"])
        if ast.unparse(keywords.get("default_factory", ast.Constant(None))) in ("list", "dict"):
            return [] if ast.unparse(keywords["default_factory"]) == "list" else {}
        return ...
    try:
        return ast.literal_eval(node) if node is not None else ...
    except ValueError:
        return ...


def fields(folder: Path) -> dict[str, object]:
    """Field name -> default, for one unpacked megatron-core wheel."""
    found: dict[str, object] = {}
    for name, path in SOURCES.items():
        tree = ast.parse((folder / path).read_text(encoding="utf-8"))
        for cls in (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name):
            for node in cls.body:
                if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
                    found[node.target.id] = literal(node.value)
    return found


def render() -> str:
    releases = wheels.versions("megatron-core")
    history: dict[str, list[tuple[int, object]]] = {}
    gone = object()
    for release in releases:
        minor = int(release.split(".")[1])
        here = fields(wheels.fetch("megatron-core", release))
        for name in [*here, *(old for old in history if old not in here)]:
            value = here.get(name, gone)
            steps = history.setdefault(name, [])
            if not steps or repr(steps[-1][1]) != repr(value):
                steps.append((minor, value))
    lines = []
    for name in sorted(history):
        steps = ", ".join(
            f"({minor}, {'GONE' if value is gone else '...' if value is ... else _quoted(value)})"
            for minor, value in history[name]
        )
        # a tuple of one needs its comma; of more, a formatter would spread it over lines
        lines.append(f'    "{name}": ({steps}{"," if len(history[name]) == 1 else ""}),\n')
    return HEADER.format(releases=", ".join(releases)) + "".join(lines) + "}\n"


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) and '"' not in value else repr(value)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    args = parser.parse_args(argv)
    try:
        text = render()
    except wheels.WheelUnavailable as error:
        print(error, file=sys.stderr)
        return 3
    if args.check:
        same = TARGET.read_text(encoding="utf-8") == text
        print("equal" if same else f"{TARGET.name} is not what the wheels say: run tests/rules/write_fields.py")
        return 0 if same else 1
    TARGET.write_text(text, encoding="utf-8")
    print(f"{TARGET.name}: {text.count(chr(10)) - HEADER.count(chr(10)) - 1} fields")
    return 0


if __name__ == "__main__":
    sys.exit(main())
