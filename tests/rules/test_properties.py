# SPDX-License-Identifier: Apache-2.0
"""Properties of the rules and the recommendation over settings drawn at random."""

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cudagraphs import families, recommend, rules, versions
from cudagraphs.rules import evaluate, mends
from cudagraphs.rules.normalize import MODULES
from cudagraphs.settings import Branch, Choice, Known, Settings, Source, Unknown

RULES = list(rules.REGISTRY)
QUICK = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MINORS = ("0.13", "0.14", "0.15", "0.16", "0.17", "0.18", "0.19")

booleans = st.booleans()
MODEL = {
    "num_moe_experts": st.sampled_from([None, None, 1, 8, 64]),
    "moe_layer_freq": st.sampled_from([1, 2, [0, 1], [1, 1]]),
    "moe_token_dispatcher_type": st.sampled_from(["allgather", "alltoall", "flex"]),
    "moe_expert_capacity_factor": st.sampled_from([None, None, 1.0]),
    "moe_pad_expert_input_to_capacity": booleans,
    "moe_router_padding_for_fp8": booleans,
    "moe_shared_expert_intermediate_size": st.sampled_from([None, 1024]),
    "attention_dropout": st.sampled_from([0.0, 0.1]),
    "hidden_dropout": st.sampled_from([0.0, 0.1]),
    "recompute_granularity": st.sampled_from([None, None, "selective", "full"]),
    "recompute_modules": st.sampled_from([None, ["core_attn"], ["mlp"], ["moe"], ["moe_act", "layernorm"]]),
    "cpu_offloading": st.sampled_from([False, False, False, True]),
    "overlap_moe_expert_parallel_comm": booleans,
    "pipeline_model_parallel_size": st.sampled_from([1, 1, 4]),
    "expert_model_parallel_size": st.sampled_from([1, 8]),
    "variable_seq_lengths": st.sampled_from([False, False, False, True]),
    "fp8": st.sampled_from([None, "e4m3"]),
}
AROUND = {
    "model.has_mamba": booleans,
    "dataset.packed_sequences": st.sampled_from([False, False, True]),
    "train.rampup_batch_size": st.sampled_from([None, None, [32, 32, 1000000]]),
    "rerun_state_machine.check_for_nan_in_loss": booleans,
    "ddp.check_for_nan_in_grad": booleans,
    "env.PYTORCH_CUDA_ALLOC_CONF": st.sampled_from([None, "expandable_segments:True"]),
    "env.PYTORCH_ALLOC_CONF": st.sampled_from([None, "expandable_segments:True"]),
    "cuda_graph_warmup_steps": st.sampled_from([0, 3]),
}
FRAMEWORKS = ("megatron-bridge", "megatron-core", "megatron-lm")
GRAPHS = {
    "cuda_graph_impl": st.sampled_from(["none", "local", "transformer_engine", "full_iteration", "nonsense"]),
    "cuda_graph_scope": st.sampled_from(
        [None, "full", "attn", ["attn", "mlp"], ["moe"], ["full_iteration"], "attn, mlp"]
    ),
    "cuda_graph_modules": st.sampled_from(
        ["full", [], ["attn"], ["moe_router"], ["attn", "moe"], ["mamba"], ["full_iteration"]]
    ),
    "enable_cuda_graph": st.sampled_from([False, False, True]),
    "external_cuda_graph": st.sampled_from([False, False, True]),
    "inference_cuda_graph_scope": st.sampled_from([None, None, "layer", "block"]),
}


def facts(**parts):
    """A dictionary with a drawn part of the given facts."""
    return st.fixed_dictionaries({}, optional=parts)


@st.composite
def runs(draw, graphs: bool = False, models: bool = True):
    minor = draw(st.sampled_from(MINORS))
    framework = draw(st.sampled_from(FRAMEWORKS))
    values = draw(facts(**AROUND, **(MODEL if models else {}), **(GRAPHS if graphs else {})))
    values.setdefault("model.has_mamba", False)
    known = rules.evaluate.defaults.field_names(int(minor[2:]))
    values = {name: value for name, value in values.items() if "." in name or name in known}
    bridge = {"0.16": "0.3.1", "0.17": "0.4.2", "0.18": "0.5.1", "0.19": "0.6.2"}.get(minor, "0.3.1")
    te = draw(st.sampled_from(["2.6", "2.9", "2.12", "2.14"]))
    resolved = versions.resolve(framework, mcore=minor, bridge=bridge, te=te, torch="2.11", automodel="none")
    return Settings(framework, resolved, {name: Known(value) for name, value in values.items()})


def blocking(run):
    return [finding for finding in rules.check(run) if finding.severity in ("error", "runtime") and not finding.needs]


