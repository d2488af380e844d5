# SPDX-License-Identifier: Apache-2.0
"""Rendered training loops on a GPU: they capture, and train as they do without graphs."""

import importlib.util
import os
import re
import socket
import subprocess
import sys

import pytest
import render_template

pytestmark = pytest.mark.gpu
NEVER = 1000  # eager steps before the capture: more than the loop has


def loop(tmp_path, name, **settings):
    """The rendered program's output: `{step: loss}` of what it printed."""
    path = tmp_path / f"{name}-{settings['warmup_steps']}.py"
    versions = ["--mcore", "0.19", "--te", "2.14"] if name.startswith("mcore") else []
    argv = [name, *versions, *(f"--set={key}={value}" for key, value in settings.items()), "--output", str(path)]
    assert render_template.main(argv) == 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    exports = dict(re.findall(r"^Before the launch: export (\w+)=(\S+)$", path.read_text(), re.M))
    environment = {**os.environ, **exports, **ranks}
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+): loss ([\d.]+)$", done.stdout, re.M)}


@pytest.mark.parametrize("name", ["pytorch-layers", "pytorch-step"])
def test_plain_loops_train(tmp_path, name):
    found = loop(
        tmp_path, name, steps=60, hidden=8, sequence=4, layers=2, microbatches=3, precision="float32",
        learning_rate=0.02, warmup_steps=3,
    )  # fmt: skip
    # the targets are noise around zero, so a loop that trains forgets its inputs and halves the loss
    assert len(found) == 7 and found[59] < 0.75 * found[0]


@pytest.mark.parametrize("name", ["mcore-te-loop", "mcore-full-iteration-loop"])
def test_megatron_core_loops_train_as_eager_ones_do(tmp_path, name):
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs megatron-core and transformer-engine")
    shape = {"layers": 2, "hidden": 256, "heads": 4, "sequence": 256, "microbatches": 2, "train_steps": 31}
    graphs = loop(tmp_path, name, **shape, warmup_steps=3)
    eager = loop(tmp_path, name, **shape, warmup_steps=NEVER)
    assert sorted(graphs) == [0, 10, 20, 30] and graphs == pytest.approx(eager, rel=2e-3)
    # random labels of 32000 kinds: the loss starts near ln 32000, whatever the number of microbatches
    assert 10 < eager[0] < 11.5
