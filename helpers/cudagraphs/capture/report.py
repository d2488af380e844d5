# SPDX-License-Identifier: Apache-2.0
"""From outcomes to verdicts: one line a variant, a recommendation over all, the table, and the result file."""

from __future__ import annotations

from collections.abc import Sequence

from cudagraphs.capture import parity, timing
from cudagraphs.capture.run import Outcome
from cudagraphs.capture.variants import EAGER, REPEAT

SCHEMA_VERSION = 1
MIB = 2**20


def assess(
    outcomes: dict[str, Outcome], jobs: dict[str, dict], rules: dict[str, dict], exit_limit_s: float
) -> list[dict]:
    """One dict a variant, eager first: everything measured, and the verdicts.

    `rules[name]` is what the rules said beforehand (`variants.legal`).
    """
    eager, repeat = outcomes[EAGER.name], outcomes.get(REPEAT)
    noise = _noise(eager, repeat)
    drift = _parity(repeat, eager, jobs[REPEAT], None) if repeat else None
    return [
        _one(outcome, eager, jobs[name], rules.get(name), noise, drift, exit_limit_s)
        for name, outcome in outcomes.items()
    ]


def summary(results: list[dict]) -> dict[str, dict]:
    """What the other ranks are told of this one's variants, by name."""
    return {
        out["name"]: {
            "problem": problem(out),
            "parity": out["parity"] and {key: out["parity"][key] for key in ("verdict", "bitwise")},
            "replays_per_step": out["replay"]["per_step"],
            "graph_launches": out["replay"]["profiler_launches"],
            "memory_cost": out["memory_cost"],
        }
        for out in results
    }


def join_ranks(results: list[dict], summaries: list[dict[str, dict]]) -> None:
    """Adds `ranks`, the summary of every rank, to each variant; a problem on another rank is a problem of the variant.

    Where there is a single rank nothing changes.
    """
    if len(summaries) == 1:
        return
    for out in results:
        out["ranks"] = [one[out["name"]] for one in summaries]
        out["peer_problem"] = next(
            (f"rank {number}: {one['problem']}" for number, one in enumerate(out["ranks"]) if one["problem"]), None
        )
        out["verdict"] = verdict(out)


def _noise(eager: Outcome, repeat: Outcome | None) -> float:
    if repeat is None or not (eager.rounds_ms and repeat.rounds_ms):
        return 0.0
    return timing.noise(timing.speedup(eager.rounds_ms, repeat.rounds_ms))


def _one(
    outcome: Outcome,
    eager: Outcome,
    job: dict,
    rule: dict | None,
    noise: float,
    drift: dict | None,
    exit_limit_s: float,
) -> dict:
    """`noise` and `drift` are what eager differs from its own repeat, in speed and in numbers."""
    baseline = job["impl"] == EAGER.impl
    dry = job["device"] != "cuda"
    out = {
        "name": outcome.name,
        "impl": job["impl"],
        "modules": job["modules"],
        "drill": job["drill"],
        "rules": rule,
        "failure": outcome.failure,
        "captures": outcome.captures,
        "capture_s": outcome.capture_s,
        "memory": outcome.memory,
        "cleanup": _cleanup(outcome, exit_limit_s),
        "losses": [step["losses"] for step in outcome.record["steps"]],
        "evaluation_losses": [step["losses"] for step in outcome.record["evaluations"]],
        "gradient_norms": _norms(outcome),
        "rounds_ms": outcome.rounds_ms,
        "wall_ms": outcome.wall_ms,
        "profile": outcome.profile,
        "replay": _replay(outcome, baseline),
    }
    out["captured"] = None if baseline else outcome.failure is None and (dry or out["replay"]["proven"])
    out["parity"] = drift if outcome.name == REPEAT else _parity(outcome, eager, job, drift)
    out["timing"] = timing.summary(outcome.rounds_ms) if outcome.rounds_ms else None
    out["speedup"] = out["busy"] = None
    if outcome.rounds_ms and eager.rounds_ms and outcome is not eager:
        ratio = timing.speedup(eager.rounds_ms, outcome.rounds_ms)
        out["speedup"] = {**ratio, "noise": noise, "verdict": timing.verdict(ratio, noise)}
    if outcome.rounds_ms and outcome.profile and outcome.profile.get("busy_ms"):
        median = out["timing"]["median"]
        out["busy"] = timing.bound(median, outcome.profile["busy_ms"])
        if outcome is not eager and eager.profile and eager.rounds_ms:
            base = timing.summary(eager.rounds_ms)["median"]
            out["busy"]["of_eager"] = timing.bound(base, eager.profile["busy_ms"], median)
    out["memory_cost"] = _memory_cost(outcome, eager) if outcome is not eager else None
    out["against_rules"] = _against_rules(out)
    out["verdict"] = verdict(out)
    return out


