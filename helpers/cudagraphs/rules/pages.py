# SPDX-License-Identifier: Apache-2.0
"""Reference pages, one a rule and an index, written from the rules themselves.

`python helpers/validate_constraints.py --write-pages references` calls `write`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from cudagraphs.rules import REGISTRY, TOPICS
from cudagraphs.rules.base import BRIDGE, LM, Example, Rule

HEADER = (
    "Generated from the rules by `python helpers/validate_constraints.py --write-pages references`; "
    "do not edit.\n"
)
SEVERITIES = {
    "error": "upstream rejects it, or it is known to break",
    "runtime": "the configuration is accepted, and fails or captures nothing later",
    "warning": "it works, or may work, but not as it should",
    "info": "worth knowing",
}


def write(directory: Path) -> list[Path]:
    """Write `CG###.md` for every rule and `index.md`; remove pages of rules that are gone. Returns the files, sorted.

    Raises OSError where the folder cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    pages = {f"{rule.code}.md": page(rule) for rule in REGISTRY}
    pages["index.md"] = index()
    for stale in directory.glob("CG[0-9][0-9][0-9].md"):
        if stale.name not in pages:
            stale.unlink()
    for name, text in pages.items():
        _replace(directory / name, text)
    return sorted(directory / name for name in pages)


def page(rule: Rule) -> str:
    """The reference page of one rule, in Markdown."""
    parts = [
        f"# {rule.code}: {rule.title}\n",
        HEADER,
        f"Severity: **{rule.severity}** ({SEVERITIES[rule.severity]}). Enforced by: {_enforced(rule)}. "
        f"Frameworks: {', '.join(rule.frameworks)}.\n",
        f"## What it does\n\nReports: {_as_text(rule.message)}.\n",
        f"## Why it fails\n\n{rule.why}\n",
        "## Example\n",
        *(_example("Breaks the rule", example) for example in rule.bad),
        *(_example("Keeps the rule", example) for example in rule.good),
        f"## Mend\n\n{_as_text(rule.mend)[:1].upper()}{_as_text(rule.mend)[1:]}.\n",
        _fix(rule),
        f"## Versions\n\n{rule.versions_text()}.\n",
        f"## Source\n\n{rule.source}\n",
    ]
    if rule.upstream:
        messages = "\n".join(f"- `{message}`" for message in rule.upstream)
        parts.append(f"Messages that users see:\n\n{messages}\n")
    return "\n".join(parts)


def index() -> str:
    """The index by topic and by upstream message."""
    lines = ["# Rules on CUDA graph settings\n", HEADER, "## By topic\n"]
    for digit, (title, _) in TOPICS.items():
        rules = [rule for rule in REGISTRY if rule.code[2] == digit]
        lines += [f"### CG{digit}xx: {title}\n", "| Rule | Severity | What |", "|---|---|---|"]
        lines += [f"| {rule.code} | {rule.severity} | {rule.title} |" for rule in rules]
        lines.append("")
    lines += ["## By upstream message\n", "| Message | Rule |", "|---|---|"]
    messages = sorted((message, rule.code) for rule in REGISTRY for message in rule.upstream)
    lines += [f"| `{message.replace('|', chr(92) + '|')}` | {code} |" for message, code in messages]
    return "\n".join(lines) + "\n"


def _enforced(rule: Rule) -> str:
    layers = {
        "config": "megatron-core's `TransformerConfig`",
        "arguments": "Megatron-LM's `validate_args`",
        "bridge": "Megatron Bridge",
        "automodel": "NeMo AutoModel",
        "capture": "the capture or the replay at run time",
        "environment": "nothing, or a check at capture; it depends on environment variables",
        "reported": "nothing; users report the failure",
    }
    return layers[rule.layer]


def _as_text(template: str) -> str:
    return template.replace("{", "`").replace("}", "`")


def _example(title: str, example: Example) -> str:
    versions = ", ".join(f"{component} {version}" for component, version in example.versions.items())
    head = f"{title}{f' ({versions})' if versions else ''}:"
    lines = "\n".join(f"{_prefix(example, name)}{name} = {value!r}" for name, value in example.facts.items())
    return f"{head}\n\n```python\n{lines or '# every setting at its default'}\n```\n"


def _prefix(example: Example, name: str) -> str:
    """How the fact is written in a Bridge recipe or a bare configuration."""
    return "" if "." in name or example.framework in (BRIDGE, LM) else "config."


def _fix(rule: Rule) -> str:
    if rule.fix is None:
        return "No mechanical mend: a person has to choose.\n"
    example = rule.bad[0]
    values = fix_of(rule, example)
    if not values:
        return "No mechanical mend for every case.\n"
    how = (
        "safe, applied by `--fix`"
        if rule.safe
        else "changes what is computed or needs more memory, so `--fix` leaves it"
    )
    lines = "\n".join(f"{_prefix(example, name)}{name} = {value!r}" for name, value in values.items())
    return f"Mechanical mend of the first example ({how}):\n\n```python\n{lines}\n```\n"


def fix_of(rule: Rule, example: Example) -> Mapping[str, object] | None:
    """The fix of the rule for one of its examples."""
    from cudagraphs import versions
    from cudagraphs.rules import check
    from cudagraphs.settings import Known, Settings

    framework = example.framework or rule.frameworks[-1]
    # only the versions named in the example count, whatever is installed where the pages are written
    resolved = versions.resolve(framework, **{**versions.NEWEST, **example.versions})
    settings = Settings(framework, resolved, {name: Known(value) for name, value in example.facts.items()})
    findings = check(settings, [rule])
    return findings[0].fix if findings else None


def _replace(path: Path, text: str) -> None:
    """Write the file whole or not at all; leave one that is right alone."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise
