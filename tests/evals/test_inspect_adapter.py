# SPDX-License-Identifier: Apache-2.0
"""The inspect-ai adapter with inspect-ai's mock model; skipped where the extra `evals` is not installed."""

import pytest

pytest.importorskip("inspect_ai")

import inspect_adapter  # noqa: E402
from inspect_ai import eval as inspect_eval  # noqa: E402
from inspect_ai.model import ModelOutput, ModelUsage, get_model  # noqa: E402


def output(text, command=None):
    # without usage the mock model looks for a tokenizer on the network
    made = (
        ModelOutput.for_tool_call("mock", "bash", {"command": command})
        if command
        else ModelOutput.from_content("mock", text)
    )
    made.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    return made


def run(outputs, tmp_path, **parameters):
    model = get_model("mockllm/model", custom_outputs=outputs)
    task = inspect_adapter.nemo_cuda_graphs(**parameters)
    return inspect_eval(task, model=model, log_dir=str(tmp_path), display="none")[0]


@pytest.mark.parametrize(
    "command, value",
    [
        ("sed -i s/--mem=48G/--mem=72G/ prep.sbatch", "C"),
        ("sed -i s/--mem=48G/--mem=64G/ prep.sbatch", "I"),
        ("ls", "I"),
    ],
    ids=["right", "wrong", "nothing done"],
)
def test_a_case_is_graded(command, value, tmp_path):
    log = run([output("", command), output("done")], tmp_path, cases="neg-slurm-memory")
    assert log.status == "success", log.error
    score = log.samples[0].scores["graded"]
    assert score.value == value, score.explanation


def test_the_skill_lies_in_the_sandbox(tmp_path):
    look = "cat .agents/skills/nemo-cuda-graphs/SKILL.md | head -2; ls .agents/skills/nemo-cuda-graphs"
    log = run([output("", look), output("done")], tmp_path, cases="neg-slurm-memory")
    said = "\n".join(message.text for message in log.samples[0].messages)
    assert "name: nemo-cuda-graphs" in said and "helpers" in said and "templates" in said


def test_without_skill_there_is_none(tmp_path):
    log = run([output("", "ls -a"), output("done")], tmp_path, cases="neg-slurm-memory", arm="without_skill")
    assert ".agents" not in log.samples[0].messages[-2].text


def test_a_bad_arm_is_refused():
    with pytest.raises(ValueError, match="with_skill"):
        inspect_adapter.nemo_cuda_graphs(arm="sideways")
