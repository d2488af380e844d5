#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write a snippet or a launch script with CUDA graphs from a template.

The settings come from the same recommendation that apply_overrides.py writes, in the names of the version, and what is
rendered is read back and judged by the rules before it is shown.

Usage:
    python helpers/render_template.py --list                            every template with its variables
    python helpers/render_template.py bridge-overrides --set model=moe --mcore 0.18
    python helpers/render_template.py megatron-lm-arguments --preset widest --mcore 0.17
    python helpers/render_template.py slurm-batch --set nodes=4 --set account=a --impl full_iteration --output job.sh
    python helpers/render_template.py bridge-overrides --from recipe.py [--function NAME]      for the run of a recipe

Output: the text on stdout, or in the file that --output names; with --json one object with `text`, `variables` and
`findings`.

Exit codes:
    0  rendered
    1  refused: the versions reject the settings; nothing was written
    2  usage: an unknown template or variable, a value outside its domain, a recipe that cannot be read, an --output file
       that holds something else (--force replaces it)
    3  a fault of this helper
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# compiled files go to the user's cache: the skill folder may be read-only, and must stay as it was signed
sys.pycache_prefix = sys.pycache_prefix or os.path.expanduser("~/.cache/nemo-cuda-graphs/pycache")

from cudagraphs import cli, rendering, report  # noqa: E402
from cudagraphs.formats import open_recipe  # noqa: E402
from cudagraphs.formats.source import write_atomically  # noqa: E402
from cudagraphs.rules.base import MEGATRON  # noqa: E402
from cudagraphs.settings import Settings  # noqa: E402

PROGRAM = "render_template"


