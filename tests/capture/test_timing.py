# SPDX-License-Identifier: Apache-2.0
import random

import pytest

from cudagraphs.capture import timing


def rounds(mean, spread, seed, number=6, steps=10):
    chance = random.Random(seed)
    return [[chance.gauss(mean, spread) for _ in range(steps)] for _ in range(number)]


def test_quantiles_interpolate_between_order_statistics():
    assert timing.quantile([4, 1, 3, 2], 0.5) == 2.5
    assert timing.quantile([1, 2, 3, 4, 5], 0.9) == pytest.approx(4.6)
    assert timing.quantile([7], 0.1) == 7
    with pytest.raises(ValueError, match="no values"):
        timing.quantile([], 0.5)


def test_the_interval_holds_the_true_ratio_about_as_often_as_it_says():
    hits = 0
    for seed in range(100):
        ratio = timing.speedup(rounds(10, 0.3, seed), rounds(8, 0.3, seed + 1000), seed, draws=300)
        hits += ratio["low"] <= 1.25 <= ratio["high"]
    assert hits >= 88


def test_a_round_that_was_disturbed_widens_the_interval():
    calm = rounds(10, 0.1, 1)
    disturbed = [[step + 5 for step in one] if number == 0 else one for number, one in enumerate(calm)]

    def width(r):
        ratio = timing.speedup(r, rounds(10, 0.1, 2), draws=500)
        return ratio["high"] - ratio["low"]

    assert width(disturbed) > width(calm)


@pytest.mark.parametrize(
    ("ratio", "noise", "expected"),
    [
        ({"low": 1.5, "high": 1.7}, 0.0, "faster"),
        ({"low": 1.01, "high": 1.7}, 0.0, "neutral"),
        ({"low": 1.015, "high": 1.018}, 0.0, "neutral"),
        ({"low": 1.05, "high": 1.08}, 0.1, "neutral"),
        ({"low": 0.9, "high": 1.1}, 0.0, "neutral"),
        ({"low": 0.7, "high": 0.9}, 0.0, "slower"),
    ],
)
def test_faster_needs_the_whole_interval_beyond_the_noise(ratio, noise, expected):
    assert timing.verdict(ratio, noise) == expected


def test_overlapping_kernels_count_once():
    assert timing.merged([(3, 4), (0, 2), (1, 2.5), (4, 5)]) == [(0, 2.5), (3, 5)]


def test_bins_share_an_interval_by_its_length():
    assert timing.binned([(0.5, 2.5), (3.75, 4.0)], 0.0, 4.0, 4) == pytest.approx([0.5, 1.0, 0.5, 0.25])
    assert timing.binned([(-1.0, 9.0)], 0.0, 4.0, 3) == pytest.approx([1.0] * 3)
    busy = timing.merged([(random.Random(n).uniform(0, 9), random.Random(n).uniform(0, 10)) for n in range(5)])
    busy = [(low, high) for low, high in busy if low < high]
    assert sum(timing.binned(busy, 0.0, 10.0, 7)) * 10 / 7 == pytest.approx(sum(high - low for low, high in busy))


def test_no_graph_gains_more_than_the_idle_time():
    bound = timing.bound(eager_ms=100, busy_ms=25, graph_ms=40)
    assert bound == {"busy_share": 0.25, "best_speedup": 4.0, "reached": pytest.approx(0.8)}
    # A profiled kernel time above the step time is measurement noise, not a negative gap.
    assert timing.bound(eager_ms=10, busy_ms=11, graph_ms=10) == {
        "busy_share": 1.0,
        "best_speedup": 1.0,
        "reached": None,
    }


def test_turns_last_about_as_long_for_short_and_long_steps():
    assert timing.steps_per_turn(5) == 30 and timing.steps_per_turn(40) == 6 and timing.steps_per_turn(5000) == 3
