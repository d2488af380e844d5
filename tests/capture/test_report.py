# SPDX-License-Identifier: Apache-2.0
import copy

import pytest

from cudagraphs.capture import report
from cudagraphs.capture.run import Outcome

LEGAL = {"verdict": "legal", "codes": [], "titles": {}}
ILLEGAL = {"verdict": "illegal", "codes": ["CG105"], "titles": {"CG105": "Scope moe on a dropless MoE"}}


def digest(value):
    return {"numel": 1, "norm": value, "hash": repr(value), "sketch": [value]}


def outcome(name, step_ms=10.0, loss=1.0, graphs=4, **more):
    record = {
        "steps": [{"index": n, "losses": [loss], "gradients": {"mlp": digest(loss)}} for n in range(3)],
        "evaluations": [{"index": 0, "losses": [loss]}],
        "parameters": {"start": {"mlp": digest(1.0)}, "end": {"mlp": digest(loss)}},
    }
    cleanup = {
        "deleted": {"live_graphs_after": 0},
        "seconds": {"graphs": 0.1},
        "exit_s": 0.5,
        "status": 0,
        "memory": {},
    }
    return Outcome(
        name,
        record,
        captures=graphs,
        capture_s=0.5,
        replays=[graphs] * 3,
        memory={"peak": {"reserved": 10 * 2**20}},
        profile={
            "graph_launches": graphs,
            "busy_ms": 4.0,
            "kernel_ms": 4.0,
            "kernels": 9,
            "activity": {"span_ms": 10.0, "busy": [1.0, 0.2, 0.4]},
        },
        rounds_ms=[[step_ms] * 4] * 3,
        wall_ms=[40.0],
        cleanup=cleanup,
        **more,
    )


def job(name, impl="local", device="cuda", drill=None, dropout=0.0):
    return {
        "name": name,
        "impl": impl,
        "modules": [],
        "drill": drill,
        "device": device,
        "precision": "bf16",
        "dropout": dropout,
    }


def assessed(variant, rule=LEGAL, eager=None, **job_fields):
    outcomes = {
        "none": eager or outcome("none", graphs=0),
        "none (repeat)": outcome("none (repeat)", graphs=0),
        "v": variant,
    }
    jobs = {"none": job("none", "none"), "none (repeat)": job("none (repeat)", "none"), "v": job("v", **job_fields)}
    results = report.assess(outcomes, jobs, {"v": rule}, 5.0)
    return results, results[-1]


FAILURE = {
    "kind": "capture",
    "phase": "capture",
    "message": "m",
    "cause": "because",
    "mend": "do",
    "code": 907,
    "name": "cudaErrorCapturedEvent",
    "rules": [],
    "detail": "",
    "memory": None,
}


def failed(kind="capture"):
    return Outcome("v", failure={**FAILURE, "kind": kind})


def test_a_fast_and_equal_variant_is_recommended():
    results, out = assessed(outcome("v", step_ms=5.0))
    assert out["verdict"] == "captured, same training to the last bit, faster 2.00x [2.00, 2.00], +0 MiB"
    assert report.recommend(results)["variant"] == "v" and report.exit_code(results) == 0
    assert report.recommend(results, world=2, gpus=1)["variant"] is None  # their times say nothing


def test_no_gain_recommends_eager_with_the_reason():
    results, out = assessed(outcome("v", step_ms=9.9))
    choice = report.recommend(results)
    assert out["speedup"]["verdict"] == "neutral" and choice["variant"] == "none" and "busy 40%" in choice["why"]
    assert report.exit_code(results) == 0


def test_fast_but_other_training_is_never_recommended():
    results, out = assessed(outcome("v", step_ms=2.0, loss=1.5))
    assert "NOT the same training" in out["verdict"] and "step 0, loss" in out["verdict"]
    assert report.recommend(results)["variant"] == "none" and report.exit_code(results) == 1


def test_a_problem_on_another_rank_is_a_problem_of_the_variant():
    results, out = assessed(outcome("v", step_ms=2.0))
    fine = report.summary(results)
    broken = copy.deepcopy(fine)
    broken["v"] |= {"problem": "other training: step 3", "parity": {"verdict": "differs", "bitwise": False}}
    report.join_ranks(results, [fine, broken])
    assert "rank 1: other training: step 3" in out["verdict"] and "parity by rank: bitwise differs" in out["verdict"]
    assert report.recommend(results)["variant"] == "none" and report.exit_code(results) == 1


