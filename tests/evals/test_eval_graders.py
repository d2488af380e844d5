# SPDX-License-Identifier: Apache-2.0
"""Every grader on a right answer, on an empty one, and on wrong ones that look right."""

import json
import re
import shutil

import cases
import pytest
from graders import Transcript

ON = 'cfg.model.cuda_graph_impl = "transformer_engine"'
RNG = "cfg.model.use_te_rng_tracker = True\n    cfg.rng.te_rng_tracker = True"
MOE = '"attn", "moe_router", "moe_preprocess"'
ENV = '"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",'
REGISTER = f'{ENV}\n      "NCCL_GRAPH_REGISTER": 0,'
CALLABLES = "        blocks = torch.cuda.make_graphed"
DESTROY = "        dist.destroy_process_group()"


def before_return(*lines):
    return ("    return cfg", "".join(f"    {line}\n" for line in lines) + "    return cfg")


def moe(scopes, *more, register=True):
    pairs = [
        ('cfg.model.cuda_graph_impl = "none"', ON),
        (
            'cfg.model.cuda_graph_scope = "full"',
            f"cfg.model.cuda_graph_scope = None\n    cfg.model.cuda_graph_modules = [{scopes}]",
        ),
    ]
    return {"recipe.py": [*pairs, *([(ENV, REGISTER)] if register else []), *more]}


def answer(**values):
    return {"answer.json": json.dumps(values)}


