#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check a recipe's CUDA graph settings against what the installed versions enforce, and against what fails later.

Usage:
    python helpers/validate_constraints.py recipe.py                       every recipe function of the file
    python helpers/validate_constraints.py recipe.py --function NAME       one of them (repeatable, globs allowed)
    python helpers/validate_constraints.py recipe.py --format json|sarif|github
    python helpers/validate_constraints.py recipe.py --set num_moe_experts=8        a fact that the recipe leaves open
    python helpers/validate_constraints.py recipe.py --fix                 apply the safe mends in place
    python helpers/validate_constraints.py train.sh | model_config.yaml | run_config.yaml | recipe.yaml
    python helpers/validate_constraints.py --mcore 0.19 -- --num-layers 32 --cuda-graph-impl local   arguments
    python helpers/validate_constraints.py --facts facts.json              neutral facts: PyTorch, Transformer Engine
    python helpers/validate_constraints.py --explain CG204                 a rule, by code
    python helpers/validate_constraints.py --explain "full recompute is only supported"   or by upstream's message
    python helpers/validate_constraints.py --list-rules
    python helpers/validate_constraints.py --fields-jsonl FILE --mcore 0.19 [--te 2.10]
    python helpers/validate_constraints.py --write-pages references        the generated reference pages

Batch mode (--fields-jsonl; `-` reads stdin) takes plain TransformerConfig field overrides, one JSON object a line:
    {"id": 1, "version": "0.17", "te": "2.8", "fields": {"cuda_graph_impl": "local"}}      version and te are optional
and prints one line each:
    {"id": 1, "verdict": "accepted"|"rejected", "codes": [...], "normalized": {"impl", "modules", "inference_scope"}}

Output: findings on stdout, all at once; with --format json one object with schema_version (the same as --json).

Exit codes:
    0  no finding of severity error or runtime (batch mode: every line was judged)
    1  such a finding stands
    2  usage, or input that cannot be read
    3  a fault of this helper
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# compiled files go to the user's cache: the skill folder may be read-only, and must stay as it was signed
if not sys.dont_write_bytecode:
    sys.pycache_prefix = sys.pycache_prefix or os.path.expanduser("~/.cache/nemo-cuda-graphs/pycache")

from cudagraphs import cli, report  # noqa: E402
from cudagraphs.formats import Recipe, open_input, split_arguments, version_names  # noqa: E402
from cudagraphs.diff import unified_diff  # noqa: E402
from cudagraphs.formats.source import write_atomically  # noqa: E402
from cudagraphs.given import setting  # noqa: E402
from cudagraphs.rules import REGISTRY, check, explain, graph_state  # noqa: E402
from cudagraphs.rules.base import AUTOMODEL, MEGATRON, Finding  # noqa: E402
from cudagraphs.settings import Settings  # noqa: E402

PROGRAM = "validate_constraints"
# A mend can uncover the next finding; upstream's longest chain of asserts that depend on each other is four.
MAX_FIX_ROUNDS = 8


