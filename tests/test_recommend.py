# SPDX-License-Identifier: Apache-2.0
"""What is recommended for which kind of model, in which version's names, and why."""

import pytest

from cudagraphs import recommend, rules, versions
from cudagraphs.recommend_automodel import recommend_automodel
from cudagraphs.settings import Branch, Choice, Known, Settings, Source, Unknown

MOE = {"num_moe_experts": 64, "moe_token_dispatcher_type": "alltoall", "expert_model_parallel_size": 8}
PADDED = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
NEW = {"mcore": "0.19.2", "bridge": "0.6.2", "te": "2.14", "torch": "2.11"}


def run(facts=(), framework="megatron-bridge", complete=True, **given):
    resolved = versions.resolve(framework, **{**versions.NEWEST, **NEW, **given})
    known = {"model.has_mamba": False, **dict(facts)} if complete else dict(facts)
    facts = {
        name: value if isinstance(value, (Known, Unknown, Choice)) else Known(value) for name, value in known.items()
    }
    return Settings(framework, resolved, facts, complete=complete)


def checkpoint(name, **facts):
    return run({"model.hf_id": name, "model.provider": "AutoBridgeProvider", **facts}, complete=False)


TE, FULL, NONE, LOCAL = "transformer_engine", "full_iteration", "none", "local"
TABLE = [
    # what, settings, keywords, implementation, scopes
    ("dense", run(), {}, TE, ("attn",)),
    ("dense-narrow", run(), {"preset": "narrow"}, TE, ("attn",)),
    ("dense-widest", run(), {"preset": "widest"}, TE, ("attn", "mlp")),
    ("dropless", run(MOE), {}, TE, ("attn", "moe_router", "moe_preprocess")),
    ("dropless-narrow", run(MOE), {"preset": "narrow"}, TE, ("moe_router", "moe_preprocess")),
    ("dropless-widest", run(MOE), {"preset": "widest"}, TE, ("attn", "moe_router", "moe_preprocess")),
    (
        "dropless-mixed-widest",
        run({**MOE, "moe_layer_freq": [0, 1]}),
        {"preset": "widest"},
        TE,
        ("attn", "moe_router", "moe_preprocess", "mlp"),
    ),
    ("drop-and-pad", run({**MOE, **PADDED}), {}, TE, ("attn", "moe")),
    ("capacity-without-padding", run({**MOE, "moe_expert_capacity_factor": 1.25}), {}, TE, ("attn", "moe_router")),
    ("router-padding", run({**MOE, "moe_router_padding_for_quantization": True}), {}, TE, ("attn", "moe_router")),
    ("one-expert-is-dense", run({"num_moe_experts": 1}), {}, TE, ("attn",)),
    ("hybrid", run({"model.has_mamba": True}), {}, TE, ("attn", "mamba")),
    ("hybrid-moe", run({**MOE, "model.has_mamba": True}), {}, TE, ("attn", "moe_router", "moe_preprocess", "mamba")),
    ("full-recompute-dense", run({"recompute_granularity": "full"}), {}, FULL, ()),
    ("full-recompute-dropless", run({**MOE, "recompute_granularity": "full"}), {}, NONE, ()),
    ("full-recompute-in-0.15", run({"recompute_granularity": "full"}, "megatron-core", mcore="0.15"), {}, NONE, ()),
    ("offload", run({"cpu_offloading": True}), {}, FULL, ()),
    ("offload-in-0.17", run({"cpu_offloading": True}, mcore="0.17.1", bridge="0.4.2"), {}, NONE, ()),
    (
        "moe-recompute",
        run({**MOE, "recompute_granularity": "selective", "recompute_modules": ["moe"]}),
        {},
        TE,
        ("attn",),
    ),
    ("dropout-in-recomputed-attention", run({"recompute_granularity": "selective"}), {}, TE, ("mlp",)),
    ("packed-dense", run({"dataset.packed_sequences": True}), {}, TE, ("mlp",)),
    ("packed-dropless", run({**MOE, "dataset.packed_sequences": True}), {}, TE, ("moe_router", "moe_preprocess")),
    ("0.17", run(MOE, mcore="0.17.1", bridge="0.4.2"), {}, TE, ("attn", "moe_router", "moe_preprocess")),
    ("0.15", run(MOE, "megatron-core", mcore="0.15"), {}, TE, ("attn",)),
    ("0.13", run({}, "megatron-core", mcore="0.13"), {}, TE, ("attn",)),
    ("qwen3-moe", checkpoint("Qwen/Qwen3-30B-A3B"), {}, TE, ("attn", "moe_router", "moe_preprocess")),
    ("llama", checkpoint("meta-llama/Meta-Llama-3-8B"), {}, TE, ("attn",)),
    (
        "nemotron",
        checkpoint("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
        {},
        TE,
        ("attn", "moe_router", "moe_preprocess", "mamba"),
    ),
    ("qwen3-next", checkpoint("Qwen/Qwen3-Next-80B-A3B-Instruct"), {}, TE, ("attn", "moe_router", "moe_preprocess")),
    ("qwen3-vl", checkpoint("Qwen/Qwen3-VL-30B-A3B-Instruct"), {}, TE, ("attn", "moe_router", "moe_preprocess")),
    ("unknown-model", run({"model.hf_id": Unknown("it is an argument")}, complete=False), {}, TE, ("attn",)),
    ("asked-full", run(), {"impl": FULL}, FULL, ()),
    ("asked-full-0.17", run({}, mcore="0.17.1", bridge="0.4.2"), {"impl": FULL}, FULL, ()),
    ("asked-local-core", run({}, "megatron-core"), {"impl": LOCAL}, LOCAL, ()),
    ("asked-scopes", run(), {"scopes": ["mlp"]}, TE, ("mlp",)),
    ("asked-none", run({"cuda_graph_impl": TE}), {"impl": NONE}, NONE, ()),
]


@pytest.mark.parametrize("settings,wanted,impl,scopes", [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_recommendation(settings, wanted, impl, scopes):
    made = recommend.recommend(settings, **wanted)
    assert made.refused is None
    assert (made.impl, set(made.modules)) == (impl, set(scopes))
    assert made.reasons and all("\n" not in reason for reason in made.reasons)
    after = settings.with_values({**made.overrides, **{f"env.{name}": value for name, value in made.exports.items()}})
    blocking = [f for f in rules.check(after) if f.severity in ("error", "runtime") and not f.needs]
    assert not blocking
    state = rules.graph_state(after)
    assert state.active is (impl != NONE) and state.full_iteration is (impl == FULL)


@pytest.mark.parametrize(
    "settings,wanted,why",
    [
        (run(), {"impl": LOCAL}, "CG503"),
        (run(MOE), {"impl": FULL}, "CG714"),
        (run(MOE), {"scopes": ["moe"]}, "CG105"),
        (run(), {"scopes": ["moe_router"]}, "CG103"),
        (run({"recompute_granularity": "full"}), {"scopes": ["attn"]}, "CG204"),
        (run({"train.rampup_batch_size": [32, 32, 1000000]}), {"impl": FULL}, "CG709"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_rule(settings, wanted, why):
    made = recommend.recommend(settings, **wanted)
    assert made.refused and why in made.refused and made.overrides == {}


@pytest.mark.parametrize(
    "wanted,complaint",
    [
        ({"impl": "te"}, "unknown implementation 'te'; megatron-core 0.19 has none, local, transformer_engine"),
        ({"scopes": ["attention"]}, "unknown scope 'attention'; megatron-core 0.19 has attn"),
        ({"preset": "wide"}, "unknown preset 'wide'"),
    ],
)
def test_unknown_names_raise(wanted, complaint):
    with pytest.raises(ValueError, match=complaint):
        recommend.recommend(run(), **wanted)


def test_the_version_decides_the_names():
    new = recommend.recommend(run({"cuda_graph_scope": "full"})).overrides
    assert new["cuda_graph_modules"] == ["attn"] and new["cuda_graph_scope"] is None
    old = recommend.recommend(run({}, mcore="0.17.1", bridge="0.4.2")).overrides
    assert old["cuda_graph_scope"] == ["attn"] and "cuda_graph_modules" not in old
    oldest = recommend.recommend(run({}, "megatron-core", mcore="0.14")).overrides
    assert oldest["external_cuda_graph"] is True and oldest["cuda_graph_scope"] == "attn"
    full = recommend.recommend(run(), impl=FULL).overrides
    assert full["cuda_graph_impl"] == "full_iteration" and full["cuda_graph_modules"] == []
    full_17 = recommend.recommend(run({}, mcore="0.17.1", bridge="0.4.2"), impl=FULL).overrides
    assert full_17["cuda_graph_impl"] == "local" and full_17["cuda_graph_scope"] == ["full_iteration"]


def test_legacy_flags_and_inference_scope_of_a_base_recipe_are_put_out_of_the_way():
    base = {"enable_cuda_graph": True, "inference_cuda_graph_scope": "block", "cuda_graph_scope": "full"}
    overrides = recommend.recommend(run(base)).overrides
    assert overrides["enable_cuda_graph"] is False
    assert overrides["inference_cuda_graph_scope"] is None and overrides["cuda_graph_scope"] is None


def test_every_setting_that_a_full_iteration_needs():
    base = {
        "ddp.check_for_nan_in_grad": True,
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "te",
        "pipeline_model_parallel_size": 4,
        "optimizer.overlap_param_gather_with_optimizer_step": True,
        "env.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "cuda_graph_warmup_steps": 0,
    }
    overrides = recommend.recommend(run(base, te="2.6"), impl=FULL).overrides
    assert overrides["rerun_state_machine.check_for_nan_in_loss"] is False
    assert overrides["ddp.check_for_nan_in_grad"] is False
    assert overrides["cross_entropy_fusion_impl"] == "native"
    assert overrides["batch_p2p_sync"] is False
    assert overrides["optimizer.overlap_param_gather_with_optimizer_step"] is False
    assert overrides["env.NCCL_GRAPH_REGISTER"] == "0"
    assert overrides["cuda_graph_warmup_steps"] == 3
    assert overrides["use_te_rng_tracker"] is True and overrides["rng.te_rng_tracker"] is True


def test_warmup_steps_that_are_set_stay_and_those_asked_for_win():
    assert recommend.recommend(run({"cuda_graph_warmup_steps": 5})).overrides["cuda_graph_warmup_steps"] == 5
    assert recommend.recommend(run(), warmup_steps=7).overrides["cuda_graph_warmup_steps"] == 7


def test_environment_goes_into_the_recipes_block_or_to_the_launch():
    block = run({"env.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    made = recommend.recommend(block)
    assert made.overrides["env.NCCL_GRAPH_REGISTER"] == "0" and not made.exports
    elsewhere = recommend.recommend(run(), extra={"env.PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert elsewhere.overrides["env.NCCL_GRAPH_REGISTER"] == "0"


def test_offline_packing_gets_its_padding():
    packed = {"dataset.packed_sequences": True, "dataset.enable_offline_packing": True}
    dense = recommend.recommend(run(packed))
    assert dense.modules == ("mlp",) and dense.overrides["dataset.pad_to_max_length"] is True
    full = recommend.recommend(run(packed), impl=FULL)
    assert full.overrides["dataset.offline_packing_specs.pad_cu_seqlens"] is True


def test_a_branch_that_recomputes_whole_layers_rules_graphs_of_layers_out():
    branch = Branch("long_context", Source("recipe.py", 9), default=False)
    recompute = Choice(branch, Known("full"), Known(None))
    made = recommend.recommend(run({"recompute_granularity": recompute}))
    assert made.impl == FULL
    made = recommend.recommend(run({**MOE, "recompute_granularity": recompute}))
    assert made.impl == NONE and any("CG714" in reason for reason in made.reasons)


def test_reasons_say_what_was_inferred_from_what():
    made = recommend.recommend(checkpoint("Qwen/Qwen3-30B-A3B"))
    assert any("inferred from the checkpoint, Qwen/Qwen3-30B-A3B" in reason for reason in made.reasons)
    vision = recommend.recommend(checkpoint("Qwen/Qwen3-VL-30B-A3B-Instruct"))
    assert any("real-data path" in reason for reason in vision.reasons)
    linear = recommend.recommend(checkpoint("Qwen/Qwen3-Next-80B-A3B-Instruct"))
    assert any("Gated DeltaNet" in reason and "attn" in reason for reason in linear.reasons)
    packed = recommend.recommend(run({"dataset.packed_sequences": True}))
    assert any("CG707" in reason for reason in packed.reasons)
    assert any("mlp" in step for step in recommend.recommend(run()).next_steps)


def test_off_keeps_later_migrations_from_turning_graphs_on():
    promoted = run({"cuda_graph_impl": "none", "cuda_graph_modules": ["full_iteration"]}, "megatron-core")
    assert rules.graph_state(promoted).active
    after = promoted.with_values(recommend.off(promoted))
    assert not rules.graph_state(after).active
    legacy = run({"external_cuda_graph": True}, "megatron-core", mcore="0.14")
    assert recommend.off(legacy) == {"external_cuda_graph": False}
    optimizer = run({"optimizer.optimizer_cuda_graph": True, "model.vision_cuda_graph_impl": TE})
    assert recommend.off(optimizer)["optimizer.optimizer_cuda_graph"] is False
    assert recommend.off(optimizer)["model.vision_cuda_graph_impl"] == "none"


def test_full_iteration_of_an_unknown_kind_of_model_waits_for_the_number_of_experts():
    unknown = run({"recompute_granularity": "full"}, complete=False)
    advice = recommend.recommend(unknown)
    assert advice.impl == NONE and advice.refused is None
    assert "give num_moe_experts (CG714)" in advice.reasons[-1]
    assert recommend.recommend(unknown, extra={"num_moe_experts": None}).impl == FULL
    dropless = recommend.recommend(unknown, extra={"num_moe_experts": 8})
    assert dropless.impl == NONE
    asked = recommend.recommend(unknown, impl=FULL)
    assert asked.impl == FULL and asked.refused is None


def test_next_steps_name_nothing_that_the_rules_reject():
    packed = recommend.recommend(run({**MOE, "dataset.packed_sequences": True}))
    assert any(line.startswith("left out") and "attn" in line for line in packed.reasons)
    assert not any("attn" in step or "full iteration" in step for step in packed.next_steps)
    narrow = recommend.recommend(run(MOE), preset="narrow")
    assert any("add attn" in step for step in narrow.next_steps)
    unknown = recommend.recommend(run(complete=False))
    assert unknown.impl == TE and not any("full iteration" in step for step in unknown.next_steps)
    assert any("full iteration" in step for step in recommend.recommend(run()).next_steps)


@pytest.mark.parametrize("attn, said", [("sdpa", "te instead of sdpa"), (None, "backend.attn: te, because"), ("te", "")])
def test_automodel_says_when_the_attention_backend_changes(attn, said):
    facts = {"backend.attn": attn} if attn else {}
    advice = recommend_automodel(run(facts, "nemo-automodel", complete=attn is not None, automodel="0.7"))
    assert advice.overrides["backend.attn"] == "te"
    lines = [line for line in advice.reasons if line.startswith("backend.attn")]
    assert len(lines) == bool(said) and all(said in line for line in lines)
    assert "te_dpa: the attention core alone; the linear and norm backends stay as they are" in advice.reasons


def test_the_old_name_is_out_of_the_way_only_where_it_could_stand():
    """A launch script names no cuda_graph_scope that would have to be put out of the way."""
    way = "cuda_graph_scope is kept out of the way"
    unread = recommend.recommend(run(complete=False))
    assert unread.overrides["cuda_graph_scope"] is None and any(way in line for line in unread.reasons)
    for launched in (run(framework="megatron-lm"), run({"harness.gpu": "h100"}, complete=False)):
        assert not any(way in line for line in recommend.recommend(launched).reasons)
