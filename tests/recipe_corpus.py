#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Read, edit and run every recipe of the released megatron-bridge 0.6.2 wheel, and compare.

For every file under recipes/, perf_recipes/ and diffusion/recipes/ and every function whose name ends in `_config`:
  - read it, and compare what reading says with what execution gives (oracle/bridge_recipes.py);
  - apply each variant (VARIANTS) to every recipe function of the file, as `apply_overrides.py FILE --all` does, check
  that the
    result parses, that a second run changes nothing, and that `--off` afterwards leaves no graph setting active;
  - run the edited files (oracle/edited_recipes.py): the settings are as intended, and every other setting is as before;
  - check the recipes that ship with graphs on against the rules.

Usage:
    python tests/recipe_corpus.py                       print the counts
    python tests/recipe_corpus.py --write FILE          and write them as JSON
    python tests/recipe_corpus.py --only 'recipes/llama/*'    files by glob, repeatable

Output: counts on stdout; what disagrees, if anything, one line each on stderr.

Exit codes: 0 nothing disagrees; 1 something does; 3 a needed wheel or torch is missing.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import json
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS), str(TESTS.parent / "helpers")]

import wheels
from apply_overrides import Request, work_on_all
from cudagraphs import report, versions
from cudagraphs.diff import unified_diff
from cudagraphs.formats.bridge import OVERLAP_TO_DDP, OVERLAP_TO_MODEL, PRECISION_TO_DDP, PRECISION_TO_MODEL
from cudagraphs.formats.python_recipe import PythonRecipe
from cudagraphs.formats.source import SourceError
from cudagraphs.rules import check, graph_state
from cudagraphs.rules.defaults import FIELDS
from cudagraphs.settings import Choice, Fact, Known, Unknown

BRIDGE, MCORE = "0.6.2", "0.19.2"
FOLDERS = ("recipes", "perf_recipes", "diffusion/recipes")
VERSIONS = versions.resolve(bridge=BRIDGE, mcore=MCORE, te="2.14", torch="2.11")
PROCESSES = 2


def request(impl: str | None = None, preset: str | None = None, off: bool = False) -> Request:
    return Request(off, impl, None, preset, None, {})


# local is not among them: Bridge 0.6 takes it for inference only, and `rejected_local` counts that it is refused
VARIANTS = {
    "default": request(),
    "widest": request(preset="widest"),
    "full_iteration": request("full_iteration"),
}
LOCAL = request("local")
OFF = request(off=True)

# What an edit may set: graph settings, what they need, and what the rules' safe mends turn off for them.
GRAPH_LINES = re.compile(
    r"cuda_graph|te_rng_tracker|check_for_nan_in_(loss|grad)|# CUDA graphs|NCCL_GRAPH_REGISTER|PYTORCH_CUDA_ALLOC_CONF|"
    r"^\s*(return \w+|\w+ = .*)$"
)


class Edit(NamedTuple):
    """What one variant did to one function. `overrides` is empty where it was refused."""

    function: str
    refused: str
    active: bool | None
    overrides: dict[str, Any]


class FileResult(NamedTuple):
    """Everything about one file; plain data, since it crosses processes."""

    path: str
    functions: list[str]
    recipes: list[str]
    unread: dict[str, str]
    facts: dict[str, Counter]
    unknown_reasons: Counter
    differences: list[str]
    compared: int
    edits: dict[str, list[Edit]]
    texts: dict[str, bytes]
    allowed: dict[str, list[str]]
    rejected_local: int
    problems: list[str]
    shipped: dict[str, list[tuple[str, str]]]
    shipped_on: int


def corpus(root: Path, patterns: Sequence[str] = ("*",)) -> list[str]:
    """The recipe files as paths under megatron/bridge."""
    package = root / "megatron" / "bridge"
    paths = (
        path.relative_to(package).as_posix() for folder in FOLDERS for path in sorted((package / folder).rglob("*.py"))
    )
    return [path for path in paths if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)]


