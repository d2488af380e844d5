# SPDX-License-Identifier: Apache-2.0
"""Run an unchanged training script as the interpreter would, with install() in place."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from cudagraphs.cleanup import exits


class Unrunnable(ValueError):
    """The script or module cannot be started; the text is one line for the user."""


def check_script(path: str) -> None:
    """Raise Unrunnable for a script that is not a readable file."""
    if not os.path.isfile(path):
        raise Unrunnable(f"{path}: no such file; give the training script after --, or -m and a module name")
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise Unrunnable(f"{path}: cannot be read ({error.strerror})") from None


def run(target: str, arguments: Sequence[str], module: bool, guard: exits.Exits) -> None:
    """Run a script path, or a module name as `python -m` does. Returns or raises as the program does.

    sys.argv, sys.path[0] and __main__ are what the program would find without us. A SystemExit that reports failure
    counts as a fault: the communicators are aborted, so that peers in a collective do not wait for this rank.
    """
    program = ModuleType("__main__")
    program.__builtins__ = builtins  # type: ignore[attr-defined]
    program.__annotations__ = {}
    sys.modules["__main__"] = program
    try:
        if module:
            sys.path[0] = os.getcwd()
            sys.argv = [target, *arguments]
            runpy._run_module_as_main(target)  # what `python -m` itself calls: __spec__, __package__, argv[0]
        else:
            sys.path[0] = os.path.dirname(os.path.realpath(target))
            sys.argv = [target, *arguments]
            _run_script(target, program)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            guard.fault = True
        raise
    finally:
        guard.delete_first_at_exit()  # before whatever the program and its libraries have registered


def _run_script(path: str, program: ModuleType) -> None:
    full_path = os.path.abspath(path)  # as the interpreter does since 3.9; sys.argv[0] stays as given
    loader = SourceFileLoader("__main__", full_path)
    program.__file__ = full_path
    program.__loader__ = loader
    program.__spec__ = None
    program.__cached__ = None  # type: ignore[attr-defined]
    code = loader.source_to_code(loader.get_data(full_path), full_path)
    exec(code, vars(program))
