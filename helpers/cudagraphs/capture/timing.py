# SPDX-License-Identifier: Apache-2.0
"""Statistics of step times: median and spread, speedup with its uncertainty, and the best that any graph could give.

All times are milliseconds. A measurement is a list of rounds, one list of step times a round; in every round each
variant is measured once, in turn, so that a drift of the machine touches all of them alike.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median

Rounds = Sequence[Sequence[float]]

# A change below this share is reported as neutral even where the interval is tighter: two runs of one binary differ as
# much.
NEUTRAL_SHARE = 0.02


def quantile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics, as numpy's default. Raises ValueError on no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(rounds: Rounds) -> dict:
    """`{"median", "p10", "p90", "steps", "rounds"}` over all steps of all rounds."""
    steps = [value for one in rounds for value in one]
    return {
        "median": median(steps),
        "p10": quantile(steps, 0.1),
        "p90": quantile(steps, 0.9),
        "steps": len(steps),
        "rounds": len(rounds),
    }


def speedup(eager: Rounds, graph: Rounds, seed: int = 0, draws: int = 2000) -> dict:
    """Median eager step over median graph step, with a 95% interval: `{"value", "low", "high"}`.

    The interval comes from a bootstrap in two stages, rounds first and then steps within a round, so that a disturbance
    that lasts a whole round counts once and not as many independent steps.
    """
    value = median([s for r in eager for s in r]) / median([s for r in graph for s in r])
    chance = random.Random(seed)
    ratios = sorted(_resampled(eager, chance) / _resampled(graph, chance) for _ in range(draws))
    return {"value": value, "low": quantile(ratios, 0.025), "high": quantile(ratios, 0.975)}


def _resampled(rounds: Rounds, chance: random.Random) -> float:
    picked = chance.choices(rounds, k=len(rounds))
    return median([step for one in picked for step in chance.choices(one, k=len(one))])


def verdict(ratio: dict, noise: float = 0.0) -> str:
    """`faster`, `neutral` or `slower`. `noise` is the share by which two runs of eager itself differed."""
    margin = max(NEUTRAL_SHARE, noise)
    if ratio["low"] > 1 + margin:
        return "faster"
    if ratio["high"] < 1 - margin:
        return "slower"
    return "neutral"


def noise(repeat: dict) -> float:
    """The share by which eager differed from its own repeat: the larger distance of the median ratio from 1."""
    return abs(repeat["value"] - 1)


def merged(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Overlapping (start, end) intervals joined, in order."""
    out: list[list[float]] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([start, end])
    return [(start, end) for start, end in out]


def binned(busy: Sequence[tuple[float, float]], start: float, end: float, bins: int) -> list[float]:
    """The share of each of `bins` equal parts of start to end that lies inside the disjoint `busy` intervals."""
    width = (end - start) / bins
    shares = [0.0] * bins
    for low, high in busy:
        low, high = max(low, start), min(high, end)
        at = int((low - start) / width)
        while low < high and at < bins:
            stop = min(high, start + (at + 1) * width)
            shares[at] += max(stop - low, 0.0) / width
            low, at = stop, at + 1
    return [min(share, 1.0) for share in shares]


def bound(eager_ms: float, busy_ms: float, graph_ms: float | None = None) -> dict:
    """What any graph could gain from the eager step: `{"busy_share", "best_speedup", "reached"}`.

    `busy_ms` is the time of an eager step in which a kernel ran. Graphs take idle time away and no kernel time, so
    eager / busy is the most a graph can reach. `reached` is the share of the idle time that the variant took away, None
    without a variant or where there is no idle time.
    """
    busy_ms = min(busy_ms, eager_ms)
    idle = eager_ms - busy_ms
    reached = None
    if graph_ms is not None and idle > 0:
        reached = (eager_ms - graph_ms) / idle
    return {
        "busy_share": busy_ms / eager_ms,
        "best_speedup": eager_ms / busy_ms if busy_ms else None,
        "reached": reached,
    }


def steps_per_turn(step_ms: float, turn_ms: float = 250.0) -> int:
    """How many steps one turn measures: about `turn_ms` of work, at least 3 and at most 30."""
    return max(3, min(30, round(turn_ms / max(step_ms, 1e-3))))