def _norms(outcome: Outcome) -> list[dict]:
    return [
        {group: digest["norm"] for group, digest in step["gradients"].items()}
        for step in outcome.record["steps"]
        if "gradients" in step
    ]


def _replay(outcome: Outcome, baseline: bool) -> dict:
    """Replays counted at torch.cuda.CUDAGraph in each compared step, and graph launches that the profiler saw in a
    step."""
    replays = outcome.replays
    launches = outcome.profile["graph_launches"] if outcome.profile else None
    usual = max(replays, default=0)
    return {
        "per_step": usual,
        "fallbacks": sum(usual - count for count in replays),
        "steps_without": sum(count == 0 for count in replays),
        "profiler_launches": launches,
        "proven": not baseline and usual > 0 and min(replays) > 0 and bool(launches),
    }


def _parity(outcome: Outcome, eager: Outcome, job: dict, drift: dict | None) -> dict | None:
    # Without every step on both sides there is nothing to compare: the failure says why.
    if outcome is eager or not (eager.record["parameters"].get("end") and outcome.record["parameters"].get("end")):
        return None
    precision = job["precision"]
    if job["dropout"] and job["impl"] != EAGER.impl:
        # Other random numbers, other losses: only the distribution can agree.
        if outcome.draws is None or eager.draws is None:
            return None
        return {**parity.dropout(eager.draws, outcome.draws), "bitwise": False}
    return parity.compare(eager.record, outcome.record, "fp8" if precision.startswith("fp8") else precision, drift)


def _cleanup(outcome: Outcome, exit_limit_s: float) -> dict | None:
    if outcome.cleanup is None:
        return None
    done = outcome.cleanup
    total = sum(done["seconds"].values()) + done["exit_s"]
    left = done["deleted"]["live_graphs_after"]
    return {**done, "total_s": total, "clean": done["status"] == 0 and total <= exit_limit_s and not left}


def _memory_cost(outcome: Outcome, eager: Outcome) -> int | None:
    """Bytes reserved at the peak beyond eager's peak."""
    try:
        return outcome.memory["peak"]["reserved"] - eager.memory["peak"]["reserved"]
    except KeyError:
        return None


def _against_rules(out: dict) -> str | None:
    """Where the GPU and the rules disagree. A drill breaks a variant on purpose and says nothing about the rules."""
    if out["captured"] is None or not out["rules"] or out["drill"]:
        return None
    if out["failure"] and out["failure"]["kind"] not in ("refused", "capture", "assert", "error"):
        return None  # memory, crashes and hangs are no question of legality
    if out["rules"]["verdict"] == "legal" and not works(out):
        return f"the rules call it legal, and it does not work: {problem(out)}"
    if out["rules"]["verdict"] == "illegal" and works(out):
        return f"the rules call it illegal ({', '.join(out['rules']['codes'])}), and it captured and trained the same"
    return None


def works(out: dict) -> bool:
    """Captured, the same training, and a clean exit."""
    return problem(out) is None


def problem(out: dict) -> str | None:
    """The first thing wrong with a variant, in a few words; None where nothing is."""
    failure = out["failure"]
    if failure:
        name = f" {failure['name']} ({failure['code']})" if failure["code"] else ""
        return f"{failure['kind']}{name} in {failure['phase']}"
    if out["captured"] is False:
        replay = out["replay"]
        if out["captures"] == 0:
            return "no graph was created: every step ran eager"
        if replay["per_step"] == 0 or not replay["profiler_launches"]:
            return "graphs were created and never replayed"
        return f"{replay['steps_without']} steps fell back to eager"
    if out["parity"] and out["parity"]["verdict"] == "differs":
        return f"other training: {out['parity']['first_difference']}"
    if out["replay"]["fallbacks"]:
        return f"{out['replay']['fallbacks']} replays fell back to eager"
    if out["cleanup"] and not out["cleanup"]["clean"]:
        done = out["cleanup"]
        left = done["deleted"]["live_graphs_after"]
        return f"cleanup took {done['total_s']:.1f} s, exit status {done['status']}, {left} graphs left"
    return out.get("peer_problem")


