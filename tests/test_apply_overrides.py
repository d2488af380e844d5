# SPDX-License-Identifier: Apache-2.0
"""The command line that turns graphs on and off: what it writes, what it says, and what it does with bad input."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import apply_overrides
import validate_constraints
import pytest

SCRIPT = Path(apply_overrides.__file__)
HEADER = """\
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.config import ConfigContainer, DistributedDataParallelConfig


"""
DENSE = (
    HEADER
    + """\
def dense_config():
    cfg = ConfigContainer(model=GPTModelProvider(num_layers=2, num_moe_experts=None))
    cfg.model.cuda_graph_impl = "none"
    return cfg
"""
)
ON = (
    HEADER
    + """\
def on_config():
    cfg = ConfigContainer(model=GPTModelProvider(num_layers=2, num_moe_experts=None))
    cfg.model.cuda_graph_impl = "transformer_engine"
    cfg.model.cuda_graph_modules = ["attn", "mlp"]
    cfg.model.cuda_graph_scope = None
    cfg.model.cuda_graph_warmup_steps = 7
    cfg.model.use_te_rng_tracker = True
    cfg.rng.te_rng_tracker = True
    return cfg
"""
)
MOE = (
    HEADER
    + """\
def moe_config():
    model = GPTModelProvider(num_layers=2, num_moe_experts=8, moe_token_dispatcher_type="alltoall")
    return ConfigContainer(model=model, env_vars={"NVTE_FWD_LAYERNORM_SM_MARGIN": 16})
"""
)
VERSIONS = ["--bridge", "0.6.2", "--mcore", "0.19.2", "--te", "2.14", "--torch", "2.11"]


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(source: str | bytes | None, *flags: str, versions=VERSIONS):
        """(exit code, stdout, stderr, text of recipe.py afterwards)."""
        path = tmp_path / "recipe.py"
        if source is not None:
            path.write_bytes(source if isinstance(source, bytes) else source.encode())
        code = apply_overrides.main(["recipe.py", *flags, *versions])
        out, err = capsys.readouterr()
        return code, out, err, path.read_bytes().decode("utf-8", "surrogateescape") if path.is_file() else None

    return call


def set_in(text: str) -> dict:
    """The settings that a recipe assigns as `cfg.PATH = literal`, the last one first."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            try:
                found[ast.unparse(node.targets[0]).partition(".")[2]] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


# -- the main job ------------------------------------------------------------------------------------------------------


def test_turns_graphs_on_and_a_second_run_changes_nothing(run):
    code, out, _, text = run(DENSE)
    assert code == 0 and "written: recipe.py" in out
    assert set_in(text) == {
        "model.cuda_graph_impl": "transformer_engine",
        "model.cuda_graph_modules": ["attn"],
        "model.use_te_rng_tracker": True,
        "rng.te_rng_tracker": True,
    }
    assert '+    cfg.model.cuda_graph_modules = ["attn"]' in out
    assert "off -> transformer_engine [attn]" in out
    code, out, _, again = run(None)
    assert code == 0 and again == text and "nothing to change" in out


def test_off_again_leaves_no_graph_and_a_second_off_changes_nothing(run):
    run(DENSE)
    code, out, _, text = run(None, "--off")
    assert code == 0 and "transformer_engine [attn] -> off" in out
    assert set_in(text)["model.cuda_graph_impl"] == "none"
    code, out, _, again = run(None, "--off")
    assert code == 0 and again == text and "nothing to change" in out


def test_graphs_that_are_on_stay_as_they_are(run):
    code, out, _, text = run(ON)
    assert code == 0 and text == ON and "graphs are on already" in out and "nothing to change" in out


def test_where_no_graphs_can_be_recommended_nothing_is_touched(run):
    source = MOE.replace("num_moe_experts=8", "num_moe_experts=8, cuda_graph_scope='full', recompute_granularity='full'")
    code, out, _, text = run(source)
    assert code == 1 and text == source and "no graphs: " in out and "nothing to change" in out


