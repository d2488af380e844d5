#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ask a released megatron-core what it makes of a TransformerConfig.

The worker imports `TransformerConfig` from the unpacked wheel of one version, under torch CPU, and builds the real
class for every request. Transformer Engine is not there; its version is an input, put where upstream caches it
(`megatron.core.utils._te_version`). triton, which 0.18 and newer import unguarded, is a stand-in (standins.py).

Usage:
    python tests/oracle/transformer_config.py 0.19 < requests.jsonl > answers.jsonl
    python tests/oracle/transformer_config.py 0.19 --fields      print the version's field names and defaults as JSON

VERSION is a pinned version or its minor ("0.19").

Request, one a line:
    {"id": anything,
     "fields": {...},                     constructor keywords on top of BASE_FIELDS; typed values as in protocol.py
     "te": "2.14.0" | null,               Transformer Engine version, null for absent; default DEFAULT_TE
     "then": {...}}                       optional: after building, set these attributes and finalize (`__post_init__`)
                                          a second time, as Megatron Bridge does; {} finalizes twice unchanged
Answer, one a line, in order:
    {"id": ...,
     "verdict": "accepted" | "rejected" | "baseline_rejected",
     "error": null | {"type": "AssertionError", "text": one line, "in": "__post_init__"},
     "normalized": null | {"impl": str, "modules": [names] | str | null, "inference_scope": str | null}}

"in" is the innermost upstream function. "baseline_rejected": the version refuses the same fields without the graph
fields (GRAPH_FIELDS), so the refusal says nothing about graphs; "error" is then what it says without them.
"normalized" is what the accepted object holds: from 0.16, modules is the list of member names (of cuda_graph_scope up
to 0.17, of cuda_graph_modules from 0.18); up to 0.15 upstream leaves cuda_graph_scope as it was given. inference_scope
is null before 0.18. 0.13 and 0.14 have no cuda_graph_impl: impl is "local" for enable_cuda_graph, "transformer_engine"
for external_cuda_graph, "local+transformer_engine" for both, else "none".

Exit codes: 0 all answered; 2 usage or unknown version; 3 the wheel or torch cannot be had.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import wheels
from oracle import protocol, standins

DEFAULT_TE = "2.14.0"
BASE_FIELDS = {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4}
GRAPH_FIELDS = frozenset(
    (
        "enable_cuda_graph",
        "external_cuda_graph",
        "cuda_graph_impl",
        "cuda_graph_scope",
        "cuda_graph_modules",
        "inference_cuda_graph_scope",
    )
)


def full_version(wanted: str) -> str:
    """The pinned megatron-core version for a version or a minor.

    Raises:
        KeyError: none is pinned.
    """
    for version in wheels.versions("megatron-core"):
        if wanted in (version, version.rpartition(".")[0]):
            return version
    raise KeyError(f"megatron-core {wanted} is not pinned; there are {', '.join(wheels.versions('megatron-core'))}")


def ask(version: str, requests: Iterable[dict]) -> Iterator[dict]:
    """Answers of one version, from a worker in a process of its own. See the module's docstring."""
    return protocol.ask(Path(__file__), [version], requests)


class Oracle:
    """The TransformerConfig of one megatron-core version."""

    def __init__(self, version: str):
        standins.complete_environment()
        sys.path.insert(0, str(wheels.fetch("megatron-core", version)))
        standins.install(["triton"], {"triton": {"__version__": "3.6.0"}})
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        from megatron.core import utils
        from megatron.core.transformer import enums
        from megatron.core.transformer.transformer_config import TransformerConfig

        self.config_class = TransformerConfig
        self.utils = utils
        self.enums = {
            name: value
            for name, value in vars(enums).items()
            if isinstance(value, type) and issubclass(value, enum.Enum)
        }
        self.names = {field.name for field in dataclasses.fields(TransformerConfig)}

    def set_te(self, te: str | None) -> None:
        # None is what upstream finds where Transformer Engine cannot be imported.
        self.utils._te_version = None if te is None else self.utils.PkgVersion(te)

    def answer(self, request: dict) -> dict:
        self.set_te(request.get("te", DEFAULT_TE))
        answer = {"id": request.get("id"), "verdict": "accepted", "error": None, "normalized": None}
        try:
            config = self.build(request["fields"])
            if "then" in request:
                for name, value in protocol.decode(request["then"], self.enums).items():
                    setattr(config, name, value)
                config.__post_init__()
            answer["normalized"] = self.normalized(config)
        except Exception as error:
            baseline_error = self.error_without_graphs(request["fields"])
            answer["verdict"] = "baseline_rejected" if baseline_error else "rejected"
            answer["error"] = protocol.error_of(baseline_error or error)
        return answer

    def build(self, fields: dict):
        return self.config_class(**{**BASE_FIELDS, **protocol.decode(fields, self.enums)})

    def error_without_graphs(self, fields: dict) -> Exception | None:
        try:
            self.build({name: value for name, value in fields.items() if name not in GRAPH_FIELDS})
        except Exception as error:
            return error
        return None

    def normalized(self, config) -> dict:
        if "cuda_graph_impl" in self.names:
            impl = config.cuda_graph_impl
        else:
            flags = (("local", config.enable_cuda_graph), ("transformer_engine", config.external_cuda_graph))
            impl = "+".join(name for name, on in flags if on) or "none"
        modules = config.cuda_graph_modules if "cuda_graph_modules" in self.names else config.cuda_graph_scope
        return {
            "impl": impl,
            "modules": [_name(item) for item in modules] if isinstance(modules, (list, tuple)) else _name(modules),
            "inference_scope": _name(getattr(config, "inference_cuda_graph_scope", None)),
        }

    def fields(self) -> dict[str, str]:
        defaults = {}
        for field in dataclasses.fields(self.config_class):
            if field.default is not dataclasses.MISSING:
                defaults[field.name] = repr(field.default)
            elif field.default_factory is not dataclasses.MISSING:
                defaults[field.name] = repr(field.default_factory())
            else:
                defaults[field.name] = "required"
        return defaults


def _name(value):
    return value.name if isinstance(value, enum.Enum) else value


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="megatron-core version or minor")
    parser.add_argument("--fields", action="store_true", help="print the fields and their defaults instead")
    args = parser.parse_args(argv)
    try:
        version = full_version(args.version)
    except KeyError as error:
        print(f"error: {error.args[0]}", file=sys.stderr)
        return 2
    try:
        oracle = Oracle(version)
    except (wheels.WheelUnavailable, ModuleNotFoundError) as error:
        print(f"error: megatron-core {version}: {error}", file=sys.stderr)
        return 3
    if args.fields:
        print(json.dumps(oracle.fields(), indent=1))
        return 0
    protocol.serve(oracle.answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