def execute(script: str, *arguments: str) -> dict[tuple[str, str], dict]:
    """The answers of an oracle script, by file and function."""
    done = subprocess.run([sys.executable, str(TESTS / "oracle" / script), *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{script}: exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    for row in rows:
        if row["status"] == "ok":
            row["settings"] = dict(flat(row["settings"]))
    return {(row["file"], row["function"]): row for row in rows}


def flat(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings with those of nested configuration objects under dotted names."""
    for key, value in settings.items():
        if isinstance(value, dict) and value and not {"enum", "dtype", "object"} & set(value):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# -- reading -----------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A value as reading and execution both give it: enum members by name, dtypes by their torch name, tuples as
    lists."""
    if isinstance(value, dict):
        if "enum" in value:
            return value["enum"].rpartition(".")[2]
        if "dtype" in value:
            return f"torch.{value['dtype']}"
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, str) else value


def called_without_arguments(fact: Fact | None) -> Fact | None:
    """The fact where every argument is left at its default; None where a branch hangs on something else, such as a
    checkpoint."""
    while isinstance(fact, Choice):
        if fact.branch.default is None:
            return None
        fact = fact.if_false if fact.branch.default is False else fact.if_true
    return fact


def expected(row: dict) -> Iterator[tuple[str, Any]]:
    """The facts that execution gives, after what Bridge does with them when training starts (see formats/bridge.py)."""
    settings = row["settings"]
    precision = settings.get("mixed_precision", {})  # null or a name; the section's fields where it is an object
    for key, value in settings.items():
        section, _, name = key.partition(".")
        if section == "model":
            if row["from_checkpoint"] and name not in row["set_by_recipe"]:
                continue  # the stand-in holds class defaults where the checkpoint decides
            fact = name if name in FIELDS else key
            if name in PRECISION_TO_MODEL:
                if isinstance(precision, str):
                    continue
                value = settings.get(f"mixed_precision.{name}", value)
            if name in OVERLAP_TO_MODEL and settings.get(f"comm_overlap.{name}") is not None:
                value = settings[f"comm_overlap.{name}"]
        elif section == "env_vars":
            fact, value = f"env.{name}", str(value)
        else:
            fact = key
            if section == "ddp" and name in PRECISION_TO_DDP:
                if isinstance(precision, str):
                    continue
                value = settings.get(f"mixed_precision.{name}", value)
            if section == "ddp" and name in OVERLAP_TO_DDP and settings.get(f"comm_overlap.{name}") is not None:
                value = settings[f"comm_overlap.{name}"]
        yield fact, value


def compare(row: dict, facts: dict[str, Fact], where: str) -> tuple[int, list[str]]:
    """How many facts were compared, and a line for each that differs. What reading leaves out or calls unknown is no
    difference."""
    compared, differences = 0, []
    for name, value in expected(row):
        fact = called_without_arguments(facts.get(name))
        if not isinstance(fact, Known) or isinstance(fact.value, dict):
            continue
        compared += 1
        if plain(fact.value) != plain(value):
            differences.append(f"{where}: {name} is read as {fact.value!r} ({fact.source}) and runs as {value!r}")
    return compared, differences


# -- one file ----------------------------------------------------------------------------------------------------------


def work(root: str, path: str, rows: dict[str, dict]) -> FileResult:
    result = FileResult(path, [], [], {}, {}, Counter(), [], 0, {}, {}, {}, 0, [], {}, 0)
    full = Path(root) / "megatron" / "bridge" / path
    try:
        recipe = PythonRecipe(full, VERSIONS)
    except SourceError as error:
        result.unread[""] = str(error)
        return result
    names = [
        node.name
        for node in ast.walk(recipe.tree)
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_config")
    ]
    result.functions.extend(names)
    result = _read(recipe, result, rows)
    result.recipes.extend(name for name in recipe.candidates() if name in result.facts)
    if result.recipes:
        for variant, wanted in VARIANTS.items():
            try:
                _apply(recipe, result, variant, wanted)
            except SourceError as error:
                result.problems.append(f"{path} [{variant}]: {error}")
        _, outcomes = work_on_all(recipe, result.recipes, LOCAL)
        result = result._replace(rejected_local=sum(bool(outcome.refused) for outcome in outcomes))
        result = _shipped(recipe, result)
    return result


def _read(recipe: PythonRecipe, result: FileResult, rows: dict[str, dict]) -> FileResult:
    compared = 0
    for name in result.functions:
        if name not in recipe.functions():
            result.unread[name] = "it is defined inside another function or a class"
            continue
        try:
            settings = recipe.run(name).settings
        except SourceError as error:
            result.unread[name] = re.sub(r"^\S+:\d+: ", "", str(error)).partition(";")[0]
            continue
        kinds = Counter(_kind(fact) for fact in settings.facts.values())
        result.facts[name] = kinds
        result.unknown_reasons.update(fact.reason for fact in settings.facts.values() if isinstance(fact, Unknown))
        row = rows.get(name)
        if row is not None and row["status"] == "ok":
            count, differences = compare(row, settings.facts, f"{result.path}:{name}")
            compared += count
            result.differences.extend(differences)
    return result._replace(compared=compared)


def _kind(fact: Fact) -> str:
    return {Known: "known", Choice: "by branch", Unknown: "unknown"}[type(fact)]


def _apply(recipe: PythonRecipe, result: FileResult, variant: str, wanted: Request) -> None:
    where = f"{result.path} [{variant}]"
    edited, outcomes = work_on_all(recipe, result.recipes, wanted)
    ast.parse(edited.file.raw)
    result.edits[variant] = [
        Edit(
            o.name,
            o.recommendation.refused or "",
            o.after.active,
            {} if o.recommendation.refused else dict(o.recommendation.overrides),
        )
        for o in outcomes
    ]
    again, _ = work_on_all(edited, result.recipes, wanted)
    if again.file.raw != edited.file.raw:
        result.problems.append(f"{where}: a second run changes it again")
    result.texts[variant] = edited.file.raw
    result.problems.extend(
        f"{where}: touches {line!r}" for line in _foreign_lines(recipe, edited, result.edits[variant])
    )
    if variant in ("default", "full_iteration"):
        without, outcomes = work_on_all(edited, result.recipes, OFF)
        result.texts[f"{variant}, off"] = without.file.raw
        result.edits[f"{variant}, off"] = [
            Edit(o.name, "", o.after.active, dict(o.recommendation.overrides)) for o in outcomes
        ]
        result.problems.extend(
            f"{where}: {o.name} is still on after --off" for o in outcomes if o.after.active is not False
        )


def _foreign_lines(before: PythonRecipe, after: PythonRecipe, edits: list[Edit]) -> Iterator[str]:
    """Added lines that name no setting which some function of the file was to get."""
    names = {key.rpartition(".")[2] for edit in edits for key in edit.overrides}
    for line in unified_diff(before.file.text, after.file.text, "").splitlines():
        if not line.startswith("+") or line.startswith("+++"):
            continue
        if not any(name in line for name in names) and not GRAPH_LINES.search(line[1:]):
            yield line


def _shipped(recipe: PythonRecipe, result: FileResult) -> FileResult:
    on = 0
    for name in result.recipes:
        settings = recipe.run(name).settings
        if graph_state(settings).active:
            on += 1
            blocking = [(f.code, f.message) for f in check(settings) if f.severity == "error" and not f.needs]
            if blocking:
                result.shipped[name] = blocking
    return result._replace(shipped_on=on)


# -- edited recipes, run -----------------------------------------------------------------------------------------------


def executed_key(fact: str) -> str:
    """The name under which execution gives a fact."""
    if fact.startswith("env."):
        return f"env_vars.{fact[4:]}"
    return fact if "." in fact else f"model.{fact}"


def check_executed(results: list[FileResult], variant: str, before: dict, after: dict) -> tuple[int, list[str]]:
    """How many edited functions ran, and a line for each setting that is not as intended or that changed without
    cause."""
    ran, problems = 0, []
    for result in results:
        edits = {edit.function: edit for edit in result.edits.get(variant, [])}
        of_the_file = {executed_key(key) for edit in edits.values() for key in edit.overrides}
        turned_off = variant.endswith(", off")
        if turned_off:
            of_the_file |= {executed_key(key) for edit in result.edits.get(variant[:-5], []) for key in edit.overrides}
        for name in edits:
            old, new = before.get((result.path, name)), after.get((result.path, name))
            if old is None or old["status"] != "ok":
                continue
            where = f"{result.path}:{name} [{variant}]"
            if new is None or new["status"] != "ok":
                problems.append(f"{where}: runs no longer: {new and new['error']}")
                continue
            ran += 1
            settings = new["settings"]
            for key, value in edits[name].overrides.items():
                key = _where_it_lands(key, settings)
                if key in settings and str(plain(settings[key])) != str(plain(value)):
                    problems.append(f"{where}: {key} is {settings[key]!r}, not {value!r}")
            for key in {**old["settings"], **settings}:
                changed = old["settings"].get(key, "absent") != settings.get(key, "absent")
                # recipes themselves clear scopes and trackers where they find that graphs are off
                follows = turned_off and ("cuda_graph" in key or "te_rng_tracker" in key)
                if (
                    changed
                    and not follows
                    and key not in of_the_file
                    and key.replace("comm_overlap.", "model.") not in of_the_file
                ):
                    problems.append(
                        f"{where}: {key} changed from {old['settings'].get(key)!r} to {settings.get(key)!r}"
                    )
            if turned_off and settings.get("model.cuda_graph_impl", "none") != "none":
                problems.append(f"{where}: cuda_graph_impl is {settings['model.cuda_graph_impl']!r}")
    return ran, problems


def _where_it_lands(fact: str, settings: dict[str, Any]) -> str:
    """Overlap settings of CommOverlapConfig win over the model's and the DDP configuration's own where they are not
    None."""
    name = fact.rpartition(".")[2]
    overlap = f"comm_overlap.{name}"
    return overlap if settings.get(overlap) is not None else executed_key(fact)


def write_tree(results: list[FileResult], variant: str, folder: Path) -> None:
    for result in results:
        if variant in result.texts:
            path = folder / "megatron" / "bridge" / result.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(result.texts[variant])


# -- everything --------------------------------------------------------------------------------------------------------


class Corpus(NamedTuple):
    results: list[FileResult]
    executed: dict[tuple[str, str], dict]
    ran: dict[str, int]
    problems: list[str]

    def summary(self) -> dict[str, Any]:
        """The counts, as they go into a result file."""
        results, functions = self.results, [(r.path, name) for r in self.results for name in r.functions]
        kinds = sum((kinds for r in results for kinds in r.facts.values()), Counter())
        unread = Counter(reason for r in results for name, reason in r.unread.items() if name)
        reasons = sum((r.unknown_reasons for r in results), Counter())
        variants = {}
        for variant in dict.fromkeys(v for r in results for v in r.edits):
            edits = [edit for r in results for edit in r.edits.get(variant, [])]
            refused = Counter(re.sub(r".*\((CG\d+)\).*", r"\1", edit.refused) for edit in edits if edit.refused)
            variants[variant] = {
                "recipes": len(edits),
                "graphs_on_after": sum(edit.active is True for edit in edits),
                "graphs_off_after": sum(edit.active is False for edit in edits),
                "refused": sum(refused.values()),
                "refused_by_rule": dict(refused.most_common()),
                "executed_and_as_intended": self.ran.get(variant, 0),
            }
        statuses = Counter(self.executed.get(key, {}).get("status", "missing") for key in functions)
        return {
            "wheel": f"megatron-bridge {BRIDGE}",
            "megatron_core": MCORE,
            "files": len(results),
            "functions": len(functions),
            "executed": statuses["ok"],
            "read": sum(len(r.facts) for r in results),
            "not_read": dict(unread.most_common()),
            "facts": {
                **kinds,
                "share_known": round((kinds["known"] + kinds["by branch"]) / max(1, sum(kinds.values())), 4),
            },
            "unknown_because": dict(reasons.most_common(20)),
            "facts_compared_with_execution": sum(r.compared for r in results),
            "facts_that_differ": sum(len(r.differences) for r in results),
            "recipes": sum(len(r.recipes) for r in results),
            "variants": variants,
            "local_refused": sum(r.rejected_local for r in results),
            "shipped_with_graphs_on": sum(r.shipped_on for r in results),
            "shipped_with_findings": {
                f"{r.path}:{n}": [c for c, _ in f] for r in results for n, f in r.shipped.items()
            },
            "problems": len(self.problems),
        }


def run(patterns: Sequence[str] = ("*",)) -> Corpus:
    """Everything. Raises wheels.WheelUnavailable where the wheels cannot be had."""
    root = wheels.fetch("megatron-bridge", BRIDGE)
    wheels.fetch("megatron-core", MCORE)
    files = corpus(root, patterns)
    only = [part for path in files for part in ("--only", path)] if tuple(patterns) != ("*",) else []
    before = execute("bridge_recipes.py", *only)
    # the largest files first, so that no process is left alone with one at the end
    files.sort(key=lambda path: -(root / "megatron" / "bridge" / path).stat().st_size)
    by_file: dict[str, dict[str, dict]] = {path: {} for path in files}
    for (path, function), row in before.items():
        by_file.setdefault(path, {})[function] = row
    with ProcessPoolExecutor(PROCESSES) as pool:
        results = list(pool.map(work, [str(root)] * len(files), files, [by_file[path] for path in files]))
    results.sort(key=lambda result: result.path)
    problems = [line for result in results for line in (*result.differences, *result.problems)]
    ran: dict[str, int] = {}
    variants = list(dict.fromkeys(variant for result in results for variant in result.texts))
    with tempfile.TemporaryDirectory() as scratch, ProcessPoolExecutor(PROCESSES) as pool:
        folders = []
        for number, variant in enumerate(variants):
            folders.append(Path(scratch) / str(number))
            write_tree(results, variant, folders[-1])
        executions = pool.map(execute, ["edited_recipes.py"] * len(folders), map(str, folders))
        for variant, after in zip(variants, executions):
            ran[variant], wrong = check_executed(results, variant, before, after)
            problems += wrong
    return Corpus(results, before, ran, problems)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the counts as JSON")
    parser.add_argument(
        "--only", action="append", default=[], metavar="GLOB", help="files by path under megatron/bridge"
    )
    arguments = parser.parse_args(argv)
    try:
        found = run(arguments.only or ("*",))
    except wheels.WheelUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    summary = found.summary()
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=TESTS, capture_output=True, text=True, check=False)
    document = {
        "schema_version": report.SCHEMA_VERSION,
        "command": "python tests/recipe_corpus.py --write evals/results/corpus/bridge-0.6.2.json",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "revision": git.stdout.strip() or "unknown",
        "python": platform.python_version(),
        **summary,
    }
    text = json.dumps(document, indent=2)
    print(text)
    if arguments.write:
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(text + "\n", encoding="utf-8")
    for line in found.problems:
        print(line, file=sys.stderr)
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