def test_a_preset_changes_graphs_that_are_on(run):
    _, _, _, text = run(ON, "--preset", "narrow")
    assert set_in(text)["model.cuda_graph_modules"] == ["attn"]


def test_graphs_that_are_on_get_what_they_lack(run):
    _, _, _, text = run(ON.replace("    cfg.rng.te_rng_tracker = True\n", ""))
    assert set_in(text)["rng.te_rng_tracker"] is True
    assert set_in(text)["model.cuda_graph_modules"] == ["attn", "mlp"]


MODELS = [
    pytest.param(DENSE, [], ["attn"], id="dense"),
    pytest.param(DENSE, ["--preset", "widest"], ["attn", "mlp"], id="dense, widest"),
    pytest.param(MOE, [], ["attn", "moe_router", "moe_preprocess"], id="dropless MoE"),
    pytest.param(MOE, ["--preset", "narrow"], ["moe_router", "moe_preprocess"], id="dropless MoE, narrow"),
    pytest.param(
        MOE.replace("num_moe_experts=8", "num_moe_experts=8, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True"),
        [], ["attn", "moe"], id="drop-and-pad MoE",
    ),
    pytest.param(
        DENSE.replace('"none"\n', '"none"\n    cfg.model.hybrid_layer_pattern = "M*M*"\n'), [], ["attn", "mamba"], id="hybrid",
    ),
]  # fmt: skip


@pytest.mark.parametrize("source, flags, scopes", MODELS)
def test_recommended_scopes(run, source, flags, scopes):
    code, out, _, _ = run(source, "--json", "--diff", *flags)
    (function,) = json.loads(out)["functions"]
    assert code == 0
    assert (function["after"]["impl"], function["after"]["modules"]) == ("transformer_engine", scopes)


def test_full_recompute_gets_full_iteration_and_no_nan_checks(run):
    source = DENSE.replace('"none"\n', '"none"\n    cfg.model.recompute_granularity = "full"\n    cfg.model.recompute_method = "uniform"\n    cfg.model.recompute_num_layers = 1\n    cfg.ddp.check_for_nan_in_grad = True\n')  # fmt: skip
    code, out, _, text = run(source)
    settings = set_in(text)
    assert code == 0
    assert settings["model.cuda_graph_impl"] == "full_iteration"
    assert settings["model.recompute_granularity"] == "full"
    assert settings["rerun_state_machine.check_for_nan_in_loss"] is False
    assert settings["ddp.check_for_nan_in_grad"] is False


def test_a_base_that_sets_the_old_field_has_it_neutralised(run, tmp_path):
    (tmp_path / "base.py").write_text(
        HEADER + "def base_config():\n    return ConfigContainer(model=GPTModelProvider(cuda_graph_scope='full'))\n"
    )
    source = "from base import base_config\n\n\ndef my_config():\n    cfg = base_config()\n    return cfg\n"
    code, _, _, text = run(source)
    assert code == 0
    assert set_in(text)["model.cuda_graph_scope"] is None and set_in(text)["model.cuda_graph_modules"] == ["attn"]


NAMES = [
    pytest.param("0.13", {"model.external_cuda_graph": True, "model.cuda_graph_scope": "attn"}, id="0.13"),
    pytest.param("0.14", {"model.external_cuda_graph": True, "model.cuda_graph_scope": "attn"}, id="0.14"),
    pytest.param("0.15", {"model.cuda_graph_impl": "transformer_engine", "model.cuda_graph_scope": "attn"}, id="0.15"),
    pytest.param(
        "0.16", {"model.cuda_graph_impl": "transformer_engine", "model.cuda_graph_scope": ["attn"]}, id="0.16"
    ),
    pytest.param(
        "0.17", {"model.cuda_graph_impl": "transformer_engine", "model.cuda_graph_scope": ["attn"]}, id="0.17"
    ),
    pytest.param(
        "0.18", {"model.cuda_graph_impl": "transformer_engine", "model.cuda_graph_modules": ["attn"]}, id="0.18"
    ),
    pytest.param(
        "0.19", {"model.cuda_graph_impl": "transformer_engine", "model.cuda_graph_modules": ["attn"]}, id="0.19"
    ),
]


