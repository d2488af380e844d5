# SPDX-License-Identifier: Apache-2.0
"""The runner: limits, secrets, streams of command-line agents, endpoints, records and replay, and the numbers of an arm."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import agents
import cases
import pytest
import run_evals
from graders import Check, Grade, Transcript

CASE = cases.load("neg-slurm-memory")[0]
FIX = "sed -i s/--mem=48G/--mem=72G/ prep.sbatch"


@pytest.fixture
def workspace(tmp_path):
    return run_evals.prepare(CASE, None, tmp_path)


def program(tmp_path, text):
    path = tmp_path / "program.py"
    path.write_text(text, encoding="utf-8")
    return f"command:{sys.executable} {path}"


def test_a_command_line_agent_works_in_its_workspace(tmp_path, workspace):
    spec = (
        program(tmp_path, "import sys, pathlib\npathlib.Path('seen.txt').write_text(sys.argv[1])\nprint('all done')\n")
        + " {prompt}"
    )
    transcript = agents.make(spec, "with_skill")(CASE, workspace, agents.Limits(20))
    assert (workspace / "seen.txt").read_text() == CASE.prompt
    assert transcript.final_message == "all done"
    assert not transcript.stopped


@pytest.mark.parametrize(
    "text, limits, reason",
    [
        ("import time\ntime.sleep(60)\n", agents.Limits(seconds=0.5), "time limit"),
        ("while True: print('x' * 1000, flush=True)\n", agents.Limits(seconds=20, output=50_000), "output limit"),
        ("import sys\nsys.exit(3)\n", agents.Limits(20), "exit 3"),
    ],
    ids=["time", "output", "exit code"],
)
def test_limits(text, limits, reason, tmp_path, workspace):
    assert reason in agents.make(program(tmp_path, text), "with_skill")(CASE, workspace, limits).stopped


def test_secrets_are_not_recorded(tmp_path, workspace, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "very-secret-value")
    spec = program(tmp_path, "import os\nprint('the key is', os.environ['SOME_API_KEY'], 'in', os.getcwd())\n")
    said = agents.make(spec, "with_skill")(CASE, workspace, agents.Limits(20)).final_message
    assert "very-secret-value" not in said and "<SOME_API_KEY>" in said and str(workspace) not in said
    assert "SOME_API_KEY" not in agents.clean_environment(workspace)
    assert "very-secret" not in agents.shell("env", workspace, 10)[1]


STREAMS = {
    "claude": [
        {
            "type": "assistant",
            "message": {"content": [{"type": "tool_use", "name": "Bash", "input": {"command": "ls"}}]},
        },
        {"type": "user", "message": {"content": [{"type": "tool_result", "content": "recipe.py"}]}},
        {"type": "result", "result": "done", "usage": {"input_tokens": 90, "output_tokens": 10}},
    ],
    "codex": [
        {
            "type": "item.completed",
            "item": {"type": "command_execution", "command": "ls", "aggregated_output": "recipe.py"},
        },
        {"type": "item.completed", "item": {"type": "agent_message", "text": "done"}},
        {"type": "turn.completed", "usage": {"input_tokens": 90, "output_tokens": 10}},
    ],
}


@pytest.mark.parametrize("client", STREAMS)
def test_streams_are_counted(client):
    transcript = Transcript()
    agents.read_stream("\n".join(map(json.dumps, STREAMS[client])), transcript)
    assert (
        len(transcript.actions) == 1
        and "ls" in transcript.actions[0]["input"]
        and transcript.actions[0]["output"] == "recipe.py"
    )
    assert transcript.final_message == "done" and transcript.tokens == 100


class Endpoint(BaseHTTPRequestHandler):
    """Asks for one command, then says that it is done; answers in the form of either interface."""

    requests: list = []
    status = 200

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Endpoint.requests.append((dict(self.headers), body))
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        if "max_tokens" in body:
            blocks = [
                {"type": "tool_use", "id": "1", "name": "shell", "input": {"command": FIX}},
                {"type": "text", "text": "done"},
            ]
            answer = {"content": blocks[turn:], "usage": {"input_tokens": 40, "output_tokens": 10}}
        else:
            call = {
                "id": "1",
                "type": "function",
                "function": {"name": "shell", "arguments": json.dumps({"command": FIX})},
            }
            message = {"role": "assistant", "content": "done", "tool_calls": [call] if turn == 0 else None}
            answer = {"choices": [{"message": message}], "usage": {"total_tokens": 50}}
        data = json.dumps(answer).encode()
        self.send_response(Endpoint.status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    Endpoint.requests, Endpoint.status = [], 200
    server = HTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.mark.parametrize("kind, header", [("openai", "Authorization"), ("anthropic", "X-api-key")])
def test_an_endpoint_works_with_the_shell_tool(kind, header, server, skill, tmp_path, monkeypatch):
    monkeypatch.setenv(agents.ENDPOINTS[kind][1], "very-secret-value")
    workspace = run_evals.prepare(CASE, skill, tmp_path)
    transcript = agents.make(f"{kind}:some-model@{server}", "with_skill")(CASE, workspace, agents.Limits(30))
    assert transcript.tokens == 100 and len(transcript.actions) == 1 and transcript.final_message == "done"
    assert CASE.grader(None)(workspace, transcript).passed
    headers, body = Endpoint.requests[0]
    assert "very-secret-value" in {key.lower(): value for key, value in headers.items()}[header.lower()]
    assert "nemo-cuda-graphs" in json.dumps(body)
    assert "very-secret" not in json.dumps(transcript.__dict__)


def test_an_endpoint_error_names_no_key(server, workspace, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "very-secret-value")
    Endpoint.status = 401
    with pytest.raises(agents.AgentError, match="401") as caught:
        agents.make(f"openai:m@{server}", "with_skill")(CASE, workspace, agents.Limits(10))
    assert "secret" not in str(caught.value)


def test_turns_are_limited(server, workspace, monkeypatch):
    transcript = agents.make(f"openai:m@{server}", "with_skill")(CASE, workspace, agents.Limits(30, turns=1))
    assert "1 turns" in transcript.stopped


def test_record_and_replay(tmp_path, capsys):
    arguments = ["--cases", CASE.id, "--arm", "without_skill", "--output", str(tmp_path / "out")]
    assert run_evals.main(["--agent", "reference", *arguments, "--record", str(tmp_path / "record")]) == 0
    record = tmp_path / "record" / "without_skill" / CASE.id
    assert json.loads((record / "transcript.json").read_text())["prompt"] == CASE.prompt
    assert (record / "files" / "prep.sbatch").is_file()
    assert run_evals.main(["--agent", f"replay:{tmp_path / 'record'}", *arguments]) == 0
    (record / "files" / "prep.sbatch").unlink()
    assert run_evals.main(["--agent", f"replay:{tmp_path / 'record'}", *arguments]) == 1
    grading = json.loads((tmp_path / "out" / "without_skill" / CASE.id / "run-1" / "grading.json").read_text())
    assert {"text", "passed", "evidence"} == set(grading["assertion_results"][0])
    benchmark = json.loads((tmp_path / "out" / "benchmark.json").read_text())
    assert benchmark["run_summary"]["without_skill"]["pass_rate"]["mean"] == 0.0


def test_prepare_and_collect(tmp_path, capsys):
    folder = tmp_path / "elsewhere"
    assert (
        run_evals.main(["--prepare", str(folder), "--cases", CASE.id, "--arm", "with_skill", "--arm", "without_skill"])
        == 0
    )
    for arm, works in (("with_skill", True), ("without_skill", False)):
        place = folder / CASE.id / arm
        assert ("SKILL.md" in (place / "task.txt").read_text()) == (arm == "with_skill")
        if works:
            script = place / "workspace" / "prep.sbatch"
            script.write_text(script.read_text().replace("48G", "72G"))
        (place / "started").write_text("1764000000\n")
        (place / "ended").write_text("1764000042\n")
    (folder / CASE.id / "with_skill" / "transcript.json").write_text(
        '{"actions": [{"tool": "edit", "input": "prep.sbatch"}]}'
    )
    record = tmp_path / "record"
    assert (
        run_evals.main(["--collect", str(folder), "--cases", CASE.id, "--agent", "someone", "--record", str(record)])
        == 0
    )
    summary = json.loads((record / "benchmark.json").read_text())["run_summary"]
    assert summary["with_skill"]["pass_rate"]["mean"] == 1.0 and summary["without_skill"]["pass_rate"]["mean"] == 0.0
    assert summary["delta"]["pass_rate"] == 1.0
    kept = json.loads((record / "with_skill" / CASE.id / "transcript.json").read_text())
    assert kept["agent"] == "someone" and kept["seconds"] == 42.0 and kept["date"] == "2025-11-24"


BAD_COMMANDS = [
    (["--agent", "reference", "--cases", "nothing-*"], "no case matches"),
    (["--agent", "reference", "--arm", "sideways"], "--arm sideways"),
    (["--agent", "reference", "--arm", "other:/nowhere"], "existing folder"),
    (["--cases", CASE.id], "--agent is needed"),
    (["--cases", CASE.id, "--grade", "/nowhere"], "existing folder"),
    (["--agent", "nobody", "--cases", CASE.id], "no agent"),
]


@pytest.mark.parametrize("arguments, message", BAD_COMMANDS)
def test_a_bad_command_is_one_line(arguments, message, capsys):
    assert run_evals.main(arguments) == 2
    assert message in capsys.readouterr().err


def outcomes(arm, results):
    grades = {True: Grade([Check("x", True, "")]), False: Grade([Check("x", False, "")])}
    return [
        run_evals.Run(case, arm, 1, Transcript(), grades[passed]) for case, passed in zip(cases.load("neg-*"), results)
    ]


@pytest.mark.parametrize(
    "first, second, mean, excludes_zero",
    [
        ([True] * 8, [False] * 8, 1.0, True),
        ([True, False] * 4, [True, False] * 4, 0.0, False),
        ([True, True, False, False], [True, False, True, False], 0.0, False),
    ],
)
def test_difference_between_arms(first, second, mean, excludes_zero):
    found = run_evals.difference(outcomes("with_skill", first), outcomes("without_skill", second))
    assert found["pass_rate"] == mean
    assert found["low"] <= mean <= found["high"]
    assert (found["low"] > 0) == excludes_zero


def test_no_difference_without_common_cases():
    assert run_evals.difference(outcomes("with_skill", [True]), []) is None
