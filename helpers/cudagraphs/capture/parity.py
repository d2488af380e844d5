# SPDX-License-Identifier: Apache-2.0
"""Is it the same training? Compares what eager and a variant recorded, as plain data from two processes.

A record is `{"steps": [step], "evaluations": [step], "parameters": {mark: groups}}` with
step = `{"index", "losses": [float], "gradients": groups or absent}` and groups = `{group: digest}`. A digest is
`{"numel", "norm", "hash", "sketch"}`: equal hashes mean equal bits, and the sketches are linear random projections, so
the norm of their difference estimates the norm of the difference of the full tensors (see `digest`), which never leave
their process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Largest relative differences that count as the same training where the bits differ: (loss, gradient group,
# parameters). BF16 keeps 8 bits of mantissa (half a unit is 2**-9, 0.2%) and FP8 E4M3 keeps 4 (2**-5, 3%); a reordered
# sum moves a loss far less than that, a gradient group by a few units, parameters kept in BF16 by up to one, and steps
# add up.
TOLERANCES = {"fp32": (1e-5, 1e-3, 1e-4), "bf16": (2e-3, 3e-2, 4e-3), "fp8": (1e-2, 2e-1, 1e-2)}
# One repeat is one draw of eager's own differences; another draw may well be twice as far.
NOISE_FACTOR = 3.0


def relative(first: dict, second: dict) -> float:
    """Estimated |first - second| / |first| of two digests; inf where only one is zero or a value is not finite."""
    values = [*first["sketch"], *second["sketch"], first["norm"], second["norm"]]
    if not all(map(math.isfinite, values)):
        return math.inf
    if first["hash"] == second["hash"]:
        return 0.0
    distance = math.dist(first["sketch"], second["sketch"])
    # The sketch cannot see a difference below its own resolution; the norms still can.
    distance = max(distance, abs(first["norm"] - second["norm"]))
    if first["norm"] == 0:
        return math.inf if distance else 0.0
    return distance / first["norm"]


def _loss_distance(first: Sequence[float], second: Sequence[float]) -> float:
    if len(first) != len(second):
        return math.inf
    worst = 0.0
    for a, b in zip(first, second):
        if not (math.isfinite(a) and math.isfinite(b)):
            return math.inf
        worst = max(worst, abs(a - b) / max(abs(a), 1e-12))
    return worst


def _compare_groups(eager: dict, graph: dict) -> tuple[bool, float, str]:
    """(bitwise, worst relative difference, group of the worst)."""
    if set(eager) != set(graph):
        return False, math.inf, ", ".join(sorted(set(eager) ^ set(graph)))
    worst, where = 0.0, ""
    for group in eager:
        distance = relative(eager[group], graph[group])
        if distance > worst:
            worst, where = distance, group
    bitwise = all(eager[group]["hash"] == graph[group]["hash"] for group in eager)
    return bitwise, worst, where


def compare(eager: dict, graph: dict, dtype: str, noise: dict | None = None) -> dict:
    """The verdict on two records: `{"verdict", "bitwise", "loss", "gradients", "parameters", "first_difference", ...}`.

    `noise` is the comparison of eager with its own repeat: what eager differs from itself, a graph may differ too, up
    to `NOISE_FACTOR` times. `verdict` is `bitwise`, `tolerance` or `differs`. Every figure is the worst over all steps,
    first replay included.
    `first_difference` names the earliest step and place beyond tolerance, None without one.
    """
    limit_loss, limit_grad, limit_param = (
        max(limit, NOISE_FACTOR * noise[kind]) if noise and math.isfinite(noise[kind]) else limit
        for limit, kind in zip(TOLERANCES[dtype], ("loss", "gradients", "parameters"))
    )
    worst = {"loss": 0.0, "gradients": 0.0, "parameters": 0.0}
    groups: dict[str, float] = {}
    bitwise = True
    first = None

    def note(distance: float, limit: float, kind: str, where: str) -> None:
        nonlocal first
        worst[kind] = max(worst[kind], distance)
        if distance > limit and first is None:
            first = f"{where}: relative difference {distance:.3g}, allowed {limit:g}"

    for stage in ("steps", "evaluations"):
        pairs = list(zip(eager[stage], graph[stage]))
        if len(eager[stage]) != len(graph[stage]):
            first = first or f"{stage}: {len(eager[stage])} in eager, {len(graph[stage])} in the variant"
            bitwise = False
        for a, b in pairs:
            name = f"{'step' if stage == 'steps' else 'evaluation'} {a['index']}"
            bitwise &= a["losses"] == b["losses"]
            note(_loss_distance(a["losses"], b["losses"]), limit_loss, "loss", f"{name}, loss")
            if "gradients" in a and "gradients" in b:
                same, distance, group = _compare_groups(a["gradients"], b["gradients"])
                bitwise &= same
                for key in a["gradients"].keys() & b["gradients"].keys():
                    groups[key] = max(groups.get(key, 0.0), relative(a["gradients"][key], b["gradients"][key]))
                note(distance, limit_grad, "gradients", f"{name}, gradients of {group}")
    for mark in eager["parameters"]:
        if mark not in graph["parameters"]:
            first = first or f"parameters {mark}: not recorded by the variant"
            bitwise = False
            continue
        same, distance, group = _compare_groups(eager["parameters"][mark], graph["parameters"][mark])
        bitwise &= same
        note(distance, limit_param, "parameters", f"parameters {mark}, {group}")
    verdict = "differs" if first else "bitwise" if bitwise else "tolerance"
    return {
        "verdict": verdict,
        "bitwise": bitwise,
        **worst,
        "by_group": groups,
        "first_difference": first,
        "steps": len(graph["steps"]),
        "evaluations": len(graph["evaluations"]),
        "dtype": dtype,
        "allowed": {"loss": limit_loss, "gradients": limit_grad, "parameters": limit_param},
    }


def kolmogorov_smirnov(first: Sequence[float], second: Sequence[float]) -> dict:
    """Two-sample Kolmogorov-Smirnov test at the 0.1% level: `{"distance", "critical", "same"}`.

    The critical distance is the asymptotic c(0.001) * sqrt((n + m) / (n * m)) with c = 1.949.
    """
    n, m = len(first), len(second)
    a, b = sorted(first), sorted(second)
    i = j = 0
    distance = 0.0
    while i < n and j < m:
        value = min(a[i], b[j])
        while i < n and a[i] <= value:
            i += 1
        while j < m and b[j] <= value:
            j += 1
        distance = max(distance, abs(i / n - j / m))
    critical = 1.949 * math.sqrt((n + m) / (n * m))
    return {"distance": distance, "critical": critical, "same": distance <= critical}


def dropout(eager: Sequence[float], graph: Sequence[float]) -> dict:
    """Does dropout still draw anew at each replay, from the same distribution?

    Both lists hold the loss of one batch, run again and again with frozen weights. `advances` is False where two
    replays gave the same loss (the generator stands still); `verdict` is `tolerance` or `differs`.
    """
    test = kolmogorov_smirnov(eager, graph)
    advances = len(set(graph)) == len(graph)
    first = None
    if not advances:
        first = f"dropout draws repeat: {len(set(graph))} different losses in {len(graph)} replays of one batch"
    elif not test["same"]:
        first = f"dropout's losses follow another distribution (distance {test['distance']:.3f})"
    return {
        "advances": advances,
        "draws": len(graph),
        "test": test,
        "first_difference": first,
        "verdict": "differs" if first else "tolerance",
    }
