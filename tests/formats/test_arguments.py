# SPDX-License-Identifier: Apache-2.0
"""Arguments without a script: behind `--`, in a file of overrides, and for the performance scripts."""

from __future__ import annotations

import pytest
from cudagraphs import rules, versions
from cudagraphs.formats import open_recipe, split_arguments
from cudagraphs.formats.arguments import from_argv
from cudagraphs.formats.flags import hydra_text, hydra_value, pattern, scalar
from cudagraphs.formats.source import SourceError
from cudagraphs.settings import Known, Unknown

LM = versions.resolve("megatron-lm", mcore="0.19.2", te="2.14", torch="2.11", automodel="0.7")
BRIDGE = versions.resolve("megatron-bridge", bridge="0.6.2", mcore="0.19.2", te="2.14", torch="2.11", automodel="0.7")
BRIDGE_04 = versions.resolve(
    "megatron-bridge", bridge="0.4.2", mcore="0.17.1", te="2.14", torch="2.11", automodel="0.7"
)
HARNESS = "--model_family_name llama --model_recipe_name llama3_8b --gpu h100 --compute_dtype bf16".split()


def values(argv, which=LM):
    settings = from_argv(argv, which).run("<arguments>").settings
    return settings, {name: fact.value for name, fact in settings.facts.items() if isinstance(fact, Known)}


def changed(argv, overrides, which=LM):
    recipe, skipped = from_argv(argv, which).edited("<arguments>", overrides)
    return recipe.file.text.strip(), skipped


def test_split_at_the_first_double_dash():
    assert split_arguments(["a", "--", "b", "--", "c"]) == (["a"], ["b", "--", "c"])
    assert split_arguments(["a"]) == (["a"], None)


def test_megatron_lm_arguments():
    settings, known = values("--num-layers 2 --cuda-graph-impl local --lr -1e-4 --moe-layer-freq ([0]*1+[1]*1)".split())
    assert settings.framework == "megatron-lm" and settings.complete and settings.versions.bridge is None
    assert known["num_layers"] == 2 and known["cuda_graph_impl"] == "local" and known["moe_layer_freq"] == [0, 1]
    assert known["args.lr"] == -1e-4, "a negative number is a value, not an option"


def test_comma_separated_scopes_are_one_wrong_name():
    settings, _ = values("--num-layers 2 --cuda-graph-impl transformer_engine --cuda-graph-modules attn,mlp".split())
    assert {"CG005", "CG401"} <= {finding.code for finding in rules.check(settings)}


def test_new_arguments_are_quoted_where_a_shell_needs_it():
    text, _ = changed(
        ["--num-layers", "2", "--data-path", "a b"], {"cuda_graph_impl": "local", "moe_layer_freq": [0, 1]}
    )
    assert text == "--num-layers 2 --cuda-graph-impl local --moe-layer-freq '[0,1]' --data-path 'a b'"


def test_overrides():
    settings, known = values(
        [
            "model.cuda_graph_impl=local",
            "+model.cuda_graph_modules=[attn, mlp]",
            "env_vars.NCCL_GRAPH_REGISTER=0",
            "comm_overlap.delay_wgrad_compute=true",
            "~model.x",
            "train.train_iters=10",
        ],
        BRIDGE,
    )
    assert settings.framework == "megatron-bridge" and not settings.complete
    assert known["cuda_graph_impl"] == "local" and known["cuda_graph_modules"] == ["attn", "mlp"]
    assert known["env.NCCL_GRAPH_REGISTER"] == "0" and known["train.train_iters"] == 10
    assert known["delay_wgrad_compute"] is True, "Bridge copies it onto the model"
    assert isinstance(settings.facts["model.x"], Unknown)


def test_overrides_are_changed_and_added():
    text, skipped = changed(
        ["model.cuda_graph_impl=local"],
        {"cuda_graph_impl": "none", "cuda_graph_scope": None, "rng.te_rng_tracker": True},
        BRIDGE,
    )
    assert text == "model.cuda_graph_impl=none model.cuda_graph_scope=null rng.te_rng_tracker=true" and not skipped


def test_file_of_overrides(tmp_path):
    path = tmp_path / "overrides.txt"
    path.write_text("# for the launch\nmodel.cuda_graph_impl=none\n'model.cuda_graph_modules=[attn]'\n")
    recipe = open_recipe(path, BRIDGE)
    assert recipe.run("<arguments>").settings.facts["cuda_graph_modules"].value == ["attn"]
    after, _ = recipe.edited("<arguments>", {"cuda_graph_modules": ["attn", "mlp"], "rng.te_rng_tracker": True})
    assert after.file.text == (
        "# for the launch\nmodel.cuda_graph_impl=none\n'model.cuda_graph_modules=[attn,mlp]'\nrng.te_rng_tracker=true\n"
    )


