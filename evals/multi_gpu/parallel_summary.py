# SPDX-License-Identifier: Apache-2.0
"""The result of partial_parallel.py in Markdown: a row a mode, with what every rank says."""

from __future__ import annotations

from typing import Any

_HEAD = (
    "Mode",
    "Settings",
    "Parity with eager",
    "Replayed calls",
    "Eager fallbacks",
    "Graph launches a step",
    "As required",
)
_TIMES = ("Eager step, ms", "Step with graphs, ms")


def shared(document: dict[str, Any]) -> bool:
    """Whether the ranks had fewer GPUs than there were ranks."""
    return 0 < document["machine"]["gpus"] < document["configuration"]["ranks"]


def on_gpus_of_their_own(document: dict[str, Any]) -> bool:
    """Whether every rank had a GPU to itself: only then do times say anything."""
    return document["configuration"]["device"] == "cuda" and not shared(document)


def summary(document: dict[str, Any]) -> str:
    """What ran, and a table. Values that differ between ranks stand in their order.

    Raises KeyError and TypeError for another document.
    """
    machine, used = document["machine"], document["configuration"]
    times = on_gpus_of_their_own(document)
    if times:
        where = f"{used['ranks']} ranks, each with a GPU of its own ({machine['gpu']}). Times are medians of a step."
    elif shared(document):
        where = (
            f"{used['ranks']} ranks that share one GPU ({machine['gpu']}): they talk through sockets and their kernels "
            "take turns, so times say nothing and none are shown."
        )
    else:
        where = f"{used['ranks']} ranks on a CPU with {used['graphs']}: times say nothing and none are shown."
    versions = ", ".join(f"{name} {value}" for name, value in document["versions"].items() if value)
    good = sum(variant["good"] for variant in document["variants"].values())
    text = (
        f"{where} {used['steps']} steps of {used['microbatches']} microbatches, {used['blocks']} blocks of width "
        f"{used['hidden']}, {used['dtype']}; losses, gradients and parameters are compared after every step. "
        "Required are bitwise equality on every rank, replays by real graph launches, and under DDP gradients that are "
        f"the mean over the ranks: {good} of {len(document['variants'])} modes hold. A cell that names no rank is "
        f"that of every rank. Versions: {versions}."
    )
    head = (*_HEAD, *(_TIMES if times else ()))
    rows = [_row(name, variant, times) for name, variant in document["variants"].items()]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return text + "\n\n" + "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _row(name: str, variant: dict[str, Any], times: bool) -> tuple[str, ...]:
    ranks = variant["ranks"]
    settings = {**variant["settings"], **variant["manager"]}
    cells = [
        f"`{name}`",
        ", ".join(f"{key} {value}" for key, value in settings.items()) or "none",
        _by_rank([_parity(row) for row in ranks]),
        _by_rank(["" if "error" in row else str(row["counters"]["replayed"]) for row in ranks]),
        _by_rank(["" if "error" in row else _fallbacks(row["counters"]) for row in ranks]),
        _by_rank(["" if "error" in row else str(row["launches_in_one_step"]["graph_launches"]) for row in ranks]),
        "yes" if variant["good"] else "**no**",
    ]
    if times:
        cells += [
            _by_rank(["" if "error" in row else f"{row['median_step_milliseconds'][way]:.2f}" for row in ranks])
            for way in ("eager", "graphs")
        ]
    return tuple(cell.replace("|", "/") for cell in cells)


def _parity(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"**failed**: {(row['error'].splitlines() or ['see the file'])[0][:120]}"
    if row["bitwise_equal"]:
        return f"bitwise, {row['compared_tensors']} tensors"
    return f"**differs** in {row['unequal_tensors']} of {row['compared_tensors']} tensors"


def _fallbacks(counters: dict[str, Any]) -> str:
    why = ", ".join(f"{reason} {count}" for reason, count in counters["reasons"].items())
    return f"{counters['fallback']}" + (f" ({why})" if why else "")


def _by_rank(values: list[str]) -> str:
    """One value where the ranks say the same, else each with its rank."""
    if len(set(values)) == 1:
        return values[0]
    return "; ".join(f"rank {rank}: {value or '-'}" for rank, value in enumerate(values))