def verdict(out: dict) -> str:
    """One line: captured, the same training, speed with its uncertainty, memory, and what is wrong."""
    if out["captured"] is None:
        text = "baseline" if out["speedup"] is None else f"eager against itself: {_ratio(out['speedup'])}"
        trouble = problem(out)
        return f"{text}; {trouble}" if trouble else text
    trouble = problem(out)
    if out["failure"]:
        return f"{trouble}: {out['failure']['cause']}. Mend: {out['failure']['mend']}"
    parts = ["captured" if out["captured"] else "not captured"]
    if out["parity"]:
        parts.append(
            {
                "bitwise": "same training to the last bit",
                "tolerance": "same training within tolerance",
                "differs": "NOT the same training",
            }[out["parity"]["verdict"]]
        )
    if out["speedup"]:
        parts.append(f"{out['speedup']['verdict']} {_ratio(out['speedup'])}")
    if out["memory_cost"] is not None:
        parts.append(f"{out['memory_cost'] / MIB:+.0f} MiB")
    if out.get("ranks"):
        verdicts = [one["parity"]["verdict"] if one["parity"] else "none" for one in out["ranks"]]
        parts.append(f"parity by rank: {' '.join(verdicts)}")
    if trouble:
        parts.append(trouble)
    return ", ".join(parts)


def _ratio(speedup: dict) -> str:
    return f"{speedup['value']:.2f}x [{speedup['low']:.2f}, {speedup['high']:.2f}]"


def recommend(results: list[dict], world: int = 1, gpus: int = 1) -> dict:
    """`{"variant", "why"}`: the fastest variant that works; eager where none is faster beyond doubt.

    Among variants that are as fast as the fastest within the noise, the one that costs least memory. None at all where
    `world` ranks share fewer `gpus`: their times say nothing.
    """
    if _shared(world, gpus):
        return {"variant": None, "why": "ranks share a GPU, so the run proves parity and ends, not speed"}
    eager = next(out for out in results if out["name"] == EAGER.name)
    if eager["failure"] or eager["timing"] is None:
        return {"variant": None, "why": f"eager itself did not run: {problem(eager)}"}
    compared = [out for out in results if out["captured"] and out["parity"] and out["speedup"]]
    good = [out for out in compared if works(out) and out["speedup"]["verdict"] == "faster"]
    if not good:
        busy = eager["busy"]
        share = f": the GPU is busy {busy['busy_share']:.0%} of an eager step" if busy else ""
        return {"variant": EAGER.name, "why": f"no variant that works is faster beyond doubt{share}"}
    best = max(good, key=lambda out: out["speedup"]["value"])
    margin = max(timing.NEUTRAL_SHARE, best["speedup"]["noise"])
    tied = [out for out in good if out["speedup"]["value"] >= best["speedup"]["value"] * (1 - margin)]
    chosen = min(tied, key=lambda out: out["memory_cost"] or 0)
    why = f"{_ratio(chosen['speedup'])} of eager's speed, {chosen['parity']['verdict']} parity"
    if chosen is not best:
        why += f"; {best['name']} is as fast within the noise and needs more memory"
    return {"variant": chosen["name"], "why": why}


def _shared(world: int, gpus: int) -> bool:
    """Whether several ranks share a GPU; without one (a dry run) none does."""
    return 0 < gpus < world


def exit_code(results: list[dict]) -> int:
    """0 where every variant that the rules allow works, 1 otherwise. Illegal ones are expected to fail, and eager that
    does not repeat itself is noise to measure against."""
    for out in results:
        if out["captured"] is None and not out["failure"]:
            continue
        illegal = out["rules"] is not None and out["rules"]["verdict"] == "illegal"
        if problem(out) is not None and not illegal:
            return 1
    return 0