@pytest.mark.parametrize("mcore, expected", NAMES)
def test_names_of_the_version(run, mcore, expected):
    source = DENSE.replace('    cfg.model.cuda_graph_impl = "none"\n', "")
    code, _, _, text = run(source, versions=["--mcore", mcore, "--te", "2.14"])
    settings = set_in(text)
    assert code == 0
    assert {name: settings.get(name) for name in expected} == expected
    assert ("model.cuda_graph_modules" in settings) == (mcore >= "0.18")
    code, _, _, again = run(None, versions=["--mcore", mcore, "--te", "2.14"])
    assert code == 0 and again == text
    code, out, _, text = run(None, "--off", versions=["--mcore", mcore, "--te", "2.14"])
    assert code == 0 and "-> off" in out


# -- flags -------------------------------------------------------------------------------------------------------------


def test_impl_scopes_warmup_and_set(run):
    flags = ["--impl", "transformer_engine", "--scopes", "attn, mlp", "--warmup-steps", "5"]
    _, _, _, text = run(
        DENSE, *flags, "--set", "model.recompute_granularity=null", "--set", "ddp.overlap_grad_reduce=true"
    )
    settings = set_in(text)
    assert settings["model.cuda_graph_modules"] == ["attn", "mlp"]
    assert settings["model.cuda_graph_warmup_steps"] == 5
    assert settings["ddp.overlap_grad_reduce"] is True
    assert run(None, *flags, "--set", "ddp.overlap_grad_reduce=true")[3] == text


def test_an_environment_variable_goes_into_the_block(run):
    _, out, _, text = run(MOE, "--set", "env.NCCL_GRAPH_REGISTER=0")
    assert '"NCCL_GRAPH_REGISTER": 0' in text and "export" not in out


def test_an_environment_variable_without_a_block_is_to_be_exported(run):
    _, out, _, text = run(DENSE, "--set", "env.NCCL_GRAPH_REGISTER=0")
    assert "NCCL_GRAPH_REGISTER" not in text
    assert "export before launch: NCCL_GRAPH_REGISTER=0" in out


def test_diff_writes_nothing(run):
    code, out, _, text = run(DENSE, "--diff")
    assert code == 0 and text == DENSE
    assert "+++ b/recipe.py" in out and "not written (--diff)" in out


def test_output_writes_elsewhere(run, tmp_path):
    code, out, _, text = run(DENSE, "--output", "other.py")
    assert code == 0 and text == DENSE and "written: other.py" in out
    assert set_in((tmp_path / "other.py").read_text())["model.cuda_graph_impl"] == "transformer_engine"


def test_output_without_a_change_is_a_copy(run, tmp_path):
    run(ON, "--output", "other.py")
    assert (tmp_path / "other.py").read_text() == ON


def test_json_is_one_object_on_stdout_and_prose_on_stderr(run):
    code, out, err, _ = run(MOE, "--json")
    document = json.loads(out)
    assert code == 0 and document["schema_version"] == 1 and document["helper"] == "apply_overrides"
    assert (
        document["changed"] is True
        and document["written"] == "recipe.py"
        and document["diff"].startswith("--- a/recipe.py")
    )
    (function,) = document["functions"]
    assert function["name"] == "moe_config" and function["refused"] is None and function["overrides"]
    assert "written: recipe.py" in err


def test_quiet_says_nothing(run):
    code, out, err, text = run(DENSE, "--quiet")
    assert (code, out, err) == (0, "", "") and text != DENSE
    code, out, err, _ = run(DENSE, "--quiet", "--json")
    assert code == 0 and json.loads(out)["changed"] and err == ""


SEVERAL = DENSE + "\n\n" + MOE.removeprefix(HEADER)


def test_several_functions_are_listed_and_none_is_picked(run):
    code, out, err, text = run(SEVERAL)
    assert code == 2 and text == SEVERAL and out == ""
    assert "  dense_config\n  moe_config" in err


