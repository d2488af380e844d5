# SPDX-License-Identifier: Apache-2.0
"""apply_overrides.py and validate_constraints.py over scripts, arguments, YAML and facts, from the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import apply_overrides
import validate_constraints
from cudagraphs import versions
from cudagraphs.formats.arguments import LaunchScript

BASH = shutil.which("bash")
NEW = ("--mcore", "0.19", "--te", "2.14")
MOE = "--num-layers 4 --num-experts 8 --moe-token-dispatcher-type alltoall"


def run(capsys, main, *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    out = capsys.readouterr()
    assert "Traceback" not in out.err
    return code, out.out, out.err


def file_of(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


FILES = {
    "train.sh": f"torchrun pretrain_gpt.py \\\n    {MOE}\n",
    "model_config.yaml": "MODEL_ARGS:\n  --num-layers: 4\n  --num-experts: 8\n  --moe-token-dispatcher-type: alltoall\n",
    "recipe.yaml": "step_scheduler: {}\nmodel:\n  pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B\n  backend:\n    attn: sdpa\n",
    "overrides.yaml": "model:\n  num_moe_experts: 8\n  moe_token_dispatcher_type: alltoall\ntrain:\n  train_iters: 5\n",
    "overrides.txt": "model.num_moe_experts=8\nmodel.moe_token_dispatcher_type=alltoall\n",
    "perf.sh": "python run_script.py --model_family_name qwen --model_recipe_name qwen3_30b_a3b model.num_moe_experts=8\n",
}


@pytest.mark.parametrize("name", FILES)
def test_apply_validate_and_turn_off(capsys, tmp_path, name):
    """Graphs go on, validate, stay as they are on a second run, and go off again."""
    path = file_of(tmp_path, name, FILES[name])
    code, out, err = run(capsys, apply_overrides.main, str(path), *NEW)
    assert code == 0 and f"written: {path}" in out, out + err
    applied = path.read_bytes()
    code, out, _ = run(capsys, validate_constraints.main, str(path), *NEW, "--json")
    (function,) = json.loads(out)["functions"]
    assert code == 0 and function["state"]["impl"] == "transformer_engine" and function["state"]["modules"]
    code, out, _ = run(capsys, apply_overrides.main, str(path), *NEW)
    assert code == 0 and "nothing to change" in out and path.read_bytes() == applied
    code, out, err = run(capsys, apply_overrides.main, str(path), *NEW, "--off")
    assert code == 0, out + err
    code, out, _ = run(capsys, validate_constraints.main, str(path), *NEW, "--json")
    assert code == 0 and json.loads(out)["functions"][0]["state"]["impl"] == "none"


def test_diff_writes_nothing(capsys, tmp_path):
    path = file_of(tmp_path, "train.sh", FILES["train.sh"])
    code, out, _ = run(capsys, apply_overrides.main, str(path), *NEW, "--diff")
    assert code == 0 and " --cuda-graph-impl transformer_engine" in out
    assert path.read_text() == FILES["train.sh"]


def test_arguments_behind_a_double_dash(capsys):
    code, out, _ = run(capsys, apply_overrides.main, *NEW, "--quiet", "--", *MOE.split())
    assert code == 0
    line = f"{MOE} --cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router moe_preprocess --te-rng-tracker"
    assert out.splitlines()[0].split() == line.replace(
        "--te-rng-tracker", "--cuda-graph-warmup-steps 3 --te-rng-tracker"
    ).split() or (out.splitlines()[0] == line)
    code, out, _ = run(capsys, validate_constraints.main, *NEW, "--", *out.splitlines()[0].split())
    assert code == 0 and "transformer_engine [attn, moe_router, moe_preprocess]" in out


def test_fix_prints_mended_arguments(capsys):
    argv = ["--num-layers", "2", "--cuda-graph-impl", "transformer_engine", "--cuda-graph-modules", "attn,mlp"]
    code, out, _ = run(capsys, validate_constraints.main, *NEW, "--fix", "--", *argv)
    assert code == 0 and out.splitlines()[0].endswith("--cuda-graph-modules attn mlp")


def test_facts_of_a_plain_loop(capsys, tmp_path):
    path = file_of(
        tmp_path,
        "facts.json",
        json.dumps({"framework": "pytorch", "torch.optimizer_in_graph": True, "torch.capture": "full_iteration"}),
    )
    code, out, _ = run(capsys, validate_constraints.main, "--facts", str(path))
    assert code == 1 and "CG901" in out and "facts.json" in out
    code, out, _ = run(capsys, validate_constraints.main, "--facts", str(path), "--fix")
    assert code == 0 and json.loads(path.read_text())["facts"] == {
        "torch.optimizer_capturable": True,
        "torch.lr_is_tensor": True,
    }


@pytest.mark.parametrize(
    "main, argv, reason",
    [
        (validate_constraints.main, ["x.sh", "--facts", "y.json"], "not a recipe and --facts"),
        (validate_constraints.main, ["x.sh", "--", "--num-layers", "2"], "not a recipe and arguments behind --"),
        (validate_constraints.main, ["--facts", "missing.json"], "no such file"),
        (validate_constraints.main, ["--"], "neither Megatron-LM arguments"),
        (apply_overrides.main, [], "not none"),
        (apply_overrides.main, ["--", "word"], "neither Megatron-LM arguments"),
    ],
)
def test_input_that_is_not_decided(capsys, tmp_path, monkeypatch, main, argv, reason):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, main, *argv)
    assert code == 2 and out == "" and reason in err and err.count("\n") == 1


def test_automodel_refusals(capsys, tmp_path):
    path = file_of(tmp_path, "r.yaml", "step_scheduler: {}\nmodel:\n  backend: {attn: te}\ndistributed: {pp_size: 2}\n")
    code, out, _ = run(capsys, apply_overrides.main, str(path), *NEW)
    assert code == 1 and "pp_size is 2" in out
    code, _, err = run(capsys, apply_overrides.main, str(path), *NEW, "--scopes", "mlp")
    assert code == 2 and "AutoModel has attn, te_dpa" in err


def test_nothing_is_recommended_for_other_frameworks(capsys, tmp_path):
    path = file_of(tmp_path, "f.yaml", "framework: pytorch\n")
    code, _, err = run(capsys, apply_overrides.main, str(path))
    assert code == 2 and "nothing is recommended for pytorch" in err


# -- random scripts, run by bash before and after ------------------------------------------------------------------------

OPTIONS = st.lists(
    st.sampled_from(
        ["--hidden-size 8", "--bf16", "--lr 1e-4", "--cuda-graph-impl local", "--cuda-graph-modules attn mlp",
         "--cuda-graph-scope full", "--te-rng-tracker", "--recompute-modules moe mlp", "--data-path 'a b'", "--split=9,1", "--x ''"]
    ), min_size=1, max_size=7, unique=True,
)  # fmt: skip
WANTED = st.fixed_dictionaries(
    {},
    optional={
        "cuda_graph_impl": st.sampled_from(["transformer_engine", "local", "none"]),
        "cuda_graph_modules": st.sampled_from([["attn"], ["attn", "mlp"], ["mlp", "moe_router", "attn"], []]),
        "cuda_graph_scope": st.just(None),
        "rng.te_rng_tracker": st.just(True),
        "recompute_modules": st.sampled_from([["mlp"], None]),
        "env.NCCL_GRAPH_REGISTER": st.sampled_from(["0", "1"]),
    },
)
STYLES = ("line", "continued", "array", "array lines", "string", "append", "branch")


def script(style: str, options: list[str]) -> str:
    head, half = "#!/bin/bash\nexport A=1\n", max(1, len(options) // 2)
    if style == "line":
        return f"{head}torchrun p.py --num-layers 4 {' '.join(options)}\n"
    if style == "continued":
        return head + "torchrun p.py --num-layers 4 \\\n" + " \\\n".join(f"    {option}" for option in options) + "\n"
    if style == "array":
        return f'{head}A=(--num-layers 4 {" ".join(options)})\ntorchrun p.py "${{A[@]}}" --end\n'
    if style == "array lines":
        return (
            head
            + "A=(\n    --num-layers 4  # heads\n"
            + "".join(f"    {o}\n" for o in options)
            + ')\ntorchrun p.py "${A[@]}"\n'
        )
    if style == "string":
        plain = [option for option in options if "'" not in option] or ["--bf16"]
        return (
            f'{head}A="\n    --num-layers 4\n'
            + "".join(f"    {option}\n" for option in plain)
            + '"\ntorchrun p.py $A\n'
        )
    if style == "append":
        return f'{head}A=(--num-layers 4 {" ".join(options[:half])})\nA+=({" ".join(options[half:])})\ntorchrun p.py "${{A[@]}}"\n'
    return (
        f'{head}A=(--num-layers 4 {" ".join(options[:half])})\nif [ "${{X:-1}}" = 1 ]; then\n    A+=({" ".join(options[half:])})\nfi\n'
        'torchrun p.py "${A[@]}"\n'
    )


def as_bash_runs(folder: Path, text: str) -> tuple[list[list[str]], str]:
    """The options that `torchrun` is given, and NCCL_GRAPH_REGISTER as it sees it."""
    log, stub = folder / "log", folder / "torchrun"
    if not stub.exists():
        stub.write_text(f'#!{BASH}\nprintf "%s\\0" "$NCCL_GRAPH_REGISTER" "$@" > "{log}"\n')
        stub.chmod(0o755)
    (folder / "s.sh").write_text(text)
    subprocess.run([BASH, str(folder / "s.sh")], env={"PATH": f"{folder}{os.pathsep}/usr/bin"}, check=True, timeout=60)
    register, _, *words = log.read_text().split("\0")[:-1]
    options: list[list[str]] = []
    for word in words:
        options.append([word]) if word.startswith("--") or not options else options[-1].append(word)
    return options, register


@pytest.mark.skipif(BASH is None, reason="needs bash")
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(style=st.sampled_from(STYLES), options=OPTIONS, wanted=WANTED)
def test_bash_passes_on_what_was_edited(tmp_path_factory, style, options, wanted):
    """What bash passes after an edit: the wanted options, every other one as before and in its order."""
    folder = tmp_path_factory.getbasetemp() / "fuzz"
    folder.mkdir(exist_ok=True)
    text = script(style, options)
    path = folder / "train.sh"
    path.write_text(text)
    before, _ = as_bash_runs(folder, text)
    recipe = LaunchScript(path, versions.resolve("megatron-lm", mcore="0.19", te="2.14", torch="2.11", automodel="0.7"))
    edited, skipped = recipe.edited("p.py", wanted)
    assert not skipped
    after, register = as_bash_runs(folder, edited.file.text)
    touched = {
        "--cuda-graph-impl",
        "--cuda-graph-modules",
        "--cuda-graph-scope",
        "--te-rng-tracker",
        "--recompute-modules",
    }
    assert [o for o in after if o[0] not in touched] == [o for o in before if o[0] not in touched]
    passed = {option[0]: option[1:] for option in after}
    for fact, value in wanted.items():
        option = "--te-rng-tracker" if "tracker" in fact else f"--{fact.replace('_', '-')}"
        if fact.startswith("env."):
            assert register == value
        elif value in (None, [], False):
            assert option not in passed or (
                fact == "rng.te_rng_tracker" and value is False and "cuda_graph_impl" in wanted
            )
        elif value is True:
            # Megatron-LM switches the tracker on by itself where graphs are on
            assert option in passed or passed.get("--cuda-graph-impl", ["none"]) != ["none"]
        elif isinstance(value, list):
            assert passed[option] == value
        else:
            assert passed.get(option, ["none"]) == [value]
