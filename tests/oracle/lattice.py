#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The configurations over which our rules are compared with upstream's TransformerConfig.

Two sources for each megatron-core minor, both deterministic, both in the request format of transformer_config.py and
both using only field names that the version has:
  - `lattice(minor)`: blocks of full products. One block per group of axes that upstream's checks combine: scopes x
    model kinds, recompute x dropout x jitter, offloading, expert-parallel overlap and delayed weight gradients x
    Transformer Engine versions, the forms in which a scope can be written x legacy flags x inference scopes, GTP.
  - `random_configurations(minor, seed, count)`: every axis drawn independently.

Usage:
    python tests/oracle/lattice.py 0.19                        the lattice as JSON lines
    python tests/oracle/lattice.py 0.19 --random 5000 --seed 7 random ones instead
    python tests/oracle/lattice.py --count                     how many there are, by version and block

Exit codes: 0 printed; 2 usage or unknown version.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Iterable, Iterator, Sequence

MINORS = ("0.13", "0.14", "0.15", "0.16", "0.17", "0.18", "0.19")

# The first minor that has a field; what is not named here is in all of them. (`transformer_config.py --fields`)
SINCE = {
    "overlap_moe_expert_parallel_comm": "0.14",
    "cuda_graph_impl": "0.15",
    "fp4": "0.15",
    "fine_grained_activation_offloading": "0.16",
    "offload_modules": "0.16",
    "moe_router_padding_for_quantization": "0.16",
    "inference_grouped_gemm_backend": "0.17",
    "cuda_graph_modules": "0.18",
    "inference_cuda_graph_scope": "0.18",
    "fine_grained_offloading_max_inflight_offloads": "0.18",
    "gtp_weight_remat_size": "0.19",
}

MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
SUBSETS = [list(names) for size in range(len(MODULES) + 1) for names in itertools.combinations(MODULES, size)]
# Enough to reach every branch that looks at scopes: each alone, each pair that a rule names, and the whole layer.
SOME_SUBSETS = [
    [],
    ["attn"],
    ["mlp"],
    ["moe"],
    ["moe_router"],
    ["mamba"],
    ["attn", "mlp"],
    ["attn", "moe"],
    ["attn", "moe_router"],
    ["mlp", "moe"],
    ["mlp", "moe_router"],
    ["moe_router", "moe_preprocess"],
    ["attn", "moe_router", "moe_preprocess"],
    ["attn", "mamba", "mlp", "moe"],
]
OLD_SCOPES = ("full", "attn", "full_iteration")  # 0.13 to 0.15 keep whatever string they get

MOE = {"num_moe_experts": 4, "add_bias_linear": False}
DROP_PAD = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
SHARED = {"moe_shared_expert_intermediate_size": 64}
DISPATCHERS = ("allgather", "alltoall", "flex")
LAYER_FREQS = (1, 2, [1, 1, 1, 1], [1, 0, 1, 0])
CAPACITIES = ({}, {"moe_expert_capacity_factor": 1.0}, DROP_PAD, {"moe_expert_capacity_factor": -1.0})
FP8 = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
# Padding the router's map only makes sense under fp8 or fp4; without it the version refuses with graphs off too.
PADDINGS = ({}, {**FP8, "moe_router_padding_for_fp8": True}, {**FP8, "moe_router_padding_for_quantization": True})

FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_num_layers": 1}
RECOMPUTES = (
    {},
    {**FULL_RECOMPUTE, "recompute_method": "uniform"},
    {**FULL_RECOMPUTE, "recompute_method": "block"},
    {"recompute_granularity": "selective"},
    {"recompute_granularity": "selective", "recompute_modules": []},
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
    {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp", "moe"]},
    {"recompute_granularity": "selective", "recompute_modules": ["shared_experts"]},
    {"recompute_granularity": "selective", "recompute_modules": ["moe_act"], "moe_grouped_gemm": True},
    {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"], "multi_latent_attention": True},
    {"recompute_modules": ["moe"]},
    {"moe_layer_recompute": True},
)
DROPOUTS = tuple(
    {"attention_dropout": attention, "hidden_dropout": hidden} for attention in (0.0, 0.1) for hidden in (0.0, 0.1)
)
JITTERS = ({}, {"moe_input_jitter_eps": 0.01})
CPU_OFFLOAD = {"cpu_offloading": True, "cpu_offloading_num_layers": 2}
OFFLOAD_MODULES = (
    ["core_attn"],
    ["attn_norm", "mlp_norm"],
    ["expert_fc1"],
    ["moe_act"],
    ["expert_fc1", "moe_act"],
    ["expert_fc1", "core_attn"],
    ["fused_group_mlp"],
)
OVERLAP = {
    **MOE,
    "overlap_moe_expert_parallel_comm": True,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    "bf16": True,
}
TE_VERSIONS = (None, "2.3.0", "2.9.0", "2.10.0", "2.14.0")


def after(minor: str, other: str) -> bool:
    """Whether `minor` is `other` or newer."""
    return MINORS.index(minor) >= MINORS.index(other)


def has(minor: str, fields: Iterable[str]) -> bool:
    return all(after(minor, SINCE.get(name, MINORS[0])) for name in fields)


def available(minor: str, options: Iterable[dict]) -> list[dict]:
    return [option for option in options if has(minor, option)]


def scope_field(minor: str) -> str:
    return "cuda_graph_modules" if after(minor, "0.18") else "cuda_graph_scope"


def implementations(minor: str) -> tuple[str, ...]:
    return ("none", "local", "transformer_engine") + (("full_iteration",) if after(minor, "0.18") else ())


def graph_settings(minor: str, subsets: Iterable[list[str]]) -> list[dict]:
    """Every way to switch graphs on: implementation x scopes, full iteration spelled as in the version."""
    if not after(minor, "0.15"):
        flags = itertools.product((False, True), (False, True))
        return [
            {"enable_cuda_graph": local, "external_cuda_graph": external, "cuda_graph_scope": scope}
            for (local, external), scope in itertools.product(flags, OLD_SCOPES)
        ]
    if minor == "0.15":
        return [
            {"cuda_graph_impl": impl, "cuda_graph_scope": scope}
            for impl, scope in itertools.product(implementations(minor), OLD_SCOPES)
        ]
    scopes = [*subsets, ["full_iteration"]]
    return [
        {"cuda_graph_impl": impl, scope_field(minor): scope}
        for impl, scope in itertools.product(implementations(minor), scopes)
    ]


def models(minor: str) -> list[dict]:
    """Dense, one expert, and MoE by layer frequency, dispatcher, capacity and router padding."""
    kinds = [{}, {"num_moe_experts": 1, "add_bias_linear": False}]
    for freq in LAYER_FREQS:
        kinds += [
            {**MOE, "moe_layer_freq": freq, "moe_token_dispatcher_type": dispatcher, **capacity, **padding}
            for dispatcher, capacity, padding in itertools.product(DISPATCHERS, CAPACITIES, available(minor, PADDINGS))
            if freq == 1 or (dispatcher == "alltoall" and not padding)
        ]
    return kinds


def some_models() -> list[dict]:
    mixed = {**MOE, "moe_layer_freq": [1, 0, 1, 0], "moe_token_dispatcher_type": "alltoall"}
    dropless = {**MOE, "moe_token_dispatcher_type": "alltoall", **SHARED}
    return [{}, dropless, mixed, {**mixed, **DROP_PAD}]


def merged(*axes: Iterable[dict]) -> Iterator[dict]:
    """The full product of the axes; a later axis wins where two set the same field."""
    for parts in itertools.product(*axes):
        combined = {}
        for part in parts:
            combined.update(part)
        yield combined


def block_models(minor: str) -> Iterator[dict]:
    yield from merged(models(minor), graph_settings(minor, SUBSETS))


def block_recompute(minor: str) -> Iterator[dict]:
    graphs = graph_settings(minor, SOME_SUBSETS)
    yield from merged(some_models(), RECOMPUTES, DROPOUTS, JITTERS, graphs)
    if not after(minor, "0.16"):  # few scopes there, so more models
        yield from merged(models(minor), RECOMPUTES, DROPOUTS, graphs)


def block_offload(minor: str) -> Iterator[dict]:
    graphs = graph_settings(minor, SOME_SUBSETS)
    precisions = [{"num_layers": layers} for layers in (4, 8)]
    yield from merged(some_models(), [{}, CPU_OFFLOAD], DROPOUTS, precisions, graphs)
    if has(minor, ["offload_modules"]):
        fine = [{"fine_grained_activation_offloading": True, "offload_modules": names} for names in OFFLOAD_MODULES]
        inflight = available(
            minor, [{}, *({"fine_grained_offloading_max_inflight_offloads": limit} for limit in (-1, 0, 2))]
        )
        warmup = [{"cuda_graph_warmup_steps": steps} for steps in (0, 3)]
        yield from merged(some_models(), fine, warmup, inflight, graphs)


def block_overlap(minor: str) -> Iterator[dict]:
    if not has(minor, OVERLAP):
        return
    kinds = [{}, SHARED, DROP_PAD, {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}]
    delays = [{}, {"delay_wgrad_compute": True}]
    for fields in merged([OVERLAP], kinds, delays, graph_settings(minor, SUBSETS)):
        for te in TE_VERSIONS:
            # The TE version only matters to delayed weight gradients; without them one version is enough.
            if "delay_wgrad_compute" in fields or te == TE_VERSIONS[-1]:
                yield {"te": te, "fields": fields}


def scope_forms(minor: str) -> list:
    """The ways to write a scope, right and wrong."""
    forms = [None, "", "full", "attn", "attn,mlp", "attn, mlp", "full,attn", "full_iteration", "nonsense"]
    forms += [["full"], ["full", "attn"], ["attn", "attn"], ["attn", "nonsense"], ["full_iteration", "attn"], [""]]
    if after(minor, "0.16"):
        old, attn = {"enum": "CudaGraphScope.full_iteration"}, {"enum": "CudaGraphScope.attn"}
        forms += [attn, old, [attn], [old], [old, attn], [attn, "mlp"], {"tuple": ["attn"]}, {"tuple": [attn]}, 1, [1]]
        forms += [["moe_preprocess"], ["moe_router", "moe"], "moe_router,moe_preprocess", {}]
    if after(minor, "0.17"):
        inference = {"enum": "CudaGraphScope.full_iteration_inference"}
        forms += ["full_iteration_inference", ["full_iteration_inference", "attn"], inference, [inference]]
        forms += [["full_iteration", "full_iteration_inference"]]
    if after(minor, "0.18"):
        new = {"enum": "CudaGraphModule.attn"}
        forms += [new, [new], [new, "mlp"], [new, {"enum": "CudaGraphScope.mlp"}], [new, "full"]]
    return forms


def block_forms(minor: str) -> Iterator[dict]:
    legacy = [
        {name: True for name, on in zip(("enable_cuda_graph", "external_cuda_graph"), flags) if on}
        for flags in itertools.product((False, True), repeat=2)
    ]
    impls = [{}]
    if has(minor, ["cuda_graph_impl"]):
        impls += [{"cuda_graph_impl": impl} for impl in (*implementations(minor), "full_iteration", "te", "", None)]
    kinds = [{}, {**MOE, "moe_token_dispatcher_type": "alltoall"}]
    kinds += [{**MOE, **DROP_PAD, "recompute_granularity": "selective"}, CPU_OFFLOAD, dict(RECOMPUTES[1])]
    scopes = [{}, *({"cuda_graph_scope": form} for form in scope_forms(minor))]
    if not has(minor, ["cuda_graph_modules"]):
        yield from merged(kinds, legacy, impls, scopes)
        return
    modules = [{}, *({"cuda_graph_modules": form} for form in scope_forms(minor))]
    inference = [{}]
    members = [{"enum": f"InferenceCudaGraphScope.{name}"} for name in ("none", "layer", "block")]
    for value in ("none", "layer", "block", "nonsense", "", 1, *members):
        inference.append({"inference_cuda_graph_scope": value})
    yield from merged(kinds[:2], legacy, impls, modules, [{}], inference)
    yield from merged(kinds[2:], impls, modules)
    yield from merged(kinds, impls, scopes)
    yield from merged(impls[1:5], scopes, modules)


def block_gtp(minor: str) -> Iterator[dict]:
    if not has(minor, ["gtp_weight_remat_size"]):
        return
    shared = [{}, SHARED, {**SHARED, "moe_shared_expert_overlap": True}]
    kinds = [{**MOE, "moe_token_dispatcher_type": "alltoall", **capacity} for capacity in ({}, DROP_PAD)]
    precisions = [{}, FP8, {"fp4": "e2m1"}]
    recompute = [
        {"recompute_granularity": "selective", "recompute_modules": names} for names in (["shared_experts"], ["mlp"])
    ]
    sizes = [{"gtp_weight_remat_size": size} for size in (1, 2)]
    yield from merged(kinds, shared, precisions, recompute, sizes, graph_settings(minor, SOME_SUBSETS))


def block_inference_optimized(minor: str) -> Iterator[dict]:
    if not has(minor, ["inference_grouped_gemm_backend"]):
        return
    base = {
        **MOE,
        "transformer_impl": "inference_optimized",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        "normalization": "RMSNorm",
    }
    gated = [{}, {"gated_linear_unit": True}]
    backends = [{"inference_grouped_gemm_backend": name} for name in ("auto", "torch", "te")]
    yield from merged([base], gated, backends, graph_settings(minor, SOME_SUBSETS))


BLOCKS = {
    "models": block_models,
    "recompute": block_recompute,
    "offload": block_offload,
    "overlap": block_overlap,
    "forms": block_forms,
    "gtp": block_gtp,
    "inference_optimized": block_inference_optimized,
}


def lattice(minor: str) -> Iterator[dict]:
    """Requests for one minor; ids are "<block>:<position in the block>"."""
    for block, generate in BLOCKS.items():
        for position, made in enumerate(generate(minor)):
            request = made if set(made) == {"te", "fields"} else {"fields": made}
            yield {"id": f"{block}:{position}", **request}


def random_configurations(minor: str, seed: int, count: int) -> Iterator[dict]:
    """Requests drawn at random; the same for the same arguments on every machine."""
    source = random.Random(f"{minor}/{seed}")
    forms = scope_forms(minor)
    for position in range(count):
        fields: dict = {}
        experts = source.choice((None, None, 1, 4, 8))
        if experts is not None:
            fields.update(num_moe_experts=experts, add_bias_linear=False)
            fields["moe_token_dispatcher_type"] = source.choice(DISPATCHERS)
            fields["moe_layer_freq"] = source.choice(LAYER_FREQS)
            for option in (CAPACITIES, available(minor, PADDINGS), JITTERS, ({}, SHARED)):
                fields.update(source.choice(option))
        fields.update(source.choice(RECOMPUTES))
        fields.update(source.choice(DROPOUTS))
        if source.random() < 0.1:
            fields.update(CPU_OFFLOAD)
        if has(minor, ["offload_modules"]) and source.random() < 0.25:
            fields.update(fine_grained_activation_offloading=True, offload_modules=source.choice(OFFLOAD_MODULES))
            fields["cuda_graph_warmup_steps"] = source.choice((0, 1, 3))
            fields.update(
                source.choice(
                    available(minor, [{}, *({"fine_grained_offloading_max_inflight_offloads": n} for n in (-1, 0, 4))])
                )
            )
        if has(minor, OVERLAP) and source.random() < 0.2:
            fields.update(OVERLAP)
            if source.random() < 0.5:
                fields["delay_wgrad_compute"] = True
        if has(minor, ["gtp_weight_remat_size"]) and source.random() < 0.2:
            fields.update({"gtp_weight_remat_size": 2, **FP8})
        if has(minor, ["cuda_graph_impl"]) and source.random() < 0.9:
            fields["cuda_graph_impl"] = source.choice((*implementations(minor), "transformer_engine", "local"))
        if source.random() < 0.15 or not has(minor, ["cuda_graph_impl"]):
            fields[source.choice(("enable_cuda_graph", "external_cuda_graph"))] = source.random() < 0.8
        scope = source.sample(MODULES, source.randint(0, 4)) if source.random() < 0.7 else source.choice(forms)
        if source.random() < 0.9:
            fields[scope_field(minor)] = scope
        if has(minor, ["cuda_graph_modules"]) and source.random() < 0.15:
            fields["cuda_graph_scope"] = source.choice(forms)
        if has(minor, ["inference_cuda_graph_scope"]) and source.random() < 0.2:
            fields["inference_cuda_graph_scope"] = source.choice(("none", "layer", "block"))
        yield {"id": f"random:{position}", "te": source.choice(TE_VERSIONS[1:]), "fields": fields}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minor", nargs="?", choices=MINORS, metavar="MINOR", help=", ".join(MINORS))
    parser.add_argument("--random", type=int, metavar="COUNT")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", action="store_true")
    args = parser.parse_args(argv)
    if args.count:
        for minor in MINORS:
            sizes = {block: sum(1 for _ in generate(minor)) for block, generate in BLOCKS.items()}
            print(minor, sum(sizes.values()), *(f"{block}={size}" for block, size in sizes.items()))
        return 0
    if args.minor is None:
        parser.error("name a minor version, or ask for --count")
    requests = random_configurations(args.minor, args.seed, args.random) if args.random else lattice(args.minor)
    for request in requests:
        print(json.dumps(request))
    return 0


if __name__ == "__main__":
    sys.exit(main())