def build_parser() -> argparse.ArgumentParser:
    parser = cli.Parser(prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", metavar="NAME", help="the template; --list shows them")
    parser.add_argument("--list", action="store_true", help="every template with its variables and defaults")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a variable of the template; repeatable"
    )
    parser.add_argument("--preset", metavar="NAME", help="the same as --set preset=NAME")
    parser.add_argument("--impl", metavar="NAME", help="the same as --set impl=NAME")
    parser.add_argument("--scopes", metavar="A,B", help="the same as --set scopes=A,B")
    parser.add_argument("--warmup-steps", metavar="N", help="the same as --set warmup_steps=N")
    parser.add_argument(
        "--from", dest="recipe", type=Path, metavar="FILE", help="take the run from this recipe instead of `model`"
    )
    parser.add_argument("--function", metavar="NAME", help="which run of the recipe")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write here instead of to stdout")
    parser.add_argument("--force", action="store_true", help="replace what --output names, whatever it holds")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    cli.add_version_flags(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    cli.utf8_streams()
    arguments = cli.arguments_of(build_parser(), argv)
    return arguments if isinstance(arguments, int) else cli.run(PROGRAM, lambda: dispatch(arguments))


def dispatch(arguments: argparse.Namespace) -> int:
    if arguments.list:
        show_list(arguments.json)
        return cli.CLEAN
    if arguments.name is None:
        raise cli.UsageError("name a template; --list shows them")
    try:
        return render(arguments)
    except rendering.Refused as reason:
        print(f"{PROGRAM}: refused: {reason}; nothing was written", file=sys.stderr)
        return cli.FINDINGS
    except rendering.RenderError as error:
        raise cli.UsageError(str(error)) from None


def show_list(as_json: bool) -> None:
    templates = rendering.index()
    if as_json:
        rows = [
            {
                "name": template.name,
                "what": template.what,
                "framework": template.framework,
                "megatron_core": [f"0.{minor}" for minor in template.minors] if template.minors else None,
                "variables": [
                    {
                        "name": v.name,
                        "default": v.default,
                        "default_by_model": dict(v.by_model),
                        "domain": v.domain(),
                        "help": v.help,
                    }
                    for v in template.variables.values()
                ],
            }
            for template in templates.values()
        ]
        cli.print_json({"schema_version": report.SCHEMA_VERSION, "helper": PROGRAM, "templates": rows})
        return
    for template in templates.values():
        versions = f", megatron-core 0.{template.minors[0]} to 0.{template.minors[1]}" if template.minors else ""
        print(f"{template.name}: {template.what} ({template.framework}{versions})")
        for variable in template.variables.values():
            default = str(variable.default).lower() if isinstance(variable.default, bool) else variable.default
            print(f"    {variable.name}={default}    {variable.help} [{variable.domain()}]")
            for model, other in variable.by_model.items():
                print(f"        with model={model}: {other or 'must be given'}")


def render(arguments: argparse.Namespace) -> int:
    template = rendering.named(arguments.name)
    values = template.values(given(arguments))
    versions = cli.versions_from(arguments, template.framework)
    settings = rendering.base_settings(template, values, versions)
    if arguments.recipe is not None:
        if not template.graphs:
            raise cli.UsageError(f"template {template.name} takes nothing from a recipe; leave --from out")
        settings = from_recipe(arguments, template, settings)
    advice = rendering.advise(template, values, settings) if template.graphs else None
    seen = rendering.context(template, values, settings, advice)
    text = rendering.render(template, seen)
    rendering.check_syntax(template, text)
    findings = rendering.judge(template, text, settings, seen)
    blocking = [finding for finding in findings if report.is_blocking(finding) and not finding.needs]
    if blocking:
        raise rendering.Refused("; ".join(f"{finding.code} {finding.message}" for finding in blocking))
    if arguments.output is not None:
        data = text.encode("utf-8")
        # a rendered script is there to be edited: what somebody made of it is not overwritten by accident
        if arguments.output.is_file() and not arguments.force and arguments.output.read_bytes() != data:
            raise cli.UsageError(f"{arguments.output}: holds something else; give another --output, or --force to replace it")
        write_atomically(arguments.output, data)
        if template.suffix == ".sh":
            os.chmod(arguments.output, 0o755)
    if arguments.json:
        cli.print_json(
            {
                "schema_version": report.SCHEMA_VERSION,
                "helper": PROGRAM,
                "template": template.name,
                "variables": values,
                "versions": versions.describe(),
                "reasons": advice.reasons if advice else [],
                "written": str(arguments.output) if arguments.output else None,
                "text": text,
                "findings": [report.finding_json(finding, template.name) for finding in findings],
            }
        )
    elif arguments.output is None:
        sys.stdout.write(text)
    else:
        print(f"written: {arguments.output}")
    return cli.CLEAN


def given(arguments: argparse.Namespace) -> dict[str, str]:
    """The variables from --set and the flags that stand for one. Raises UsageError for a --set without `=`."""
    values: dict[str, str] = {}
    for text in arguments.set:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise cli.UsageError(f"--set {text!r}: give KEY=VALUE")
        values[key.strip()] = value
    for name in ("preset", "impl", "scopes", "warmup_steps"):
        value = getattr(arguments, name)
        if value is not None:
            values[name] = value
    return values


def from_recipe(arguments: argparse.Namespace, template: rendering.Template, settings: Settings) -> Settings:
    """The run of a recipe, judged for the template's framework."""
    recipe = open_recipe(arguments.recipe, settings.versions)
    names = recipe.select([arguments.function] if arguments.function else [])
    run = recipe.run(names[0]).settings
    same_kind = run.framework == template.framework or (run.framework in MEGATRON and template.framework in MEGATRON)
    if not same_kind:
        raise cli.UsageError(
            f"{arguments.recipe}: is for {run.framework}, and template {template.name} for {template.framework}"
        )
    given_facts = {name: fact for name, fact in settings.facts.items() if name.startswith(("env.", "harness."))}
    return Settings(
        template.framework,
        settings.versions,
        {**run.facts, **given_facts},
        run.name,
        run.path,
        run.complete,
        run.incomplete_reason,
    )


if __name__ == "__main__":
    sys.exit(main())
