# SPDX-License-Identifier: Apache-2.0
"""The command line of smoke_capture.py: dry runs on a CPU from start to verdict, wrong usage, and what a GPU machine
must show."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import smoke_capture
from cudagraphs.capture import plan, ranks, recipe, report, variants

HELPERS = Path(__file__).parents[1] / "helpers"
TINY = [
    "--device",
    "cpu",
    "--precision",
    "fp32",
    "--layers",
    "2",
    "--hidden",
    "32",
    "--ffn",
    "64",
    "--sequence",
    "16",
    "--vocabulary",
    "64",
    "--rounds",
    "1",
    "--steps",
    "4",
    "--quiet",
]
torch_needed = pytest.mark.skipif(smoke_capture.known.installed("torch") is None, reason="torch is not installed")


def result_of(tmp_path, *more):
    target = tmp_path / "result.json"
    code = smoke_capture.main([*TINY, *more, "--json", str(target)])
    return code, json.loads(target.read_text())


@torch_needed
def test_a_dry_run_goes_from_start_to_verdict(tmp_path, capsys):
    code, result = result_of(
        tmp_path, "--variant", "full_iteration", "--variant", "make_graphed_callables:attn", "--long", "3"
    )
    assert code == 0
    names = [out["name"] for out in result["variants"]]
    assert names == ["none", "none (repeat)", "full_iteration", "make_graphed_callables:attn"]
    for out in result["variants"][1:]:
        assert out["parity"]["verdict"] == "bitwise" and out["cleanup"]["clean"]
        assert out["parity"]["steps"] == 4 + 4 + 3 and out["parity"]["evaluations"] == 10
    losses = [out["losses"] for out in result["variants"]]
    assert all(loss == losses[0] for loss in losses) and len({tuple(step) for step in losses[0]}) == len(losses[0])
    text = capsys.readouterr().out
    assert "Recommendation: " in text and "full_iteration: captured, same training to the last bit" in text
    assert (
        result["command"].startswith("python helpers/smoke_capture.py --device cpu")
        and "--json" not in result["command"]
    )


@torch_needed
def test_gradients_that_alias_static_buffers_are_caught(tmp_path):
    code, result = result_of(tmp_path, "--variant", "make_graphed_callables", "--drill", "static-grads")
    out = result["variants"][-1]
    assert code == 1 and out["parity"]["verdict"] == "differs" and "gradients of" in out["parity"]["first_difference"]
    assert result["recommendation"]["variant"] == "none"


@torch_needed
@pytest.mark.parametrize(("drill", "limit"), [("crash", "180"), ("hang", "30")])
def test_the_tool_survives_what_a_variant_does(tmp_path, drill, limit):
    code, result = result_of(tmp_path, "--variant", "full_iteration", "--drill", drill, "--phase-limit", limit)
    failure = result["variants"][-1]["failure"]
    # both leave the stack in which they stood
    assert code == 1 and failure["kind"] == drill and "disturbed" in failure["detail"]
    assert result["variants"][1]["parity"]["verdict"] == "bitwise"


@torch_needed
def test_dropout_is_checked_by_its_distribution(tmp_path):
    code, result = result_of(tmp_path, "--variant", "full_iteration", "--dropout", "0.2")
    assert code == 0 and result["variants"][-1]["parity"]["advances"]


@torch_needed
def test_fresh_processes_give_the_same_verdict_as_forked_ones(tmp_path):
    code, result = result_of(tmp_path, "--variant", "full_iteration", "--start", "spawn")
    assert code == 0 and result["variants"][-1]["parity"]["verdict"] == "bitwise"


@torch_needed
def test_json_on_stdout_is_one_object_and_the_table_moves_aside():
    done = subprocess.run(
        [sys.executable, str(HELPERS / "smoke_capture.py"), *TINY, "--variant", "full_iteration", "--json"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema_version"] == 1 and "Recommendation: " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--variant", "te"], "no implementation 'te'"),
        (["--variant", "full_iteration:mlp+router"], "no scope 'router'"),
        (["--stack", "megatron-core"], "--device cpu runs the torch stack only"),
        (["--drill", "oom"], "needs a GPU"),
        (["--plot", "out.pdf"], "written as .png or .svg"),
        (["--model", "moe-dropless"], "has no model moe-dropless"),
        (["--precision", "fp8-delayed"], "needs --stack"),
        (["--hidden", "100", "--heads", "7"], "does not divide"),
        (["--tp", "2"], "do not divide"),
        (["--recipe", "recipe.py"], "needs --stack megatron-core"),
        (["--vpp", "2"], "--vpp: only with --stack megatron-core, and this is torch"),
        (["--overlap-grad-reduce"], "--overlap-grad-reduce: only with --stack megatron-core, and this is torch"),
        (["--distributed-optimizer"], "--distributed-optimizer: only with --stack megatron-core"),
        (["--overlap-param-gather"], "--overlap-param-gather: only with --stack megatron-core"),
        (["--json", "missing/x.json"], "--json missing/x.json: there is no folder missing"),
        (["--json", "/dev/null"], "--json /dev/null: this is no regular file"),
        (["--json", "."], "--json .: this is a folder"),
        (["--plot", "missing/x.svg"], "--plot missing/x.svg: there is no folder missing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@torch_needed
def test_wrong_usage_is_one_line_and_exit_code_2(arguments, word, capsys):
    assert smoke_capture.main([*TINY, *arguments]) == 2
    text = capsys.readouterr().err
    assert word in text and len(text.splitlines()) == 1 and text.startswith("smoke_capture.py: ")


@torch_needed
def test_output_that_cannot_be_written_is_found_before_the_stack_is_imported(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(smoke_capture.parent, "ForkLauncher", None)
    monkeypatch.setattr(smoke_capture.os, "access", lambda *_: False)
    assert smoke_capture.main([*TINY, "--json", str(tmp_path / "x.json")]) == 2
    assert f"the folder {tmp_path} cannot be written to" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(smoke_capture.parent, "ForkLauncher", None)
    monkeypatch.setattr(smoke_capture, "find_spec", lambda _: None)
    assert smoke_capture.main([*TINY, "--plot", str(tmp_path / "x.svg")]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


def test_a_result_that_cannot_be_written_any_more_is_on_stdout(tmp_path, capsys):
    assert not smoke_capture._kept({"schema_version": 1}, tmp_path / "gone" / "x.json")
    heard = capsys.readouterr()
    assert json.loads(heard.out) == {"schema_version": 1} and "it follows on stdout" in heard.err


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--size", "huge"], ["--rounds", "x"]], ids=" ".join)
def test_arguments_that_argparse_refuses_are_exit_code_2(arguments):
    with pytest.raises(SystemExit, match="2"):
        smoke_capture.main(arguments)


def test_a_stack_that_is_not_there_is_exit_code_4_with_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(smoke_capture.known, "installed", lambda name: "2.13.0" if name == "torch" else None)
    assert smoke_capture.main(["--stack", "megatron-core", "--quiet"]) == 4
    text = capsys.readouterr().err
    assert "megatron-core needs transformer-engine, megatron-core" in text and "pip install megatron-core" in text


@torch_needed
def test_no_gpu_is_exit_code_4():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run(
        [sys.executable, str(HELPERS / "smoke_capture.py"), "--stack", "torch", "--quiet"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 4 and "no usable GPU" in done.stderr


def test_a_fault_of_the_tool_is_exit_code_3_with_its_traceback(monkeypatch, capsys):
    def broken(*_):
        raise ZeroDivisionError("made up")

    monkeypatch.setattr(smoke_capture, "_stack", broken)
    assert smoke_capture.main(["--quiet"]) == 3
    assert "ZeroDivisionError: made up" in capsys.readouterr().err


def test_auto_takes_the_richest_stack_that_is_installed(monkeypatch):
    def installed(*names):
        monkeypatch.setattr(smoke_capture.known, "installed", lambda name: "1.0" if name in names else None)

    installed("torch", "te", "mcore")
    assert smoke_capture._stack("auto", "cuda")[0] == "megatron-core"
    installed("torch", "te")
    assert smoke_capture._stack("auto", "cuda")[0] == "transformer-engine"
    installed("torch", "mcore")
    assert smoke_capture._stack("auto", "cuda")[0] == "torch"
    installed()
    with pytest.raises(smoke_capture.Unavailable, match="pip install torch"):
        smoke_capture._stack("auto", "cuda")


def planned(*arguments, model="moe-dropless"):
    """(jobs, skipped) as a GPU machine with megatron-core would plan them."""
    args = smoke_capture._arguments().parse_args(["--model", model, *arguments])
    found = {"torch": "2.11.0", "transformer-engine": "2.20.2", "megatron-core": "0.19.2"}
    setup, rules, chosen = smoke_capture._setup(
        args, None, ranks.Ranks(), "megatron-core", found, {"free_bytes": 2**37}
    )
    return smoke_capture._jobs(setup, chosen, rules, args, "megatron-core")


def test_a_sweep_runs_what_the_rules_allow_and_names_the_rest():
    jobs, skipped = planned("--sweep")
    assert list(jobs)[:2] == ["none", variants.REPEAT] and "transformer_engine:attn+moe_router+moe_preprocess" in jobs
    assert skipped["transformer_engine:attn+moe"]["codes"] == ["CG105"] and not set(jobs) & set(skipped)
    more, none = planned("--sweep", "--include-illegal")
    assert set(more) == set(jobs) | set(skipped) and none == {}


def test_a_variant_asked_for_by_name_runs_whatever_the_rules_say():
    jobs, skipped = planned("--variant", "transformer_engine:moe")
    assert "transformer_engine:moe" in jobs and skipped == {}


def test_a_recipe_is_scaled_down_and_its_own_variant_runs(tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(
        """
