# SPDX-License-Identifier: Apache-2.0
"""Agents under test. An agent gets a prompt in a workspace and leaves the workspace changed and a transcript.

Specs (`--agent`):
    command:CMD...            a command line, run in the workspace; {prompt} is the prompt. Actions are counted for tools
                              that print JSON lines:
                                command:claude -p {prompt} --output-format stream-json --verbose
                                command:codex exec --json --sandbox workspace-write {prompt}
                                command:gemini -p {prompt} --output-format stream-json --yolo
    openai:MODEL[@URL]        an OpenAI-compatible chat endpoint with one shell tool; the key is in OPENAI_API_KEY
    anthropic:MODEL[@URL]     the same for the Anthropic messages interface; the key is in ANTHROPIC_API_KEY
    replay:DIR                recorded runs: DIR/<arm>/<case>/transcript.json and files/ (evals/results/agents)
    reference                 follows SKILL.md literally: runs the case's reference commands as far as SKILL.md, or a
                              page that it names, shows them
    mutant:NAME               the reference, then spoiled in one way (MUTANTS): graders must notice
    null                      does nothing
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cases import SKILL, Case
from graders import Transcript

SKILL_FOLDER = f".agents/skills/{SKILL}"
OUTPUT_LIMIT = 20_000  # characters of one tool result that an agent sees, and that is recorded
SECRET_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL|AUTH", re.I)


class AgentError(ValueError):
    """A spec that names no agent, or one that cannot be used here; the text is one line."""


@dataclass(frozen=True)
class Limits:
    """seconds: wall time of one run; turns: calls of a model; output: bytes kept of a program's output."""

    seconds: float = 600.0
    turns: int = 60
    output: int = 4_000_000


Agent = Callable[[Case, Path, Limits], Transcript]


def make(spec: str, arm: str) -> Agent:
    """The agent for a spec. Raises AgentError."""
    kind, _, rest = spec.partition(":")
    if kind == "null":
        return lambda case, workspace, limits: Transcript()
    if kind == "reference":
        return reference
    if kind == "mutant":
        if rest not in MUTANTS:
            raise AgentError(f"mutant:{rest}: there are {', '.join(MUTANTS)}")
        return lambda case, workspace, limits: spoil(rest, case, workspace, reference(case, workspace, limits))
    if kind == "replay":
        if not Path(rest).is_dir():
            raise AgentError(f"replay:{rest}: no such folder")
        return lambda case, workspace, limits: replay(Path(rest) / arm / case.id, workspace)
    if kind == "command" and rest:
        return lambda case, workspace, limits: command_line(shlex.split(rest), case, workspace, limits)
    if kind in ENDPOINTS and rest:
        return lambda case, workspace, limits: endpoint(kind, rest, case, workspace, limits)
    raise AgentError(f"{spec!r} is no agent; see evals/agents.py for the specs")


def clean_environment(workspace: Path) -> dict[str, str]:
    """The environment of what an agent runs: no secrets, and a home of its own."""
    kept = {
        name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV")
    }
    kept["PATH"] = f"{Path(sys.executable).parent}:{kept.get('PATH', '')}"
    return {**kept, "HOME": str(workspace.parent), "PYTHONDONTWRITEBYTECODE": "1"}


