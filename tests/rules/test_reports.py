# SPDX-License-Identifier: Apache-2.0
"""references/reported-failures.md: what it says is found is found, and every report is a further one."""

import re
from pathlib import Path

import pytest

from cudagraphs import rules, versions
from cudagraphs.settings import Known, Settings
from rules.test_cases import CASES

PAGE = Path(__file__).parents[2] / "references" / "reported-failures.md"
ROWS = re.findall(
    r"^\| \[(.+?)\]\((https://github\.com/\S+?)\) \| (.+?) \| (.+?) \|$", PAGE.read_text(encoding="utf-8"), re.M
)
TE = {"cuda_graph_impl": "transformer_engine", "use_te_rng_tracker": True}
FULL = {"cuda_graph_impl": "full_iteration", "use_te_rng_tracker": True}
NEW = {"mcore": "0.19", "te": "2.16", "torch": "2.11", "bridge": "0.6.2"}

# what the reporter had, as far as the thread says: report -> (framework, facts, versions, the rule)
REPORTS = {
    "Megatron-LM#5889": (
        "megatron-lm",
        {"optimizer.optimizer_cuda_graph": True},
        {"mcore": "0.18", "te": "2.14"},
        "CG805",
    ),
    "Megatron-LM#5966": (
        "megatron-lm",
        {
            **TE,
            "cuda_graph_modules": ["attn"],
            "num_moe_experts": 128,
            "moe_token_dispatcher_type": "alltoall",
            "overlap_moe_expert_parallel_comm": True,
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 8,
            "virtual_pipeline_model_parallel_size": 4,
            "expert_model_parallel_size": 8,
        },
        NEW,
        "CG806",
    ),
    "Megatron-Bridge#3517": (
        "megatron-bridge",
        {
            **TE,
            "cuda_graph_modules": ["attn", "moe_router", "moe_preprocess"],
            "num_moe_experts": 128,
            "moe_token_dispatcher_type": "alltoall",
            "expert_model_parallel_size": 32,
            "pipeline_model_parallel_size": 8,
        },
        NEW,
        "CG807",
    ),
    "Megatron-LM#422": ("pytorch", {"torch.capture": "partial", "torch.microbatches_in_flight": 4}, {}, "CG911"),
    "Megatron-LM#1566": (
        "megatron-lm",
        {"external_cuda_graph": True, "cuda_graph_scope": "attn", "num_moe_experts": 8},
        {"mcore": "0.13"},
        "CG402",
    ),
    "Megatron-LM#3871": ("megatron-lm", {**TE, "checkpoint.load": "/checkpoints"}, {"mcore": "0.15"}, "CG720"),
    "Megatron-LM#2056": ("megatron-lm", FULL, NEW, "CG403"),
    "Megatron-Bridge#1562": ("megatron-bridge", FULL, NEW, "CG501"),
    "Megatron-LM PR 4491": (
        "megatron-lm",
        {**TE, "cuda_graph_modules": ["attn"], "cuda_graph_warmup_steps": 0},
        NEW,
        "CG804",
    ),
    "Megatron-LM#6152": (
        "megatron-bridge",
        {**FULL, "ddp.use_megatron_fsdp": True, "ddp.data_parallel_sharding_strategy": "optim_grads_params"},
        NEW,
        "CG727",
    ),
    "Megatron-Bridge#2216": (
        "megatron-bridge",
        {
            **TE,
            "cuda_graph_modules": ["attn"],
            "comm_overlap.delay_wgrad_compute": True,
            "ddp.overlap_grad_reduce": True,
            "add_bias_linear": False,
        },
        {**NEW, "te": "2.11"},
        "CG504",
    ),
    "Megatron-LM PR 7348": ("megatron-lm", {**TE, "cuda_graph_modules": ["attn"]}, {**NEW, "torch": "2.14"}, "CG808"),
    "pytorch#83148": ("pytorch", {"torch.capture": "partial", "torch.checkpoint_in_graph": True}, {}, "CG906"),
    "pytorch#162504": (
        "pytorch",
        {
            "torch.capture": "full_iteration",
            "torch.checkpoint_in_graph": True,
            "torch.checkpoint_preserve_rng_state": True,
        },
        {},
        "CG906",
    ),
    "pytorch#82465": ("pytorch", {"torch.capture": "partial", "torch.checkpoint_in_graph": True}, {}, "CG906"),
    "pytorch#106802": (
        "pytorch",
        {"torch.capture": "full_iteration", "torch.optimizer_in_graph": True, "torch.optimizer_capturable": True},
        {},
        "CG902",
    ),
    "pytorch#118018": (
        "pytorch",
        {"torch.capture": "full_iteration", "torch.optimizer": "SGD", "torch.optimizer_in_graph": True},
        {},
        "CG901",
    ),
    "pytorch#89546": (
        "pytorch",
        {"torch.capture": "full_iteration", "torch.ddp": True, "torch.warmup_iterations": 3},
        {},
        "CG909",
    ),
    "pytorch#87794": ("pytorch", {"torch.capture": "full_iteration", "torch.model_device": 1}, {}, "CG912"),
    "microsoft/dion PR 108": (
        "pytorch",
        {"torch.optimizer_in_graph": True, "torch.optimizer_capturable": True, "torch.params_without_grad": True},
        {},
        "CG913",
    ),
    "spikingjelly PR 740": ("megatron-core", {"cuda_graph_impl": "local"}, {"mcore": "0.18"}, "CG701"),
}


@pytest.mark.parametrize("name", REPORTS)
def test_what_the_page_says_is_found_is_found(name):
    framework, facts, given, code = REPORTS[name]
    resolved = versions.resolve(framework, **{**versions.NEWEST, **given})
    settings = Settings(framework, resolved, {fact: Known(value) for fact, value in facts.items()})
    found = {finding.code: finding for finding in rules.check(settings) if not finding.needs}
    assert code in found and found[code].mend


def test_the_page_lists_at_least_fifteen_reports_that_are_new():
    names = [name for name, _, _, _ in ROWS]
    known = " ".join(case.source for case in CASES)
    assert len(set(names)) == len(names) >= 15
    assert not [name for name in names if re.search(re.escape(name) + r"(?!\d)", known)]
    assert {name for name, _, _, found in ROWS if "CG" in found} == set(REPORTS)


def test_every_code_on_the_page_is_a_rule():
    codes = {code for _, _, _, found in ROWS for code in re.findall(r"CG\d{3}", found)}
    assert codes and all(code in rules.REGISTRY for code in codes)
    for name, _, _, found in ROWS:
        assert name not in REPORTS or REPORTS[name][3] in found