# (case, what was done, edits: file -> new text, or pairs of old and new text; the check that must fail, None for a
# pass)
TABLE = [
    ("moe-dropless", "right", moe(MOE, before_return(*RNG.split("\n    "))), None),
    ("moe-dropless", "empty", {}, "the implementation is"),
    ("moe-dropless", "experts of a dropless MoE", moe('"attn", "moe"', before_return(*RNG.split("\n    "))), "accepts the configuration"),
    ("moe-dropless", "attention alone", moe('"attn"', before_return(*RNG.split("\n    "))), "captures"),
    ("moe-dropless", "no RNG tracker", moe(MOE), "RNG tracker"),
    ("moe-dropless", "no NCCL_GRAPH_REGISTER", moe(MOE, before_return(*RNG.split("\n    ")), register=False), "NCCL_GRAPH_REGISTER=0"),
    (
        "moe-dropless", "the base's scope is left", {"recipe.py": [
            ('cfg.model.cuda_graph_impl = "none"', f"{ON}\n    cfg.model.cuda_graph_modules = [{MOE}]"), (ENV, REGISTER)]},
        "accepts the configuration",
    ),
    ("moe-dropless", "batch size changed too", moe(MOE, before_return(*RNG.split("\n    "), "cfg.train.micro_batch_size = 2")), "no other setting"),
    (
        "moe-dropless", "the shared base edited",
        {**moe(MOE, before_return(*RNG.split("\n    "))), "common.py": [("lr_warmup_iters=200", "lr_warmup_iters=200  # was 200")]},
        "no other file",
    ),
    ("moe-dropless", "a syntax error", {"recipe.py": [("def moe", "deff moe")]}, "accepts the configuration"),
    ("shared-base-two-recipes", "the sibling changed through the base", {"common.py": [
        ("        seq_length=seq_length,\n        vocab", '        seq_length=seq_length,\n        cuda_graph_impl="transformer_engine",\n        vocab')]},
     "debug_8b_config"),
    ("migrate-core-014", "right", {"model_config.py": [
        ("external_cuda_graph=True", 'cuda_graph_impl="transformer_engine"'), ('cuda_graph_scope="attn"', 'cuda_graph_modules=["attn"]')]}, None),
    ("migrate-core-014", "empty", {}, "cuda_graph"),
    ("migrate-core-014", "local is not what external meant", {"model_config.py": [
        ("external_cuda_graph=True", 'cuda_graph_impl="local"'), ('cuda_graph_scope="attn"', 'cuda_graph_modules=["attn"]')]},
     "the implementation is"),
    ("migrate-core-014", "flag kept beside the new name", {"model_config.py": [
        ('cuda_graph_scope="attn"', 'cuda_graph_impl="transformer_engine",\n        cuda_graph_modules=["attn"]')]}, "accepts the configuration"),
    ("off-last-assignment", "right edit, wrong line", {
        "recipe.py": [("    memory_tuning(cfg.model)\n", ""), before_return("memory_tuning(cfg.model)", ON)],
        **answer(file="tuning.py", line=12, function="memory_tuning")}, "answer.json line"),
    ("off-last-assignment", "right", {
        "recipe.py": [("    memory_tuning(cfg.model)\n", ""), before_return("memory_tuning(cfg.model)", ON)],
        **answer(file="tuning.py", line=9, function="memory_tuning")}, None),
    ("lm-dense-script", "right", {"pretrain.sh": [
        ("    --bf16\n", "    --bf16\n    --cuda-graph-impl transformer_engine\n    --cuda-graph-modules attn\n    --te-rng-tracker\n"),
        ("export CUDA", "export NCCL_GRAPH_REGISTER=0\nexport CUDA")]}, None),
    ("lm-dense-script", "empty", {}, "the implementation is"),
    ("lm-dense-script", "expandable segments alone", {"pretrain.sh": [
        ("    --bf16\n", "    --bf16\n    --cuda-graph-impl transformer_engine\n    --cuda-graph-modules attn\n    --te-rng-tracker\n")]},
     "accepts the command line"),
    ("lm-dense-script", "set, but not exported", {"pretrain.sh": [
        ("    --bf16\n", "    --bf16\n    --cuda-graph-impl transformer_engine\n    --cuda-graph-modules attn\n    --te-rng-tracker\n"),
        ("export CUDA", "NCCL_GRAPH_REGISTER=0\nexport CUDA")]}, "accepts the command line"),
    ("lm-dense-script", "options behind the launcher's own", {"pretrain.sh": [
        ("pretrain_gpt.py", "--cuda-graph-impl transformer_engine --cuda-graph-modules attn pretrain_gpt.py"),
        ("export CUDA", "export NCCL_GRAPH_REGISTER=0\nexport CUDA")]}, "the implementation is"),
    ("repair-comma-list", "quoted as one word", {"pretrain.sh": [("attn,mlp", '"attn mlp"')]}, "accepts the command line"),
    ("automodel-attn", "right", {"config.yaml": [
        ("linear: te", "linear: torch"), ("rms_norm: torch_fp32", "rms_norm: torch\n    cuda_graph:\n      modules: [attn]")]}, None),
    ("automodel-attn", "empty", {}, "captures"),
    ("automodel-attn", "rms_norm left", {"config.yaml": [
        ("linear: te", "linear: torch\n    cuda_graph:\n      modules: [attn]")]}, "accepts the backend"),
    ("automodel-attn", "beside the backend", {"config.yaml": [
        ("linear: te", "linear: torch"), ("rms_norm: torch_fp32", "rms_norm: torch"), ("optimizer:", "cuda_graph:\n  modules: [attn]\noptimizer:")]},
     "captures"),
    ("automodel-attn", "comments lost", {"config.yaml": [
        ("  # kernels\n", ""), ("linear: te", "linear: torch"),
        ("rms_norm: torch_fp32", "rms_norm: torch\n    cuda_graph:\n      modules: [attn]")]}, "comments"),
    ("automodel-attn", "not YAML any more", {"config.yaml": [("linear: te", "linear: [te")]}, "is YAML"),
    ("teardown-plain-torch", "right", {"train.py": [
        (CALLABLES, "        graphs = []\n" + CALLABLES),
        (DESTROY, "        for graph in [o for o in gc.get_objects() if isinstance(o, torch.cuda.CUDAGraph)]:\n            graph.reset()\n" + DESTROY),
        ("import torch\n", "import gc\n\nimport torch\n")]}, None),
    ("teardown-plain-torch", "empty", {}, "no hang"),
    ("teardown-plain-torch", "names deleted, graphs still referenced", {"train.py": [
        (DESTROY, "        del optimizer_graph\n        torch.cuda.empty_cache()\n" + DESTROY)]}, "no hang"),
    ("teardown-plain-torch", "left by os._exit", {"train.py": [(DESTROY, "        import os\n        os._exit(0)")]}, "reset, not abandoned"),
    ("teardown-plain-torch", "the hanging call dropped", {"train.py": [(DESTROY, "        pass")]}, "destroy_process_group"),
    ("teardown-te-helper", "deleted without asking whether there are any", {"train.py": [
        (DESTROY, "        helper.delete_cuda_graphs()\n" + DESTROY)]}, "too short to capture"),
    ("teardown-te-helper", "only at the end of a good run", {"train.py": [
        ("args.warmup)\n", "args.warmup)\n        if helper.graphs_created():\n            helper.delete_cuda_graphs()\n")]}, "failing replay: no hang"),
    ("smoke-parity", "right", answer(decision="on", variant="transformer_engine:attn", reason="parity"), None),
    ("smoke-parity", "empty", {}, "is there"),
    ("smoke-parity", "the fastest", answer(decision="on", variant="transformer_engine:attn+moe_router+moe_preprocess", reason="x"), "variant"),
    ("smoke-parity", "none at all", answer(decision="off", variant="none", reason="gradients differ"), "decision"),
    ("smoke-parity", "not JSON", {"answer.json": "decision: on"}, "is there"),
    ("profile-gpu-busy", "bound without the idle share", answer(busy_share=0.97, upper_bound_speedup=1.2, worth_it=False), "upper_bound"),
    ("profile-gpu-busy", "a number in words", answer(busy_share="high", upper_bound_speedup=1.03, worth_it=False), "busy_share"),
    ("neg-loss-plot", "right for another window", {"summarize.py": "print('best step: 30')\n"}, "prints"),
    ("neg-pipeline-dag", "what it waited for is gone", {"jobs.yaml": [("needs: [train]\n  run: python evaluate", "needs: [convert]\n  run: python evaluate")]}, "holds"),
]  # fmt: skip


