# SPDX-License-Identifier: Apache-2.0
"""The partial graph manager under DDP, FSDP2 and a pipeline: two CPU ranks with stand-in graphs; and the launcher."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("torch has no gloo", allow_module_level=True)

from multi_gpu import partial_parallel  # noqa: E402
from parallel_modes import BLOCKS, MICROBATCHES, VARIANTS  # noqa: E402
from parallel_worker import STEPS, Comparison  # noqa: E402

SCRIPT = Path(partial_parallel.__file__)
FAULTY = Path(__file__).with_name("faulty_variants.py")


def launch(script, output, *arguments):
    """(exit code, result, stderr) of a run on the CPU."""
    done = subprocess.run([sys.executable, script, "--output", output, "--device", "cpu", "--hidden", "32", *arguments],
                          capture_output=True, text=True, timeout=120)
    assert output.exists(), done.stderr
    return done.returncode, json.loads(output.read_text()), done.stderr


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return launch(SCRIPT, tmp_path_factory.mktemp("parallel") / "result.json", "--revision", "abc")


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    return launch(FAULTY, tmp_path_factory.mktemp("faulty") / "result.json", "--variant-limit", "8")


# Every mode


def test_every_variant_is_equal_and_replayed_on_both_ranks(healthy):
    code, result, stderr = healthy
    assert code == 0 and result["all_good"], stderr
    assert list(result["variants"]) == list(VARIANTS)
    assert {variant.mode for variant in VARIANTS.values()} == {"ddp", "fsdp2", "pipeline"}
    for name, variant in result["variants"].items():
        assert [row["rank"] for row in variant["ranks"]] == [0, 1]
        blocks = BLOCKS // 2 if variant["mode"] == "pipeline" else BLOCKS
        for row in variant["ranks"]:
            assert row["bitwise_equal"] and row["largest_difference"] == 0.0, name
            losses = MICROBATCHES if variant["mode"] != "pipeline" or row["rank"] == 1 else 0
            assert row["compared_tensors"] == STEPS * (2 * 6 * blocks + losses)
            counters = dict(row["counters"])
            # in torch 2.11, not in 2.13, a stage asks for its shapes with a call without gradients in the first step
            assert counters.pop("captured") in ([blocks, 2 * blocks] if variant["mode"] == "pipeline" else [blocks])
            assert counters == {"replayed": blocks * MICROBATCHES * (STEPS - 1), "fallback": 0, "reasons": {}}
            chains = 1 if name == "ddp-merged" else blocks
            assert row["launches_in_one_step"] == {"replayed_calls": blocks * MICROBATCHES,
                                                   "graph_launches": 2 * chains * MICROBATCHES}


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.mode == "ddp"])
def test_ddp_reduces_in_several_buckets_and_leaves_the_mean_on_every_rank(healthy, name):
    for row in healthy[1]["variants"][name]["ranks"]:
        assert row["averaging"]["own_gradients_differ_between_ranks"]
        assert row["averaging"]["equal_on_all_ranks"]
        assert row["averaging"]["largest_difference_to_mean"] == 0.0 < row["averaging"]["largest_gradient"]
        assert len(row["rebuilt_bucket_sizes"].split(",")) > BLOCKS


def test_a_pipeline_stage_has_a_slot_for_every_microbatch_in_flight(healthy):
    first, last = (row["slots"] for row in healthy[1]["variants"]["pipeline-gpipe"]["ranks"])
    assert max(first["0"]) == max(first["1"]) == max(last["2"]) == MICROBATCHES
    assert max(last["3"]) == MICROBATCHES + 1, "the schedule keeps the outputs of the last stage"
    first, last = (row["slots"] for row in healthy[1]["variants"]["pipeline-1f1b"]["ranks"])
    assert max(first["0"]) == 2 and max(last["2"]) == 1


def test_the_result_says_what_ran_where_and_names_no_path(healthy):
    _, result, _ = healthy
    assert result["command"] == ("python3 evals/multi_gpu/partial_parallel.py --output result.json --device cpu "
                                 "--hidden 32 --revision abc")
    assert result["revision"] == "abc" and result["seed"] and result["date"] and result["schema_version"] == 1
    assert result["versions"]["torch"] == torch.__version__
    assert result["configuration"]["graphs"] == "stand-in graphs"
    assert str(SCRIPT.parents[2]) not in json.dumps(result)


# What goes wrong


def test_a_rank_that_raises_stops_the_other_one_and_says_where(faulty):
    code, result, stderr = faulty
    assert code == 1 and not result["all_good"], stderr
    waiting, failed = result["variants"]["raises"]["ranks"]
    assert (failed["error"], failed["stage"]) == ("ValueError: planted", "step 2")
    assert any("in raises" in line for line in failed["log_end"])
    assert "error" in waiting and waiting["log_end"]
    assert not result["variants"]["raises"]["good"]


def test_a_rank_that_dies_is_reported_with_its_exit_code(faulty):
    _, died = faulty[1]["variants"]["dies"]["ranks"]
    assert died["error"] == "the process ended with 7" and not faulty[1]["variants"]["dies"]["good"]


def test_a_rank_that_hangs_is_ended_and_its_stack_is_in_the_log(faulty):
    for row in faulty[1]["variants"]["hangs"]["ranks"]:
        assert "error" in row
    hung = faulty[1]["variants"]["hangs"]["ranks"][1]
    assert any("faulty_variants.py" in line for line in hung["log_end"])
    assert str(SCRIPT.parents[2]) not in json.dumps(faulty[1])


def test_gradients_that_differ_by_a_millionth_are_found(faulty):
    variant = faulty[1]["variants"]["wrong"]
    assert not variant["good"]
    for row in variant["ranks"]:
        assert not row["bitwise_equal"] and 0 < row["largest_difference"] < 1e-3
        assert row["first_unequal"].startswith("step 1 gradient of")


def test_gradients_that_nobody_averaged_are_found(faulty):
    variant = faulty[1]["variants"]["alone"]
    assert not variant["good"]
    for row in variant["ranks"]:
        assert row["bitwise_equal"] and not row["averaging"]["equal_on_all_ranks"]


def test_a_variant_after_failed_ones_runs_and_counts_what_no_slot_was_free_for(faulty):
    variant = faulty[1]["variants"]["one-slot"]
    assert variant["good"]
    for row in variant["ranks"]:
        calls = BLOCKS // 2 * MICROBATCHES * (STEPS - 1)
        assert row["counters"]["replayed"] == calls // MICROBATCHES
        assert row["counters"]["reasons"] == {"in flight": calls - calls // MICROBATCHES}


def test_what_the_limit_leaves_no_time_for_is_in_the_result(tmp_path):
    code, result, _ = launch(SCRIPT, tmp_path / "result.json", "--limit", "0.5", "--variants", "ddp", "pipeline-1f1b")
    assert code == 1 and list(result["variants"]) == ["ddp", "pipeline-1f1b"]
    for variant in result["variants"].values():
        assert all(row["error"].startswith("ended by the launcher") for row in variant["ranks"])


# Parts


def good_row():
    return {"rank": 0, "bitwise_equal": True, "counters": {"replayed": 8},
            "launches_in_one_step": {"graph_launches": 4},
            "averaging": {"own_gradients_differ_between_ranks": True, "equal_on_all_ranks": True,
                          "largest_difference_to_mean": 0.0, "largest_gradient": 1.0}}


@pytest.mark.parametrize(("place", "key", "value"), [
    (None, "error", "RuntimeError"), (None, "bitwise_equal", False), ("counters", "replayed", 0),
    ("launches_in_one_step", "graph_launches", 0), ("averaging", "own_gradients_differ_between_ranks", False),
    ("averaging", "equal_on_all_ranks", False), ("averaging", "largest_difference_to_mean", 1e-3)])
def test_a_row_is_good_only_as_a_whole(place, key, value):
    row = copy.deepcopy(good_row())
    assert partial_parallel.is_good(row)
    (row if place is None else row[place])[key] = value
    assert not partial_parallel.is_good(row)


@pytest.mark.parametrize("other", [None, torch.zeros(3), torch.tensor([1.0, float("nan")])])
def test_what_cannot_be_compared_is_unequal_without_a_number(other):
    comparison = Comparison()
    comparison.add("same", torch.ones(2), torch.ones(2))
    comparison.add("other", torch.ones(2), other)
    assert comparison.row() == {"bitwise_equal": False, "compared_tensors": 2, "unequal_tensors": 1,
                                "first_unequal": "other", "largest_difference": None}


def test_nothing_compared_is_not_equal():
    assert not Comparison().row()["bitwise_equal"]


@pytest.mark.parametrize(("arguments", "message"), [
    (["--output", "missing/out.json"], "no directory missing"),
    (["--output", "out.json", "--variants", "zero3"], "zero3"),
    (["--output", "out.json", "--hidden", "0"], "--hidden must be at least 1, got 0"),
    ([], "--output"),
])
def test_bad_usage_is_refused_with_two(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        partial_parallel.main([*arguments, "--device", "cpu"])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("form", [["--output", "{}"], ["--output={}"]], ids=len)
def test_the_command_names_the_file_that_it_wrote(form, tmp_path, monkeypatch):
    root = SCRIPT.parents[2]
    monkeypatch.chdir(root)
    for given, named in (
        (root / "evals" / "results" / "x.json", "evals/results/x.json"),
        ("evals/results/gpu/../x.json", "evals/results/x.json"),
        (tmp_path / "x.json", "x.json"),
    ):
        shown = partial_parallel.command(["--share-gpu", *(word.format(given) for word in form), "--revision", "r"])
        wanted = " ".join(form).format(named)
        assert shown == f"python3 evals/multi_gpu/partial_parallel.py --share-gpu {wanted} --revision r"


def test_an_option_is_not_abbreviated_so_that_the_command_names_no_path(tmp_path):
    with pytest.raises(SystemExit, match="2"):
        partial_parallel.main(["--out", str(tmp_path / "x.json"), "--device", "cpu"])


def test_ranks_that_a_launcher_made_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as stopped:
        partial_parallel.main(["--output", str(tmp_path / "out.json")])
    assert stopped.value.code == 2 and "plain python3" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="two GPUs here")
def test_fewer_than_two_gpus_is_four(tmp_path, capsys):
    assert partial_parallel.main(["--output", str(tmp_path / "out.json")]) == 4
    assert "needs 2 GPUs, found" in capsys.readouterr().err and not (tmp_path / "out.json").exists()
