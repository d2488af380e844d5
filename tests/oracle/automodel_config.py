#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ask a released NeMo AutoModel what it makes of a `backend:` block.

The worker builds the real `BackendConfig` (nemo_automodel/components/models/common/utils.py). Its defaults depend on
the machine: it is imported as on a training machine, with a GPU reported and Transformer Engine present (a stand-in),
without DeepEP and UCCL-EP. So attn and linear are "te", and dispatcher is "torch", unless the request says otherwise.

Usage:
    python tests/oracle/automodel_config.py < requests.jsonl > answers.jsonl
    python tests/oracle/automodel_config.py --cases      print the comparison cases as requests

Request, one a line:
    {"id": anything, "backend": {"attn": "te", "cuda_graph": {"modules": ["attn"]}, ...}}
  as in YAML, plus {"object": {"fp8_dpa": true}} for a recipe object with these attributes.
Answer, one a line, in order:
    {"id": ...,
     "verdict": "accepted" | "rejected" | "baseline_rejected",     the latter: refused without cuda_graph too
     "error": null | {"type", "text", "in"},
     "normalized": null | {"modules", "attn", "linear", "rms_norm", "dispatcher", "experts"}}

Exit codes: 0 all answered; 2 usage; 3 the wheel or torch cannot be had.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import wheels
from oracle import protocol, standins

AUTOMODEL = "0.7.0"
MODULES = ("attn", "te_dpa", "moe_router", "moe_preprocess")
STANDIN_ROOTS = (
    "PIL datasets einops huggingface_hub jinja2 megatron_fsdp mlflow regex safetensors torchao torchdata torchvision "
    "tqdm transformer_engine transformers triton wandb yaml"
).split()
STANDIN_ATTRIBUTES = {
    "transformer_engine": {"__version__": "2.14.0"},
    "transformers": {"__version__": "5.3.0"},
    "triton": {"__version__": "3.6.0"},
}


def ask(requests: Iterable[dict]) -> Iterator[dict]:
    """Answers from a worker in a process of its own. See the module's docstring."""
    return protocol.ask(Path(__file__), [], requests)


class Oracle:
    """The BackendConfig of the pinned AutoModel version."""

    def __init__(self):
        standins.complete_environment()
        sys.path.insert(0, str(wheels.fetch("nemo-automodel", AUTOMODEL)))
        standins.install(STANDIN_ROOTS, STANDIN_ATTRIBUTES)
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        import torch

        torch.cuda.is_available = lambda: True
        from nemo_automodel.components.models.common.utils import BackendConfig

        self.config_class = BackendConfig

    def answer(self, request: dict) -> dict:
        answer = {"id": request.get("id"), "verdict": "accepted", "error": None, "normalized": None}
        backend = request["backend"]
        try:
            config = self.build(backend)
        except Exception as error:
            answer.update(verdict="rejected", error=protocol.error_of(error))
            try:
                self.build({name: value for name, value in backend.items() if name != "cuda_graph"})
            except Exception as baseline:
                answer.update(verdict="baseline_rejected", error=protocol.error_of(baseline))
            return answer
        kept = ("attn", "linear", "rms_norm", "dispatcher", "experts")
        answer["normalized"] = {"modules": config.cuda_graph.modules, **{name: getattr(config, name) for name in kept}}
        return answer

    def build(self, backend: dict):
        return self.config_class(**_objects(backend))


def _objects(value):
    if isinstance(value, dict):
        if set(value) == {"object"}:
            return types.SimpleNamespace(**value["object"])
        return {name: _objects(item) for name, item in value.items()}
    return value


def cases() -> Iterator[dict]:
    """Every subset of the scopes x what the rules look at, and wrong ways to write the block."""
    subsets = [list(names) for size in range(5) for names in itertools.combinations(MODULES, size)]
    fp8 = [{}, *({"te_fp8": {"recipe": {"object": {"fp8_dpa": dpa}}}, "experts": "te"} for dpa in (False, True))]
    axes = (
        [{}, {"attn": "te"}, {"attn": "sdpa"}],
        [{}, {"linear": "torch"}, {"linear": "te"}],
        [{}, {"rms_norm": "torch"}, {"rms_norm": "te"}],
        [{}, {"dispatcher": "hybridep"}, {"dispatcher": "deepep"}],
        [{}, {"fake_balanced_gate": True}],
        fp8,
    )
    forms = ["attn", None, {}, [1], ["attn", "attn"], ["mlp"], ["moe"], ["mamba"], ["full_iteration"], ["Attn"]]
    blocks = [*({"modules": form} for form in forms), {}, None, [], "attn", {"module": ["attn"]}, {"enabled": True}]
    position = 0
    for names, *parts in itertools.product(subsets, *axes):
        backend = {"cuda_graph": {"modules": names}}
        for part in parts:
            backend.update(part)
        yield {"id": position, "backend": backend}
        position += 1
    for block in blocks:
        yield {"id": position, "backend": {"attn": "te", "linear": "torch", "rms_norm": "torch", "cuda_graph": block}}
        position += 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", action="store_true", help="print the comparison cases instead")
    args = parser.parse_args(argv)
    if args.cases:
        for request in cases():
            print(json.dumps(request))
        return 0
    try:
        oracle = Oracle()
    except (wheels.WheelUnavailable, ModuleNotFoundError) as error:
        print(f"error: nemo-automodel {AUTOMODEL}: {error}", file=sys.stderr)
        return 3
    protocol.serve(oracle.answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
