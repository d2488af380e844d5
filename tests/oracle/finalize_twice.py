#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Finalize the model of released recipes twice, as Bridge's training path does (ConfigContainer.validate, then the
provider).

Usage:
    python tests/oracle/finalize_twice.py FILE:FUNCTION...      files as paths under megatron/bridge

Output: one JSON object a line: {"recipe": ..., "errors": [first, second]}, null where finalizing raised nothing.

Exit codes: 0 ran; 3 a needed wheel or torch is missing.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import wheels
from oracle import bridge_recipes


def errors_of(recipe: str) -> list[str | None]:
    file, _, function = recipe.partition(":")
    module = importlib.import_module("megatron.bridge." + file.removesuffix(".py").replace("/", "."))
    model = getattr(module, function)().model
    errors: list[str | None] = []
    for _ in range(2):
        try:
            model.finalize()
            errors.append(None)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
    return errors


def main(argv: Sequence[str] | None = None) -> int:
    recipes = sys.argv[1:] if argv is None else list(argv)
    answers, sys.stdout = sys.stdout, sys.stderr  # what recipes print must not mix with the answers
    try:
        bridge_recipes.import_bridge(wheels.fetch("megatron-bridge", bridge_recipes.BRIDGE), bridge_recipes.MCORE)
        bridge_recipes.replace_checkpoints(experts=8)
    except (wheels.WheelUnavailable, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    for recipe in recipes:
        print(json.dumps({"recipe": recipe, "errors": errors_of(recipe)}), file=answers)
    sys.stdout = answers
    return 0


if __name__ == "__main__":
    sys.exit(main())