@pytest.mark.parametrize(
    "flags, changed",
    [
        pytest.param(["--function", "moe_config"], ["moe_config"], id="by name"),
        pytest.param(["--function", "*e_config"], ["dense_config", "moe_config"], id="by glob"),
        pytest.param(["--function", "moe*", "--function", "dense*"], ["dense_config", "moe_config"], id="repeated"),
        pytest.param(["--all"], ["dense_config", "moe_config"], id="all"),
    ],
)
def test_picking_functions(run, flags, changed):
    code, out, _, text = run(SEVERAL, "--json", *flags)
    assert code == 0
    assert [function["name"] for function in json.loads(out)["functions"]] == changed
    again = run(None, "--json", *flags)
    assert again[3] == text and json.loads(again[1])["changed"] is False


def test_functions_that_build_on_an_edited_one_are_named(run):
    source = DENSE + "\n\ndef big_config():\n    cfg = dense_config()\n    cfg.model.num_layers = 4\n    return cfg\n"
    _, out, _, _ = run(source, "--function", "dense_config")
    assert "also changes what builds on it: big_config" in out


def test_both_sides_of_a_branch_are_reported(run):
    source = HEADER + textwrap.dedent(
        """\
        def my_config(moe: bool = False):
            cfg = ConfigContainer(model=GPTModelProvider(num_layers=2, num_moe_experts=8 if moe else None))
            if moe:
                cfg.model.moe_token_dispatcher_type = "flex"
            else:
                cfg.model.moe_token_dispatcher_type = "alltoall"
            return cfg
        """
    )
    _, out, _, _ = run(source)
    assert "depends: moe_token_dispatcher_type: alltoall or flex, by `moe` (recipe.py:7)" in out


def test_an_argument_that_a_caller_may_change_is_reported(run):
    source = DENSE.replace("dense_config()", "dense_config(offload: bool = False)").replace(
        '"none"\n', '"none"\n    cfg.model.cpu_offloading = offload\n'
    )
    _, out, _, _ = run(source)
    assert "depends: cpu_offloading: False or unknown, by the argument `offload` is left at its default" in out


def test_unknown_facts_are_said_to_be_unknown(run):
    source = "from elsewhere import base_config\n\n\ndef my_config():\n    cfg = base_config()\n    return cfg\n"
    _, out, _, _ = run(source, "--diff")
    assert "unknown: " in out and "the source of `elsewhere.base_config` was not found" in out


# -- refusals ----------------------------------------------------------------------------------------------------------

REFUSED = [
    pytest.param(DENSE, ["--scopes", "moe_router"], "CG", id="a scope of MoE on a dense model"),
    pytest.param(MOE, ["--scopes", "moe"], "CG", id="whole experts of a dropless MoE"),
    pytest.param(DENSE, ["--impl", "local", "--scopes", "attn"], "CG", id="local with scopes under Bridge 0.6"),
]


@pytest.mark.parametrize("source, flags, text", REFUSED)
def test_refused_with_the_rule_and_nothing_written(run, source, flags, text):
    code, out, _, after = run(source, *flags)
    assert code == 1 and after == source
    assert "refused: " in out and text in out and "nothing was written" in out


def test_one_refused_function_keeps_the_whole_file(run):
    code, out, _, after = run(SEVERAL, "--all", "--scopes", "moe_router,moe_preprocess")
    assert code == 1 and after == SEVERAL and "refused: dense_config" in out


def test_quiet_refusals_are_one_line(run):
    code, out, err, _ = run(DENSE, "--scopes", "moe_router", "--quiet")
    assert code == 1 and out == "" and len(err.splitlines()) == 1 and "dense_config: refused" in err


# -- bad input ---------------------------------------------------------------------------------------------------------