HARNESS_CASES = [
    (
        "scopes",
        BRIDGE,
        "--cuda_graph_impl transformer_engine --cuda_graph_scope attn,mlp",
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn", "mlp"], "rng.te_rng_tracker": True},
    ),
    (
        "scopes before 0.18",
        BRIDGE_04,
        "--cuda_graph_impl transformer_engine --cuda_graph_scope attn",
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn"]},
    ),
    (
        "whole iteration",
        BRIDGE,
        "--cuda_graph_impl local --cuda_graph_scope full_iteration",
        {
            "cuda_graph_impl": "full_iteration",
            "cuda_graph_modules": [],
            "rerun_state_machine.check_for_nan_in_loss": False,
        },
    ),
    (
        "whole iteration before 0.18",
        BRIDGE_04,
        "--cuda_graph_impl local --cuda_graph_scope full_iteration",
        {"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]},
    ),
    (
        "none clears the scopes",
        BRIDGE,
        "--cuda_graph_impl none --cuda_graph_scope attn",
        {"cuda_graph_impl": "none", "cuda_graph_modules": []},
    ),
    (
        "other options",
        BRIDGE,
        "--recompute_num_layers 2 --activation_offload_layers 1 --use_tokendrop true -ep 8 -ce A=1,B=x",
        {
            "recompute_granularity": "full",
            "cpu_offloading": True,
            "moe_pad_expert_input_to_capacity": True,
            "expert_model_parallel_size": 8,
            "env.A": "1",
            "env.B": "x",
        },
    ),
]


@pytest.mark.parametrize(
    "which, text, expected", [case[1:] for case in HARNESS_CASES], ids=[case[0] for case in HARNESS_CASES]
)
def test_performance_script_options(which, text, expected):
    _, known = values([*HARNESS, *text.split()], which)
    assert {name: known.get(name) for name in expected} == expected


def test_local_with_attn_in_the_harness_is_an_error():
    settings, _ = values([*HARNESS, *"--cuda_graph_impl local --cuda_graph_scope attn".split()], BRIDGE)
    assert "error" in {finding.severity for finding in rules.check(settings) if not finding.needs}


def test_performance_script_edits():
    text, skipped = changed(
        [*HARNESS, *"--cuda_graph_impl none".split()],
        {
            "cuda_graph_impl": "full_iteration",
            "cuda_graph_modules": [],
            "cuda_graph_scope": None,
            "ddp.check_for_nan_in_grad": False,
        },
        BRIDGE,
    )
    assert (
        text.endswith("--cuda_graph_impl local --cuda_graph_scope full_iteration ddp.check_for_nan_in_grad=false")
        and not skipped
    )


def test_whole_layer_cannot_be_said_to_the_performance_scripts():
    _, skipped = changed(
        [*HARNESS, "--cuda_graph_impl", "none"],
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": []},
        BRIDGE,
    )
    assert "no scope for the whole layer" in skipped["cuda_graph_modules"]


@pytest.mark.parametrize("argv", [[], ["word"], ["--unknown", "1"]])
def test_arguments_that_tell_nothing(argv):
    with pytest.raises(SourceError, match="give the framework with --framework"):
        from_argv(argv, LM)


@pytest.mark.parametrize(
    "text, value",
    [
        ("3", 3),
        ("-1", -1),
        ("1e-4", 1e-4),
        (".5", 0.5),
        ("x", "x"),
        ("None", None),
        ("1.2.3", "1.2.3"),
        ("0x10", "0x10"),
    ],
)
def test_scalar(text, value):
    assert scalar(text) == value and type(scalar(text)) is type(value)


@pytest.mark.parametrize(
    "text, value",
    [
        ("1", 1),
        ("[0]*2+[1]*3", [0, 0, 1, 1, 1]),
        ("([0, 1]*2)", [0, 1, 0, 1]),
        ("([0]*1+[1]*1)", [0, 1]),
        ("Et|(tt|)*6mL", "Et|(tt|)*6mL"),
        ("[1]*99999999", "[1]*99999999"),
    ],
)
def test_pattern_is_never_evaluated(text, value):
    assert pattern(text) == value


@pytest.mark.parametrize("value", [None, True, False, 3, 0.5, "attn", "a b", "", ["attn", "mlp"], []])
def test_hydra_values_go_both_ways(value):
    assert hydra_value(hydra_text(value)) == value


@pytest.mark.parametrize("program,has_mamba", [("pretrain_gpt.py", False), ("pretrain_mamba.py", True), ("mine.py", None)])
def test_the_training_program_tells_whether_there_are_mamba_layers(program, has_mamba, tmp_path):
    script = tmp_path / "train.sh"
    graphs = "--cuda-graph-impl local --cuda-graph-scope moe_router"
    script.write_text(f"torchrun {program} --num-layers 2 --hidden-size 64 {graphs}\n")
    recipe = open_recipe(script, versions.resolve(mcore="0.17"))
    fact = recipe.run(recipe.candidates()[0]).settings.facts.get("model.has_mamba")
    assert (fact.value if fact else None) is has_mamba


@pytest.mark.parametrize(
    "options,found",
    [
        ("--cuda_graph_impl full_iteration", True),
        ("--cuda_graph_impl transformer_engine --cuda_graph_scope attn,mlp", False),
    ],
)
def test_what_the_performance_script_cannot_take_is_a_finding(options, found):
    recipe = from_argv(["-m", "llama3", "-mr", "8b", *options.split()], versions.resolve(bridge="0.6.2"))
    codes = {finding.code for finding in rules.check(recipe.run(recipe.candidates()[0]).settings) if not finding.needs}
    assert ("CG516" in codes) is found