def build_parser() -> argparse.ArgumentParser:
    parser = cli.Parser(prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, nargs="?", help="the file that configures the training run")
    parser.add_argument(
        "--function", action="append", default=[], metavar="NAME", help="recipe function, a name or a glob; repeatable"
    )
    parser.add_argument(
        "--framework", choices=cli.FRAMEWORKS, help="read the file as this framework's, instead of by its content"
    )
    parser.add_argument(
        "--source-root", action="append", default=[], type=Path, metavar="DIR", help="where base recipes' packages lie"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a fact that the recipe leaves open; repeatable"
    )
    parser.add_argument("--fix", action="store_true", help="apply the safe mends in place")
    parser.add_argument("--facts-only", action="store_true", help="print every fact that was read, judge nothing")
    parser.add_argument("--format", choices=("text", "json", "sarif", "github"), default="text")
    parser.add_argument("--json", action="store_true", help="the same as --format json")
    parser.add_argument("--quiet", action="store_true", help="print nothing but findings of severity error and runtime")
    other = parser.add_argument_group("instead of a recipe")
    other.add_argument(
        "--facts", type=Path, metavar="FILE", help="JSON or YAML with the framework and the facts of a run"
    )
    other.add_argument(
        "--explain", metavar="CODE|TEXT", help="print a rule by its code or by a piece of upstream's message"
    )
    other.add_argument("--list-rules", action="store_true", help="one line a rule")
    other.add_argument("--fields-jsonl", metavar="FILE", help="batch mode over TransformerConfig fields; - for stdin")
    other.add_argument(
        "--jsonl", action="store_true", help="batch mode: accepted for clarity; the output is JSON lines anyway"
    )
    other.add_argument("--write-pages", type=Path, metavar="DIR", help="write the generated reference pages")
    cli.add_version_flags(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    cli.utf8_streams()
    own, given = split_arguments(sys.argv[1:] if argv is None else argv)
    arguments = cli.arguments_of(build_parser(), own)
    if isinstance(arguments, int):
        return arguments
    arguments.given = given
    return cli.run(PROGRAM, lambda: dispatch(arguments))


def dispatch(arguments: argparse.Namespace) -> int:
    if arguments.explain is not None:
        return explain_rule(arguments.explain, arguments.json or arguments.format == "json")
    if arguments.list_rules:
        for rule in REGISTRY:
            print(f"{rule.code} {rule.severity:8} {rule.layer:12} {rule.title} [{rule.versions_text()}]")
        return cli.CLEAN
    if arguments.write_pages is not None:
        from cudagraphs import references
        from cudagraphs.rules import pages

        written = [*references.write(arguments.write_pages), *pages.write(arguments.write_pages / "rules")]
        print(f"{len(written)} pages in {arguments.write_pages}")
        return cli.CLEAN
    if arguments.fields_jsonl is not None:
        return batch(arguments)
    if arguments.recipe is None and arguments.facts is None and arguments.given is None:
        raise cli.UsageError(
            "name a recipe, --facts FILE, arguments behind --, or --explain, --list-rules, --fields-jsonl or --write-pages; "
            "see --help"
        )
    return validate(arguments)


def explain_rule(text: str, as_json: bool) -> int:
    rules = explain(text)
    if as_json:
        rows = [
            {"code": r.code, "title": r.title, "severity": r.severity, "layer": r.layer, "why": r.why, "mend": r.mend,
             "versions": r.versions_text(), "source": r.source, "upstream": list(r.upstream)}
            for r in rules
        ]  # fmt: skip
        cli.print_json({"schema_version": report.SCHEMA_VERSION, "helper": PROGRAM, "query": text, "rules": rows})
        return cli.CLEAN if rules else cli.USAGE
    if not rules:
        raise cli.UsageError(f"--explain {text!r}: no rule has this code or a message like it; --list-rules shows all")
    for rule in rules:
        print(
            f"{rule.code} {rule.title}\n  severity: {rule.severity} ({rule.layer})\n  versions: {rule.versions_text()}"
        )
        print(f"  why: {rule.why}\n  mend: {rule.mend}\n  source: {rule.source}")
        for message in rule.upstream:
            print(f"  upstream says: {message}")
    return cli.CLEAN


def batch(arguments: argparse.Namespace) -> int:
    from cudagraphs import batch as batches

    versions = cli.versions_from(arguments)
    mcore = arguments.mcore or ".".join(map(str, versions.mcore or ()))
    te = arguments.te if arguments.te is not None else ".".join(map(str, versions.te or ()))
    if arguments.fields_jsonl == "-":
        sys.stdout.writelines(line + "\n" for line in batches.run(sys.stdin, mcore, te))
        return cli.CLEAN
    try:
        with open(arguments.fields_jsonl, encoding="utf-8") as lines:
            sys.stdout.writelines(line + "\n" for line in batches.run(lines, mcore, te))
    except OSError as error:
        raise cli.UsageError(f"--fields-jsonl {arguments.fields_jsonl}: cannot be read ({error.strerror})") from None
    return cli.CLEAN


def validate(arguments: argparse.Namespace) -> int:
    versions = cli.versions_from(arguments)
    original = open_input(
        arguments.recipe, arguments.facts, arguments.given, versions, arguments.framework, arguments.source_root
    )
    arguments.recipe = original.path
    names = original.select(arguments.function, everything=True)
    if arguments.facts_only:
        rows = {name: report.settings_json(original.run(name).settings, every=True) for name in names}
        cli.print_json(
            {
                "schema_version": report.SCHEMA_VERSION,
                "helper": PROGRAM,
                "recipe": str(arguments.recipe),
                "functions": rows,
            }
        )
        return cli.CLEAN
    first = original.run(names[0]).settings
    known = dict(setting(text, first.versions, first.framework == AUTOMODEL, judged=True) for text in arguments.set)
    recipe = original
    fixed: dict[str, list[str]] = {}
    if arguments.fix:
        for name in names:
            recipe, fixed[name] = fix(recipe, name, known)
        if recipe.file.raw != original.file.raw and arguments.given is not None:
            # arguments have no file: the mended ones are printed
            print(
                recipe.file.text.strip(),
                file=sys.stderr if arguments.json or arguments.format != "text" else sys.stdout,
            )
        elif recipe.file.raw != original.file.raw:
            write_atomically(arguments.recipe, recipe.file.raw, original.file.raw)
    results = [(name, finding) for name in names for finding in check(recipe.run(name).settings.with_values(known))]
    show(arguments, original, recipe, names, results, fixed, known)
    return cli.FINDINGS if any(report.is_blocking(finding) for _, finding in results) else cli.CLEAN


def fix(recipe: Recipe, name: str, known: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    """Apply safe mends until none is left, or one comes back; returns what was done, a line a mend."""
    recipe, renames = version_names(recipe, name)
    mended = [f"CG016: {old} renamed to {new}" for old, new in renames.items()]
    codes: set[str] = set()
    for _ in range(MAX_FIX_ROUNDS):
        findings = [
            f
            for f in check(recipe.run(name).settings.with_values(known))
            if f.fix and f.safe and not f.needs and f.severity != "info" and f.code not in codes
        ]
        if not findings:
            break
        finding = findings[0]
        recipe, _ = recipe.edited(name, finding.fix)
        codes.add(finding.code)
        given = ", ".join(f"{key}={value}" for key, value in finding.fix.items())
        mended.append(f"{finding.code} ({finding.message}): {given}")
    return recipe, mended


def by_name(settings: Settings, findings: Sequence[Finding]) -> dict[str, Any] | None:
    """What would stand if the model were of the kind that names tell, which apply_overrides.py goes by.

    None where the recipe itself tells the kind, or no rule waits for it. A name is no proof, so it decides nothing here.
    """
    waiting = {name for finding in findings for name in finding.needs}
    if settings.framework not in MEGATRON or not waiting & {"num_moe_experts", "model.has_mamba"}:
        return None
    from cudagraphs import families

    family = families.infer(settings)
    assumed = families.assume(settings, family)
    taken = {name: fact.value for name, fact in assumed.facts.items() if fact is not settings.facts.get(name)}
    if not waiting & set(taken):
        return None
    already = {finding.code for finding in findings if not finding.needs}
    would = [f.code for f in check(assumed) if report.is_blocking(f) and f.code not in already]
    reasons = [trait.reason for trait in (family.moe, family.mamba) if trait.how == "inferred"]
    return {"kind": family.describe(), "reason": reasons[0], "facts": taken, "would_stand": list(dict.fromkeys(would))}


def by_name_text(kind: Mapping[str, Any]) -> str:
    codes = f"{', '.join(kind['would_stand'])} would stand" if kind["would_stand"] else "no error would stand"
    return (
        f"  kind of model: not told by the recipe; apply_overrides.py goes by {kind['kind']} ({kind['reason']}): "
        f"as such {codes}"
    )


def show(
    arguments: argparse.Namespace,
    original: Recipe,
    recipe: Recipe,
    names: list[str],
    results: list[tuple[str, Finding]],
    fixed: dict[str, list[str]],
    known: Mapping[str, Any],
) -> None:
    style = "json" if arguments.json else arguments.format
    if style == "sarif":
        print(json.dumps(report.sarif(results, REGISTRY), indent=2))
        return
    if style == "github":
        for name, finding in results:
            print(report.github_annotation(name, finding, str(arguments.recipe)))
        return
    if style == "json":
        functions = []
        for name in names:
            settings = recipe.run(name).settings.with_values(known)
            own = [finding for owner, finding in results if owner == name]
            functions.append(
                {
                    "name": name,
                    "state": report.state_json(graph_state(settings)),
                    "fixed": fixed.get(name, []),
                    "settings": report.settings_json(settings),
                    "findings": [report.finding_json(finding, name) for finding in own],
                    "by_name": by_name(settings, own),
                }
            )
        cli.print_json(
            {
                "schema_version": report.SCHEMA_VERSION,
                "helper": PROGRAM,
                "recipe": str(arguments.recipe),
                "functions": functions,
            }
        )
        return
    if arguments.quiet:
        for name, finding in results:
            if report.is_blocking(finding):
                print(f"{arguments.recipe}: {name}")
                print("\n".join(report.finding_text(finding)))
        return
    if recipe.file.raw != original.file.raw:
        print(unified_diff(original.file.text, recipe.file.text, str(arguments.recipe)))
        print()
    first = recipe.run(names[0]).settings
    print(f"{arguments.recipe}: {first.versions.describe(first.framework)}")
    for name in names:
        settings = recipe.run(name).settings.with_values(known)
        before = report.state_text(graph_state(original.run(name).settings.with_values(known)))
        after = report.state_text(graph_state(settings))
        print(f"{name}: {after}" if before == after else f"{name}: {before} -> {after}")
        print("\n".join(report.facts_text(settings)))
        for line in fixed.get(name, []):
            print(f"  mended: {line}")
        own = [finding for owner, finding in results if owner == name]
        for finding in own:
            if not finding.needs:
                print("\n".join(report.finding_text(finding)))
        print("".join(f"{line}\n" for line in report.undecided_text(own)), end="")
        kind = by_name(settings, own)
        if kind is not None:
            print(by_name_text(kind))
        if not own:
            print("  no findings")


if __name__ == "__main__":
    sys.exit(main())
