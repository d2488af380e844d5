#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ask Megatron-LM's own argument checks about a command line.

The megatron-core wheels contain megatron/training from 0.17 on. The worker parses the command line with the real parser
and runs the real `validate_args` (megatron/training/arguments.py), then builds the TransformerConfig from it, as
training does. 0.13 to 0.16 ship without megatron/training: their rules are not covered here.

Usage:
    python tests/oracle/megatron_lm_args.py 0.19 < requests.jsonl > answers.jsonl
    python tests/oracle/megatron_lm_args.py 0.19 --cases         print the version's comparison cases as requests

Request, one a line:
    {"id": anything,
     "argv": ["--cuda-graph-impl", "local", ...],   appended to BASE_ARGV
     "env": {"PYTORCH_CUDA_ALLOC_CONF": ..., ...},  optional; of ENVIRONMENT only what is named here is set
     "te": "2.14.0" | null}                         Transformer Engine version, null for absent; default DEFAULT_TE
Answer, one a line, in order:
    {"id": ...,
     "verdict": "accepted" | "rejected" | "baseline_rejected",
     "stage": null | "parse" | "validate_args" | "config",     what refused it; "config" is TransformerConfig
     "error": null | {"type", "text", "in"},                   as in transformer_config.py
     "normalized": null | {"impl", "modules", "inference_scope", "te_rng_tracker"}}    after validate_args

"baseline_rejected": refused without its graph options (GRAPH_OPTIONS) too; "error" then says why.

Exit codes: 0 all answered; 2 usage or unknown version; 3 the wheel or torch cannot be had.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import wheels
from oracle import protocol, standins, transformer_config
from oracle.transformer_config import DEFAULT_TE

MINORS = ("0.17", "0.18", "0.19")
BASE_ARGV = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --max-position-embeddings 512 --seq-length 512 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-4 --bf16"
).split()
GRAPH_OPTIONS = frozenset(
    (
        "--enable-cuda-graph",
        "--external-cuda-graph",
        "--cuda-graph-impl",
        "--cuda-graph-scope",
        "--cuda-graph-modules",
        "--inference-cuda-graph-scope",
    )
)
ENVIRONMENT = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "NCCL_GRAPH_REGISTER",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NVTE_CPU_OFFLOAD_V1",
    "WORLD_SIZE",
)
STANDIN_ROOTS = ("einops", "google", "tensorboard", "tqdm", "transformers", "wandb", "yaml")


def ask(minor: str, requests: Iterable[dict]) -> Iterator[dict]:
    """Answers of one version, from a worker in a process of its own. See the module's docstring."""
    return protocol.ask(Path(__file__), [minor], requests)


def without_graphs(argv: Sequence[str]) -> list[str]:
    """The command line without its graph options and their values."""
    kept, dropping = [], False
    for token in argv:
        if token.startswith("--"):
            dropping = token in GRAPH_OPTIONS
        if not dropping:
            kept.append(token)
    return kept


class Refused(Exception):
    """A stage refused the command line."""

    def __init__(self, stage: str, error: BaseException):
        super().__init__(stage)
        self.stage = stage
        self.error = protocol.error_of(error)


class Oracle:
    """The argument checks of one Megatron-LM version."""

    def __init__(self, version: str):
        standins.install(STANDIN_ROOTS, {"tensorboard": {"__version__": "2.19.0"}})
        self.config = transformer_config.Oracle(version)  # puts the wheel on the path and holds the TE version
        from megatron.training import arguments

        self.arguments = arguments
        # Building the parser takes a hundred times as long as using it.
        parser = arguments.add_megatron_arguments(argparse.ArgumentParser(prog="megatron", allow_abbrev=False))
        arguments.add_megatron_arguments = lambda _: parser
        arguments._print_args = lambda title, args: None

    def answer(self, request: dict) -> dict:
        self.config.set_te(request.get("te", DEFAULT_TE))
        answer = {"id": request.get("id"), "verdict": "accepted", "stage": None, "error": None, "normalized": None}
        env = request.get("env", {})
        try:
            answer["normalized"] = self.check(request["argv"], env)
        except Refused as refused:
            answer.update(verdict="rejected", stage=refused.stage, error=refused.error)
            try:
                self.check(without_graphs(request["argv"]), env)
            except Refused as baseline:
                answer.update(verdict="baseline_rejected", stage=baseline.stage, error=baseline.error)
        return answer

    def check(self, argv: Sequence[str], env: dict[str, str]) -> dict:
        for name in ENVIRONMENT:
            os.environ.pop(name, None)
        os.environ.update(env)
        sys.argv = ["pretrain_gpt.py", *BASE_ARGV, *argv]
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                args = self.arguments.parse_args()
        except SystemExit as error:
            last = said.getvalue().strip().splitlines()[-1]
            raise Refused("parse", SystemExit(last).with_traceback(error.__traceback__)) from None
        except Exception as error:
            raise Refused("parse", error) from None
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                self.arguments.validate_args(args)
        except Exception as error:
            raise Refused("validate_args", error) from None
        modules = args.cuda_graph_modules if hasattr(args, "cuda_graph_modules") else args.cuda_graph_scope
        normalized = {
            "impl": args.cuda_graph_impl,
            "modules": [module.name for module in modules],
            "inference_scope": getattr(getattr(args, "inference_cuda_graph_scope", None), "name", None),
            "te_rng_tracker": args.te_rng_tracker,
        }
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                self.arguments.core_transformer_config_from_args(args)
        except Exception as error:
            raise Refused("config", error) from None
        return normalized