from megatron.core.transformer import TransformerConfig

def pretrain():
    return TransformerConfig(
        num_layers=32, hidden_size=4096, num_attention_heads=32, ffn_hidden_size=14336, tensor_model_parallel_size=4,
        cuda_graph_impl="full_iteration", cuda_graph_modules=[], recompute_granularity="full",
        recompute_method="uniform", recompute_num_layers=16,
    )
"""
    )
    args = smoke_capture._arguments().parse_args(["--recipe", str(path)])
    found = {"torch": "2.11.0", "transformer-engine": "2.20.2", "megatron-core": "0.19.2"}
    read = recipe.read(path, None)
    setup, rules, chosen = smoke_capture._setup(
        args, read, ranks.Ranks(), "megatron-core", found, {"free_bytes": 2**37}
    )
    assert [variant.name for variant in chosen] == ["full_iteration"] and rules["full_iteration"]["verdict"] == "legal"
    assert setup["config"]["num_layers"] == 8 and setup["config"]["recompute_num_layers"] == 8
    for change in (
        "layers 32 -> 8",
        "recompute_num_layers 16 -> 8",
        "tensor_model_parallel_size 4 -> 1 (--tp sets it)",
    ):
        assert change in setup["changes"]


def test_a_job_carries_upstreams_fields_and_is_plain_data():
    jobs, _ = planned("--variant", "local", "--seed", "7", model="dense")
    job = json.loads(json.dumps(jobs["local"]))
    assert job["graph"] == {"cuda_graph_impl": "local", "cuda_graph_modules": []} and job["seed"] == 7
    assert job["config"]["num_layers"] == plan.Shape().layers and jobs["none"]["graph"] == {"cuda_graph_impl": "none"}


def test_the_command_that_is_recorded_leaves_out_where_the_result_went():
    words = [
        "--sweep",
        "--json",
        "a.json",
        "--plot=b.svg",
        "--quiet",
        "--seed",
        "3",
        "--revision",
        "r",
        "--json",
        "--long",
        "4",
    ]
    assert report.recorded(words) == ["--sweep", "--seed", "3", "--long", "4"]


def test_the_command_that_is_recorded_has_each_option_once_as_it_counted():
    words = ["--rounds", "2", "--variant", "local", "--variant", "full_iteration", "--sweep", "--rounds=3", "--sweep"]
    kept = ["--rounds=3", "--variant", "local", "--variant", "full_iteration", "--sweep"]
    assert report.recorded(words) == kept
    parse = smoke_capture._arguments().parse_args
    assert parse(words) == parse(kept)


def test_an_option_is_not_abbreviated_so_that_the_command_holds_its_name(capsys):
    with pytest.raises(SystemExit, match="2"):
        smoke_capture.main(["--js", "x.json"])
    assert "--js" in capsys.readouterr().err


def test_a_result_file_is_replaced_whole(tmp_path):
    target = tmp_path / "r.json"
    target.write_text("old")
    smoke_capture._write(target, "new")
    assert target.read_text() == "new" and os.listdir(tmp_path) == ["r.json"]


@pytest.mark.gpu
@pytest.mark.parametrize("stack", ["torch", "transformer-engine", "megatron-core"])
def test_on_a_gpu_every_legal_variant_captures_and_trains_the_same(tmp_path, stack):
    target = tmp_path / "result.json"
    code = smoke_capture.main(["--stack", stack, "--layers", "4", "--rounds", "2", "--quiet", "--json", str(target)])
    if code == 4:
        pytest.skip(f"{stack} is not installed")
    result = json.loads(target.read_text())
    assert code == 0, [out["verdict"] for out in result["variants"]]
    assert all(out["replay"]["proven"] for out in result["variants"] if out["captured"] is not None)


@pytest.mark.gpu
def test_on_a_gpu_a_synchronization_in_the_captured_region_is_named(tmp_path):
    target = tmp_path / "result.json"
    code = smoke_capture.main(
        [
            "--stack",
            "torch",
            "--drill",
            "sync",
            "--variant",
            "full_iteration",
            "--rounds",
            "1",
            "--quiet",
            "--json",
            str(target),
        ]
    )
    assert code == 1 and json.loads(target.read_text())["variants"][-1]["failure"]["code"] == 900
