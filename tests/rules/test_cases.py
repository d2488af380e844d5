# SPDX-License-Identifier: Apache-2.0
"""Failures that people reported in public: each that settings can tell is found, under the rule that names its mend.

`found` is the rule that must be among the findings, `severity` the verdict that users need (error also covers runtime:
accepted by the configuration, and failing later). Cases that only a run can show are listed with the helper that shows
them, so that the table is whole.
"""

from typing import NamedTuple

import pytest

from cudagraphs import rules, versions
from cudagraphs.settings import Known, Settings

NEW = {"mcore": "0.19.2", "te": "2.14", "torch": "2.11"}
BRIDGE = {**NEW, "bridge": "0.6.2"}
TRACKED = {"use_te_rng_tracker": True}
TE = {"cuda_graph_impl": "transformer_engine", **TRACKED}
FULL = {"cuda_graph_impl": "full_iteration", **TRACKED}
MOE = {"num_moe_experts": 8, "moe_token_dispatcher_type": "alltoall"}


class Case(NamedTuple):
    id: str
    source: str
    framework: str
    facts: dict
    versions: dict
    found: str
    severity: str


CASES = [
    Case(
        "nan-adamw",
        "Lightning#18501",
        "pytorch",
        {
            "torch.capture": "full_iteration",
            "torch.optimizer": "AdamW",
            "torch.optimizer_in_graph": True,
            "torch.optimizer_capturable": False,
        },
        {},
        "CG901",
        "error",
    ),
    Case(
        "first-replay-fp8",
        "Megatron-Bridge PR 3076",
        "megatron-bridge",
        {
            **FULL,
            "ddp.fp8_param_gather": True,
            "ddp.overlap_param_gather": True,
            "ddp.reuse_grad_buf_for_mxfp8_param_ag": True,
        },
        BRIDGE,
        "CG802",
        "warning",
    ),
    Case(
        "packed-te",
        "Megatron-LM#5619",
        "megatron-core",
        {**TE, "cuda_graph_modules": ["attn"], "dataset.packed_sequences": True},
        NEW,
        "CG707",
        "error",
    ),
    Case(
        "packed-offline",
        "Megatron Bridge config",
        "megatron-bridge",
        {
            **TE,
            "cuda_graph_modules": ["attn"],
            "dataset.packed_sequences": True,
            "dataset.enable_offline_packing": True,
            "dataset.pad_to_max_length": False,
        },
        BRIDGE,
        "CG507",
        "error",
    ),
    Case(
        "ramp-up",
        "code reading",
        "megatron-core",
        {**FULL, "train.rampup_batch_size": [32, 32, 1000000]},
        NEW,
        "CG709",
        "error",
    ),
    Case(
        "dropless-moe-scope",
        "Megatron-LM#1598",
        "megatron-core",
        {**TE, **MOE, "cuda_graph_modules": ["moe"]},
        NEW,
        "CG105",
        "error",
    ),
    Case(
        "alltoall-capacity",
        "Megatron-LM PR 1917",
        "megatron-core",
        {
            **TE,
            **MOE,
            "cuda_graph_modules": ["attn", "moe_router", "moe_preprocess"],
            "moe_expert_capacity_factor": 1.25,
            "moe_pad_expert_input_to_capacity": False,
        },
        NEW,
        "CG106",
        "error",
    ),
    Case(
        "full-recompute-fp8",
        "Bridge FP8 recipes",
        "megatron-bridge",
        {
            **TE,
            "cuda_graph_modules": ["mlp"],
            "recompute_granularity": "full",
            "recompute_num_layers": 10,
            "recompute_method": "block",
        },
        BRIDGE,
        "CG204",
        "error",
    ),
    Case(
        "optimizer-step-overlap",
        "Megatron-Bridge#1688, PR 5788",
        "megatron-bridge",
        {**FULL, "optimizer.overlap_param_gather_with_optimizer_step": True},
        BRIDGE,
        "CG724",
        "error",
    ),
    Case(
        "expandable-te",
        "Megatron-LM#5474",
        "megatron-core",
        {**TE, "cuda_graph_modules": ["attn"], "env.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        NEW,
        "CG703",
        "error",
    ),
    Case(
        "fsdp-hooks",
        "pytorch#127225, #164264",
        "pytorch",
        {"torch.fsdp": 1, "torch.capture": "full_iteration"},
        {},
        "CG903",
        "error",
    ),
    Case(
        "zero3",
        "DeepSpeed#6552",
        "deepspeed",
        {"deepspeed.zero_stage": 3, "torch.capture": "partial"},
        {},
        "CG905",
        "error",
    ),
    Case(
        "official-defaults-oom",
        "Megatron-Bridge#4587",
        "megatron-bridge",
        {
            **FULL,
            **MOE,
            "fp8": "e4m3",
            "fp8_recipe": "mxfp8",
            "moe_paged_stash": True,
            "moe_expert_rank_capacity_factor": 1.5,
        },
        BRIDGE,
        "CG803",
        "warning",
    ),
    Case(
        "silently-off",
        "Megatron-Bridge PR 6129",
        "megatron-bridge",
        {"cuda_graph_impl": "none", "history.cuda_graph_impl": ["transformer_engine", "none"]},
        BRIDGE,
        "CG512",
        "error",
    ),
    Case(
        "harness-local-attn",
        "Megatron-Bridge PR 4607",
        "megatron-bridge",
        {**TRACKED, "cuda_graph_impl": "local", "cuda_graph_modules": ["attn"]},
        BRIDGE,
        "CG503",
        "error",
    ),
    Case(
        "scope-and-modules",
        "Megatron Bridge recipes",
        "megatron-bridge",
        {**TE, "cuda_graph_scope": "full", "cuda_graph_modules": ["attn"]},
        BRIDGE,
        "CG003",
        "error",
    ),
    Case(
        "profiler-items",
        "Megatron-LM PR 7407",
        "megatron-lm",
        {"optimizer.optimizer_cuda_graph": True, "optimizer.log_num_zeros_in_grad": True},
        NEW,
        "CG725",
        "error",
    ),
]
# what settings cannot tell, and the helper that shows or prevents it
ELSEWHERE = {
    "teardown-te": "delete_graphs",
    "teardown-full": "delete_graphs",
    "eval-recaptures": "delete_graphs",
    "grad-accumulation-static": "smoke_capture",
    "fp8-expert-grads": "smoke_capture",
    "ddp-overlap-attn": "smoke_capture",
    "captured-not-faster": "smoke_capture",
    "silent-fallback": "partial_graphs",
}


def settings_of(case: Case) -> Settings:
    resolved = versions.resolve(case.framework, **{**versions.NEWEST, **case.versions})
    return Settings(case.framework, resolved, {name: Known(value) for name, value in case.facts.items()})


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_reported_failure_is_found_with_its_mend(case):
    findings = {finding.code: finding for finding in rules.check(settings_of(case)) if not finding.needs}
    assert case.found in findings
    finding = findings[case.found]
    assert finding.mend and finding.source
    assert finding.severity == case.severity


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_the_mend_of_a_reported_failure_removes_it(case):
    settings = settings_of(case)
    for _ in range(6):
        fixes = [
            finding for finding in rules.check(settings) if finding.fix and (finding.safe or finding.code == case.found)
        ]
        if not fixes:
            break
        settings = settings.with_values(fixes[0].fix)
    left = {finding.code for finding in rules.check(settings) if finding.severity in ("error", "runtime")}
    assert not left
    assert case.found not in {finding.code for finding in rules.check(settings)} or not rules.REGISTRY[case.found].fix


def test_the_table_names_every_case_once():
    assert len({case.id for case in CASES} | set(ELSEWHERE)) == len(CASES) + len(ELSEWHERE) == 25
