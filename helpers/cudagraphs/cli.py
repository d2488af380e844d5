# SPDX-License-Identifier: Apache-2.0
"""What the command-line helpers share: version flags, faults turned into one line and an exit code."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from cudagraphs.formats.source import SourceError
from cudagraphs.versions import VersionError, Versions, resolve

CLEAN, FINDINGS, USAGE, FAULT = 0, 1, 2, 3
FRAMEWORKS = ("megatron-bridge", "megatron-lm", "megatron-core", "nemo-automodel", "transformer-engine", "pytorch", "deepspeed")


class UsageError(ValueError):
    """A request that cannot be carried out; the text is one line with the mend."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line with exit code 2, as every other error of the helpers is."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(USAGE, f"{self.prog}: {message}; see --help\n")


def add_version_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("versions", "by default those installed here, else the newest known")
    group.add_argument("--mcore", metavar="VERSION", help="megatron-core, for example 0.19")
    group.add_argument("--bridge", metavar="VERSION", help="Megatron Bridge; implies the megatron-core that it pins")
    group.add_argument("--te", metavar="VERSION", help="Transformer Engine, or `none` where it is absent")
    group.add_argument("--automodel", metavar="VERSION", help="NeMo AutoModel")
    group.add_argument("--torch", metavar="VERSION", help="PyTorch")
    group.add_argument("--gpu-arch", metavar="ARCH", help="GPU name or compute capability, for example h100 or 9.0")


def versions_from(arguments: argparse.Namespace, framework: str = "megatron-bridge") -> Versions:
    """Raises VersionError for a version text that is none."""
    return resolve(
        framework,
        mcore=arguments.mcore,
        bridge=arguments.bridge,
        te=arguments.te,
        automodel=arguments.automodel,
        torch=arguments.torch,
        arch=arguments.gpu_arch,
    )


def run(program: str, body: Callable[[], int]) -> int:
    """Run a helper's body: expected faults become one line on stderr and exit code 2, unexpected ones a report and 3."""
    try:
        return body()
    except (SourceError, VersionError, UsageError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        # the reader of our output left (for example `| head`): nothing is wrong, and Python must not complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLEAN
    except KeyboardInterrupt:
        print(f"{program}: interrupted; nothing was written", file=sys.stderr)
        return USAGE
    except Exception:
        traceback.print_exc()
        print(f"{program}: this is a fault of the helper itself; nothing was written", file=sys.stderr)
        return FAULT


def print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2, default=str))


def utf8_streams() -> None:
    """Reports hold file text of any script; a C locale must not turn them into a crash."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def arguments_of(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace | int:
    """The parsed arguments, or the exit code where argparse has already answered (--help, or a usage error)."""
    try:
        return parser.parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
