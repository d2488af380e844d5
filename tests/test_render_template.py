# SPDX-License-Identifier: Apache-2.0
"""Templates: every one renders for every preset and version that it claims, is accepted by the rules, and never runs a
value.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import render_template
import yaml
from cudagraphs import rendering

TE = "2.14"
NEWEST_MINOR = 19
TEMPLATES = rendering.index()
GRAPHS = [name for name, template in TEMPLATES.items() if template.graphs]
BASH = shutil.which("bash")


def rendered(capsys, *argv: str) -> str:
    code = render_template.main(argv)
    out = capsys.readouterr()
    assert code == 0, out.err
    return out.out


def refused(capsys, *argv: str) -> tuple[int, str]:
    code = render_template.main(argv)
    out = capsys.readouterr()
    assert out.out == "" and out.err.count("\n") == 1, out
    return code, out.err


def without_default(template: rendering.Template, model: str) -> list[str]:
    """The flags for the variables that have no default for this kind of model."""
    missing = [name for name, variable in template.variables.items() if variable.by_model.get(model, "") is None]
    return [word for name in missing for word in ("--set", f"{name}=some.recipe")]


def minors(template: rendering.Template) -> range:
    low, high = template.minors or (NEWEST_MINOR, NEWEST_MINOR)
    return range(low, min(high, NEWEST_MINOR) + 1)


def parse(template: rendering.Template, text: str) -> None:
    if template.suffix == ".py":
        ast.parse(text)
    elif template.suffix == ".yaml":
        assert isinstance(yaml.safe_load(text), dict)
    elif template.suffix == ".sh" and BASH:
        subprocess.run([BASH, "-n"], input=text.encode(), check=True)


# -- every claim -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRAPHS)
def test_every_preset_model_and_version(capsys, name):
    """0: rendered, parsed and accepted by the rules.

    1 only where the version has no such graphs, and then it says so.
    """
    template = TEMPLATES[name]
    for minor in minors(template):
        for preset in ("default", "narrow", "widest"):
            for model in template.models:
                argv = [name, "--mcore", f"0.{minor}", "--te", TE, "--preset", preset, "--set", f"model={model}"]
                argv += without_default(template, model)
                code = render_template.main(argv)
                out = capsys.readouterr()
                assert code == 0, (argv, out.err)
                assert out.err == "" and out.out.endswith("\n") and "{{" not in out.out


@pytest.mark.parametrize("name", GRAPHS)
def test_full_recompute_gives_full_iteration_or_a_reason(capsys, name):
    argv = [name, "--mcore", "0.19", "--te", TE, "--set", "recompute=full"]
    code = render_template.main(argv)
    out = capsys.readouterr()
    if TEMPLATES[name].framework == "nemo-automodel":
        assert code == 0
    elif TEMPLATES[name].impls == ("transformer_engine",):
        assert code == 1 and "refused" in out.err and "CG204" in out.err
    else:
        assert code == 0 and "full_iteration" in out.out


@pytest.mark.parametrize("name", GRAPHS)
def test_expandable_segments_bring_what_they_need(capsys, name):
    text = rendered(capsys, name, "--mcore", "0.19", "--te", TE, "--set", "expandable_segments=true")
    if TEMPLATES[name].framework != "nemo-automodel":
        assert "NCCL_GRAPH_REGISTER=0" in text and "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in text


@pytest.mark.parametrize("name", ["pytorch-layers", "pytorch-step"])
def test_plain_loops_run_where_there_is_no_gpu(capsys, tmp_path, name):
    pytest.importorskip("torch")
    path = tmp_path / "loop.py"
    settings = {
        "steps": 60,
        "hidden": 8,
        "sequence": 4,
        "layers": 2,
        "microbatches": 3,
        "precision": "float32",
        "learning_rate": 0.02,
    }
    rendered(capsys, name, *(f"--set={key}={value}" for key, value in settings.items()), "--output", str(path))
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=300, env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 0, done.stderr
    losses = [float(number) for number in re.findall(r"^step \d+: loss ([\d.]+)$", done.stdout, re.M)]
    # the targets are noise around zero, so a loop that trains forgets its inputs and halves the loss
    assert len(losses) == 7 and losses[-1] < 0.75 * losses[0]


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize("name, launcher", [("torchrun-launch", "torchrun"), ("slurm-batch", "srun")])
def test_launch_scripts_pass_their_arguments_on(capsys, tmp_path, name, launcher):
    """The scripts run, with stand-ins for the launcher and Slurm's tools that write down what they are given."""
    script, log = tmp_path / "launch.sh", tmp_path / "log"
    rendered(
        capsys,
        name,
        "--mcore",
        "0.19",
        "--te",
        TE,
        "--set",
        "program=my dir/pretrain_gpt.py",
        "--set",
        "arguments=--num-layers 2 --data-path 'a b'",
        "--set",
        "expandable_segments=true",
        "--output",
        str(script),
    )
    for tool, body in (
        (launcher, f'printf "%s\\n" "$NCCL_GRAPH_REGISTER" "$@" > "{log}"'),
        ("scontrol", "echo node1; echo node2"),
    ):
        (tmp_path / tool).write_text(f"#!{BASH}\n{body}\n")
        (tmp_path / tool).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NTASKS": "16"}
    subprocess.run([str(script), "--extra", "c d"], env=environment, check=True, timeout=60)
    register, *words = log.read_text().splitlines()
    assert register == "0"
    at = words.index("my dir/pretrain_gpt.py")
    assert words[at + 1 : at + 5] == ["--num-layers", "2", "--data-path", "a b"]
    assert "--cuda-graph-impl" in words[at:] and words[-2:] == ["--extra", "c d"]
    assert script.stat().st_mode & 0o111