def cases(minor: str) -> Iterator[dict]:
    """Requests that cover the rules of validate_args about graphs, by full products of what each rule looks at."""
    option = "--cuda-graph-scope" if minor == "0.17" else "--cuda-graph-modules"
    impls = ["none", "local", "transformer_engine"] + (["full_iteration"] if minor != "0.17" else [])
    scopes = [[], ["attn"], ["mlp"], ["attn", "mlp"], ["full"], ["full", "attn"], ["full_iteration"]]
    scopes += [["attn,mlp"], ["x"]]
    if minor != "0.17":
        scopes += [["full_iteration_inference"], ["moe_router"]]
    graphs = [
        ["--cuda-graph-impl", impl, *([option, *scope] if scope else [])]
        for impl, scope in itertools.product(impls, scopes)
    ]
    nan_off = [[], ["--no-check-for-nan-in-loss-and-grad"]]
    segments = "expandable_segments:True"
    environments = [
        {},
        {"PYTORCH_CUDA_ALLOC_CONF": segments},
        {"PYTORCH_CUDA_ALLOC_CONF": segments, "NCCL_GRAPH_REGISTER": "0"},
        {"PYTORCH_CUDA_ALLOC_CONF": segments, "NCCL_GRAPH_REGISTER": "1"},
        {"PYTORCH_ALLOC_CONF": segments},
    ]
    transformer_impls = [[], ["--transformer-impl", "local"]]
    products = [
        itertools.product(graphs, nan_off, transformer_impls, environments),
        itertools.product(
            [["--enable-cuda-graph"], ["--external-cuda-graph"], ["--enable-cuda-graph", "--external-cuda-graph"]],
            [[], ["--cuda-graph-impl", "local"], ["--cuda-graph-scope", "attn"]],
            nan_off,
            environments,
        ),
        itertools.product(
            graphs,
            nan_off[1:],
            [
                ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"],
                ["--recompute-granularity", "selective"],
                ["--attention-dropout", "0", "--hidden-dropout", "0", "--recompute-granularity", "selective"],
            ],
            environments[:1],
        ),
    ]
    moe = ["--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall"]
    moe += ["--disable-bias-linear"]
    two = {"WORLD_SIZE": "2"}
    products.append(
        itertools.product(graphs, nan_off, [moe, [*moe, "--moe-pad-experts-for-cuda-graph-inference"]], [two])
    )
    for number, product in enumerate(products):
        for position, (graph, nan, extra, env) in enumerate(product):
            yield {"id": f"{number}:{position}", "argv": [*graph, *nan, *extra], "env": env}
    yield from _weight_gradient_cases(option, moe, two)
    if minor != "0.17":
        both = ["--cuda-graph-scope", "attn", "--cuda-graph-modules", "mlp"]
        for position, impl in enumerate(impls):
            yield {"id": f"both:{position}", "argv": ["--cuda-graph-impl", impl, *both]}
    if minor != "0.17":
        yield from _inference_cases(impls)


def _weight_gradient_cases(option: str, moe: list[str], env: dict[str, str]) -> Iterator[dict]:
    overlap = [*moe, "--overlap-moe-expert-parallel-comm"]
    biased = [token for token in overlap if token != "--disable-bias-linear"]
    variants = itertools.product(
        [overlap, biased, [*overlap, "--add-qkv-bias"]],
        [["attn"], ["moe_router"], ["attn", "moe_router"], ["mamba"], []],
        [[], ["--moe-shared-expert-intermediate-size", "64"]],
        [[], ["--no-gradient-accumulation-fusion"]],
        [[], ["--overlap-grad-reduce"]],
        [[], ["--delay-wgrad-compute"]],
        ("2.9.0", "2.10.0", "2.12.0", None),
    )
    for position, (base, scope, shared, fusion, reduce, delay, te) in enumerate(variants):
        graph = ["--cuda-graph-impl", "transformer_engine", *([option, *scope] if scope else [])]
        argv = [*base, *shared, *fusion, *reduce, *delay, *graph]
        yield {"id": f"wgrad:{position}", "argv": argv, "env": env, "te": te}


def _inference_cases(impls: list[str]) -> Iterator[dict]:
    fp8 = [[], ["--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"], ["--fp8-format", "hybrid"]]
    transformer_impls = [[], ["--transformer-impl", "inference_optimized", "--normalization", "RMSNorm"]]
    scopes = [[], *(["--inference-cuda-graph-scope", name] for name in ("none", "layer", "block", "x"))]
    variants = itertools.product(impls, scopes, fp8, transformer_impls)
    for position, (impl, scope, precision, extra) in enumerate(variants):
        argv = ["--cuda-graph-impl", impl, "--no-check-for-nan-in-loss-and-grad", *scope, *precision, *extra]
        yield {"id": f"inference:{position}", "argv": argv}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minor", choices=MINORS)
    parser.add_argument("--cases", action="store_true", help="print the comparison cases instead")
    args = parser.parse_args(argv)
    if args.cases:
        for request in cases(args.minor):
            print(json.dumps(request))
        return 0
    try:
        oracle = Oracle(transformer_config.full_version(args.minor))
    except (wheels.WheelUnavailable, ModuleNotFoundError) as error:
        print(f"error: megatron-core {args.minor}: {error}", file=sys.stderr)
        return 3
    protocol.serve(oracle.answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
