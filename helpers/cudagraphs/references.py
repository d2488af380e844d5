# SPDX-License-Identifier: Apache-2.0
"""Writes the reference pages whose facts live in code: versions and renames, CUDA capture errors.

The rules' own pages are written by `cudagraphs.rules.pages`.
"""

from __future__ import annotations

from pathlib import Path

from cudagraphs.capture.errors import CAPTURE_ERRORS
from cudagraphs.rules import REGISTRY
from cudagraphs.rules.defaults import NEWEST_MINOR, field_names
from cudagraphs.rules.normalize import implementations, scope_names
from cudagraphs.versions import BRIDGE_PINS, NEWEST

COMMAND = "python helpers/validate_constraints.py --write-pages references"
GRAPH_FIELDS = (
    "enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl", "cuda_graph_scope", "cuda_graph_modules",
    "inference_cuda_graph_scope", "cuda_graph_warmup_steps", "cuda_graph_use_single_mempool", "cuda_graph_retain_backward_graph",
)  # fmt: skip


def write(directory: Path) -> list[Path]:
    """Write versions.md and cuda-errors.md into `directory`; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in (("versions.md", versions_page()), ("cuda-errors.md", errors_page())):
        path = directory / name
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def versions_page() -> str:
    lines = [
        "# Versions and renames", "",
        f"Written by `{COMMAND}` from the field tables and migrations in code. Grep it: one row a version and fact.", "",
        "## Which names exist", "",
        "| megatron-core | values of cuda_graph_impl | scope names |", "|---|---|---|",
    ]  # fmt: skip
    minors = range(13, NEWEST_MINOR + 1)
    for minor in minors:
        impls = ", ".join(implementations(minor)) if minor >= 15 else "no such field: enable_cuda_graph (local), external_cuda_graph (TE)"
        lines.append(f"| 0.{minor} | {impls} | {', '.join(scope_names(minor))} |")
    lines += ["", "## Which fields TransformerConfig has", "", "| field | " + " | ".join(f"0.{m}" for m in minors) + " |"]
    lines.append("|---|" + "---|" * len(minors))
    for field in GRAPH_FIELDS:
        lines.append(f"| {field} | " + " | ".join("yes" if field in field_names(m) else "no" for m in minors) + " |")
    lines += ["", "## The same request in each version", ""]
    lines += ["| request | 0.13-0.14 | 0.15 | 0.16-0.17 | 0.18 and newer |", "|---|---|---|---|---|"]
    lines += [
        '| TE graphs of attention | external_cuda_graph=True, cuda_graph_scope="attn" | cuda_graph_impl="transformer_engine", '
        'cuda_graph_scope="attn" | cuda_graph_impl="transformer_engine", cuda_graph_scope=["attn"] | '
        'cuda_graph_impl="transformer_engine", cuda_graph_modules=["attn"] |',
        '| whole layers | external_cuda_graph=True, cuda_graph_scope="full" | cuda_graph_impl="transformer_engine", '
        'cuda_graph_scope="full" | cuda_graph_impl="transformer_engine", cuda_graph_scope=[] | '
        'cuda_graph_impl="transformer_engine", cuda_graph_modules=[] |',
        '| full iteration | 0.14: enable_cuda_graph=True, cuda_graph_scope="full_iteration" | cuda_graph_impl="local", '
        'cuda_graph_scope="full_iteration" | cuda_graph_impl="local", cuda_graph_scope=["full_iteration"] | '
        'cuda_graph_impl="full_iteration", cuda_graph_modules=[] |',
        '| off | both flags False | cuda_graph_impl="none" | cuda_graph_impl="none" | cuda_graph_impl="none", '
        'cuda_graph_modules=[] (a "full_iteration" left there turns graphs on again) |',
    ]
    lines += [
        "", "From 0.18 on `cuda_graph_scope` and `cuda_graph_modules` must not both be set: where a base recipe sets the old name,",
        "set it to None. `cuda_graph_impl` and the two legacy flags must not both be set from 0.15 on.", "",
        "On the Megatron-LM command line the scopes are separated by spaces (`--cuda-graph-modules attn mlp`); on the Bridge",
        "performance script by commas (`--cuda_graph_scope attn,mlp`).", "",
        "## Which releases belong together", "", "| Megatron Bridge | megatron-core |", "|---|---|",
    ]  # fmt: skip
    lines += [f"| {'.'.join(map(str, bridge))} | {core} |" for bridge, core in BRIDGE_PINS.items()]
    newest = ", ".join(f"{name} {number}" for name, number in NEWEST.items())
    lines += ["", f"Newest known: {newest}. The wheels do not bound megatron-core: what is installed decides.", ""]
    lines += ["## Rules by version", "", "| rule | holds in | severity | title |", "|---|---|---|---|"]
    lines += [f"| {rule.code} | {rule.versions_text()} | {rule.severity} | {rule.title} |" for rule in REGISTRY]
    return "\n".join(lines) + "\n"


def errors_page() -> str:
    lines = [
        "# CUDA capture errors 900 to 909", "",
        f"Written by `{COMMAND}`. Source of numbers and names: CUDA runtime API, enumeration cudaError. A failed capture leaves",
        "the process unusable (its random number generators stay in capture state): start a new process for the next attempt.", "",
    ]  # fmt: skip
    for code, (name, message, cause, mend) in CAPTURE_ERRORS.items():
        lines += [f"## {code} {name}", "", f"- message: {message}", f"- cause: {cause}", f"- mend: {mend}", ""]
    lines += [
        "## No code, but at capture or replay", "",
        "- illegal memory access: memory of a replay was freed or moved after the capture. With expandable segments set",
        "  `NCCL_GRAPH_REGISTER=0`; keep every static input alive as long as its graph. Or cuDNN before 9.15.1 in a",
        "  full-iteration graph, with a sequence length that is no multiple of 128 (CG731): then NaN is as likely.",
        "- out of memory: a graph's private pool is not shared with eager steps. Fewer scopes, fewer captured microbatches.",
        "",
    ]  # fmt: skip
    return "\n".join(lines)