def table(result: dict) -> str:
    """The run for people: machine, table, verdicts, recommendation."""
    machine, versions = result["machine"], result["versions"]
    lines = [
        f"{machine.get('gpu', 'CPU, dry run')}, "
        + ", ".join(f"{name} {number}" for name, number in versions.items() if number),
        f"{result['stack']}, {result['model']}, {result['precision']}, " + _shape(result["shape"]),
    ]
    ranks = result["parallel"]
    if _shared(ranks["world"], ranks["gpus"]):
        lines.append(f"{ranks['world']} ranks share {ranks['gpus']} GPU and wait for each other's turns: times say nothing")
    lines += [f"scaled down: {change}" for change in result["changes"]]
    lines.append("")
    head = (
        "variant",
        "step ms",
        "p10-p90",
        "speedup",
        "95%",
        "GPU busy",
        "graphs/step",
        "capture s",
        "parity",
        "MiB",
        "exit s",
    )
    rows = [head, *(_row(out) for out in result["variants"])]
    widths = [max(len(row[at]) for row in rows) for at in range(len(head))]
    for row in rows:
        lines.append(
            "  ".join(
                cell.ljust(width) if at == 0 else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths))
            ).rstrip()
        )
    lines.append("")
    eager = next(out for out in result["variants"] if out["name"] == EAGER.name)
    if eager["busy"]:
        busy = eager["busy"]
        lines.append(
            f"The GPU was busy {busy['busy_share']:.0%} of an eager step: no graph can give more than "
            f"{busy['best_speedup']:.2f}x."
        )
    twin = next((out for out in result["variants"] if out["name"] == REPEAT), None)
    if twin and twin["parity"] and not twin["parity"]["bitwise"]:
        lines.append(
            f"Eager does not repeat itself bit for bit here (gradients {twin['parity']['gradients']:.1e} apart): "
            "bitwise parity of a graph cannot be expected."
        )
    for out in result["variants"]:
        lines.append(f"{out['name']}: {out['verdict']}")
        if out["against_rules"]:
            lines.append(f"{out['name']}: {out['against_rules']}")
    for name, rule in result["skipped"].items():
        lines.append(f"{name}: not run, illegal by {', '.join(rule['codes'])} (--include-illegal runs it)")
    choice = result["recommendation"]
    lines.append(f"Recommendation: {choice['variant'] or 'none'}. {choice['why'][0].upper()}{choice['why'][1:]}.")
    return "\n".join(lines)


def _shape(shape: dict) -> str:
    text = (
        f"{shape['layers']} layers, hidden {shape['hidden']}, sequence {shape['sequence']}, "
        f"micro-batch {shape['microbatch']}, {shape['microbatches']} microbatches"
    )
    return text + (f", {shape['experts']} experts top-{shape['top_k']}" if shape["experts"] else "")


def _row(out: dict) -> tuple[str, ...]:
    steps, speed, busy, cleanup = out["timing"], out["speedup"], out["busy"], out["cleanup"]
    return (
        out["name"],
        f"{steps['median']:.2f}" if steps else "-",
        f"{steps['p10']:.2f}-{steps['p90']:.2f}" if steps else "-",
        f"{speed['value']:.2f}x" if speed else "-",
        f"{speed['low']:.2f}-{speed['high']:.2f}" if speed else "-",
        f"{busy['busy_share']:.0%}" if busy else "-",
        f"{out['replay']['profiler_launches']:.0f}" if out["replay"]["profiler_launches"] is not None else "-",
        f"{out['capture_s']:.1f}" if out["captures"] else "-",
        out["parity"]["verdict"] if out["parity"] else "-",
        f"{out['memory_cost'] / MIB:+.0f}" if out["memory_cost"] is not None else "-",
        f"{cleanup['total_s']:.1f}" if cleanup else "-",
    )


def recorded(argv: Sequence[str]) -> list[str]:
    """The arguments of smoke_capture.py that decide its result, each once: of an option that was given again the last
    one counts, as for argparse. Where the result was written and what recorded it does not matter; --variant adds up.
    """
    groups: list[list[str]] = []
    for word in argv:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(word)
    out: dict[object, list[str]] = {}
    for number, group in enumerate(groups):
        name = group[0].partition("=")[0]
        if name not in ("--json", "--plot", "--revision", "--quiet"):
            out[number if name == "--variant" else name] = group
    return [word for group in out.values() for word in group]
