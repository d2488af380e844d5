# SPDX-License-Identifier: Apache-2.0
"""The launcher under torchrun: two ranks and gloo on the CPU, one fails while the other waits in a collective."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import delete_graphs

pytest.importorskip("torch")

HELPER = Path(delete_graphs.__file__)
TRAIN = """
    import os, signal, sys, time
    import torch, torch.distributed as dist

    class Graph(torch.cuda.CUDAGraph):
        def __new__(cls): return object.__new__(cls)
        def __init__(self): self.live = True
        def pool(self):
            if not self.live: raise RuntimeError
        def reset(self):
            self.live = False
            print(f"rank {dist.get_rank()} reset", flush=True)

    dist.init_process_group("gloo")
    graph = Graph()
    number = torch.ones(1)
    dist.all_reduce(number)
    if dist.get_rank() == 1 and sys.argv[1] == "raises":
        raise ValueError("rank 1")
    if dist.get_rank() == 1 and sys.argv[1] == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] != "succeeds":
        dist.all_reduce(number)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("what", "resets", "codes"),
    [("succeeds", {0, 1}, set()), ("raises", {0, 1}, {"1"}), ("is killed", {0}, {"-9"})],
)
def test_torchrun(tmp_path, what, resets, codes):
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(HELPER),
            "--limit",
            "60",
            "--",
            "train.py",
            what,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert {int(rank) for rank in re.findall(r"rank (\d) reset", done.stdout)} == resets
    failed = re.findall(r"exitcode\s*:\s*(-?\d+)", done.stderr)
    assert (done.returncode == 0) == (not codes)
    assert codes <= set(failed) and "0" not in failed