def with_recommendation(run, **wanted):
    made = recommend.recommend(run, **wanted)
    exports = {f"env.{name}": value for name, value in made.exports.items()}
    return made, run.with_values({**made.overrides, **exports})


@QUICK
@given(runs(), st.sampled_from([None, "narrow", "widest"]))
def test_the_recommendation_always_validates(run, preset):
    made, after = with_recommendation(run, preset=preset)
    assert made.refused is None and made.reasons
    left = [finding for finding in blocking(after)]
    if made.impl == "none":
        # whatever stands then has nothing to do with the model's graphs
        assert not rules.graph_state(after).active
    else:
        assert not left, [(finding.code, finding.message) for finding in left]
        assert rules.graph_state(after).active


@QUICK
@given(runs(graphs=True), st.sampled_from([None, "widest"]))
def test_the_recommendation_replaces_whatever_graph_settings_stood_there(run, preset):
    made, after = with_recommendation(run, preset=preset)
    state = rules.graph_state(after)
    assert made.impl != "none" or not state.active
    if made.impl != "none":
        assert not blocking(after)
        assert set(made.modules) <= set(state.modules) or state.full_iteration


@QUICK
@given(runs())
def test_widest_is_maximal(run):
    made, after = with_recommendation(run, preset="widest")
    if made.impl != "transformer_engine" or run.versions.minor < 16 or not made.modules:
        return
    facts = evaluate.Reader(run)
    for extra in MODULES:
        if extra not in made.modules:
            wider = after.with_values(mends.scopes(facts, run.versions, (*made.modules, extra)))
            assert blocking(wider), f"{extra} could be added to {made.modules}"


@QUICK
@given(runs(graphs=True), st.randoms(use_true_random=False))
def test_the_order_of_rules_does_not_matter(run, order: random.Random):
    shuffled = RULES[:]
    order.shuffle(shuffled)
    assert rules.check(run, shuffled) == rules.check(run)


@QUICK
@given(runs(graphs=True))
def test_off_leaves_no_graph(run):
    after = run.with_values(recommend.off(run))
    assert not rules.graph_state(after).active
    config = [finding for finding in blocking(after) if finding.layer == "config"]
    assert not config, [(finding.code, finding.message) for finding in config]


@QUICK
@given(runs(graphs=True))
def test_applying_the_recommendation_twice_changes_nothing(run):
    made, after = with_recommendation(run)
    again, _ = with_recommendation(after)
    assert (again.impl, again.modules) == (made.impl, made.modules)
    assert {**after.facts, **after.with_values(again.overrides).facts}.keys() >= after.facts.keys()
    for name, value in again.overrides.items():
        if name in made.overrides:
            assert value == made.overrides[name], name


@QUICK
@given(runs(graphs=True), st.data())
def test_what_is_unknown_is_never_guessed(run, data):
    """A finding that stands while a fact is unknown stands whatever the fact turns out to be."""
    if not run.facts:
        return
    name = data.draw(st.sampled_from(sorted(run.facts)))
    hidden = Settings(run.framework, run.versions, {**run.facts, name: Unknown("hidden")})
    certain = {finding.code for finding in rules.check(hidden) if not finding.needs}
    shown = {finding.code for finding in rules.check(run)}
    assert certain <= shown, (name, certain - shown)
    undecided = {finding.code for finding in rules.check(hidden) if finding.needs}
    assert shown <= certain | undecided, (name, shown - certain - undecided)


@QUICK
@given(runs(graphs=True), runs(graphs=True), st.data())
def test_a_branch_is_judged_on_both_sides(run, other, data):
    names = sorted(set(run.facts) & set(other.facts))
    if not names:
        return
    name = data.draw(st.sampled_from(names))
    branch = Branch("flag", Source("recipe.py", 3), default=True)
    both = Settings(
        run.framework, run.versions, {**run.facts, name: Choice(branch, run.facts[name], other.facts[name])}
    )
    true_side, false_side = run, Settings(run.framework, run.versions, {**run.facts, name: other.facts[name]})
    codes = [{finding.code for finding in rules.check(side)} for side in (true_side, false_side)]
    found = {finding.code: finding.when for finding in rules.check(both)}
    assert set(found) == codes[0] | codes[1]
    for code, when in found.items():
        sides = (code in codes[0], code in codes[1])
        assert (when == "") == (sides == (True, True)), (code, when, sides)
        if sides == (True, False):
            assert "`flag` is true" in when


@QUICK
@given(runs(graphs=True))
def test_a_family_that_is_known_is_not_inferred(run):
    family = families.infer(run)
    if "num_moe_experts" in run.facts:
        assert family.moe.how == "known"
