# SPDX-License-Identifier: Apache-2.0
"""Settings given on the command line: `--set KEY=VALUE`."""

from __future__ import annotations

from typing import Any

from cudagraphs.cli import UsageError
from cudagraphs.rules.defaults import SECTIONS, fact_names, field_names
from cudagraphs.versions import Versions


def setting(text: str, versions: Versions, automodel: bool = False, judged: bool = False) -> tuple[str, Any]:
    """`model.key=value` -> (fact name, value). Raises UsageError for a text without `=` or an unknown key.

    `judged`: the value is only judged and never written, so that it may be any fact that a rule asks for.
    """
    import yaml

    key, equals, value = text.partition("=")
    key = key.strip().removeprefix("cfg.")
    if not equals or not key:
        raise UsageError(f"--set {text!r}: give KEY=VALUE")
    fields = field_names(versions.minor)
    others = [name for name in fact_names() if "." in name] if judged else SECTIONS
    fact = key.removeprefix("model.")
    if automodel and "." in fact:
        pass  # a path of the YAML; the framework itself checks it
    elif fact not in fields:
        fact = key
        if not (key.startswith("env.") and len(key) > 4) and key not in others:
            import difflib

            near = difflib.get_close_matches(fact.removeprefix("model."), [*fields, *others], 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise UsageError(f"--set {key}: megatron-core 0.{versions.minor} has no such setting{hint}")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        parsed = value
    return fact, str(value) if fact.startswith("env.") else parsed
