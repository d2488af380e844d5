# SPDX-License-Identifier: Apache-2.0
"""The result as a picture: step time by variant with its spread, and when the GPU was busy. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

# Okabe and Ito's colours, which people with colour vision deficiencies tell apart.
EAGER, GRAPH, FAULT = "#999999", "#0072B2", "#D55E00"


def draw(result: dict, path: Path) -> None:
    """Writes PNG or SVG by the file's suffix. Raises ImportError without matplotlib, ValueError for another suffix."""
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"{path.name}: a plot is written as .png or .svg")
    from matplotlib.figure import Figure

    timed = [out for out in result["variants"] if out["timing"]]
    traced = [out for out in timed if out["profile"] and out["profile"].get("activity")]
    figure = Figure(figsize=(9, 1.6 + 0.45 * (len(timed) + len(traced))), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=[max(len(timed), 1), max(len(traced), 1)])
    _step_times(upper, timed)
    _activity(lower, traced)
    shape = result["shape"]
    figure.suptitle(
        f"{result['stack']} {result['model']} {result['precision']}, {shape['layers']} layers, "
        f"hidden {shape['hidden']}, sequence {shape['sequence']}, {result['machine'].get('gpu', 'CPU')}",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)


def _colour(out: dict) -> str:
    if out["captured"] is None:
        return EAGER
    wrong = out["failure"] or not out["captured"] or (out["parity"] and out["parity"]["verdict"] == "differs")
    return FAULT if wrong else GRAPH


def _step_times(axes, timed: list[dict]) -> None:
    for row, out in enumerate(timed):
        steps = out["timing"]
        error = [[steps["median"] - steps["p10"]], [steps["p90"] - steps["median"]]]
        axes.barh(row, steps["median"], xerr=error, color=_colour(out), capsize=3, height=0.7)
        if out["busy"]:
            axes.plot(out["profile"]["busy_ms"], row, marker="|", markersize=14, color="black")
    axes.set_yticks(range(len(timed)), [out["name"] for out in timed])
    axes.invert_yaxis()
    axes.set_xlabel("step time, ms: median, 10th to 90th percentile; black mark: time in which the GPU was busy")


def _activity(axes, traced: list[dict]) -> None:
    """One band a variant, as high at each moment as the share of it in which a kernel ran."""
    for row, out in enumerate(traced):
        activity = out["profile"]["activity"]
        width = activity["span_ms"] / len(activity["busy"])
        edges = [at * width for at in range(len(activity["busy"]) + 1)]
        tops = [row + 0.4 - 0.8 * share for share in activity["busy"]]
        axes.stairs(tops, edges, baseline=row + 0.4, fill=True, color=_colour(out))
        axes.hlines(row + 0.4, 0, activity["span_ms"], color="black", linewidth=0.5)
    axes.set_yticks(range(len(traced)), [out["name"] for out in traced])
    axes.set_ylim(len(traced) - 0.5, -0.5)
    axes.set_xlabel("one step under the profiler, ms; height: share of the time in which the GPU was busy")
