#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turn CUDA graphs on (or off) in a training recipe, in place.

Reads the recipe without running it, recommends the implementation and the scopes, writes every setting that they need
under the names of the installed version, checks the result against the rules, and shows what changed. Nothing is
written if the result would be rejected.

Usage:
    python helpers/apply_overrides.py recipe.py                         recommend and write
    python helpers/apply_overrides.py recipe.py --diff                  show, write nothing
    python helpers/apply_overrides.py recipe.py --function 'qwen3_*'    pick among several recipe functions (repeatable)
    python helpers/apply_overrides.py recipe.py --all                   every recipe function of the file
    python helpers/apply_overrides.py recipe.py --preset narrow|widest  fewer or more scopes than the default
    python helpers/apply_overrides.py recipe.py --impl transformer_engine --scopes attn,mlp
    python helpers/apply_overrides.py recipe.py --set model.cuda_graph_warmup_steps=5
    python helpers/apply_overrides.py recipe.py --off                   turn graphs off cleanly
    python helpers/apply_overrides.py train.sh                          a launch script, MODEL_ARGS, an AutoModel recipe
    python helpers/apply_overrides.py --mcore 0.19 -- --num-layers 32   arguments or overrides: prints the new ones

Output: a unified diff and a short report on stdout; with --json one object on stdout instead, and the prose on stderr.

Exit codes:
    0  done, or nothing to do
    1  refused, and nothing was written: the result would not validate, or would break a recipe that builds on it; or no
       graphs can be recommended for a function, which stays as it is
    2  usage, or input that cannot be read
    3  a fault of this helper
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# compiled files go to the user's cache: the skill folder may be read-only, and must stay as it was signed
if not sys.dont_write_bytecode:
    sys.pycache_prefix = sys.pycache_prefix or os.path.expanduser("~/.cache/nemo-cuda-graphs/pycache")

from cudagraphs import cli, families, report  # noqa: E402
from cudagraphs.diff import unified_diff  # noqa: E402
from cudagraphs.formats import Recipe, open_input, split_arguments, version_names  # noqa: E402
from cudagraphs.formats.source import SourceError, write_atomically  # noqa: E402
from cudagraphs.given import setting  # noqa: E402
from cudagraphs.recommend import GRAPH_FACTS, Recommendation, off, recommend  # noqa: E402
from cudagraphs.recommend_automodel import SCOPES as AUTOMODEL_SCOPES  # noqa: E402
from cudagraphs.recommend_automodel import recommend_automodel  # noqa: E402
from cudagraphs.rules import check, graph_state  # noqa: E402
from cudagraphs.rules.base import AUTOMODEL, MEGATRON, Finding, GraphState  # noqa: E402
from cudagraphs.rules.normalize import implementations, scope_names  # noqa: E402
from cudagraphs.settings import Known, Settings  # noqa: E402

PROGRAM = "apply_overrides"
# recipes of one file build on each other at most this deep
MAX_PASSES = 4


@dataclass
class Outcome:
    """What was done to one recipe function."""

    name: str
    before: GraphState
    after: GraphState
    settings: Settings
    recommendation: Recommendation
    exports: dict[str, str]
    skipped: dict[str, str]
    findings: list[Finding] = field(default_factory=list)
    also_changed: list[str] = field(default_factory=list)
    breaks: str = ""
    off_asked_for: bool = False

    @property
    def without_graphs(self) -> bool:
        """No graphs can be recommended; the function stays as it is."""
        return self.recommendation.impl == "none" and not self.off_asked_for and not self.recommendation.refused

    @property
    def refused(self) -> str:
        if self.recommendation.refused or self.breaks:
            return self.recommendation.refused or self.breaks
        codes = [finding.code for finding in self.findings if report.is_blocking(finding)]
        return f"the result would not validate: {', '.join(dict.fromkeys(codes))}" if codes else ""