# -- values ----------------------------------------------------------------------------------------

HOSTILE = [
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned",
    "a b",
    "'; touch pwned; '",
    '"; touch pwned; "',
    "x\ny",
    "x\r",
    "\x00",
    "\u2028",
    "{{ 7*7 }}",
    "{% for x in [] %}",
    "{{ ''.__class__.__mro__ }}",
    '"""',
    "\\",
    "__import__('os').system('touch pwned')",
    "../../etc/passwd",
    "-rf",
    "--help",
    "#",
    "$HOME",
    "&& true",
    "|cat",
    "> pwned",
    "*",
    "~",
    "é✓",
    "a=b",
    "!!python/object",
    "- x",
    ": x",
    "[",
    "&a",
    "*a",
    "\ud800",
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_value_becomes_code(capsys, tmp_path, monkeypatch, name):
    """A hostile value is refused with one line, or stands in the text as the very value.

    The text parses and nothing runs.
    """
    template = TEMPLATES[name]
    monkeypatch.chdir(tmp_path)
    plain = rendered(capsys, name, "--te", TE)
    for variable in template.variables:
        for value in HOSTILE:
            code = render_template.main([name, "--te", TE, "--set", f"{variable}={value}"])
            out = capsys.readouterr()
            assert code in (0, 1, 2), (variable, value, out.err)
            assert "Traceback" not in out.err
            if code:
                assert out.out == "" and len(out.err.strip().splitlines()) == 1, (variable, value, out.err)
                continue
            assert template.variables[variable].type == "text" or variable == "scopes", (variable, value)
            parse(template, out.out)
            assert structure(template, out.out) == structure(template, plain) or variable == "arguments", (
                variable,
                value,
            )
    assert list(tmp_path.iterdir()) == []


def structure(template: rendering.Template, text: str):
    """What a value must not change: the tree of the code without its constants, the keys, the commands."""
    if template.suffix == ".py":
        return ast.dump(ast.parse(re.sub(r"(?m)^#.*$", "", text)))
    if template.suffix == ".yaml":

        def keys(node):
            return {key: keys(value) for key, value in node.items()} if isinstance(node, dict) else type(node).__name__

        return keys(yaml.safe_load(text))
    from cudagraphs.formats.shell_run import Run

    return [[word.text for word in invocation.words][:1] for invocation in Run(Path("x.sh"), text).invocations]


@pytest.mark.parametrize(
    "argv, reason",
    [
        (["nothing"], "no template 'nothing'"),
        (["slurm-bach"], "did you mean slurm-batch?"),
        (["slurm-batch", "--set", "node=2"], "did you mean nodes?"),
        (["slurm-batch", "--set", "nodes"], "give KEY=VALUE"),
        (["slurm-batch", "--set", "nodes=0"], "int from 1 to 100000"),
        (["slurm-batch", "--set", "nodes=2.5"], "int from 1"),
        (["slurm-batch", "--set", "nodes=99999999999999999999"], "int from 1"),
        (["slurm-batch", "--set", "time_limit=soon"], "hours:minutes:seconds"),
        (["slurm-batch", "--set", "arguments='open"], "No closing quotation"),
        (["bridge-recipe", "--set", "base=single"], "names no module"),
        (["bridge-recipe", "--set", "function=class"], "keyword of Python"),
        (["bridge-recipe", "--preset", "most"], "default | narrow | widest"),
        (["bridge-recipe", "--scopes", "attn,attn"], "any of"),
        (["bridge-recipe", "--scopes", "mamba", "--mcore", "0.13"], "megatron-core 0.16 to 0.20"),
        (
            ["megatron-lm-arguments", "--scopes", "moe", "--mcore", "0.15"],
            "megatron-core 0.15 has attn, full_iteration",
        ),
        (["megatron-lm-arguments", "--impl", "full_iteration", "--mcore", "0.13"], "unknown implementation"),
        (["automodel-yaml", "--scopes", "mlp"], "AutoModel has attn"),
        (["mcore-te-loop", "--impl", "local"], "is for transformer_engine"),
        (["mcore-te-loop", "--set", "model=hybrid"], "is for model=dense"),
        (["pytorch-step", "--from", "x.py"], "takes nothing from a recipe"),
        ([], "name a template"),
        (["bridge-recipe", "--set", "model=moe-padded"], "no default of base for model=moe-padded; give --set base="),
        (["automodel-yaml", "--set", "model=hybrid"], "no default of pretrained"),
        (["performance-harness", "--set", "model=moe-padded"], "--set model_family=... --set model_recipe=..."),
    ],
)
def test_one_clear_line(capsys, argv, reason):
    code, text = refused(capsys, *argv)
    assert code == 2 and reason in text, text


@pytest.mark.parametrize(
    "argv, reason",
    [
        (["automodel-yaml", "--scopes", "attn", "--set", "activation_checkpointing=true"], "only te_dpa"),
        (["automodel-yaml", "--te", "none"], "need Transformer Engine"),
        (["bridge-recipe", "--impl", "local", "--scopes", "attn", "--bridge", "0.6.2", "--mcore", "0.19"], "rejected"),
        (["megatron-lm-arguments", "--set", "expandable_segments=true", "--mcore", "0.15"], "no graphs"),
    ],
)
def test_what_the_versions_reject_is_refused(capsys, argv, reason):
    code, text = refused(capsys, *argv)
    assert code == 1 and reason in text, text


@pytest.mark.parametrize("model", ["moe", "moe-padded"])
@pytest.mark.parametrize("request_", [
    ["--set", "recompute=full"], ["--impl", "full_iteration"], ["--scopes", "attn,mlp"], ["--scopes", "moe"], [],
])  # fmt: skip
def test_the_same_request_has_the_same_answer_in_every_template(capsys, model, request_):
    """A Bridge snippet stands on a base that is not read; the kind of model is as known as for a whole command."""
    answers = {}
    for name in ("megatron-lm-arguments", "bridge-overrides", "bridge-recipe", "performance-harness"):
        argv = [name, "--mcore", "0.19", "--te", TE, "--set", f"model={model}", *request_]
        code = render_template.main([*argv, *without_default(TEMPLATES[name], model), "--json"])
        out = capsys.readouterr()
        answers[name] = out.err if code else re.search("CUDA graphs: ([^.]*), for", json.loads(out.out)["text"])[1]
    assert len(set(answers.values())) == 1, answers
    if model == "moe" and request_ and "attn,mlp" not in request_ and "moe" not in request_:
        assert "CG714" in answers["bridge-overrides"]


@pytest.mark.parametrize("name", ["bridge-recipe", "performance-harness", "automodel-yaml"])
def test_the_default_base_is_of_the_kind_of_model(capsys, name):
    texts = {
        model: rendered(capsys, name, "--mcore", "0.19", "--te", TE, "--set", f"model={model}")
        for model in ("dense", "moe")
    }
    assert re.search("llama3_8b|Qwen3-0.6B", texts["dense"])
    assert re.search("gpt_oss_20b|qwen3_30b_a3b|Qwen3-30B-A3B", texts["moe"])
    assert not re.search("llama|Qwen3-0.6B", texts["moe"])


def test_undefined_name_in_a_template(tmp_path):
    template = TEMPLATES["automodel-yaml"]
    (tmp_path / template.file).write_text("a: {{ missing | yaml }}\n")
    with pytest.raises(rendering.RenderError, match="'missing' is undefined"):
        rendering.render(template, {}, tmp_path)


@pytest.mark.parametrize(
    "text", ["a: {{ value }}\n", "a: {{ 'x' + value }}\n", "a: {{ value | upper }}\n", "{{ ''.__class__ | yaml }}\n"]
)
def test_value_without_a_filter_is_refused(tmp_path, text):
    template = TEMPLATES["automodel-yaml"]
    (tmp_path / template.file).write_text(text)
    with pytest.raises(rendering.RenderError):
        rendering.render(template, {"value": "x"}, tmp_path)


def test_output_is_an_executable_file_and_nothing_on_refusal(capsys, tmp_path):
    path = tmp_path / "job.sh"
    code, _ = refused(capsys, "slurm-batch", "--set", "nodes=0", "--output", str(path))
    assert code == 2 and not path.exists()
    assert "written" in rendered(capsys, "slurm-batch", "--output", str(path))
    assert path.read_text().startswith("#!/bin/bash\n#SBATCH")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_only_regular_files_are_written(capsys, tmp_path):
    pipe, loop = tmp_path / "pipe", tmp_path / "loop"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    for path, reason in ((pipe, "no regular file"), (loop, "loop of symbolic links")):
        code, error = refused(capsys, "slurm-batch", "--force", "--output", str(path))
        assert code == 2 and reason in error
    assert pipe.is_fifo() and loop.is_symlink()


def test_what_somebody_made_of_a_rendered_file_stays(capsys, tmp_path):
    path = tmp_path / "job.sh"
    rendered(capsys, "slurm-batch", "--output", str(path))
    rendered(capsys, "slurm-batch", "--output", str(path))  # the same text again
    path.write_text("mine\n")
    code, error = refused(capsys, "slurm-batch", "--output", str(path))
    assert code == 2 and "--force" in error and path.read_text() == "mine\n"
    rendered(capsys, "slurm-batch", "--output", str(path), "--force")
    assert path.read_text().startswith("#!/bin/bash")


def test_list_names_every_variable(capsys):
    text = rendered(capsys, "--list")
    listed = json.loads(rendered(capsys, "--list", "--json"))
    assert [row["name"] for row in listed["templates"]] == list(TEMPLATES)
    for name, template in TEMPLATES.items():
        assert f"{name}: {template.what}" in text
        for variable in template.variables.values():
            assert variable.parse(variable.default) is not None or variable.default == ""
            assert f"    {variable.name}=" in text


def test_json(capsys):
    document = json.loads(rendered(capsys, "bridge-overrides", "--json", "--te", TE, "--mcore", "0.19"))
    assert document["schema_version"] == 1 and "model.cuda_graph_impl=transformer_engine" in document["text"]
    assert document["variables"]["preset"] == "default" and document["reasons"]


def test_from_a_recipe(capsys, tmp_path):
    path = tmp_path / "train.sh"
    path.write_text("torchrun pretrain_gpt.py --num-layers 2 --num-experts 8 --moe-token-dispatcher-type alltoall\n")
    text = rendered(capsys, "bridge-overrides", "--from", str(path), "--mcore", "0.19", "--te", TE)
    assert "'model.cuda_graph_modules=[attn,moe_router,moe_preprocess]'" in text
    code, text = refused(capsys, "automodel-yaml", "--from", str(path))
    assert code == 2 and "is for megatron-lm" in text


@pytest.mark.parametrize(
    "name,given", [("megatron-lm-arguments", "array=PATH"), ("megatron-lm-arguments", "array=a.b"), ("bridge-recipe", "function=a.b")]
)
def test_names_are_plain_and_not_the_shells_own(name, given, capsys):
    assert render_template.main([name, "--set", given]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
