# SPDX-License-Identifier: Apache-2.0
"""doctor.py: what is here, and what the rules say to the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import doctor
import pytest

HELPER = Path(doctor.__file__)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine whose nvidia-smi is a script; returns a function that writes it."""
    for name in doctor.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    def smi(body: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    return smi


def look(capsys, *argv: str) -> tuple[int, dict]:
    code = doctor.main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_gpus_and_the_architecture_they_bring(machine, capsys):
    machine('echo "NVIDIA H200, 9.0, 570.12, 143771"; echo "NVIDIA B200, 10.0, 570.12, [N/A]"')
    code, document = look(capsys)
    assert code == 0
    assert document["gpus"] == [
        {"name": "NVIDIA H200", "arch": "9.0", "driver": "570.12", "memory_mib": 143771},
        {"name": "NVIDIA B200", "arch": "10.0", "driver": "570.12", "memory_mib": None},
    ]


@pytest.mark.parametrize(
    "body, reason",
    [
        ("", "the driver reports no GPU"),
        ("echo no driver >&2; exit 9", "nvidia-smi: no driver"),
        ("exit 3", "exit code 3"),
        (None, "nvidia-smi is not here"),
    ],
)
def test_no_gpu_says_why(machine, capsys, body, reason):
    if body is not None:
        machine(body)
    code, document = look(capsys)
    assert code == 0 and document["gpus"] == [] and reason in document["gpu_reason"]


def test_driver_that_hangs(machine, capsys, monkeypatch):
    machine("exec sleep 30")
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:/bin:/usr/bin")
    monkeypatch.setattr(doctor, "SMI_LIMIT_S", 0.2)
    assert "does not answer" in look(capsys)[1]["gpu_reason"]


@pytest.mark.parametrize(
    "mcore, environment, graphs, code",
    [
        ("0.19", {}, [], 0),
        ("0.19", {"NCCL_GRAPH_REGISTER": "0"}, [], 0),
        ("0.19", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, ["transformer_engine"], 1),
        ("0.19", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "0"}, [], 0),
        ("0.18", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, ["transformer_engine", "local"], 1),
        ("0.14", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "0"}, ["local"], 1),
    ],
)
def test_verdicts_come_from_the_rules(machine, capsys, monkeypatch, mcore, environment, graphs, code):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found, document = look(capsys, "--mcore", mcore, "--te", "2.14", "--gpu-arch", "9.0")
    assert document["environment"] == environment
    broken = [
        kind
        for verdict in document["verdicts"]
        if verdict["severity"] in ("error", "runtime")
        for kind in verdict["graphs"]
    ]
    assert sorted(set(broken)) == sorted(graphs) and found == code


def test_new_name_of_the_allocator_variable_is_judged_too(machine, capsys, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert look(capsys, "--mcore", "0.19")[1]["verdicts"]


@pytest.mark.parametrize(
    "mcore, field, implementations",
    [
        ("0.14", "cuda_graph_scope", ["local", "transformer_engine"]),
        ("0.17", "cuda_graph_scope", ["none", "local", "transformer_engine"]),
        ("0.19", "cuda_graph_modules", ["none", "local", "transformer_engine", "full_iteration"]),
    ],
)
def test_names_follow_the_version(machine, capsys, mcore, field, implementations):
    names = look(capsys, "--mcore", mcore)[1]["names"]
    assert names["scopes_field"] == field and names["implementations"] == implementations


def test_text_and_usage(machine, capsys):
    assert doctor.main(["--mcore", "0.19"]) == 0
    text = capsys.readouterr().out
    assert "megatron-core: not installed; judged by 0.19 (given)" in text or "megatron-core: " in text
    assert "names in megatron-core 0.19: cuda_graph_impl" in text
    assert doctor.main(["--mcore", "new"]) == 2 and capsys.readouterr().err.count("\n") == 1


def test_nothing_heavy_is_imported():
    code = f"import sys; sys.path.insert(0, {str(HELPER.parent)!r}); import doctor; "
    code += "print([m for m in ('torch', 'jinja2', 'yaml') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
