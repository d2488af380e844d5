# SPDX-License-Identifier: Apache-2.0
"""What kind of model a run trains: known facts win, then the most telling name."""

import pytest

from cudagraphs import families, versions
from cudagraphs.settings import Known, Settings, Unknown

VERSIONS = versions.resolve("megatron-bridge", **versions.NEWEST)


def family(name="", path="", complete=False, **facts):
    facts = {
        key.replace("__", "."): value if isinstance(value, Unknown) else Known(value) for key, value in facts.items()
    }
    return families.infer(Settings("megatron-bridge", VERSIONS, facts, name, path, complete))


CHECKPOINTS = {
    "Qwen/Qwen3-235B-A22B": "MoE",
    "Qwen/Qwen3-0.6B": "dense model",
    "Qwen/Qwen2.5-7B": "dense model",
    "Qwen/Qwen3-VL-8B-Instruct": "vision-language dense model",
    "Qwen/Qwen3-VL-235B-A22B-Instruct": "vision-language MoE",
    "Qwen/Qwen3.5-27B": "vision-language dense model with Gated DeltaNet layers",
    "Qwen/Qwen3.5-397B-A17B": "vision-language MoE with Gated DeltaNet layers",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "MoE with Gated DeltaNet layers and multi-token prediction",
    "meta-llama/Meta-Llama-3.1-405B": "dense model",
    "mistralai/Mixtral-8x7B-v0.1": "MoE",
    "mistralai/Ministral-3-8B-Instruct-2512": "dense model",
    "deepseek-ai/DeepSeek-V2-Lite": "MoE",
    "deepseek-ai/DeepSeek-V3": "MoE and multi-token prediction",
    "moonshotai/Moonlight-16B-A3B": "MoE",
    "moonshotai/Kimi-K2-Instruct": "MoE",
    "moonshotai/Kimi-K2.5": "vision-language MoE",
    "zai-org/GLM-4.5-Air": "MoE and multi-token prediction",
    "zai-org/GLM-5.1": "MoE",
    "openai/gpt-oss-120b": "MoE",
    "allenai/OLMoE-1B-7B-0924": "MoE",
    "MiniMaxAI/MiniMax-M3": "MoE",
    "stepfun-ai/Step-3.5-Flash": "MoE",
    "google/gemma-3-27b-it": "dense model",
    "google/gemma-4-26B-A4B-it": "MoE",
    "LGAI-EXAONE/EXAONE-4.0-1.2B": "dense model",
    "nvidia/Nemotron-H-56B-Base-8K": "hybrid dense model with Mamba layers",
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2-Base": "hybrid dense model with Mamba layers",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "hybrid MoE with Mamba layers",
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": "hybrid MoE with Mamba layers",
    "black-forest-labs/FLUX.1-dev": "model of unknown kind",
}


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_checkpoint_names(checkpoint):
    found = family(model__hf_id=checkpoint)
    assert found.describe() == CHECKPOINTS[checkpoint]
    assert all(trait.how in ("", "inferred") for trait in found)


@pytest.mark.parametrize(
    "provider,described",
    [
        ("Qwen3MoEModelProvider235B_A22B", "MoE"),
        ("Llama31ModelProvider405B", "dense model"),
        ("NemotronHModelProvider8B", "hybrid dense model with Mamba layers"),
        ("DeepSeekV3ModelProvider", "MoE and multi-token prediction"),
        ("Qwen3VLMoEModelProvider", "vision-language MoE"),
    ],
)
def test_provider_names(provider, described):
    assert family(model__provider=provider).describe() == described


def test_what_is_known_wins_over_names():
    found = family(model__hf_id="Qwen/Qwen3-235B-A22B", num_moe_experts=None)
    assert found.moe == families.Trait(False, "known", "num_moe_experts is None")
    assert family(model__hf_id="Qwen/Qwen3-8B", num_moe_experts=8).moe.value is True
    assert family(num_moe_experts=1, complete=True).moe.value is False
    assert family(model__hf_id="meta-llama/Meta-Llama-3-8B", model__has_mamba=True).mamba.how == "known"
    pattern = family(hybrid_layer_pattern="M-M*-")
    assert pattern.mamba.value is True and "M-M*-" in pattern.mamba.reason


def test_expert_parallelism_tells_an_moe():
    found = family(expert_model_parallel_size=8)
    assert found.moe.value is True and "expert_model_parallel_size=8" in found.moe.reason


def test_less_telling_names_are_asked_last():
    assert family("qwen3_30b_a3b_pretrain_config").moe.reason.endswith(
        "the recipe's name, qwen3_30b_a3b_pretrain_config"
    )
    assert family("pretrain", "recipes/mixtral.py").moe.value is True
    # the checkpoint settles it, whatever the file is called
    assert family("moe_baseline", "moe.py", model__hf_id="meta-llama/Meta-Llama-3-8B").moe.value is False
    assert family("pretrain", "train.py").describe() == "model of unknown kind"
    assert family(model__hf_id=Unknown("an argument"), model__provider="AutoBridgeProvider").moe.value is None


def test_assumptions_fill_in_what_is_unknown_only():
    run = Settings("megatron-bridge", VERSIONS, {"model.hf_id": Known("Qwen/Qwen3-30B-A3B")}, complete=False)
    assumed = families.assume(run, families.infer(run))
    assert assumed.facts["num_moe_experts"].how == "inferred" and assumed.facts["num_moe_experts"].value > 1
    assert assumed.facts["model.has_mamba"].value is False
    known = run.with_values({"num_moe_experts": 128})
    assert families.assume(known, families.infer(known)).facts["num_moe_experts"].value == 128
