#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ask a released Megatron Bridge what it makes of a run configuration.

The worker takes the release's own base recipe (`_pretrain_common` or `_sft_common` in recipes/common.py) with a small
model provider, sets the requested attributes, and calls `runtime_config_update`, as training does before anything is
built: mixed precision, communication overlap, then `ConfigContainer.validate()`, which finalizes the model. Bridge and
megatron-core are real (versions in PINS, the pair that each release was made for); other packages are stand-ins.

Usage:
    python tests/oracle/bridge_config.py 0.6 < requests.jsonl > answers.jsonl
    python tests/oracle/bridge_config.py 0.6 --cases      print the version's comparison cases as requests

Request, one a line:
    {"id": anything,
     "set": {"model.cuda_graph_impl": "local", "rng.te_rng_tracker": true, ...},
                                           dotted attribute -> typed value (protocol.py), in this order;
                                           "comm_overlap.X" makes a CommOverlapConfig where there is none
     "base": "pretrain" | "sft",           default "pretrain"
     "provider": "GPTModelProvider",       class name; default DEFAULT_PROVIDER
     "world_size": 1,                      default 1
     "te": "2.14.0",                       Transformer Engine version; default DEFAULT_TE
     "update": 1 | 2}                      how often runtime_config_update runs; default 1
Answer, one a line, in order:
    {"id": ...,
     "verdict": "accepted" | "rejected" | "baseline_rejected",
     "stage": null | "update" | "provide",      what refused it; "provide" is the check with which the provider's
                                                provide() begins, where graphs are on
     "error": null | {"type", "text", "in"},
     "normalized": null | {"impl", "modules", "inference_scope", "te_rng_tracker"}}     as training would see them

"baseline_rejected": refused without the graph settings (model.*cuda_graph*) too; "error" then says why.

Exit codes: 0 all answered; 2 usage or unknown version; 3 a wheel or torch cannot be had.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import inspect
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import wheels
from oracle import bridge_recipes, protocol
from oracle.transformer_config import DEFAULT_TE, GRAPH_FIELDS

# Bridge minor -> the pinned Bridge, and the megatron-core that it names as its own.
PINS = {
    "0.3": ("0.3.1", "0.16.1"),
    "0.4": ("0.4.2", "0.17.1"),
    "0.5": ("0.5.1", "0.18.2"),
    "0.6": ("0.6.2", "0.19.2"),
}
DEFAULT_PROVIDER = "GPTModelProvider"
SIZES = {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 512, "seq_length": 512}


def ask(minor: str, requests: Iterable[dict]) -> Iterator[dict]:
    """Answers of one version, from a worker in a process of its own. See the module's docstring."""
    return protocol.ask(Path(__file__), [minor], requests)


class Oracle:
    """`runtime_config_update` of one Bridge version."""

    def __init__(self, minor: str):
        bridge, mcore = PINS[minor]
        bridge_recipes.import_bridge(wheels.fetch("megatron-bridge", bridge), mcore)
        from megatron.core import utils
        from megatron.core.transformer import enums

        self.config = importlib.import_module("megatron.bridge.training.config")
        self.common = importlib.import_module("megatron.bridge.recipes.common")
        self.overlap = importlib.import_module("megatron.bridge.training.comm_overlap")
        self.utils = utils
        self.enums = {
            name: value
            for name, value in vars(enums).items()
            if isinstance(value, type) and issubclass(value, enum.Enum)
        }

    def answer(self, request: dict) -> dict:
        answer = {"id": request.get("id"), "verdict": "accepted", "stage": None, "error": None, "normalized": None}
        settings = request["set"]
        try:
            config = self.updated(request, settings)
        except Exception as error:
            answer.update(verdict="rejected", stage="update", error=protocol.error_of(error))
            without_graphs = {
                name: value for name, value in settings.items() if name.removeprefix("model.") not in GRAPH_FIELDS
            }
            try:
                self.updated(request, without_graphs)
            except Exception as baseline:
                answer.update(verdict="baseline_rejected", error=protocol.error_of(baseline))
            return answer
        error = self.provide_error(config.model)
        if error is None:
            answer["normalized"] = self.normalized(config)
        else:
            answer.update(verdict="rejected", stage="provide", error=error)
        return answer

    def provide_error(self, model) -> dict | None:
        """What the checks at the start of provide() say. Building the model itself needs a GPU, so it fails later."""
        if model.cuda_graph_impl == "none":
            return None
        try:
            model.provide(pre_process=True, post_process=True)
        except Exception as error:
            said = protocol.error_of(error)
            return said if said["in"] in ("provide", "validate_cuda_graph_configuration") else None
        return None

    def updated(self, request: dict, settings: dict):
        self.utils._te_version = self.utils.PkgVersion(request.get("te", DEFAULT_TE))
        os.environ["WORLD_SIZE"] = str(request.get("world_size", 1))
        config = self.base(request)
        for dotted, value in settings.items():
            *path, name = dotted.split(".")
            owner = config
            for part in path:
                if part == "comm_overlap" and owner.comm_overlap is None:
                    owner.comm_overlap = self.overlap.CommOverlapConfig(tp_comm_overlap=False)
                owner = getattr(owner, part)
            setattr(owner, name, protocol.decode(value, self.enums))
        for _ in range(request.get("update", 1)):
            self.config.runtime_config_update(config)
        return config

    def normalized(self, config) -> dict:
        model = config.model
        modules = model.cuda_graph_modules if hasattr(model, "cuda_graph_modules") else model.cuda_graph_scope
        return {
            "impl": model.cuda_graph_impl,
            "modules": [_name(item) for item in modules] if isinstance(modules, (list, tuple)) else _name(modules),
            "inference_scope": _name(getattr(model, "inference_cuda_graph_scope", None)),
            "te_rng_tracker": [model.use_te_rng_tracker, config.rng.te_rng_tracker],
        }

    def base(self, request: dict):
        config = {"pretrain": self.common._pretrain_common, "sft": self.common._sft_common}[
            request.get("base", "pretrain")
        ]()
        provider = bridge_recipes.provider_class(request.get("provider", DEFAULT_PROVIDER))
        known = inspect.signature(provider).parameters
        config.model = provider(**{name: size for name, size in SIZES.items() if name in known})
        config.dataset.seq_length = SIZES["seq_length"]
        if getattr(config.dataset, "offline_packing_specs", None) is not None:
            config.dataset.offline_packing_specs.packed_sequence_size = SIZES["seq_length"]
        return config