def shell(command: str, workspace: Path, seconds: float) -> tuple[int, str]:
    """Exit code (124 at the limit) and what was printed, shortened."""
    try:
        done = subprocess.run(
            ["bash", "-c", command], cwd=workspace, env=clean_environment(workspace), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=max(seconds, 1), text=True, errors="replace",
        )  # fmt: skip
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, output = (
            124,
            (error.stdout or b"").decode(errors="replace") if isinstance(error.stdout, bytes) else str(error.stdout),
        )
    if len(output) > OUTPUT_LIMIT:
        output = output[: OUTPUT_LIMIT // 2] + "\n...\n" + output[-OUTPUT_LIMIT // 2 :]
    return code, output


# -- the reference -----------------------------------------------------------------------------------------------------


def reference(case: Case, workspace: Path, limits: Limits) -> Transcript:
    """Take the case's reference steps; those that come from the skill only as far as its text shows them."""
    started, transcript = time.monotonic(), Transcript()
    known = skill_text(workspace / SKILL_FOLDER)
    for step in case.reference:
        unknown = missing_knowledge(step, known)
        if unknown:
            transcript.actions.append({"tool": "none", "input": "", "output": f"the skill does not show {unknown}"})
            continue
        _take(step, workspace, transcript, limits)
    transcript.seconds = time.monotonic() - started
    return transcript


def skill_text(folder: Path) -> str | None:
    """SKILL.md in a skill's folder with the pages that it names, or None where there is no skill."""
    if not (folder / "SKILL.md").is_file():
        return None
    text = (folder / "SKILL.md").read_text(encoding="utf-8")
    pages = sorted(set(re.findall(r"references/[\w./-]+\.md", text)))
    found = [folder / page for page in pages if (folder / page).is_file()]
    return "\n".join([text, *(page.read_text(encoding="utf-8") for page in found)])


def missing_knowledge(step: dict, known: str | None) -> str:
    """What of a step the skill's text does not show: a helper, an option, or the sentence that the step rests on."""
    if "needs" in step:
        return "" if known is not None and re.search(step["needs"], " ".join(known.split())) else step["needs"]
    command = step.get("run", "")
    if "launcher" in step:
        command = "python helpers/delete_graphs.py --"
    if "library" in step:
        command = "graphs_deleted_on_exit"
        return "" if known is not None and command in known else command
    if "helpers/" not in command:
        return ""
    words = [word for word in shlex.split(command) if word.startswith(("helpers/", "--"))]
    return next((word for word in words if known is None or word.partition("=")[0] not in known), "")


def _take(step: dict, workspace: Path, transcript: Transcript, limits: Limits) -> None:
    if "run" in step:
        command = re.sub(r"python helpers/", f"python {SKILL_FOLDER}/helpers/", step["run"])
        code, output = shell(command, workspace, limits.seconds)
        transcript.actions.append({"tool": "shell", "input": command, "output": f"{output}\n[exit {code}]"})
    files = dict(step.get("write", {}))
    if "answer" in step:
        files["answer.json"] = json.dumps(step["answer"]) + "\n"
    if "launcher" in step:
        text = (workspace / step["launcher"]).read_text(encoding="utf-8")
        files[step["launcher"]] = text.replace(
            "python train.py", f"python {SKILL_FOLDER}/helpers/delete_graphs.py -- train.py"
        )
    if "library" in step:
        text = (workspace / step["library"]).read_text(encoding="utf-8")
        head = f'import sys\n\nsys.path.insert(0, __file__.rpartition("/")[0] + "/{SKILL_FOLDER}/helpers")\n'
        text = text.replace(
            "import torch\n", head + "from delete_graphs import graphs_deleted_on_exit\nimport torch\n", 1
        )
        before = "        dist.destroy_process_group()"
        files[step["library"]] = text.replace(
            before, f"        with graphs_deleted_on_exit():\n            pass\n{before}"
        )
    for name, pairs in step.get("replace", {}).items():
        text = (workspace / name).read_text(encoding="utf-8")
        for old, new in pairs:
            if old not in text:
                raise ValueError(f"{name} has no {old!r}")
            text = text.replace(old, new)
        files[name] = text
    for name, text in files.items():
        (workspace / name).parent.mkdir(parents=True, exist_ok=True)
        (workspace / name).write_text(text, encoding="utf-8")
        transcript.actions.append({"tool": "write", "input": name, "output": text[:OUTPUT_LIMIT]})
    transcript.final_message = step.get("say", transcript.final_message)


# -- mutants: what a grader must notice --------------------------------------------------------------------------------


def _edit(pattern: str, replacement: str, files: str = "*.py") -> Callable[[Path], None]:
    def spoiled(workspace: Path) -> None:
        for path in sorted(workspace.glob(files)):
            text = path.read_text(encoding="utf-8")
            path.write_text(re.sub(pattern, replacement, text, flags=re.M), encoding="utf-8")

    return spoiled


def _at_end(line: str) -> Callable[[Path], None]:
    """A line before the last statement of the recipe functions."""
    return _edit(r"^( +)return cfg$", rf"\1{line}\n\1return cfg")


def _flip(workspace: Path) -> None:
    path = workspace / "answer.json"
    if path.is_file():
        flip = {bool: lambda v: not v, int: lambda v: v + 3, float: lambda v: v * 1.5, str: lambda v: "cuda_graph_impl"}
        answer = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(
            json.dumps({key: flip.get(type(value), lambda v: v)(value) for key, value in answer.items()}),
            encoding="utf-8",
        )


def _restore(workspace: Path) -> None:
    (workspace / "answer.json").unlink(missing_ok=True)


TEARDOWN_LINE = r"^( +)with graphs_deleted_on_exit\(\):\n +pass\n( +)dist\.destroy_process_group\(\)$"
# name -> (what it does, which cases it must fail, how it spoils the reference's result)
MUTANTS: dict[str, tuple[str, Callable[[Case], bool], Callable[[Path], None]]] = {
    "all-scopes": (
        "names every scope there is",
        lambda case: case.grader_name == "recipe" and "require" in case.parameters,
        _edit(
            r"(cuda_graph_(?:modules|scope) *= *)\[[^\]]*\]",
            r'\1["attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"]',
        ),
    ),
    "whole-layer": (
        "leaves the scopes empty, which captures whole layers",
        lambda case: case.grader_name == "recipe" and "require" in case.parameters,
        _edit(r"(cuda_graph_(?:modules|scope) *= *)\[[^\]]*\]", r"\1[]"),
    ),
    "off-again": (
        "turns graphs off after turning them on",
        lambda case: (
            case.grader_name == "recipe"
            and "cfg" in (case.workspace / case.parameters["file"]).read_text(encoding="utf-8")
        ),
        _at_end('cfg.model.cuda_graph_impl = "none"'),
    ),
    "no-rng-tracker": (
        "forgets the RNG tracker",
        lambda case: case.grader_name == "recipe" and bool(case.versions.get("bridge")),
        _edit(r"^.*te_rng_tracker.*\n", ""),
    ),
    "collateral": (
        "changes the batch size on the way",
        lambda case: case.grader_name == "recipe" and bool(case.versions.get("bridge")),
        _at_end("cfg.train.global_batch_size = 32"),
    ),
    "comma-list": (
        "gives Megatron-LM a comma list",
        lambda case: case.grader_name == "launch" and len(case.parameters.get("require", [])) > 1,
        _edit(r"--cuda-graph-(modules|scope) ([a-z_]+) ([a-z_ ]+)", r"--cuda-graph-\1 \2,\3", "*.sh"),
    ),
    "leave-at-once": (
        "leaves by os._exit instead of cleaning up",
        lambda case: case.grader_name == "teardown",
        _edit(r"^( +)dist\.destroy_process_group\(\)$", r"\1import os\n\1os._exit(0)"),
    ),
    "skip-destroy": (
        "drops the call that hangs",
        lambda case: case.grader_name == "teardown",
        _edit(r"^( +)dist\.destroy_process_group\(\)$", r"\1pass"),
    ),
    "flipped-answer": (
        "answers the contrary",
        lambda case: any(
            "json" in check and check["json"] == "answer.json" for check in case.parameters.get("checks", [])
        ),
        _flip,
    ),
    "no-answer": (
        "does the work and writes no answer",
        lambda case: any(check.get("json") == "answer.json" for check in case.parameters.get("checks", [])),
        _restore,
    ),
    "skill-everywhere": ("uses the skill where it does not apply", lambda case: case.negative, lambda workspace: None),
}


def spoil(name: str, case: Case, workspace: Path, transcript: Transcript) -> Transcript:
    MUTANTS[name][2](workspace)
    if name == "skill-everywhere":
        transcript.actions.append(
            {"tool": "shell", "input": f"python {SKILL_FOLDER}/helpers/validate_constraints.py .", "output": ""}
        )
    return transcript


# -- recorded runs -----------------------------------------------------------------------------------------------------


def replay(folder: Path, workspace: Path) -> Transcript:
    """Put the recorded final files in place. Raises AgentError where the run was not recorded."""
    file = folder / "transcript.json"
    if not file.is_file():
        raise AgentError(f"no recorded run in {folder.name}")
    record = json.loads(file.read_text(encoding="utf-8"))
    for name in record.get("deleted", []):
        (workspace / name).unlink(missing_ok=True)
    if (folder / "files").is_dir():
        shutil.copytree(folder / "files", workspace, dirs_exist_ok=True)
    return Transcript(
        record["actions"],
        record["final_message"],
        record.get("seconds") or 0.0,
        record.get("tokens"),
        record.get("stopped", ""),
    )


# -- programs ----------------------------------------------------------------------------------------------------------


def command_line(words: list[str], case: Case, workspace: Path, limits: Limits) -> Transcript:
    """Run a command-line agent. It gets the whole environment, since it needs its own key; its output is scrubbed."""
    started, transcript = time.monotonic(), Transcript()
    command = [word.replace("{prompt}", case.prompt) for word in words]
    log = workspace.parent / "agent-output"
    with log.open("wb") as stream:
        try:
            process = subprocess.Popen(
                command,
                cwd=workspace,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise AgentError(f"{command[0]}: {error.strerror}") from None
        while process.poll() is None:
            time.sleep(0.05)
            if time.monotonic() - started > limits.seconds:
                transcript.stopped = f"time limit of {limits.seconds:.0f} s"
            elif log.stat().st_size > limits.output:
                transcript.stopped = f"output limit of {limits.output} bytes"
            if transcript.stopped:
                os.killpg(process.pid, 9)
                process.wait()
    output = scrub(log.read_bytes()[: limits.output].decode(errors="replace"), workspace)
    log.unlink()
    read_stream(output, transcript)
    transcript.seconds = time.monotonic() - started
    if process.returncode and not transcript.stopped:
        transcript.stopped = f"exit {process.returncode}"
    return transcript


def read_stream(output: str, transcript: Transcript) -> None:
    """Tool calls, tokens and the last message from JSON lines as Claude Code, Codex and Gemini CLI print them."""
    plain = []
    for line in output.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            plain.append(line)
            continue
        message = event.get("message")
        message = message if isinstance(message, dict) else event
        for block in message.get("content") or [] if isinstance(message.get("content"), list) else []:
            if block.get("type") == "tool_use":
                transcript.actions.append(
                    {"tool": block.get("name"), "input": json.dumps(block.get("input")), "output": ""}
                )
            elif block.get("type") == "tool_result" and transcript.actions:
                transcript.actions[-1]["output"] = str(block.get("content"))[:OUTPUT_LIMIT]
            elif block.get("type") == "text":
                transcript.final_message = block["text"]
        item = event.get("item")
        if isinstance(item, dict) and event.get("type") == "item.completed":
            if item.get("type") == "agent_message":
                transcript.final_message = item.get("text", "")
            elif "command" in item:
                output_text = str(item.get("aggregated_output", ""))[:OUTPUT_LIMIT]
                transcript.actions.append({"tool": "shell", "input": item["command"], "output": output_text})
        if event.get("type") == "tool_use" and "tool_name" in event:
            transcript.actions.append(
                {"tool": event["tool_name"], "input": json.dumps(event.get("parameters")), "output": ""}
            )
        if event.get("type") == "result" and isinstance(event.get("result"), str):
            transcript.final_message = event["result"]
        usage = event.get("usage") if event.get("type") in ("result", "turn.completed") else None
        if isinstance(usage, dict):
            transcript.tokens = sum(usage.get(name) or 0 for name in ("input_tokens", "output_tokens"))
    if not transcript.final_message:
        transcript.final_message = "\n".join(plain)[-OUTPUT_LIMIT:]


def scrub(text: str, workspace: Path) -> str:
    """Paths of this machine and values of secret environment variables are taken out."""
    for name, value in os.environ.items():
        if SECRET_NAMES.search(name) and len(value) > 7:
            text = text.replace(value, f"<{name}>")
    # the longest first: a workspace lies in its parent, an interpreter may lie in the home folder
    for path, name in (
        (str(workspace), "."),
        (str(workspace.parent), ".."),
        (sys.executable, "python"),
        (str(Path.home()), "~"),
    ):
        text = text.replace(path, name)
    return re.sub(r"/(?:tmp|root|work|home|dev/shm|var/tmp)/[^\s\"'`;:,)]*", "<path>", text)


# -- endpoints ---------------------------------------------------------------------------------------------------------

ENDPOINTS = {
    "openai": ("https://api.openai.com/v1/chat/completions", "OPENAI_API_KEY"),
    "anthropic": ("https://api.anthropic.com/v1/messages", "ANTHROPIC_API_KEY"),
}
SYSTEM = (
    "You are a coding agent. Do what the user asks, in the current folder, by shell commands; edit files in place. "
    "When you are done, answer in a few sentences without calling the tool."
)
TOOL = {
    "name": "shell",
    "description": "Run a bash command in the workspace and get its output and exit code.",
    "schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}


def system_prompt(workspace: Path) -> str:
    """With the names and descriptions of the skills in the workspace, as clients show them."""
    lines = []
    for file in sorted(workspace.glob(".agents/skills/*/SKILL.md")):
        found = re.search(r"^description: (.+)$", file.read_text(encoding="utf-8"), re.M)
        lines.append(f"- {file.parent.name} ({file.relative_to(workspace)}): {found.group(1) if found else ''}")
    return SYSTEM + (
        "\nSkills; read the SKILL.md of one that fits before you start:\n" + "\n".join(lines) if lines else ""
    )


def endpoint(kind: str, rest: str, case: Case, workspace: Path, limits: Limits) -> Transcript:
    model, _, url = rest.partition("@")
    default, key_name = ENDPOINTS[kind]
    key = os.environ.get(key_name)
    if not key and not url:
        raise AgentError(f"{kind}: set {key_name}")
    ask = _openai if kind == "openai" else _anthropic
    started, transcript = time.monotonic(), Transcript(tokens=0)
    messages: list[dict] = [{"role": "user", "content": case.prompt}]
    for _ in range(limits.turns):
        left = limits.seconds - (time.monotonic() - started)
        if left <= 0:
            transcript.stopped = f"time limit of {limits.seconds:.0f} s"
            break
        reply, calls, text, tokens = ask(url or default, key or "", model, system_prompt(workspace), messages, left)
        messages.append(reply)
        transcript.tokens += tokens
        transcript.final_message = text
        if not calls:
            break
        results = []
        for call_id, command in calls:
            code, output = shell(command, workspace, left)
            output = scrub(output, workspace)
            transcript.actions.append(
                {"tool": "shell", "input": scrub(command, workspace), "output": f"{output}\n[exit {code}]"}
            )
            results.append((call_id, f"{output}\n[exit {code}]"))
        messages += _results(kind, results)
    else:
        transcript.stopped = f"limit of {limits.turns} turns"
    transcript.seconds = time.monotonic() - started
    return transcript


def _results(kind: str, results: list[tuple[str, str]]) -> list[dict]:
    if kind == "openai":
        return [{"role": "tool", "tool_call_id": call_id, "content": text} for call_id, text in results]
    blocks = [{"type": "tool_result", "tool_use_id": call_id, "content": text} for call_id, text in results]
    return [{"role": "user", "content": blocks}]


def _openai(url, key, model, system, messages, seconds):
    tools = [
        {
            "type": "function",
            "function": {"name": TOOL["name"], "description": TOOL["description"], "parameters": TOOL["schema"]},
        }
    ]
    body = {"model": model, "messages": [{"role": "system", "content": system}, *messages], "tools": tools}
    answer = _post(url, {"Authorization": f"Bearer {key}"}, body, seconds)
    reply = answer["choices"][0]["message"]
    calls = [
        (call["id"], json.loads(call["function"]["arguments"]).get("command", ""))
        for call in reply.get("tool_calls") or []
    ]
    return reply, calls, reply.get("content") or "", answer.get("usage", {}).get("total_tokens", 0)


def _anthropic(url, key, model, system, messages, seconds):
    tools = [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["schema"]}]
    body = {"model": model, "max_tokens": 8192, "system": system, "messages": messages, "tools": tools}
    answer = _post(url, {"x-api-key": key, "anthropic-version": "2023-06-01"}, body, seconds)
    calls = [
        (block["id"], block["input"].get("command", "")) for block in answer["content"] if block["type"] == "tool_use"
    ]
    text = "\n".join(block["text"] for block in answer["content"] if block["type"] == "text")
    usage = answer.get("usage", {})
    return (
        {"role": "assistant", "content": answer["content"]},
        calls,
        text,
        usage.get("input_tokens", 0) + usage.get("output_tokens", 0),
    )


def _post(url: str, headers: dict, body: dict, seconds: float) -> dict:
    """Raises AgentError with the status, never with the request, which holds the key."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise AgentError(f"the endpoint answered {error.code} {error.reason}") from None
    except (urllib.error.URLError, TimeoutError) as error:
        raise AgentError(f"the endpoint did not answer: {getattr(error, 'reason', error)}") from None
