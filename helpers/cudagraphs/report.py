# SPDX-License-Identifier: Apache-2.0
"""What people and programs see: findings and facts as text, JSON, SARIF 2.1.0 and GitHub annotations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from cudagraphs import __version__
from cudagraphs.rules.base import Finding, GraphState
from cudagraphs.settings import Choice, Fact, Known, Settings, Source

SCHEMA_VERSION = 1

# The facts that a report always speaks of, in the order in which people ask.
KEY_FACTS = (
    "cuda_graph_impl", "cuda_graph_modules", "cuda_graph_scope", "num_moe_experts", "moe_token_dispatcher_type",
    "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "recompute_granularity", "recompute_modules",
    "cpu_offloading", "fine_grained_activation_offloading", "attention_dropout", "hidden_dropout",
    "dataset.packed_sequences",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "context_parallel_size",
    "overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "ddp.overlap_grad_reduce", "ddp.overlap_param_gather",
    "fp8", "fp4",
)  # fmt: skip
SARIF_LEVELS = {"error": "error", "runtime": "error", "warning": "warning", "info": "note"}
GITHUB_LEVELS = {"error": "error", "runtime": "error", "warning": "warning", "info": "notice"}


def is_blocking(finding: Finding) -> bool:
    """Whether the run would be rejected, or would break or capture nothing: what nothing may be written for."""
    return finding.severity in ("error", "runtime") and not finding.needs


def finding_json(finding: Finding, name: str) -> dict[str, Any]:
    return {
        "code": finding.code,
        "severity": finding.severity,
        "layer": finding.layer,
        "function": name,
        "title": finding.title,
        "message": finding.message,
        "mend": finding.mend,
        "fix": dict(finding.fix) if finding.fix else None,
        "fix_is_safe": finding.safe,
        "when": finding.when or None,
        "needs": list(finding.needs),
        "upstream": finding.source,
        "locations": [{"path": s.path, "line": s.line, "column": s.column, "text": s.text} for s in finding.locations],
    }


def finding_text(finding: Finding) -> list[str]:
    place = f" ({', '.join(map(str, finding.locations[:3]))})" if finding.locations else ""
    lines = [f"  {finding.code} {finding.severity}: {finding.message}{place}"]
    if finding.when:
        lines.append(f"      when {finding.when}")
    lines.append(f"      mend: {finding.mend}")
    lines.append(f"      source: {finding.source}")
    return lines


def undecided_text(findings: Iterable[Finding], how: str = "give it with --set") -> list[str]:
    """What could not be judged, a line for each set of facts that rules would need to know; `how` says where to give them."""
    by_needs: dict[tuple[str, ...], list[str]] = {}
    for finding in findings:
        if finding.needs:
            by_needs.setdefault(tuple(finding.needs), []).append(finding.code)
    lines = []
    for needs, codes in by_needs.items():
        codes = list(dict.fromkeys(codes))
        listed = ", ".join(codes[:6]) + (", ..." if len(codes) > 6 else "")
        which = f"{listed} is" if len(codes) == 1 else f"{len(codes)} rules ({listed}) are"
        lines.append(f"  {which} not decided for want of {', '.join(needs)}; {how}")
    return lines


def fact_json(fact: Fact) -> dict[str, Any]:
    if isinstance(fact, Known):
        return {"value": fact.value, "how": fact.how, "source": str(fact.source) if fact.source else None}
    if isinstance(fact, Choice):
        return {
            "branch": fact.branch.text,
            "source": str(fact.branch.source),
            "default": fact.branch.default,
            "if_true": fact_json(fact.if_true),
            "if_false": fact_json(fact.if_false),
        }
    return {"unknown": fact.reason, "source": str(fact.source) if fact.source else None}


def facts_text(settings: Settings) -> list[str]:
    """Known key facts on one line, those that a branch decides on a line each, and what is unknown with the reason."""
    known, choices, unknown = [], [], {}
    for name in KEY_FACTS:
        fact = settings.facts.get(name)
        if isinstance(fact, Known):
            known.append(f"{name}={_value(fact.value)}")
        elif isinstance(fact, Choice):
            choices.append(f"  depends: {name}: {choice_text(fact)}")
        elif fact is not None:
            unknown.setdefault(fact.reason, []).append(name)
        elif not settings.complete:
            unknown.setdefault(settings.incomplete_reason, []).append(name)
    lines = [f"  facts: {', '.join(known)}"] if known else []
    lines += choices
    lines += [f"  unknown: {', '.join(names)}: {reason}" for reason, names in unknown.items()]
    return lines


def choice_text(fact: Choice) -> str:
    """`alltoall or flex, by `condition` (file:line) and 2 more`."""
    values: list[str] = []
    branches: list[str] = []

    def visit(side: Fact) -> None:
        if isinstance(side, Choice):
            branches.append(str(side.branch))
            sides = (side.if_false, side.if_true) if side.branch.default is False else (side.if_true, side.if_false)
            visit(sides[0])
            visit(sides[1])
        else:
            values.append(_value(side.value) if isinstance(side, Known) else "unknown")

    visit(fact)
    more = f" and {len(branches) - 1} more" if len(branches) > 1 else ""
    return f"{' or '.join(dict.fromkeys(values))}, by {branches[0]}{more}"


def _value(value: Any) -> str:
    return "[" + ",".join(map(str, value)) + "]" if isinstance(value, (list, tuple)) else str(value)


def state_text(state: GraphState) -> str:
    if state.unknown:
        return state.unknown
    if not state.active:
        return "off"
    if state.full_iteration:
        return f"{state.impl}, whole iteration"
    return f"{state.impl} [{', '.join(state.modules)}]" if state.modules else f"{state.impl}, whole layer"


def state_json(state: GraphState) -> dict[str, Any]:
    return {
        "active": state.active,
        "impl": state.impl,
        "modules": list(state.modules),
        "inference_scope": state.inference_scope,
        "unknown": state.unknown or None,
    }


def sarif(results: Iterable[tuple[str, Finding]], rules: Iterable[Any]) -> dict[str, Any]:
    """A SARIF 2.1.0 log with one run."""
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "nemo-cuda-graphs",
                        "version": __version__,
                        "rules": [
                            {
                                "id": rule.code,
                                "shortDescription": {"text": rule.title},
                                "fullDescription": {"text": rule.why},
                                "help": {"text": rule.mend},
                                "defaultConfiguration": {"level": SARIF_LEVELS[rule.severity]},
                            }
                            for rule in rules
                        ],
                    }
                },
                "results": [
                    {
                        "ruleId": finding.code,
                        "level": SARIF_LEVELS[finding.severity],
                        "message": {"text": f"{name}: {finding.message}\nMend: {finding.mend}"},
                        "locations": [_sarif_location(source) for source in finding.locations],
                    }
                    for name, finding in results
                ],
            }
        ],
    }


def _sarif_location(source: Source) -> dict[str, Any]:
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": source.path},
            "region": {"startLine": source.line, "startColumn": source.column},
        }
    }


def github_annotation(name: str, finding: Finding, path: str) -> str:
    """A workflow command that GitHub shows at the line; commas, colons and newlines are escaped as it asks."""
    source = finding.locations[0] if finding.locations else Source(path, 1)

    def escaped(text: str, in_property: bool = False) -> str:
        text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
        return text.replace(":", "%3A").replace(",", "%2C") if in_property else text

    place = f"file={escaped(source.path, True)},line={source.line},title={escaped(finding.code, True)}"
    needs = f"\nNot decided: needs {', '.join(finding.needs)}" if finding.needs else ""
    message = escaped(f"{name}: {finding.message}{needs}\nMend: {finding.mend}")
    return f"::{GITHUB_LEVELS[finding.severity]} {place}::{message}"


def settings_json(settings: Settings, every: bool = False) -> dict[str, Any]:
    names = sorted(settings.facts) if every else [name for name in KEY_FACTS if name in settings.facts]
    document: Mapping[str, Any] = {name: fact_json(settings.facts[name]) for name in names}
    return {
        "framework": settings.framework,
        "versions": settings.versions.describe(settings.framework),
        "complete": settings.complete,
        "incomplete_reason": settings.incomplete_reason or None,
        "facts": document,
    }
