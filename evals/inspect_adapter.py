# SPDX-License-Identifier: Apache-2.0
"""The cases and graders as an inspect-ai task (extra `evals`: inspect-ai 0.3.285).

Usage:
    inspect eval evals/inspect_adapter.py --model PROVIDER/MODEL
    inspect eval evals/inspect_adapter.py --model PROVIDER/MODEL -T cases='repair-*' -T arm=without_skill -T turns=40

Each sample gets the case's workspace, and in the arm with_skill the packaged skill in .agents/skills, as files of its
sandbox (inspect-ai's own skill type leaves helpers/ and templates/ out). The agent has one bash tool. When it is done,
the sandbox's files are brought out and graded by the same graders as everywhere else.
"""

from __future__ import annotations

import io
import sys
import tarfile
import tempfile
from pathlib import Path

EVALS = Path(__file__).resolve().parent
sys.path.insert(0, str(EVALS))

import agents  # noqa: E402
import cases as case_files  # noqa: E402
import run_evals  # noqa: E402
from graders import Transcript  # noqa: E402
from inspect_ai import Task, task  # noqa: E402
from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.model import ChatMessageAssistant, ChatMessageTool  # noqa: E402
from inspect_ai.scorer import CORRECT, INCORRECT, Score, accuracy, scorer, stderr  # noqa: E402
from inspect_ai.solver import TaskState, generate, system_message, use_tools  # noqa: E402
from inspect_ai.tool import bash  # noqa: E402
from inspect_ai.util import sandbox  # noqa: E402
from upstream import Upstream  # noqa: E402

COMMAND_LIMIT_S = 120


@task
def nemo_cuda_graphs(cases: str = "*", arm: str = "with_skill", turns: int = 60) -> Task:
    """One sample a case. Raises ValueError for an arm that is neither with_skill nor without_skill."""
    if arm not in ("with_skill", "without_skill"):
        raise ValueError(f"arm {arm!r}: with_skill or without_skill")
    folder = Path(tempfile.mkdtemp(prefix="eval-inspect-"))
    skill = run_evals.package(folder / "skill") if arm == "with_skill" else None
    chosen = case_files.load(cases)
    samples, prompt = [], agents.SYSTEM
    for case in chosen:
        (folder / case.id).mkdir()
        workspace = run_evals.prepare(case, skill, folder / case.id)
        prompt = agents.system_prompt(workspace)
        files = {path.relative_to(workspace).as_posix(): str(path) for path in workspace.rglob("*") if path.is_file()}
        samples.append(Sample(input=case.prompt, id=case.id, files=files, metadata={"category": case.category}))
    return Task(
        dataset=samples,
        solver=[system_message(prompt), use_tools(bash(timeout=COMMAND_LIMIT_S)), generate(tool_calls="loop")],
        scorer=graded(),
        sandbox="local",
        message_limit=2 * turns,
    )


@scorer(metrics=[accuracy(), stderr()])
def graded():
    """The case's own grader over the files that are in the sandbox at the end."""

    async def score(state: TaskState, target) -> Score:
        case = case_files.load(str(state.sample_id))[0]
        with tempfile.TemporaryDirectory(prefix="eval-") as scratch:
            workspace = Path(scratch, "workspace")
            await bring_out(workspace)
            with Upstream() as upstream:
                grade = case.grader(upstream)(workspace, transcript_of(state))
        lines = [f"{'ok  ' if check.passed else 'FAIL'} {check.text}: {check.evidence}" for check in grade.checks]
        return Score(
            value=CORRECT if grade.passed else INCORRECT,
            explanation="\n".join(lines),
            metadata=grade.as_json()["summary"],
        )

    return score


async def bring_out(target: Path) -> None:
    """Copy the sandbox's working folder to this machine; works for every kind of sandbox that has tar."""
    archive = ".eval-result.tar"
    done = await sandbox().exec(["tar", "-cf", archive, f"--exclude={archive}", "."])
    if not done.success:
        raise RuntimeError(f"tar in the sandbox: {done.stderr.strip()}")
    data = await sandbox().read_file(archive, text=False)
    target.mkdir()
    with tarfile.open(fileobj=io.BytesIO(data)) as stream:
        members = [member for member in stream.getmembers() if member.isfile() and ".." not in Path(member.name).parts]
        stream.extractall(target, members=members)


def transcript_of(state: TaskState) -> Transcript:
    transcript = Transcript(final_message=state.output.completion if state.output else "")
    for message in state.messages:
        if isinstance(message, ChatMessageAssistant):
            for call in message.tool_calls or []:
                transcript.actions.append(
                    {"tool": call.function, "input": str(call.arguments.get("command", call.arguments)), "output": ""}
                )
        elif isinstance(message, ChatMessageTool) and transcript.actions:
            transcript.actions[-1]["output"] = message.text[: agents.OUTPUT_LIMIT]
    return transcript