BAD_FLAGS = [
    pytest.param(["--impl", "jit"], "--impl 'jit': megatron-core 0.19 has", id="an unknown implementation"),
    pytest.param(["--scopes", "attention"], "--scopes 'attention': megatron-core 0.19 has attn", id="an unknown scope"),
    pytest.param(["--preset", "huge"], "--preset", id="an unknown preset"),
    pytest.param(["--set", "model.cuda_graph_iml=none"], "did you mean cuda_graph_impl", id="an unknown key"),
    pytest.param(["--set", "novalue"], "give KEY=VALUE", id="a key without a value"),
    pytest.param(["--mcore", "nineteen"], "'nineteen' is not a version", id="a text that is no version"),
    pytest.param(["--mcore", "0.9"], "outside what the rules cover", id="a version that is too old"),
    pytest.param(["--mcore", "1.7"], "outside what the rules cover", id="a version that is too new"),
    pytest.param(["--gpu-arch", "voodoo2"], "is not a GPU architecture", id="an unknown GPU"),
    pytest.param(["--off", "--impl", "local"], "--off turns graphs off", id="off and on"),
    pytest.param(["--warmup-steps", "-1"], "give 0 or more", id="negative warmup"),
    pytest.param(["--warmup-steps", "many"], "invalid int value", id="warmup that is no number"),
    pytest.param(
        ["--function", "nothing*"], "no function matches --function 'nothing*'", id="a function that is not there"
    ),
    pytest.param(["--function", "_helper"], "returns no configuration", id="a function that builds none"),
    pytest.param(["--framework", "caffe"], "invalid choice", id="an unknown framework"),
    pytest.param(["--unknown-flag"], "unrecognized arguments", id="an unknown flag"),
]


@pytest.mark.parametrize("flags, message", BAD_FLAGS)
def test_bad_flags(run, flags, message):
    source = DENSE + "\n\ndef _helper(x):\n    return x + 1\n"
    versions = [] if {"--mcore", "--gpu-arch"} & set(flags) else VERSIONS
    code, out, err, after = run(source, *flags, versions=versions)
    assert code == 2 and out == "" and after == source
    assert message in err and len(err.strip().splitlines()) == 1


BAD_FILES = [
    pytest.param(b"", "is empty", id="empty"),
    pytest.param(b"# nothing\n", "is empty", id="comments only"),
    pytest.param(b"def f(:\n", "recipe.py:1:7: not valid Python", id="a syntax error"),
    pytest.param(b"type X[T = int] = list[T]\nx = t'{1'\n", "not valid Python", id="syntax of a newer Python"),
    pytest.param(b"hello world, this is prose\n", "not valid Python", id="not Python"),
    pytest.param(b"\x7fELF\x00\x00", "null bytes", id="a binary"),
    pytest.param(b"x = 1\0\n", "null bytes", id="null bytes"),
    pytest.param(b"x = 1\n", "no recipe function found", id="no recipe function"),
    pytest.param(b"def my_config():\n    return make()\n", "returns no configuration that can be followed", id="a configuration that cannot be found"),
    pytest.param(b"#" * 10_000_000, "too large for a recipe", id="ten megabytes"),
    pytest.param(b"x = '\xe9'\n", "save it as UTF-8", id="not UTF-8 and no coding line"),
    pytest.param((HEADER + "def my_config(): return ConfigContainer(model=GPTModelProvider())\n").encode(), "shares its line", id="a body on the line of its def"),
]  # fmt: skip


@pytest.mark.parametrize("content, message", BAD_FILES)
def test_bad_files(run, tmp_path, content, message):
    code, out, err, _ = run(content)
    assert code == 2 and out == ""
    assert message in err and err.startswith("apply_overrides: recipe.py") and len(err.strip().splitlines()) == 1
    assert (tmp_path / "recipe.py").read_bytes() == content
    assert os.listdir(tmp_path) == ["recipe.py"]


@pytest.mark.parametrize(
    "make, message",
    [
        pytest.param(lambda path: None, "no such file", id="missing"),
        pytest.param(lambda path: path.mkdir(), "is a directory", id="a directory"),
        pytest.param(lambda path: path.symlink_to("nowhere.py"), "no such file", id="a dangling link"),
    ],
)
def test_no_file(run, tmp_path, make, message):
    make(tmp_path / "recipe.py")
    code, out, err, _ = run(None)
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1


