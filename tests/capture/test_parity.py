# SPDX-License-Identifier: Apache-2.0
import copy
import math
import random

import pytest

from cudagraphs.capture import parity


def digest(values):
    return {"numel": len(values), "norm": math.hypot(*values), "hash": repr(values), "sketch": list(values)}


def record(steps=6):
    chance = random.Random(3)

    def groups():
        return {
            "mlp": digest([chance.random() for _ in range(4)]),
            "router": digest([chance.random() for _ in range(4)]),
        }

    return {
        "steps": [
            {"index": n, "losses": [chance.random(), chance.random()], "gradients": groups()} for n in range(steps)
        ],
        "evaluations": [{"index": 0, "losses": [chance.random()]}],
        "parameters": {"start": groups(), "end": groups()},
    }


def changed(change):
    out = copy.deepcopy(record())
    change(out)
    return parity.compare(record(), out, "bf16")


def scale(groups, name, factor):
    groups[name] = digest([value * factor for value in groups[name]["sketch"]])


def test_equal_bits_are_reported_as_such():
    out = changed(lambda r: None)
    assert out["verdict"] == "bitwise" and out["loss"] == out["gradients"] == out["parameters"] == 0.0
    assert out["first_difference"] is None and out["steps"] == 6


def test_a_small_difference_is_within_tolerance_and_not_bitwise():
    def change(r):
        r["steps"][2]["losses"][1] *= 1.0001
        scale(r["steps"][3]["gradients"], "mlp", 1.001)

    out = changed(change)
    assert out["verdict"] == "tolerance" and not out["bitwise"] and 5e-5 < out["loss"] < 2e-4


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda r: scale(r["steps"][0]["gradients"], "router", 0.5), "step 0, gradients of router"),
        (lambda r: r["steps"][4]["losses"].__setitem__(0, 9.0), "step 4, loss"),
        (lambda r: r["steps"][4]["losses"].__setitem__(0, math.nan), "step 4, loss"),
        (lambda r: r["steps"][1]["losses"].pop(), "step 1, loss"),
        (lambda r: r["evaluations"][0]["losses"].__setitem__(0, 9.0), "evaluation 0, loss"),
        (lambda r: scale(r["parameters"]["end"], "mlp", 1.1), "parameters end, mlp"),
        (lambda r: r["parameters"].pop("end"), "parameters end"),
        (lambda r: r["steps"].pop(), "steps: 6 in eager, 5"),
        (lambda r: r["steps"][2]["gradients"].pop("router"), "step 2, gradients of router"),
        (lambda r: scale(r["steps"][5]["gradients"], "router", 0.0), "step 5, gradients of router"),
    ],
    ids=[
        "one group halved at the first step",
        "loss",
        "nan",
        "a microbatch lost",
        "evaluation",
        "parameters",
        "no end",
        "a step lost",
        "a group lost",
        "zero gradient",
    ],
)
def test_other_training_is_found_where_it_begins(change, where):
    out = changed(change)
    assert out["verdict"] == "differs" and where in out["first_difference"]


def test_one_group_is_seen_although_the_total_norm_hides_it():
    """Expert and router gradients shrank under replay while the total norm hardly moved (TransformerEngine issue
    3051)."""

    def change(r):
        for step in r["steps"]:
            step["gradients"]["router"] = digest([v * 1e-3 for v in step["gradients"]["router"]["sketch"]])

    base = record()
    for step in base["steps"]:
        step["gradients"]["mlp"] = digest([1e4] * 4)
    other = copy.deepcopy(base)
    change(other)
    out = parity.compare(base, other, "fp8")
    assert out["verdict"] == "differs" and "router" in out["first_difference"] and out["by_group"]["mlp"] == 0.0


def test_frozen_dropout_is_found():
    eager = [random.Random(n).gauss(5, 1) for n in range(40)]
    frozen = parity.dropout(eager, [5.0] * 40)
    assert not frozen["advances"] and frozen["verdict"] == "differs"


def test_dropout_of_another_strength_is_found_and_the_same_is_not():
    chance = random.Random(7)
    eager = [chance.gauss(5, 1) for _ in range(60)]
    assert parity.dropout(eager, [chance.gauss(5, 1) for _ in range(60)])["verdict"] == "tolerance"
    assert parity.dropout(eager, [chance.gauss(8, 1) for _ in range(60)])["verdict"] == "differs"


def test_the_two_sample_distance_is_the_largest_gap_of_the_distributions():
    assert parity.kolmogorov_smirnov([1, 2, 3, 4], [1, 2, 3, 4])["distance"] == 0
    assert parity.kolmogorov_smirnov([1, 2], [3, 4])["distance"] == 1
    assert parity.kolmogorov_smirnov([1, 3], [2, 4])["distance"] == 0.5


def test_what_eager_differs_from_itself_a_graph_may_differ_too():
    other = copy.deepcopy(record())
    scale(other["steps"][0]["gradients"], "mlp", 1.05)
    assert parity.compare(record(), other, "bf16")["verdict"] == "differs"
    noise = {"loss": 0.0, "gradients": 0.02, "parameters": 0.0}
    out = parity.compare(record(), other, "bf16", noise)
    assert out["verdict"] == "tolerance" and out["allowed"]["gradients"] == pytest.approx(0.06)
