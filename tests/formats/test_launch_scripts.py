# SPDX-License-Identifier: Apache-2.0
"""Launch scripts: options are read as bash passes them on, written where they stand, and every other byte is kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
from cudagraphs import versions
from cudagraphs.formats import open_recipe
from cudagraphs.formats.arguments import LaunchScript
from cudagraphs.formats.shell_run import Run
from cudagraphs.formats.source import SourceError
from cudagraphs.settings import Choice, Known, Unknown

V19 = versions.resolve("megatron-lm", mcore="0.19.2", te="2.14", torch="2.11", automodel="0.7")
V17 = versions.resolve("megatron-lm", mcore="0.17.1", te="2.14", torch="2.11", automodel="0.7")
V14 = versions.resolve("megatron-lm", mcore="0.14.0", te="2.14", torch="2.11", automodel="0.7")
GRAPHS = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn", "mlp"]}
BASH = shutil.which("bash")


def script_of(folder: Path, text: str, which=V19, name: str = "train.sh") -> LaunchScript:
    path = folder / name
    path.write_bytes(textwrap.dedent(text).lstrip("\n").encode())
    return LaunchScript(path, which)


def only(script: LaunchScript) -> str:
    (name,) = script.select([])
    return name


def facts(script: LaunchScript) -> dict:
    return script.run(only(script)).settings.facts


def edited(folder: Path, text: str, overrides: dict, which=V19) -> str:
    script = script_of(folder, text, which)
    after, skipped = script.edited(only(script), overrides)
    assert skipped == {}
    again, _ = after.edited(only(after), overrides)
    assert again.file.raw == after.file.raw
    if BASH:
        subprocess.run([BASH, "-n"], input=after.file.raw, check=True)
    return after.file.text


# -- what bash passes on ---------------------------------------------------------------------------

AS_BASH_RUNS_IT = {
    "arrays": """
        A=(--num-layers 2 # a comment
           --hidden-size "8 8"
        )
        A+=('--lr' 1e-4)
        torchrun train.py "${A[@]}" ${A[@]} end
        """,
    "strings of options": """
        OPTS=" --num-layers 2 \\
            --lr 1e-4 "
        OPTS="$OPTS --bf16"
        OPTS+=" --seed 1"
        torchrun train.py $OPTS "$OPTS" x
        """,
    "defaults and empty values": """
        TP=${TP:-2}
        : ${PP:=4}
        NONE=
        torchrun train.py --tp $TP --pp $PP $NONE "$NONE" --x "${UNSET:-}" --y ${EMPTY:-a b}
        """,
    "quotes": """
        torchrun train.py 'a $B' "c\\$d" e\\ f g"h"'i' "" --k="v w" "q\\\\r" \\
            last
        """,
    "conditions that the script decides": """
        DTYPE=fp8
        A=(--num-layers 2)
        if [[ "$DTYPE" == "fp8" ]]; then A+=(--fp8-format hybrid); else A+=(--bf16); fi
        if [ "$DTYPE" != fp8 ]; then A+=(--never); elif [ -n "$DTYPE" ]; then A+=(--elif); fi
        [ -z "$DTYPE" ] && A+=(--empty)
        [ 2 -gt 1 ] && A+=(--greater) || A+=(--smaller)
        case $DTYPE in
            bf16) A+=(--case-bf16) ;;
            fp*|mx*) A+=(--case-fp) ;;
            *) A+=(--case-other) ;;
        esac
        torchrun train.py "${A[@]}"
        """,
    "conditions on the environment, read without it": """
        A=(--num-layers 2)
        if [ "${FSDP:-1}" = 1 ]; then
            A=("${A[@]}" --use-megatron-fsdp)
        fi
        if [ -n "${WANDB}" ]; then A+=(--wandb); fi
        if [ ${SLOW:-false} == true ]; then A+=(--slow); else A+=(--fast); fi
        torchrun train.py ${A[@]} --tail
        """,
    "functions and eval": """
        args() { EXTRA="--num-layers $N"; }
        N=3
        args
        CMD="torchrun train.py $EXTRA --hidden-size 8"
        eval $CMD
        $CMD --again
        """,
    "here-document": """
        L=--num-layers
        bash <<EOF
        torchrun train.py $L 2 \\
            --hidden-size 8
        EOF
        torchrun after.py $L 3
        """,
    "last assignment wins": """
        N=1
        N=2
        export N
        torchrun train.py --num-layers $N
        N=3
        unset N
        torchrun train.py --num-layers ${N:-gone}
        """,
    "subshells, pipes and background jobs": """
        (cd / && torchrun train.py --num-layers 2 2>&1) | cat
        torchrun train.py --num-layers 3 > /dev/null < /dev/null && echo done || echo failed
        { torchrun train.py --num-layers 4; }
        """,
}


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize("text", AS_BASH_RUNS_IT.values(), ids=AS_BASH_RUNS_IT)
def test_words_are_those_that_bash_passes(tmp_path, text):
    """The script is run with a `torchrun` that writes down what it gets."""
    path, log = tmp_path / "script.sh", tmp_path / "log"
    path.write_text(textwrap.dedent(text).lstrip("\n"))
    stub = tmp_path / "bin" / "torchrun"
    stub.parent.mkdir()
    stub.write_text(f'#!{BASH}\nprintf "%s\\0" "$@" >> "{log}"\nprintf "\\n" >> "{log}"\n')
    stub.chmod(0o755)
    environment = {"PATH": f"{stub.parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([BASH, str(path)], env=environment, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    passed = [line.split("\0")[:-1] for line in log.read_text().split("\n")[:-1]]
    # stdout of a program in a pipe goes elsewhere: order of lines in the log is still the script's
    read = []
    for invocation in Run(path, path.read_text()).invocations:
        words = [w for w in invocation.words if all(branch.default is side for branch, side in w.guards)]
        if words[0].text == "torchrun":
            read.append([word.text for word in words[1:]])
    assert read == passed


# -- facts -----------------------------------------------------------------------------------------


def test_facts_of_megatron_lm_options(tmp_path):
    found = facts(
        script_of(
            tmp_path,
            """
        export NCCL_GRAPH_REGISTER=0 UNUSED=1
        torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --num-experts 64 --disable-bias-linear \\
            --moe-layer-freq "([0]*1+[1]*7)" --cuda-graph-impl=local --recompute-granularity selective \\
            --recompute-modules moe mlp --no-check-for-nan-in-loss-and-grad --rampup-batch-size 32 32 1000 \\
            --overlap-grad-reduce --hidden-dropout 0.0
        """,
        )
    )
    value = {name: fact.value for name, fact in found.items() if isinstance(fact, Known)}
    assert value["num_moe_experts"] == 64 and value["add_bias_linear"] is False
    assert value["moe_layer_freq"] == [0, 1, 1, 1, 1, 1, 1, 1]
    assert value["cuda_graph_impl"] == "local" and value["recompute_modules"] == ["moe", "mlp"]
    assert value["ddp.check_for_nan_in_grad"] is False and value["rerun_state_machine.check_for_nan_in_loss"] is False
    assert value["train.rampup_batch_size"] == [32, 32, 1000] and value["ddp.overlap_grad_reduce"] is True
    assert value["gradient_accumulation_fusion"] is True, "on by default in Megatron-LM"
    assert value["env.NCCL_GRAPH_REGISTER"] == "0"
    assert value["rng.te_rng_tracker"] is True, "Megatron-LM switches the tracker on by itself"
    assert "args.nproc_per_node" not in found, "options of the launcher are not the program's"


@pytest.mark.parametrize(
    "options, expected",
    [
        ("--enable-cuda-graph", None),
        ("--external-cuda-graph --cuda-graph-scope attn", "attn"),
        ("--cuda-graph-impl local", None),
    ],
)
def test_tracker_in_0_13_is_not_switched_on(tmp_path, options, expected):
    which = versions.resolve("megatron-lm", mcore="0.13.1", te="2.8")
    found = facts(script_of(tmp_path, f"torchrun pretrain_gpt.py --num-layers 2 {options}\n", which))
    assert "rng.te_rng_tracker" not in found
    assert (found["cuda_graph_scope"].value if expected else None) == expected


def test_sides_of_a_condition_are_kept_apart(tmp_path):
    found = facts(
        script_of(
            tmp_path,
            """
        A=(--num-layers 2 --cuda-graph-impl none)
        if [ "${GRAPHS:-0}" = 1 ]; then
            A+=(--cuda-graph-impl local)
        fi
        torchrun pretrain_gpt.py "${A[@]}"
    """,
        )
    )
    impl = found["cuda_graph_impl"]
    assert isinstance(impl, Choice)
    assert impl.if_true.value == "local" and impl.if_false.value == "none"
    assert impl.branch.default is False and "GRAPHS" in impl.branch.text


def test_default_that_the_script_fills_in(tmp_path):
    found = facts(
        script_of(
            tmp_path,
            'if [ -z "$EP" ]; then\n  EP=2\nfi\ntorchrun p.py --num-layers 2 --expert-model-parallel-size $EP\n',
        )
    )
    size = found["expert_model_parallel_size"]
    assert size.branch.default is True and size.if_true.value == 2
    assert isinstance(size.if_false, Unknown) and "$EP is set outside" in size.if_false.reason


def test_value_from_outside_is_unknown_and_says_so(tmp_path):
    found = facts(script_of(tmp_path, "torchrun pretrain_gpt.py --num-layers $LAYERS --cuda-graph-impl local\n"))
    assert isinstance(found["num_layers"], Unknown) and "$LAYERS is set outside" in found["num_layers"].reason


def test_open_argument_list_leaves_the_rest_unknown(tmp_path):
    script = script_of(tmp_path, "torchrun pretrain_gpt.py --num-layers 2 $MORE\n")
    settings = script.run(only(script)).settings
    assert not settings.complete and "$MORE" in settings.incomplete_reason


def test_checkpoint_arguments_are_unknown(tmp_path):
    found = facts(
        script_of(tmp_path, "torchrun pretrain_gpt.py --use-checkpoint-args --num-layers 2 --num-experts 8\n")
    )
    assert isinstance(found["num_moe_experts"], Unknown)


def test_sourced_file_is_followed(tmp_path):
    (tmp_path / "common.sh").write_text('COMMON="--num-layers 2 --cuda-graph-impl local"\n')
    script = script_of(tmp_path, "source ./common.sh\ntorchrun pretrain_gpt.py $COMMON --hidden-size 8\n")
    assert facts(script)["cuda_graph_impl"].value == "local"
    with pytest.raises(SourceError, match="not written in train.sh itself"):
        script.edited(only(script), {"cuda_graph_impl": "transformer_engine"})


@pytest.mark.parametrize(
    "folder",
    [
        '$(dirname "$0")',
        '"$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"',
        "`dirname $0`",
        "$(dirname $(readlink -f $0))",
    ],
)
def test_sourced_file_beside_the_script(tmp_path, folder):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "model.sh").write_text("MODEL_ARGS=(--num-layers 2 --num-experts 8)\n")
    text = f'HERE={folder}\n. "${{HERE}}/conf/model.sh"\ntorchrun p.py "${{MODEL_ARGS[@]}}" --bf16\n'
    script = script_of(tmp_path, text)
    assert facts(script)["num_moe_experts"].value == 8 and script.run("p.py").settings.complete
    after, _ = script.edited("p.py", {"cuda_graph_impl": "local"})
    assert after.file.text == text.replace("--bf16", "--bf16 --cuda-graph-impl local")


def test_commands_of_one_program_are_told_apart(tmp_path):
    script = script_of(tmp_path, "torchrun t.py --num-layers 1\ntorchrun t.py --num-layers 2\npython other.py\n")
    assert script.candidates() == ["t.py", "t.py#2"]
    with pytest.raises(SourceError, match="2 times training command"):
        script.select([])
    assert script.select(["t.py#*"]) == ["t.py#2"]


# -- edits -----------------------------------------------------------------------------------------

EDITS = [
    (
        "array, one option a line",
        'A=(\n    --num-layers 2\n    --bf16  # kept\n)\ntorchrun p.py ${A[@]} "$@"\n',
        GRAPHS,
        "A=(\n    --num-layers 2\n    --bf16  # kept\n    --cuda-graph-impl transformer_engine\n    "
        "--cuda-graph-modules attn mlp\n)\n"
        'torchrun p.py ${A[@]} "$@"\n',
    ),
    (
        "continued lines",
        "torchrun p.py \\\n    --num-layers 2 \\\n    --lr 1e-4\n",
        {"cuda_graph_impl": "local"},
        "torchrun p.py \\\n    --num-layers 2 \\\n    --cuda-graph-impl local \\\n    --lr 1e-4\n",
    ),
    (
        "continued lines, the model's option last",
        "torchrun p.py \\\n    --lr 1e-4 \\\n    --num-layers 2\necho done\n",
        {"cuda_graph_impl": "local"},
        "torchrun p.py \\\n    --lr 1e-4 \\\n    --num-layers 2 \\\n    --cuda-graph-impl local\necho done\n",
    ),
    (
        "one line",
        "torchrun p.py --num-layers 2 --lr 1\n",
        {"cuda_graph_impl": "local"},
        "torchrun p.py --num-layers 2 --cuda-graph-impl local --lr 1\n",
    ),
    (
        "string of options",
        'O="\n  --num-layers 2\n  --bf16\n"\ntorchrun p.py $O\n',
        {"cuda_graph_impl": "local"},
        'O="\n  --num-layers 2\n  --bf16\n  --cuda-graph-impl local\n"\ntorchrun p.py $O\n',
    ),
    (
        "value in place, quotes kept",
        'torchrun p.py --num-layers 2 --cuda-graph-impl "local" --x\n',
        {"cuda_graph_impl": "transformer_engine"},
        'torchrun p.py --num-layers 2 --cuda-graph-impl "transformer_engine" --x\n',
    ),
    (
        "value behind an equals sign",
        "torchrun p.py --num-layers 2 --cuda-graph-impl=local\n",
        {"cuda_graph_impl": "transformer_engine"},
        "torchrun p.py --num-layers 2 --cuda-graph-impl=transformer_engine\n",
    ),
    (
        "literal variable is changed where it is set",
        "IMPL=local  # which\ntorchrun p.py --num-layers 2 --cuda-graph-impl $IMPL\n",
        {"cuda_graph_impl": "transformer_engine"},
        "IMPL=transformer_engine  # which\ntorchrun p.py --num-layers 2 --cuda-graph-impl $IMPL\n",
    ),
    (
        "variable that the environment may set is replaced where it is used",
        'IMPL=${IMPL:-local}\ntorchrun p.py --num-layers 2 --cuda-graph-impl "${IMPL}"\n',
        {"cuda_graph_impl": "transformer_engine"},
        "IMPL=${IMPL:-local}\ntorchrun p.py --num-layers 2 --cuda-graph-impl transformer_engine\n",
    ),
    (
        "several values",
        "torchrun p.py --num-layers 2 --cuda-graph-impl transformer_engine --cuda-graph-modules attn --x\n",
        GRAPHS,
        "torchrun p.py --num-layers 2 --cuda-graph-impl transformer_engine --cuda-graph-modules attn mlp --x\n",
    ),
    (
        "option goes, with its line",
        "torchrun p.py \\\n  --num-layers 2 \\\n  --cuda-graph-modules attn \\\n  --x\n",
        {"cuda_graph_modules": []},
        "torchrun p.py \\\n  --num-layers 2 \\\n  --x\n",
    ),
    (
        "last option goes, with the continuation that led to it",
        "torchrun p.py \\\n  --num-layers 2 \\\n  --cuda-graph-modules attn\n",
        {"cuda_graph_modules": []},
        "torchrun p.py \\\n  --num-layers 2\n",
    ),
    (
        "option whose value may come from elsewhere is not built on",
        'A=" \\\n  --num-layers 2 \\\n  --bf16 \\\n"\ntorchrun p.py $A $MORE\n',
        {"cuda_graph_impl": "local"},
        'A=" \\\n  --num-layers 2 \\\n  --cuda-graph-impl local \\\n  --bf16 \\\n"\ntorchrun p.py $A $MORE\n',
    ),
    (
        "program that a condition chooses",
        'if [ "$H" = 1 ]; then P=a.py; else P=b.py; fi\n: ${TP:=1}\ntorchrun ${P} \\\n  --num-layers $TP\n',
        {"cuda_graph_impl": "local"},
        'if [ "$H" = 1 ]; then P=a.py; else P=b.py; fi\n: ${TP:=1}\ntorchrun ${P} \\\n  --num-layers $TP \\\n'
        "  --cuda-graph-impl local\n",
    ),
    (
        "the last two options go",
        "torchrun p.py \\\n  --num-layers 2 \\\n  --cuda-graph-scope full \\\n  --cuda-graph-modules attn\necho\n",
        {"cuda_graph_modules": [], "cuda_graph_scope": None},
        "torchrun p.py \\\n  --num-layers 2\necho\n",
    ),
    (
        "old name of the scopes goes",
        "torchrun p.py --num-layers 2 --cuda-graph-impl transformer_engine --cuda-graph-scope full --x\n",
        {"cuda_graph_modules": ["attn"], "cuda_graph_scope": None},
        "torchrun p.py --num-layers 2 --cuda-graph-impl transformer_engine --cuda-graph-modules attn --x\n",
    ),
    (
        "option under a condition is changed there and set for the other side",
        'A=(--num-layers 2)\nif [ "$G" = 1 ]; then\n  A+=(--cuda-graph-impl local)\nfi\ntorchrun p.py "${A[@]}"\n',
        {"cuda_graph_impl": "transformer_engine"},
        'A=(--num-layers 2 --cuda-graph-impl transformer_engine)\nif [ "$G" = 1 ]; then\n  A+=(--cuda-graph-impl '
        "transformer_engine)\nfi\n"
        'torchrun p.py "${A[@]}"\n',
    ),
    (
        "environment in place",
        "export NCCL_GRAPH_REGISTER=1\ntorchrun p.py --num-layers 2\n",
        {"env.NCCL_GRAPH_REGISTER": "0"},
        "export NCCL_GRAPH_REGISTER=0\ntorchrun p.py --num-layers 2\n",
    ),
    (
        "environment behind the last export, not in front of batch directives",
        "#!/bin/bash\n#SBATCH --nodes=2\nexport A=1\necho\nsrun python p.py --num-layers 2\n",
        {"env.NCCL_GRAPH_REGISTER": "0"},
        "#!/bin/bash\n#SBATCH --nodes=2\nexport A=1\nexport NCCL_GRAPH_REGISTER=0\necho\nsrun python p.py "
        "--num-layers 2\n",
    ),
    (
        "environment in front of the command, under its indentation",
        "if true; then\n    torchrun p.py \\\n        --num-layers 2\nfi\n",
        {"env.NCCL_GRAPH_REGISTER": "0"},
        "if true; then\n    export NCCL_GRAPH_REGISTER=0\n    torchrun p.py \\\n        --num-layers 2\nfi\n",
    ),
    (
        "two checks, one option",
        "torchrun p.py --num-layers 2\n",
        {"rerun_state_machine.check_for_nan_in_loss": False, "ddp.check_for_nan_in_grad": False},
        "torchrun p.py --num-layers 2 --no-check-for-nan-in-loss-and-grad\n",
    ),
    (
        "characters beyond ASCII",
        "# größe → 2\ntorchrun p.py --num-layers 2 # ✓\n",
        {"cuda_graph_impl": "local"},
        "# größe → 2\ntorchrun p.py --num-layers 2 --cuda-graph-impl local # ✓\n",
    ),
    (
        "string for another shell",
        'CMD="cd /x; python p.py --num-layers 2 --bf16"\nsrun bash -c "${CMD}" 2>&1 | tee log\n',
        {"cuda_graph_impl": "local"},
        'CMD="cd /x; python p.py --num-layers 2 --bf16 --cuda-graph-impl local"\nsrun bash -c "${CMD}" 2>&1 | tee '
        "log\n",
    ),
    (
        "Hydra overrides, quoted for the shell",
        "torchrun run_recipe.py --recipe r \\\n  model.tensor_model_parallel_size=2 \\\n  train.train_iters=5\n",
        {"cuda_graph_modules": ["attn", "mlp"]},
        "torchrun run_recipe.py --recipe r \\\n  model.tensor_model_parallel_size=2 \\\n  train.train_iters=5 \\\n"
        "  'model.cuda_graph_modules=[attn,mlp]'\n",
    ),
]


@pytest.mark.parametrize("source, overrides, expected", [edit[1:] for edit in EDITS], ids=[edit[0] for edit in EDITS])
def test_edit(tmp_path, source, overrides, expected):
    assert edited(tmp_path, source, overrides) == expected


def test_windows_line_ends_are_kept(tmp_path):
    path = tmp_path / "train.sh"
    path.write_bytes(b"A=(\r\n  --num-layers 2\r\n)\r\ntorchrun p.py ${A[@]}\r\n")
    after, _ = LaunchScript(path, V19).edited("p.py", {"cuda_graph_impl": "local"})
    assert after.file.raw == b"A=(\r\n  --num-layers 2\r\n  --cuda-graph-impl local\r\n)\r\ntorchrun p.py ${A[@]}\r\n"


@pytest.mark.parametrize(
    "which, overrides, expected",
    [
        (
            V14,
            {"external_cuda_graph": True, "cuda_graph_scope": "attn"},
            " --external-cuda-graph --cuda-graph-scope attn",
        ),
        (
            V17,
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn", "mlp"]},
            " --cuda-graph-impl transformer_engine --cuda-graph-scope attn mlp",
        ),
        (V19, GRAPHS, " --cuda-graph-impl transformer_engine --cuda-graph-modules attn mlp"),
    ],
)
def test_names_follow_the_version(tmp_path, which, overrides, expected):
    assert (
        edited(tmp_path, "torchrun p.py --num-layers 2\n", overrides, which)
        == f"torchrun p.py --num-layers 2{expected}\n"
    )


def test_setting_that_the_version_does_not_have_is_reported(tmp_path):
    script = script_of(tmp_path, "torchrun p.py --num-layers 2\n", V14)
    after, skipped = script.edited("p.py", {"cuda_graph_impl": "local", "cpu_offloading_weights": False})
    assert after.file.raw == script.file.raw
    assert skipped == {
        "cuda_graph_impl": "megatron-core 0.14 has no cuda_graph_impl",
        "cpu_offloading_weights": "Megatron-LM has no argument for it",
    }


def test_shared_options_are_named(tmp_path):
    script = script_of(
        tmp_path, 'A="--num-layers 2"\nif [ "$X" = 1 ]; then torchrun a.py $A; else python b.py $A; fi\n'
    )
    assert script.built_on("a.py") == ["b.py"]


def test_edit_that_would_change_something_else_is_refused(tmp_path):
    script = script_of(tmp_path, "V=local\ntorchrun p.py --num-layers 2 --cuda-graph-impl $V --transformer-impl $V\n")
    with pytest.raises(SourceError, match="would also change transformer_impl"):
        script.edited("p.py", {"cuda_graph_impl": "transformer_engine"})


def test_script_without_a_training_command(tmp_path):
    path = tmp_path / "clean.sh"
    path.write_text("rm -rf build\npython setup.py build\n")
    with pytest.raises(SourceError, match="no training command found"):
        open_recipe(path, V19)


@pytest.mark.parametrize(
    "text", ["", "if\n", "A=(\n", "'", '"${', "$((", "case x in", "f() {", "<<EOF", "\\", "{ } ; )", "a=$(", "[[", "`"]
)
def test_odd_text_never_breaks_the_parser(tmp_path, text):
    assert Run(Path("odd.sh"), text + "\n").invocations is not None
    assert Run(Path("odd.sh"), "torchrun t.py --num-layers 2\n" + text).invocations[0].words[0].text == "torchrun"


@pytest.mark.parametrize(
    "text, reason",
    [
        ("f() { f; f; f; f; f; f; }\nf\n", "too many to follow"),
        ("( " * 20000, "nested too deeply"),
        ("if a; then " * 20000, "nested too deeply"),
    ],
)
def test_scripts_without_end_are_refused(tmp_path, text, reason):
    with pytest.raises(SourceError, match=reason):
        script_of(tmp_path, text)