def apply(workspace, edits):
    for name, edit in edits.items():
        path = workspace / name
        if isinstance(edit, str):
            path.write_text(edit, encoding="utf-8")
            continue
        text = path.read_text(encoding="utf-8")
        for old, new in edit:
            assert old in text, f"{name} has no {old!r}"
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")


@pytest.mark.wheels
@pytest.mark.parametrize("case_id, what, edits, fails", TABLE, ids=[f"{row[0]}: {row[1]}" for row in TABLE])
def test_grade(case_id, what, edits, fails, upstream, tmp_path):
    case = cases.load(case_id)[0]
    workspace = tmp_path / "workspace"
    shutil.copytree(case.workspace, workspace)
    apply(workspace, edits)
    grade = case.grader(upstream)(workspace, Transcript())
    failed = [f"{check.text}: {check.evidence}" for check in grade.checks if not check.passed]
    if fails is None:
        assert grade.passed, failed
    else:
        assert not grade.passed
        assert any(re.search(re.escape(fails), text) for text in failed), failed


def test_the_table_covers_every_grader():
    seen = {}
    for case_id, _, edits, fails in TABLE:
        kinds = seen.setdefault(cases.load(case_id)[0].grader_name, set())
        kinds.add("right" if fails is None else "wrong" if edits else "empty")
    assert seen == {name: {"right", "empty", "wrong"} for name in cases.GRADERS}


def test_a_grade_without_points_does_not_pass():
    from graders import Grade

    assert not Grade().passed
    assert Grade().as_json()["summary"] == {"passed": 0, "failed": 0, "total": 0, "pass_rate": 0.0}