def test_eager_that_does_not_repeat_itself_is_noise_and_no_failure():
    outcomes = {"none": outcome("none", graphs=0), "none (repeat)": outcome("none (repeat)", graphs=0, loss=1.5)}
    results = report.assess(outcomes, {name: job(name, "none") for name in outcomes}, {}, 5.0)
    assert "other training" in results[1]["verdict"] and report.exit_code(results) == 0


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"captures": 0, "replays": [0, 0, 0]}, "no graph was created"),
        ({"replays": [0, 0, 0]}, "never replayed"),
        ({"replays": [4, 0, 4]}, "1 steps fell back to eager"),
        ({"replays": [4, 3, 4]}, "1 replays fell back to eager"),
    ],
)
def test_replay_is_proven_and_not_assumed(change, word):
    variant = outcome("v", step_ms=5.0)
    for name, value in change.items():
        setattr(variant, name, value)
    results, out = assessed(variant)
    assert word in out["verdict"] and report.recommend(results)["variant"] == "none" and report.exit_code(results) == 1


def test_replays_that_the_profiler_did_not_see_prove_nothing():
    variant = outcome("v", step_ms=5.0)
    variant.profile["graph_launches"] = 0
    assert assessed(variant)[1]["captured"] is False


def test_the_rules_and_the_gpu_are_held_against_each_other():
    assert "rules call it legal" in assessed(failed())[1]["against_rules"]
    assert "CG105" in assessed(outcome("v"), ILLEGAL)[1]["against_rules"]
    assert assessed(failed(), ILLEGAL)[1]["against_rules"] is None
    assert assessed(outcome("v"))[1]["against_rules"] is None
    # memory and crashes are no question of legality, and a drill says nothing
    assert assessed(failed("out-of-memory"))[1]["against_rules"] is None
    assert assessed(failed(), drill="sync")[1]["against_rules"] is None


def test_an_illegal_variant_that_fails_as_predicted_is_no_failure_of_the_run():
    assert report.exit_code(assessed(failed(), ILLEGAL)[0]) == 0
    assert report.exit_code(assessed(failed(), LEGAL)[0]) == 1


def test_the_cheaper_of_two_equally_fast_variants_wins():
    outcomes = {"none": outcome("none", graphs=0), "a": outcome("a", step_ms=5.0), "b": outcome("b", step_ms=5.05)}
    outcomes["a"].memory = {"peak": {"reserved": 100 * 2**20}}
    jobs = {name: job(name, "none" if name == "none" else "local") for name in outcomes}
    choice = report.recommend(report.assess(outcomes, jobs, {}, 5.0))
    assert choice["variant"] == "b" and "a is as fast" in choice["why"]


def test_dropout_compares_distributions_and_not_losses():
    eager = outcome("none", graphs=0, draws=[float(n) for n in range(40)])
    frozen = outcome("v", loss=7.0, draws=[1.0] * 40)
    assert "dropout draws repeat" in assessed(frozen, eager=eager, dropout=0.1)[1]["verdict"]
    moving = outcome("v", loss=7.0, draws=[n + 0.5 for n in range(40)])
    assert assessed(moving, eager=eager, dropout=0.1)[1]["parity"]["verdict"] == "tolerance"


def test_the_table_has_a_row_and_a_verdict_for_each_variant():
    results, _ = assessed(outcome("v", step_ms=5.0))
    report.join_ranks(results, [report.summary(results)] * 2)
    result = {
        "machine": {"gpu": "NVIDIA H200"},
        "versions": {"torch": "2.11.0", "nccl": None},
        "stack": "torch",
        "model": "dense",
        "precision": "bf16",
        "parallel": {"world": 2, "gpus": 1},
        "changes": ["layers 32 -> 8"],
        "variants": results,
        "skipped": {"local:moe": ILLEGAL},
        "recommendation": report.recommend(results),
        "shape": {
            "layers": 8,
            "hidden": 1024,
            "sequence": 512,
            "microbatch": 1,
            "microbatches": 2,
            "experts": 8,
            "top_k": 2,
        },
    }
    text = report.table(copy.deepcopy(result))
    for piece in (
        "NVIDIA H200, torch 2.11.0\n",
        "scaled down: layers 32 -> 8",
        "2.00x",
        "busy 40% of an eager step",
        "local:moe: not run, illegal by CG105",
        "parity by rank: bitwise bitwise",
        "2 ranks share 1 GPU",
        "Recommendation: v.",
        "8 experts top-2",
    ):
        assert piece in text
    assert all(line == line.rstrip() for line in text.splitlines())