def test_no_recipe_at_all(capsys):
    assert apply_overrides.main([]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_help(capsys):
    assert apply_overrides.main(["--help"]) == 0
    assert "Exit codes" in capsys.readouterr().out


def test_a_read_only_file_is_refused_but_can_be_looked_at(run, tmp_path):
    (tmp_path / "recipe.py").write_text(DENSE)
    (tmp_path / "recipe.py").chmod(0o444)
    code, out, err, text = run(None)
    assert code == 2 and "is read-only" in err and text == DENSE
    assert run(None, "--diff")[0] == 0
    assert run(None, "--output", "other.py")[0] == 0


def test_output_into_a_folder_that_is_not_there(run):
    code, _, err, text = run(DENSE, "--output", "no/such/folder.py")
    assert code == 2 and "does not exist" in err and text == DENSE


def test_a_symbolic_link_stays_one(run, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "target.py").write_text(DENSE)
    (tmp_path / "recipe.py").symlink_to("real/target.py")
    assert run(None)[0] == 0
    assert (tmp_path / "recipe.py").is_symlink()
    assert set_in((tmp_path / "real" / "target.py").read_text())["model.cuda_graph_impl"] == "transformer_engine"
    assert os.listdir(tmp_path / "real") == ["target.py"]


def test_a_base_beside_the_target_of_a_link_is_found(run, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "base.py").write_text(DENSE)
    (tmp_path / "real" / "target.py").write_text(
        "from base import dense_config\n\n\ndef my_config():\n    cfg = dense_config()\n    return cfg\n"
    )
    (tmp_path / "recipe.py").symlink_to("real/target.py")
    _, out, _, _ = run(None)
    assert "unknown:" not in out


FORMS = [
    pytest.param(DENSE.replace("\n", "\r\n").encode(), id="CRLF"),
    pytest.param(b"\xef\xbb\xbf" + DENSE.encode(), id="byte-order mark"),
    pytest.param(DENSE.replace("    ", "\t").encode(), id="tabs"),
    pytest.param(b"# -*- coding: latin-1 -*-\n# caf\xe9\n" + DENSE.encode(), id="Latin-1 with a coding line"),
    pytest.param(DENSE.encode().rstrip(b"\n"), id="no newline at the end"),
    pytest.param(DENSE.replace("cfg", "κονφίγ").encode(), id="names that are not ASCII"),
    pytest.param(("\x0c\n" + DENSE + "\n\n\n# end\n").encode(), id="form feeds and blank lines"),
]


@pytest.mark.parametrize("raw", FORMS)
def test_untouched_bytes_stay(run, tmp_path, raw):
    """Every old line is still there, in order, byte for byte, but for the one that was changed."""
    code, _, _, _ = run(raw)
    assert code == 0
    after = (tmp_path / "recipe.py").read_bytes()
    ast.parse(after)
    new_lines = after.split(b"\n")
    for line in raw.split(b"\n"):
        if b"cuda_graph_impl" in line:
            line = line.replace(b'"none"', b'"transformer_engine"')
        assert line in new_lines, line
        del new_lines[: new_lines.index(line) + 1]
    if b"\r\n" in raw:
        assert after.count(b"\n") == after.count(b"\r\n")
    code, out, _, _ = run(None)
    assert code == 0 and "nothing to change" in out
    assert (tmp_path / "recipe.py").read_bytes() == after


# -- whole processes ---------------------------------------------------------------------------------------------------


def process(path: Path, *flags: str, **options):
    command = [sys.executable, str(SCRIPT), str(path), *flags, *VERSIONS]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_runs_by_path_from_anywhere_and_writes_nothing_beside_itself(tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(DENSE)
    before = sorted(str(entry) for entry in SCRIPT.parent.rglob("__pycache__"))
    with process(path, cwd="/", env={**os.environ, "HOME": str(tmp_path)}) as done:
        out, err = done.communicate()
    assert done.returncode == 0 and "written:" in out and err == ""
    assert sorted(str(entry) for entry in SCRIPT.parent.rglob("__pycache__")) == before


def test_a_reader_that_leaves_early_is_no_fault(tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(DENSE)
    with process(path, "--diff") as running:
        running.stdout.close()
        err = running.stderr.read()
        code = running.wait()
    assert "Traceback" not in err and code in (0, 1)


def test_two_runs_at_once_leave_one_whole_file(tmp_path):
    path = tmp_path / "recipe.py"
    for _ in range(3):
        path.write_text(DENSE)
        running = [process(path, "--preset", preset) for preset in ("narrow", "widest")]
        outcomes = [(runner, runner.communicate()[1], runner.returncode) for runner in running]
        settings = set_in(path.read_text())
        assert settings["model.cuda_graph_impl"] == "transformer_engine"
        assert settings["model.cuda_graph_modules"] in (["attn"], ["attn", "mlp"])
        assert settings["rng.te_rng_tracker"] is True
        for _, err, code in outcomes:
            # the slower one either saw the faster one's file, or found that it had changed and wrote nothing
            assert code == 0 or (code == 2 and "changed while it was being worked on" in err)
        assert os.listdir(tmp_path) == ["recipe.py"]


def test_a_kill_at_any_moment_leaves_a_whole_file(tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(DENSE)
    with process(path, "--output", str(tmp_path / "wanted.py")) as done:
        done.communicate()
    wanted = (tmp_path / "wanted.py").read_text()
    for delay in (0.0, 0.03, 0.06, 0.09, 0.12, 0.15, 0.2, 0.3):
        path.write_text(DENSE)
        with process(path) as running:
            try:
                running.wait(delay)
            except subprocess.TimeoutExpired:
                running.send_signal(signal.SIGKILL)
        assert path.read_text() in (DENSE, wanted)


TURNED_OFF_AGAIN = '''from megatron.bridge import AutoBridge
from megatron.bridge.training.config import ConfigContainer


def save_memory(model):
    model.cuda_graph_impl = "none"


def a_config() -> ConfigContainer:
    cfg = ConfigContainer(model=AutoBridge.from_hf_pretrained("meta-llama/Llama-3-8B").to_megatron_provider())
    cfg.model.cuda_graph_impl = "transformer_engine"
    cfg.model.cuda_graph_modules = ["attn", "mlp"]
    save_memory(cfg.model)
    return cfg
'''


def test_the_graphs_that_a_recipe_asks_for_and_loses_are_the_ones_turned_on(tmp_path, capsys):
    path = tmp_path / "recipe.py"
    path.write_text(TURNED_OFF_AGAIN)
    assert validate_constraints.main([str(path), "--mcore", "0.19"]) == 1
    assert "CG512 error" in capsys.readouterr().out
    assert apply_overrides.main([str(path), "--mcore", "0.19"]) == 0
    assert "a_config: off -> transformer_engine [attn, mlp]" in capsys.readouterr().out
    assert validate_constraints.main([str(path), "--mcore", "0.19"]) == 0
    assert apply_overrides.main([str(path), "--mcore", "0.19", "--off"]) == 0
    assert "-> off" in capsys.readouterr().out


BUILT_ON = TURNED_OFF_AGAIN.replace('    save_memory(cfg.model)\n', '').replace('"transformer_engine"\n', '"none"\n') + '''

def b_config() -> ConfigContainer:
    cfg = a_config()
    cfg.model.recompute_granularity = "full"
    return cfg
'''


def test_an_edit_that_breaks_a_recipe_built_on_it_is_refused(tmp_path, capsys):
    path = tmp_path / "recipe.py"
    path.write_text(BUILT_ON)
    flags = ["--mcore", "0.19", "--function", "a_config", "--impl", "transformer_engine", "--scopes", "attn"]
    assert apply_overrides.main([str(path), *flags]) == 1
    assert "b_config builds on it and would not validate any more: CG204" in capsys.readouterr().out
    assert path.read_text() == BUILT_ON
