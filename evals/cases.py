#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The eval cases: read, checked, and written out in the forms that other tools read.

A case is a folder evals/cases/<id>/ with case.yaml, which the agent under test never sees, and workspace/, which it
gets a copy of. evals.json (one entry a case) and trigger_evals.json (queries that must, or must not, bring the skill
up) are generated.

Usage:
    python evals/cases.py            list the cases
    python evals/cases.py --write    write evals.json and trigger_evals.json
    python evals/cases.py --check    exit 1 if these two are not what --write would write

Output: a table of the cases, or the names of the files written.

Exit codes: 0 done or in step; 1 --check found a difference; 2 usage, or a case that is not right.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

EVALS = Path(__file__).resolve().parent
CASES = EVALS / "cases"
SKILL = "nemo-cuda-graphs"
GRADERS = ("recipe", "launch", "automodel", "teardown", "outcome")
CATEGORIES = (
    "pick-scopes", "repair", "migrate", "why-off", "read-smoke", "teardown", "automodel", "pytorch", "do-not",
    "negative",
)  # fmt: skip
# Also asked of the trigger list, beside the prompts of the cases: short forms, as people type them.
TRIGGERS = (
    ("turn on cuda graphs for our Megatron Bridge recipe", True),
    ("AssertionError: CUDA graphs not supported with activation recomputation", True),
    ("which cuda_graph_modules can I use with a dropless MoE?", True),
    ("job never exits after training since we use --cuda-graph-impl transformer_engine", True),
    ("our Megatron step is launch bound, the GPU idles between kernels", True),
    ("is torch.cuda.make_graphed_callables worth it for our decoder blocks in training", True),
    ("cudaErrorStreamCaptureUnsupported in the first captured step of pretrain_gpt.py", True),
    ("AutoModel backend.cuda_graph.modules: attn raises ValueError", True),
    ("TECudaGraphHelper captured 48 layers but the step is not faster", True),
    ("move our cuda_graph_scope settings to megatron-core 0.19", True),
    ("vLLM runs out of memory while capturing decode graphs", False),
    ("speed up generate() with torch.compile(mode='reduce-overhead')", False),
    ("write a Cypher query for our graph database", False),
    ("train a graph neural network with PyTorch Geometric on two GPUs", False),
    ("nsys shows warp divergence in my custom kernel", False),
    ("plot the loss graph of the last run", False),
    ("RuntimeError: Trying to backward through the graph a second time", False),
    ("NCCL watchdog timeout in the data loader, no graphs in use", False),
    ("TensorRT engine with CUDA graphs for our ranking model", False),
    ("which tensor parallel size for a 70B model on 16 GPUs", False),
)


class CaseError(ValueError):
    """A case that is not right; the text is one line naming file and key."""


@dataclass(frozen=True)
class Case:
    id: str
    title: str
    category: str
    prompt: str
    versions: dict
    grader_name: str
    parameters: dict
    expectations: list[str]
    expected_script: str | None
    reference: list[dict]
    folder: Path = field(compare=False)

    @property
    def workspace(self) -> Path:
        return self.folder / "workspace"

    @property
    def negative(self) -> bool:
        return self.category == "negative"

    def grader(self, upstream) -> Callable:
        """`grade(workspace, transcript) -> Grade` with this case's parameters, and the skill-use check of negatives."""
        grade = importlib.import_module(f"graders.{self.grader_name}").grade
        return functools.partial(_graded, grade, self, upstream)


def _graded(grade, case: Case, upstream, workspace: Path, transcript):
    result = grade(workspace, transcript, case=case, upstream=upstream)
    if case.negative:
        used = transcript.uses(f"skills/{SKILL}/helpers")
        result.add("the skill's helpers were not run", not used, used[0] if used else "none was")
    return result


def load(pattern: str = "*") -> list[Case]:
    """The cases whose id matches the glob, by id. Raises CaseError."""
    folders = sorted(path.parent for path in CASES.glob("*/case.yaml"))
    return [load_one(folder) for folder in folders if fnmatch.fnmatch(folder.name, pattern)]


def load_one(folder: Path) -> Case:
    file = folder / "case.yaml"
    data = yaml.safe_load(file.read_text(encoding="utf-8"))
    known = {
        "title",
        "category",
        "prompt",
        "versions",
        "grader",
        "parameters",
        "expectations",
        "expected_script",
        "reference",
    }
    for key in known ^ set(data):
        raise CaseError(f"{file}: key {key} is {'missing' if key in known else 'unknown'}")
    if data["category"] not in CATEGORIES:
        raise CaseError(f"{file}: category {data['category']}: one of {', '.join(CATEGORIES)}")
    if data["grader"] not in GRADERS:
        raise CaseError(f"{file}: grader {data['grader']}: one of {', '.join(GRADERS)}")
    if not (folder / "workspace").is_dir():
        raise CaseError(f"{folder}: has no workspace folder")
    return Case(
        folder.name, data["title"], data["category"], data["prompt"].strip(), data["versions"], data["grader"],
        data["parameters"], data["expectations"], data["expected_script"], data["reference"], folder,
    )  # fmt: skip


def evals_json(cases: list[Case]) -> dict:
    entries = []
    for number, case in enumerate(cases, 1):
        files = sorted(
            path.relative_to(EVALS.parent).as_posix() for path in case.workspace.rglob("*") if path.is_file()
        )
        entries.append(
            {
                "id": number,
                "name": case.id,
                "prompt": case.prompt,
                "expected_output": case.title,
                "files": files,
                "assertions": case.expectations,
                "expectations": case.expectations,
                "expected_skill": None if case.negative else SKILL,
                "expected_script": case.expected_script,
                "should_trigger": not case.negative,
                "grader": f"evals/graders/{case.grader_name}.py",
            }
        )
    return {"skill_name": SKILL, "evals": entries}


def generated(cases: list[Case]) -> dict[Path, str]:
    triggers = [{"query": query, "should_trigger": should} for query, should in TRIGGERS]
    documents = {EVALS / "evals.json": evals_json(cases), EVALS / "trigger_evals.json": triggers}
    return {path: json.dumps(document, indent=1, ensure_ascii=False) + "\n" for path, document in documents.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args(argv)
    try:
        cases = load()
    except CaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.check:
        stale = [
            path.name
            for path, text in generated(cases).items()
            if not path.is_file() or path.read_text(encoding="utf-8") != text
        ]
        print("\n".join(f"{name}: not what `python evals/cases.py --write` writes" for name in stale) or "in step")
        return 1 if stale else 0
    if arguments.write:
        for path, text in generated(cases).items():
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(EVALS.parent))
        return 0
    for case in cases:
        print(f"{case.category:12} {case.id:28} {case.title}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