def cases(minor: str) -> Iterator[dict]:
    """Requests that cover Bridge's rules about graphs, by full products of what each rule looks at."""
    new_names = minor in ("0.5", "0.6")
    impls = ["none", "local", "transformer_engine"] + (["full_iteration"] if new_names else [])
    scopes = [None, "full", "attn", [], ["attn"], ["mlp"], ["moe_router"], ["full_iteration"], "full_iteration", "x"]
    scopes += [[{"enum": "CudaGraphScope.attn"}], [{"enum": "CudaGraphScope.full_iteration"}]]
    graphs = [
        {"model.cuda_graph_impl": impl, "model.cuda_graph_scope": scope}
        for impl, scope in itertools.product(impls, scopes)
    ]
    if new_names:
        modules = [*scopes[1:10], [{"enum": "CudaGraphModule.attn"}]]
        graphs += [
            {"model.cuda_graph_impl": impl, "model.cuda_graph_modules": names}
            for impl, names in itertools.product(impls, modules)
        ]
        graphs += [
            {"model.cuda_graph_impl": impl, "model.cuda_graph_modules": names, "model.cuda_graph_scope": scope}
            for impl, names, scope in itertools.product(impls, (["attn"], []), (None, "full", ["attn"], []))
        ]
        graphs += [
            {"model.cuda_graph_impl": impl, "model.cuda_graph_modules": [], "model.inference_cuda_graph_scope": scope}
            for impl, scope in itertools.product(impls, ("none", "layer", "block"))
        ]
    legacy = [
        {f"model.{flag}": True, "model.cuda_graph_scope": scope}
        for flag, scope in itertools.product(("enable_cuda_graph", "external_cuda_graph"), ("full", ["attn"], []))
    ]
    trackers = [{}, {"model.use_te_rng_tracker": True}, {"rng.te_rng_tracker": True}]
    nan = [{}, {"rerun_state_machine.check_for_nan_in_loss": False}]
    requests = [
        {"set": merge(*parts), "update": update}
        for update in (1, 2)
        for parts in itertools.product(graphs + legacy, trackers, nan)
    ]
    on = {"model.use_te_rng_tracker": True, "rerun_state_machine.check_for_nan_in_loss": False}
    if minor == "0.6":
        pads = [
            {},
            {"dataset.pad_to_max_length": True},
            {"dataset.pad_to_max_length": False, "dataset.dataset_kwargs": {}},
        ]
        boundaries = [{}, {"dataset.offline_packing_specs.pad_cu_seqlens": True}]
        requests += [{"set": merge(*parts, on), "base": "sft"} for parts in itertools.product(graphs, pads, boundaries)]
    requests += list(_weight_gradient_cases(on, "cuda_graph_modules" if new_names else "cuda_graph_scope"))
    for position, request in enumerate(requests):
        yield {"id": position, **request}


def _weight_gradient_cases(on: dict, field: str) -> Iterator[dict]:
    moe = {
        "model.num_moe_experts": 4,
        "model.expert_model_parallel_size": 2,
        "model.moe_token_dispatcher_type": "alltoall",
        "model.add_bias_linear": False,
        "comm_overlap.overlap_moe_expert_parallel_comm": True,
        "comm_overlap.delay_wgrad_compute": True,
    }
    scopes = [["attn"], ["moe_router"], ["mamba"], [], "attn", "moe_router,attn"]
    if field == "cuda_graph_scope":
        scopes += [[{"enum": "CudaGraphScope.attn"}], [{"enum": "CudaGraphScope.moe_router"}]]
    graph = [{"model.cuda_graph_impl": "transformer_engine", f"model.{field}": names} for names in scopes]
    shared = [{}, {"model.moe_shared_expert_intermediate_size": 64}]
    fusion = [{"model.gradient_accumulation_fusion": fused} for fused in (True, False)]
    bias = [{}, {"model.add_bias_linear": True}, {"model.add_qkv_bias": True}]
    for parts in itertools.product(graph, shared, fusion, bias):
        for te in ("2.9.0", "2.10.0", "2.12.0"):
            yield {"set": merge(moe, *parts, on), "te": te, "world_size": 2}


def merge(*parts: dict) -> dict:
    merged = {}
    for part in parts:
        merged.update(part)
    return merged


def _name(value):
    return value.name if isinstance(value, enum.Enum) else value


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minor", choices=PINS)
    parser.add_argument("--cases", action="store_true", help="print the comparison cases instead")
    args = parser.parse_args(argv)
    if args.cases:
        for request in cases(args.minor):
            print(json.dumps(request))
        return 0
    try:
        oracle = Oracle(args.minor)
    except (wheels.WheelUnavailable, ModuleNotFoundError) as error:
        print(f"error: megatron-bridge {args.minor}: {error}", file=sys.stderr)
        return 3
    protocol.serve(oracle.answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
