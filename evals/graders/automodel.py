# SPDX-License-Identifier: Apache-2.0
"""Grades a NeMo AutoModel YAML by the BackendConfig of the released AutoModel and by the scopes that come out.

Parameters of the case:
    file, backend             the YAML and the path of its backend mapping (for example model.backend)
    require, allow            scopes; both empty: graphs must be off
    settings                  {dotted path: [allowed values]}
    may_change                dotted paths that may differ from the original, beside the backend's cuda_graph
"""

from __future__ import annotations

from typing import Any

import yaml

from graders import Grade, only_changed
from graders.recipe import unchanged


def grade(workspace, transcript, *, case, upstream) -> Grade:
    result = Grade()
    wanted = case.parameters
    only_changed(result, case.workspace, workspace, [wanted["file"]])
    before = flat(yaml.safe_load((case.workspace / wanted["file"]).read_text(encoding="utf-8")))
    try:
        document = yaml.safe_load((workspace / wanted["file"]).read_text(encoding="utf-8"))
        after = flat(document)
    except (OSError, yaml.YAMLError) as error:
        result.add(f"{wanted['file']} is YAML", False, type(error).__name__)
        return result
    backend = document
    for step in wanted["backend"].split("."):
        backend = backend.get(step, {}) if isinstance(backend, dict) else {}
    backend = {name: value for name, value in backend.items() if name != "_target_"}
    answer = upstream.automodel(case.versions, backend)
    if not result.add(
        f"AutoModel {case.versions['automodel']} accepts the backend", answer["verdict"] == "accepted",
        answer["error"]["text"] if answer["error"] else "accepted",
    ):  # fmt: skip
        return result
    scopes, require = set(answer["modules"]), set(wanted.get("require", []))
    allowed = require | set(wanted.get("allow", []))
    result.add(
        f"captures {sorted(require)} and nothing beyond {sorted(allowed)}", require <= scopes <= allowed, sorted(scopes)
    )
    for name, values in wanted.get("settings", {}).items():
        result.add(f"{name} is {' or '.join(map(str, values))}", after.get(name) in values, after.get(name))
    free = [f"{wanted['backend']}.cuda_graph*", *wanted.get("may_change", [])]
    result.add(*unchanged("no other setting was changed", before, after, free))
    original = (case.workspace / wanted["file"]).read_text(encoding="utf-8")
    comments = [line.strip() for line in original.splitlines() if line.strip().startswith("#")]
    kept = (workspace / wanted["file"]).read_text(encoding="utf-8")
    lost = [comment for comment in comments if comment not in kept]
    result.add("the comments are still there", not lost, lost or "all are")
    return result


def flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {
            key: item for name, child in value.items() for key, item in flat(child, f"{path}.{name}".strip(".")).items()
        }
    return {path: value}
