# SPDX-License-Identifier: Apache-2.0
"""The order of a run: who starts when, who measures alone, and the raw outcome of each variant as plain data."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cudagraphs.capture import timing
from cudagraphs.capture.parent import Child, Session
from cudagraphs.capture.ranks import Ranks
from cudagraphs.capture.variants import EAGER, REPEAT

DROPOUT_DRAWS = 40
# The first step that every variant may already replay: three eager ones, and one that captures.
FIRST_REPLAY = 4
PROFILED_STEPS = 2


@dataclass(frozen=True)
class Effort:
    """How much to run: `steps` compared after the capture, `long` more without digests, `rounds` of timing, `jobs` at
    once."""

    steps: int = 20
    long: int = 0
    rounds: int = 6
    jobs: int = 8
    dropout: bool = False


@dataclass
class Outcome:
    """What one process did: record for parity, counts, times. Missing parts were not reached; `failure` says why."""

    name: str
    record: dict = field(default_factory=lambda: {"steps": [], "evaluations": [], "parameters": {}})
    captures: int = 0
    capture_s: float = 0.0
    replays: list[int] = field(default_factory=list)
    memory: dict = field(default_factory=dict)
    draws: list[float] | None = None
    profile: dict | None = None
    rounds_ms: list[list[float]] = field(default_factory=list)
    wall_ms: list[float] = field(default_factory=list)
    cleanup: dict | None = None
    failure: dict | None = None


def run(
    session: Session,
    jobs: dict[str, dict],
    effort: Effort,
    ranks: Ranks,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Outcome]:
    """Runs the jobs, by name; the eager ones (`none`, its repeat) stay alive as the baseline of every wave of variants.

    A variant that runs out of memory while others share the GPU is tried once more with only the baseline beside it.
    """
    baseline = [name for name in (EAGER.name, REPEAT) if name in jobs]
    rest = [name for name in jobs if name not in baseline]
    room = max(1, effort.jobs - len(baseline))
    waves = [rest[at : at + room] for at in range(0, len(rest), room)] or [[]]
    outcomes: dict[str, Outcome] = {}
    base: list[Child] = []
    everyone: list[Child] = []
    first = True
    try:
        while waves:
            wave = waves.pop(0)
            started = time.monotonic()
            names = (baseline if first else []) + wave
            new = [session.start(jobs[name]) for name in names]
            everyone += new
            if first:
                base = new[: len(baseline)]
            progress(f"{', '.join(names)}: started")
            for child in new:
                outcomes[child.name] = Outcome(child.name)
            _prepare(session, new, effort, outcomes, progress)
            _measure(session, base, new[len(baseline) if first else 0 :], effort, ranks, outcomes, progress)
            variants = [child for child in new if child not in base]
            _finish(session, variants, outcomes)
            shared = len(names) > 1
            again = [
                child.name
                for child in variants
                if shared and child.failure and child.failure.kind == "out-of-memory" and not jobs[child.name]["drill"]
            ]
            if again and len(wave) > 1:
                progress(f"{', '.join(again)}: out of memory beside {len(names) - 1} others, once more without them")
                waves += [[name] for name in again]
            first = False
            progress(f"wave of {len(wave)} done in {time.monotonic() - started:.1f} s")
        for child in base:
            _profile(session, child, outcomes)
        _finish(session, base, outcomes)
    finally:
        session.close(everyone)
    return outcomes


def _prepare(session: Session, children: list[Child], effort: Effort, outcomes, progress) -> None:
    """Build, warmup and parity run together; captures run one at a time, so that their seconds are their own."""
    session.ask(children, {"do": "build"})
    progress("models built")
    for child in session.ask(children, {"do": "warmup"}):
        _merge(outcomes[child.name], child.answers["warmup"])
    for child in children:
        if session.ask([child], {"do": "capture"}):
            answer, outcome = child.answers["capture"], outcomes[child.name]
            _merge(outcome, answer)
            outcome.captures, outcome.capture_s = answer["captures"], answer["seconds"]
            if answer["captures"]:
                progress(f"{child.name}: {answer['captures']} graphs in {answer['seconds']:.1f} s")
    _parity(session, children, FIRST_REPLAY, effort.steps, True, outcomes)
    progress(f"{effort.steps} steps compared")
    if effort.long:
        _parity(session, children, FIRST_REPLAY + effort.steps, effort.long, False, outcomes)
        progress(f"{effort.long} more steps compared")
    if effort.dropout:
        for child in session.ask(children, {"do": "dropout", "draws": DROPOUT_DRAWS}):
            outcomes[child.name].draws = child.answers["dropout"]["losses"]
    for child in children:
        _keep_failure(child, outcomes)


def _parity(session: Session, children: list[Child], first: int, steps: int, digests: bool, outcomes) -> None:
    command = {"do": "parity", "until": first + steps, "evaluate_at": first + steps // 2, "digests": digests}
    for child in session.ask(children, command):
        answer, outcome = child.answers["parity"], outcomes[child.name]
        _merge(outcome, answer)
        outcome.replays += answer["replays"]
        outcome.captures = answer["captures"]
        outcome.memory = answer["memory"]


def _measure(session: Session, base, variants, effort: Effort, ranks: Ranks, outcomes, progress) -> None:
    """Times all children in turns, `rounds` times over, then profiles each once: a profiler stays attached to its
    process."""
    children = [child for child in (*base, *variants) if child.alive]
    turns: dict[str, int] = {}
    for child in children:
        if session.ask([child], {"do": "time", "steps": 3}):
            times = child.answers["time"]["steps_ms"]
            # The ranks must run the same number of steps; rank 0 decides.
            turns[child.name] = ranks.agree("turn", timing.steps_per_turn(timing.quantile(times, 0.5)))[0]
    for number in range(effort.rounds):
        for child in children:
            if child.alive and session.ask([child], {"do": "time", "steps": turns[child.name]}):
                answer = child.answers["time"]
                outcomes[child.name].rounds_ms.append(answer["steps_ms"])
                outcomes[child.name].wall_ms.append(answer["wall_ms"])
        progress(f"timing round {number + 1} of {effort.rounds}")
    for child in variants:
        _profile(session, child, outcomes)
    for child in children:
        _keep_failure(child, outcomes)


def _profile(session: Session, child: Child, outcomes) -> None:
    if child.alive and session.ask([child], {"do": "profile", "steps": PROFILED_STEPS}):
        outcomes[child.name].profile = child.answers["profile"]


def _finish(session: Session, children: list[Child], outcomes) -> None:
    for name, cleanup in session.finish(children).items():
        outcomes[name].cleanup = cleanup
        outcomes[name].memory |= cleanup["memory"]
    for child in children:
        _keep_failure(child, outcomes)


def _merge(outcome: Outcome, answer: dict) -> None:
    new = answer["record"]
    outcome.record["steps"] += new["steps"]
    outcome.record["evaluations"] += new["evaluations"]
    for mark, groups in new["parameters"].items():
        # A second parity phase has its own evaluation and end.
        key = mark if mark not in outcome.record["parameters"] else f"{mark} {len(outcome.record['parameters'])}"
        outcome.record["parameters"][key] = groups


def _keep_failure(child: Child, outcomes) -> None:
    if child.failure is not None and outcomes[child.name].failure is None:
        outcomes[child.name].failure = child.failure.as_dict()
