#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run edited recipe files of a Megatron Bridge release for real, each alone among the released ones.

Every file under DIR/megatron/bridge takes the place of the released file of the same path while its functions run; what
it imports is the released code. So an edit is judged by what it does itself, not by what edits of its base recipes do.

Usage:
    python tests/oracle/edited_recipes.py DIR

Output: the lines of bridge_recipes.py, in order of file and line.

Exit codes: 0 ran (errors are in the lines); 2 usage, or DIR is no Bridge tree; 3 a needed wheel or torch is missing.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import wheels
from oracle import bridge_recipes


def run_edited(root: Path, path: Path) -> Iterator[dict]:
    dotted = path.relative_to(root).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    released = importlib.import_module(dotted)
    edited = types.ModuleType(dotted)
    edited.__file__, edited.__package__ = str(path), released.__package__
    sys.modules[dotted] = edited
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), edited.__dict__)
        yield from bridge_recipes.run_file(root, path, ["*"])
    finally:
        sys.modules[dotted] = released


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    root = Path(arguments[0]).resolve() if len(arguments) == 1 else None
    if root is None or not (root / "megatron" / "bridge").is_dir():
        print("error: name one folder that holds megatron/bridge", file=sys.stderr)
        return 2
    answers, sys.stdout = sys.stdout, sys.stderr  # what recipes print must not mix with the answers
    try:
        bridge_recipes.import_bridge(wheels.fetch("megatron-bridge", bridge_recipes.BRIDGE), bridge_recipes.MCORE)
        bridge_recipes.replace_checkpoints()
    except (wheels.WheelUnavailable, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    for path in sorted((root / "megatron" / "bridge").rglob("*.py")):
        for answer in run_edited(root, path):
            print(json.dumps(answer), file=answers)
    sys.stdout = answers
    return 0


if __name__ == "__main__":
    sys.exit(main())