def build_parser() -> argparse.ArgumentParser:
    parser = cli.Parser(prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, nargs="?", help="the file that configures the training run")
    parser.add_argument(
        "--function", action="append", default=[], metavar="NAME", help="recipe function, a name or a glob; repeatable"
    )
    parser.add_argument("--all", action="store_true", help="every recipe function of the file")
    parser.add_argument(
        "--framework", choices=cli.FRAMEWORKS, help="read the file as this framework's, instead of by its content"
    )
    parser.add_argument(
        "--source-root", action="append", default=[], type=Path, metavar="DIR", help="where base recipes' packages lie"
    )
    wanted = parser.add_argument_group("what to turn on")
    wanted.add_argument("--impl", metavar="NAME", help="implementation: transformer_engine, full_iteration, local")
    wanted.add_argument("--scopes", metavar="A,B", help="modules to capture, comma separated")
    wanted.add_argument(
        "--preset", choices=("narrow", "widest"), help="fewer, or as many, scopes as the version accepts"
    )
    wanted.add_argument("--warmup-steps", type=int, metavar="N", help="eager steps before capture")
    wanted.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one more setting; repeatable")
    wanted.add_argument("--off", action="store_true", help="turn CUDA graphs off")
    output = parser.add_argument_group("output")
    output.add_argument("--diff", action="store_true", help="show the change, write nothing")
    output.add_argument("--output", type=Path, metavar="FILE", help="write here instead of in place")
    output.add_argument("--json", action="store_true", help="one JSON object on stdout")
    output.add_argument("--quiet", action="store_true", help="print nothing but errors")
    cli.add_version_flags(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    cli.utf8_streams()
    own, given = split_arguments(sys.argv[1:] if argv is None else argv)
    arguments = cli.arguments_of(build_parser(), own)
    if isinstance(arguments, int):
        return arguments
    arguments.given = given
    return cli.run(PROGRAM, lambda: apply(arguments))


def apply(arguments: argparse.Namespace) -> int:
    versions = cli.versions_from(arguments)
    original = open_input(arguments.recipe, None, arguments.given, versions, arguments.framework, arguments.source_root)
    arguments.recipe = original.path
    names = original.select(arguments.function, arguments.all)
    request = request_from(arguments, original.run(names[0]).settings)
    recipe, outcomes = work_on_all(original, names, request)
    refused = [outcome for outcome in outcomes if outcome.refused]
    changed = recipe.file.raw != original.file.raw
    written = None
    if arguments.given is not None and not arguments.output:
        # arguments have no file: the new ones are the output
        if not refused and not arguments.json:
            print(recipe.file.text.strip())
    elif not refused and not arguments.diff and (changed or arguments.output):
        target = arguments.output or arguments.recipe
        write_atomically(target, recipe.file.raw, None if arguments.output else original.file.raw)
        written = str(target)
    show(arguments, original, recipe, outcomes, changed, written)
    return cli.FINDINGS if refused or any(outcome.without_graphs for outcome in outcomes) else cli.CLEAN


@dataclass
class Request:
    """What the flags ask for; the setting names and scopes in it exist in the version."""

    off: bool
    impl: str | None
    scopes: list[str] | None
    preset: str | None
    warmup_steps: int | None
    extra: dict[str, Any]


def request_from(arguments: argparse.Namespace, settings: Settings) -> Request:
    """Raises UsageError for an implementation, scope, key or number that the framework and version do not have."""
    if settings.framework not in (*MEGATRON, AUTOMODEL):
        raise cli.UsageError(
            f"{arguments.recipe}: nothing is recommended for {settings.framework}; validate_constraints.py checks it"
        )
    versions, automodel = settings.versions, settings.framework == AUTOMODEL
    minor = versions.minor
    scopes = None
    if arguments.impl is not None and arguments.impl not in (*implementations(minor), "full_iteration"):
        raise cli.UsageError(
            f"--impl {arguments.impl!r}: megatron-core 0.{minor} has {', '.join(implementations(minor))}"
        )
    if arguments.scopes is not None:
        scopes = [scope.strip() for scope in arguments.scopes.split(",") if scope.strip()]
        known = AUTOMODEL_SCOPES if automodel else scope_names(minor)
        for scope in scopes:
            if known and scope not in known:
                owner = "AutoModel" if automodel else f"megatron-core 0.{minor}"
                raise cli.UsageError(f"--scopes {scope!r}: {owner} has {', '.join(known)}")
    if arguments.off and (arguments.impl or arguments.scopes or arguments.preset):
        raise cli.UsageError("--off turns graphs off, so it does not go with --impl, --scopes or --preset")
    if arguments.warmup_steps is not None and arguments.warmup_steps < 0:
        raise cli.UsageError(f"--warmup-steps {arguments.warmup_steps}: give 0 or more")
    return Request(
        arguments.off,
        arguments.impl,
        scopes,
        arguments.preset,
        arguments.warmup_steps,
        dict(setting(text, versions, automodel) for text in arguments.set),
    )


def work_on_all(original: Recipe, names: Sequence[str], request: Request) -> tuple[Recipe, list[Outcome]]:
    """Work on several runs of one file, until what one of them builds on no longer changes under it."""
    recipe = original
    outcomes: dict[str, Outcome] = {}
    for _ in range(MAX_PASSES):
        before = recipe
        for name in names:
            recipe, outcome = work_on(recipe, name, request)
            if name in outcomes:
                first = outcomes[name]
                outcome.before = first.before
                if outcome.refused == first.refused and recipe.file.raw == before.file.raw:
                    outcome.recommendation = first.recommendation
            outcomes[name] = outcome
        if len(names) == 1 or recipe.file.raw == before.file.raw:
            break
    for name in names:
        outcome = outcomes[name]
        outcome.before = graph_state(original.run(name).settings)
        outcome.also_changed = [other for other in recipe.built_on(name) if other not in names]
        outcome.breaks = broken_by(original, recipe, outcome.also_changed)
    return recipe, list(outcomes.values())


def broken_by(original: Recipe, recipe: Recipe, others: Sequence[str]) -> str:
    """Why a run that builds on an edited one would not validate any more; "" if each is as good as before."""
    for other in others:
        try:
            old, new = (
                {finding.code for finding in check(assumed(one.run(other).settings)) if report.is_blocking(finding)}
                for one in (original, recipe)
            )
        except SourceError:
            continue  # it was no recipe before, and is none now
        if new - old:
            codes = ", ".join(sorted(new - old))
            return f"{other} builds on it and would not validate any more: {codes}; edit both with --function, or edit {other} alone"
    return ""


def assumed(settings: Settings) -> Settings:
    """The settings with the kind of model that the recommendation goes by, where the recipe leaves it to a checkpoint."""
    return families.assume(settings, families.infer(settings)) if settings.framework in MEGATRON else settings


def work_on(recipe: Recipe, name: str, request: Request) -> tuple[Recipe, Outcome]:
    """Recommend for one run, write it into the recipe, and check what came out."""
    recipe, renames = version_names(recipe, name)
    run = recipe.run(name)
    before = graph_state(run.settings)
    if run.settings.framework == AUTOMODEL:
        advice = recommend_automodel(
            run.settings, request.preset, "none" if request.off else request.impl, request.scopes, request.extra
        )
    elif request.off:
        overrides = off(run.settings)
        advice = Recommendation("none", (), overrides, {}, ["turned off on request"], left_off(run.settings), None)
    else:
        advice = kept(run.settings, before, request) or intended(run.settings, before, request) or recommend(
            run.settings, preset=request.preset, impl=request.impl, scopes=request.scopes,
            warmup_steps=request.warmup_steps, extra=request.extra,
        )  # fmt: skip
    advice = advice._replace(reasons=[f"{old} is named {new} in this version" for old, new in renames.items()] + advice.reasons)
    if advice.refused:
        findings = [finding for finding in check(run.settings) if finding.severity != "info"]
        return recipe, Outcome(name, before, before, run.settings, advice, {}, {}, findings)
    asked_off = request.off or request.impl == "none"
    without = advice.impl == "none" and before.active is False and not asked_off
    if without:
        advice = advice._replace(overrides={})  # graphs are off and stay so: nothing to tidy up
    wanted = {} if without else {**advice.overrides, **request.extra}
    edited, skipped = recipe.edited(name, wanted)
    exports = {key[4:]: str(wanted[key]) for key in skipped if key.startswith("env.")}
    exports.update({key: str(value) for key, value in advice.exports.items()})
    settings = edited.run(name).settings
    # what the report asks to export is taken as exported, or every such recipe would be refused
    judged = assumed(settings.with_values({f"env.{key}": value for key, value in exports.items()}))
    # turning graphs off on request is no accident, even where the recipe turns them on first
    findings = [finding for finding in check(judged) if not (request.off and finding.code == "CG512")]
    skipped = {key: reason for key, reason in skipped.items() if not key.startswith("env.")}
    return edited, Outcome(
        name, before, graph_state(settings), settings, advice, exports, skipped, findings, off_asked_for=asked_off
    )


# What full iteration asks to turn off. Whether a recipe had them off for graphs or for its own sake cannot be read.
NAN_CHECKS = ("rerun_state_machine.check_for_nan_in_loss", "ddp.check_for_nan_in_grad")


def left_off(settings: Settings) -> list[str]:
    """What to look at after graphs are off: checks that are off and may have been turned off for graphs only."""
    facts = {name: settings.facts.get(name) for name in NAN_CHECKS}
    off_now = [
        name
        for name, fact in facts.items()
        if isinstance(fact, Known) and fact.value is False and fact.how != "default"
    ]
    return [f"{name} is False and stays so; turn it on again if it was off for graphs only" for name in off_now]


def kept(settings: Settings, before: GraphState, request: Request) -> Recommendation | None:
    """Graphs that are on already stay as they are, with what they still need added.

    None where the flags ask for something else, where graphs are off, or where the rules reject these very graphs.
    """
    if request.preset or request.impl or request.scopes is not None or not before.active or before.by_world:
        return None
    impl = "full_iteration" if before.full_iteration else before.impl
    scopes = [] if before.full_iteration else list(before.modules)
    if not set(scopes) <= set(scope_names(settings.versions.minor)):
        return None
    advice = recommend(settings, impl=impl, scopes=scopes, warmup_steps=request.warmup_steps, extra=request.extra)
    if advice.refused:
        return None
    reason = (
        f"graphs are on already ({report.state_text(before)}) and stay so; --preset, --impl or --scopes changes them"
    )
    missing = {name: value for name, value in advice.overrides.items() if name not in GRAPH_FACTS}
    if any(report.is_blocking(finding) for finding in check(settings.with_values(missing))):
        return advice._replace(reasons=[reason, *advice.reasons])
    return advice._replace(overrides=missing, reasons=[reason])


def intended(settings: Settings, before: GraphState, request: Request) -> Recommendation | None:
    """The graphs that the recipe itself asks for before a later assignment turns them off; None where it asks for none."""
    history = settings.facts.get("history.cuda_graph_impl")
    if request.preset or request.impl or request.scopes is not None or before.active or not isinstance(history, Known):
        return None
    asked = [value for value in history.value[:-1] if value not in (None, "none")]
    if not asked:
        return None
    on = graph_state(settings.with_values({"cuda_graph_impl": asked[-1]}))
    again = kept(settings.with_values({"cuda_graph_impl": asked[-1]}), on, request)
    if again is None:
        return None
    reason = f"the recipe asks for {report.state_text(on)}, and a later assignment turns it off ({history.source})"
    return again._replace(overrides={**again.overrides, "cuda_graph_impl": asked[-1]}, reasons=[reason])


def show(
    arguments: argparse.Namespace,
    original: Recipe,
    recipe: Recipe,
    outcomes: list[Outcome],
    changed: bool,
    written: str | None,
) -> None:
    difference = unified_diff(original.file.text, recipe.file.text, str(arguments.recipe)) if changed else ""
    if arguments.json:
        cli.print_json(document(arguments, outcomes, difference, changed, written))
    if arguments.quiet:
        for outcome in outcomes:
            if outcome.refused:
                print(f"{PROGRAM}: {arguments.recipe}: {outcome.name}: refused: {outcome.refused}", file=sys.stderr)
        return
    stream = sys.stderr if arguments.json else sys.stdout
    if difference and not arguments.json:
        print(difference, file=stream)
        print(file=stream)
    print(f"{arguments.recipe}: {outcomes[0].settings.versions.describe(outcomes[0].settings.framework)}", file=stream)
    for outcome in outcomes:
        for line in outcome_text(outcome):
            print(line, file=stream)
    print(verdict(arguments, outcomes, changed, written), file=stream)


def outcome_text(outcome: Outcome) -> list[str]:
    lines = [f"{outcome.name}: {report.state_text(outcome.before)} -> {report.state_text(outcome.after)}"]
    lines += report.facts_text(outcome.settings)
    lines += [f"  why: {reason}" for reason in outcome.recommendation.reasons]
    lines += [f"  export before launch: {name}={value}" for name, value in outcome.exports.items()]
    lines += [f"  not written: {name}: {reason}" for name, reason in outcome.skipped.items()]
    if outcome.also_changed:
        lines.append(f"  also changes what builds on it: {', '.join(outcome.also_changed)}")
    for finding in outcome.findings:
        if not finding.needs and finding.severity != "info":
            lines += report.finding_text(finding)
    # --set would write the fact into the recipe here
    lines += report.undecided_text(outcome.findings, "find it out, and judge with validate_constraints.py --set")
    lines += [f"  next: {step}" for step in outcome.recommendation.next_steps]
    return lines


def verdict(arguments: argparse.Namespace, outcomes: list[Outcome], changed: bool, written: str | None) -> str:
    refused = [outcome for outcome in outcomes if outcome.refused]
    if refused:
        return "\n".join(f"refused: {outcome.name}: {outcome.refused}; nothing was written" for outcome in refused)
    if written:
        return f"written: {written}"
    if changed and arguments.given is not None:
        return "the first line holds the new arguments"
    without = [outcome.name for outcome in outcomes if outcome.without_graphs]
    if without and not changed:
        return f"no graphs can be recommended for {', '.join(without)}; nothing to change"
    return "not written (--diff)" if changed else "nothing to change"


def document(
    arguments: argparse.Namespace, outcomes: list[Outcome], difference: str, changed: bool, written: str | None
) -> dict[str, Any]:
    return {
        "schema_version": report.SCHEMA_VERSION,
        "helper": PROGRAM,
        "recipe": str(arguments.recipe),
        "changed": changed,
        "written": written,
        "diff": difference,
        "functions": [
            {
                "name": outcome.name,
                "refused": outcome.refused or None,
                "before": report.state_json(outcome.before),
                "after": report.state_json(outcome.after),
                "impl": outcome.recommendation.impl,
                "scopes": list(outcome.recommendation.modules),
                "overrides": outcome.recommendation.overrides,
                "exports": outcome.exports,
                "not_written": outcome.skipped,
                "reasons": outcome.recommendation.reasons,
                "next_steps": outcome.recommendation.next_steps,
                "also_changes": outcome.also_changed,
                "settings": report.settings_json(outcome.settings),
                "findings": [report.finding_json(finding, outcome.name) for finding in outcome.findings],
            }
            for outcome in outcomes
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
