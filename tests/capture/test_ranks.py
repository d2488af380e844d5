# SPDX-License-Identifier: Apache-2.0
"""Several ranks keep step, and one that fails does not leave the others waiting. The ranks are threads or processes on
a CPU."""

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

dist = pytest.importorskip("torch.distributed")

import smoke_capture  # noqa: E402
from cudagraphs.capture import parent, report  # noqa: E402
from cudagraphs.capture.ranks import Ranks, StoreRanks, from_environment  # noqa: E402
from cudagraphs.capture.run import Effort, run  # noqa: E402
from test_parent import FAKE, job  # noqa: E402

# Two runs of one process: the second must not read what the first left in the store.
TWICE = """
import sys
sys.path.insert(0, sys.argv[1])
import smoke_capture
launchers = smoke_capture.Launchers()
try:
    codes = [smoke_capture.main(sys.argv[2:] + ["--seed", str(seed)], launchers) for seed in (1, 2)]
finally:
    launchers.close()
sys.exit(max(codes))
"""
HELPERS = Path(__file__).parents[2] / "helpers"


def on_two_ranks(tmp_path, behave, limits):
    """Runs one variant with the fakes on two ranks; `behave` holds what the variant does on each. Returns (results,
    seconds)."""
    store = dist.HashStore()

    def rank(number):
        ranks = StoreRanks(store, number, 2, limit_s=60)
        folder = tmp_path / str(number)
        folder.mkdir()
        jobs = {one["name"]: one for one in (job("none", "none"), job("v", behave=behave[number]))}
        session = parent.Session(parent.SpawnLauncher(folder, FAKE), limits, ranks)
        outcomes = run(session, jobs, Effort(rounds=1, jobs=1), ranks)
        ranks.leave()
        return {out["name"]: out for out in report.assess(outcomes, jobs, {}, 5.0)}

    begin = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(rank, range(2)))
    return results, time.monotonic() - begin


def test_ranks_that_all_work_agree(tmp_path):
    results, _ = on_two_ranks(tmp_path, [{}, {}], {"default": 20.0, "exit": 5.0})
    assert all(out["v"]["captured"] and out["v"]["failure"] is None for out in results)


@pytest.mark.parametrize("phase", ["capture", "parity", "time"])
def test_a_rank_that_dies_frees_the_one_that_waits_for_it(tmp_path, phase):
    """Rank 0 hangs as it would in a collective whose partner is gone; its own limit is far away."""
    results, seconds = on_two_ranks(tmp_path, [{phase: "hang"}, {phase: "crash"}], {"default": 100.0, "exit": 5.0})
    assert seconds < 30
    waiting, dead = (out["v"]["failure"] for out in results)
    assert dead["kind"] == "crash" and waiting["kind"] == "peer" and "rank 1" in waiting["cause"]
    assert all(out["none"]["failure"] is None for out in results)


def test_a_failure_on_one_rank_is_a_failure_on_all(tmp_path):
    results, _ = on_two_ranks(tmp_path, [{}, {"capture": "oom"}], {"default": 20.0, "exit": 5.0})
    assert [out["v"]["failure"]["kind"] for out in results] == ["peer", "out-of-memory"]
    assert [report.exit_code(list(out.values())) for out in results] == [1, 1]


def test_values_come_back_in_the_order_of_ranks():
    store = dist.HashStore()
    ranks = [StoreRanks(store, number, 3, limit_s=10) for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda one: one.agree("x", one.rank * 10), ranks)) == [[0, 10, 20]] * 3
        assert list(pool.map(lambda one: one.agree("x", None), ranks)) == [[None] * 3] * 3


def test_one_rank_needs_no_store(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    alone = from_environment(1.0)
    assert type(alone) is Ranks and alone.agree("x", 5) == [5] and alone.failed("v") is None
    alone.leave()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def without_an_agent(*arguments, delay=(0.0, 0.0)):
    """(exit code, stderr) of both ranks of smoke_capture.py as srun or mpirun start them: rank 0 holds the store.

    The ranks get `arguments`, where {rank} stands for the rank, and start after `delay` seconds.
    """
    port, started = free_port(), []
    for rank in range(2):
        time.sleep(delay[rank])
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
        environment |= {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        words = [word.format(rank=rank) for word in arguments]
        started.append(
            subprocess.Popen(
                [sys.executable, str(HELPERS / "smoke_capture.py"), "--device", "cpu", "--quiet", *words],
                env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    try:
        return [(one.returncode, err) for one in started for err in [one.communicate(timeout=60)[1]]]
    finally:
        for one in started:
            one.kill()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--precision", "fp8-delayed"], "needs --stack"),
        (["--tp", "3"], "2 processes do not divide"),
        (["--variant", "te"], "no implementation"),
        (["--hidden", "100", "--heads", "7"], "does not divide"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_leaves_no_rank_behind(arguments, word):
    # the second rank comes when the first has gone, and its store with it
    for code, err in without_an_agent(*arguments, delay=(0.0, 3.0)):
        assert code == 2 and word in err and len(err.splitlines()) == 1


def test_what_only_the_rank_that_writes_can_find_ends_all(tmp_path):
    (tmp_path / "1").mkdir()
    first, second = without_an_agent("--json", str(tmp_path / "{rank}" / "x.json"))
    assert first[0] == second[0] == 2
    assert "there is no folder" in first[1] and "rank 0: --json" in second[1]


@pytest.mark.parametrize(
    ("variables", "word"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set, and WORLD_SIZE is 2"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two: not a number"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_PORT": "1"}, "RANK=2: of 2 ranks"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "1"}, "MASTER_ADDR is not set"),
    ],
    ids=str,
)
def test_a_launcher_that_set_too_little_is_wrong_usage(monkeypatch, capsys, variables, word):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert smoke_capture.main(["--device", "cpu"]) == 2
    assert word in capsys.readouterr().err


def test_a_fault_on_one_rank_ends_what_all_do_together():
    store = dist.HashStore()

    def rank(number):
        def work():
            if number:
                raise smoke_capture.Unavailable("no GPU")
            return "ready"

        with pytest.raises(smoke_capture.Unavailable) as stopped:
            smoke_capture._agreed(StoreRanks(store, number, 2, limit_s=20), "start", work)
        return str(stopped.value)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, range(2))) == ["rank 1: no GPU", "no GPU"]


def test_two_processes_train_data_parallel_over_gloo(tmp_path):
    port = free_port()
    arguments = [
        "--device",
        "cpu",
        "--precision",
        "fp32",
        "--layers",
        "1",
        "--hidden",
        "32",
        "--ffn",
        "64",
        "--sequence",
        "16",
        "--vocabulary",
        "64",
        "--rounds",
        "1",
        "--variant",
        "full_iteration",
        "--phase-limit",
        "60",
        "--quiet",
    ]
    # as torchrun does, the launcher holds the store
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    started = []
    for rank in range(2):
        environment = {
            **os.environ,
            "WORLD_SIZE": "2",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", TWICE, str(HELPERS), *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    (out, err), (silent, err_one) = [one.communicate(timeout=240) for one in started]
    assert [one.returncode for one in started] == [0, 0], err + err_one
    assert out.count("full_iteration: captured, same training to the last bit") == 2 and silent == ""
    assert out.count("parity by rank: bitwise bitwise") == 2
    del store
