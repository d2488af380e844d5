# SPDX-License-Identifier: Apache-2.0
"""The parent survives what its children do, and says what it was. Children are fakes that speak the protocol."""

import os
import sys
import time
from pathlib import Path

import pytest

from cudagraphs.capture import parent, report
from cudagraphs.capture.ranks import Ranks
from cudagraphs.capture.run import Effort, run

FAKE = [sys.executable, str(Path(__file__).with_name("fake_child.py"))]
LIMITS = {"default": 20.0, "exit": 5.0}


def job(name, impl="transformer_engine", **more):
    return {
        "name": name,
        "impl": impl,
        "modules": [],
        "drill": None,
        "device": "cuda",
        "precision": "bf16",
        "dropout": 0,
        **more,
    }


def jobs(*variants):
    return {one["name"]: one for one in (job("none", "none"), job("none (repeat)", "none"), *variants)}


def go(tmp_path, all_jobs, limits=LIMITS, ranks=None, **effort):
    ranks = ranks or Ranks()
    session = parent.Session(parent.SpawnLauncher(tmp_path, FAKE), limits, ranks)
    return run(session, all_jobs, Effort(**{"rounds": 2, **effort}), ranks)


def assessed(tmp_path, all_jobs, rules=None, **more):
    outcomes = go(tmp_path, all_jobs, **more)
    return {out["name"]: out for out in report.assess(outcomes, all_jobs, rules or {}, 5.0)}


def no_process_left(outcomes):
    """Every process that was started is gone: no child of this process runs the fake, and none was left behind."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            _, _, state, parent_pid, *_ = (entry / "stat").read_text().split()
            ours = int(parent_pid) in (os.getpid(), 1)  # other test processes have fakes of their own
            if ours and state != "Z" and str(FAKE[1]).encode() in (entry / "cmdline").read_bytes():
                return False
        except OSError:
            continue
    return True


def test_a_clean_run_gives_every_variant_its_figures(tmp_path):
    out = assessed(tmp_path, jobs(job("fast", step_ms=2.5, reserved=300)))
    fast = out["fast"]
    assert fast["captured"] and fast["parity"]["verdict"] == "bitwise" and fast["cleanup"]["clean"]
    assert fast["speedup"]["value"] == pytest.approx(4.0) and fast["speedup"]["verdict"] == "faster"
    assert fast["memory_cost"] == 200
    assert out["none"]["busy"]["best_speedup"] == pytest.approx(5.0)
    assert report.recommend(list(out.values()))["variant"] == "fast"
    assert report.exit_code(list(out.values())) == 0


@pytest.mark.parametrize(
    ("phase", "behave", "kind", "word"),
    [
        ("build", "crash", "crash", "SIGSEGV"),
        ("capture", "crash", "crash", "cudaErrorStreamCaptureImplicit"),
        ("parity", "kill", "crash", "host memory"),
        ("profile", "exit", "crash", "exit status 7"),
        ("capture", "oom", "out-of-memory", "private pools"),
        ("capture", "error", "capture", "device-to-host"),
    ],
)
def test_a_variant_that_dies_leaves_the_others_alone(tmp_path, phase, behave, kind, word):
    out = assessed(tmp_path, jobs(job("bad", behave={phase: behave}), job("good", step_ms=5.0)), jobs=8)
    failure = out["bad"]["failure"]
    assert (failure["kind"], failure["phase"]) == (kind, phase)
    assert word in failure["cause"] + failure["detail"]
    assert out["good"]["captured"] and out["good"]["speedup"]["verdict"] == "faster"
    assert report.exit_code(list(out.values())) == 1
    assert no_process_left(out)


def test_a_hang_ends_at_its_limit_with_the_stack(tmp_path):
    begin = time.monotonic()
    out = assessed(
        tmp_path, jobs(job("bad", behave={"capture": "hang"}), job("good")), limits={"default": 2.0, "exit": 5.0}
    )
    assert time.monotonic() - begin < 30
    failure = out["bad"]["failure"]
    assert (
        failure["kind"] == "hang"
        and "standing in capture()" in failure["detail"]
        and "in capture" in failure["message"]
    )
    assert out["good"]["captured"] and no_process_left(out)


def test_a_hang_at_exit_is_part_of_the_verdict(tmp_path):
    out = assessed(
        tmp_path, jobs(job("bad", behave={"close": "hang after close"})), limits={"default": 10.0, "exit": 1.0}
    )
    assert out["bad"]["failure"]["phase"] == "exit" and not out["bad"]["cleanup"]["clean"]
    assert report.exit_code(list(out.values())) == 1 and no_process_left(out)


def test_a_graph_that_outlives_the_cleanup_is_part_of_the_verdict(tmp_path):
    out = assessed(tmp_path, jobs(job("bad", left=3)))
    assert not out["bad"]["cleanup"]["clean"] and "3 graphs left" in out["bad"]["verdict"]


def test_lines_that_are_no_message_are_passed_over(tmp_path):
    assert assessed(tmp_path, jobs(job("odd", behave={"parity": "garbage"})))["odd"]["captured"]


def test_out_of_memory_beside_others_is_tried_once_alone(tmp_path):
    started = []

    class Launcher(parent.SpawnLauncher):
        def start(self, one):
            started.append(one["name"])
            if started.count(one["name"]) > 1:
                one = {**one, "behave": {}}
            return super().start(one)

    ranks = Ranks()
    all_jobs = jobs(job("big", behave={"capture": "oom"}), job("small"))
    session = parent.Session(Launcher(tmp_path, FAKE), LIMITS, ranks)
    outcomes = run(session, all_jobs, Effort(rounds=1), ranks)
    assert started.count("big") == 2 and started.count("none") == 1
    assert outcomes["big"].failure is None


def test_waves_keep_to_the_number_of_processes(tmp_path):
    alive, most = [], []

    class Launcher(parent.SpawnLauncher):
        def start(self, one):
            alive[:] = [child for child in alive if child.alive]
            child = super().start(one)
            alive.append(child)
            most.append(len(alive))
            return child

    ranks = Ranks()
    session = parent.Session(Launcher(tmp_path, FAKE), LIMITS, ranks)
    outcomes = run(session, jobs(*(job(f"v{n}") for n in range(4))), Effort(rounds=1, jobs=3), ranks)
    assert max(most) == 3 and all(outcomes[f"v{n}"].cleanup for n in range(4))


def test_eager_that_fails_leaves_no_recommendation(tmp_path):
    all_jobs = jobs(job("v"))
    all_jobs["none"]["behave"] = {"build": "exit"}
    results = list(assessed(tmp_path, all_jobs).values())
    assert report.recommend(results)["variant"] is None and report.exit_code(results) == 1


def test_descriptors_are_given_back(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    go(tmp_path, jobs(job("bad", behave={"capture": "crash"}), job("good")))
    assert len(os.listdir("/proc/self/fd")) == before
