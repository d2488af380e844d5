# SPDX-License-Identifier: Apache-2.0
"""The command line that checks settings: everything at once, in every format, and safe mends."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import validate_constraints
from cudagraphs.rules import REGISTRY

SCRIPT = Path(validate_constraints.__file__)
HEADER = """\
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.config import ConfigContainer


"""
CLEAN = (
    HEADER
    + """\
def my_config():
    cfg = ConfigContainer(model=GPTModelProvider(num_layers=2, num_moe_experts=None))
    cfg.model.cuda_graph_impl = "transformer_engine"
    cfg.model.cuda_graph_modules = ["attn"]
    cfg.model.use_te_rng_tracker = True
    cfg.rng.te_rng_tracker = True
    return cfg
"""
)
# three faults that do not hang on each other
BROKEN = (
    HEADER
    + """\
def my_config():
    cfg = ConfigContainer(model=GPTModelProvider(num_layers=2, num_moe_experts=None))
    cfg.model.cuda_graph_impl = "transformer_engine"
    cfg.model.cuda_graph_modules = ["attn", "moe_router"]
    cfg.model.recompute_granularity = "full"
    cfg.model.cpu_offloading = True
    cfg.model.use_te_rng_tracker = True
    cfg.rng.te_rng_tracker = True
    return cfg
"""
)
VERSIONS = ["--bridge", "0.6.2", "--mcore", "0.19.2", "--te", "2.14", "--torch", "2.11"]


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(source: str | None, *flags: str, versions=VERSIONS):
        """(exit code, stdout, stderr)."""
        if source is not None:
            (tmp_path / "recipe.py").write_text(source)
        code = validate_constraints.main(["recipe.py", *flags, *versions])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def codes_of(out: str) -> set[str]:
    (function,) = json.loads(out)["functions"]
    return {f["code"] for f in function["findings"] if f["severity"] in ("error", "runtime") and not f["needs"]}


# -- a recipe ----------------------------------------------------------------------------------------------------------


def test_a_clean_recipe(run):
    code, out, err = run(CLEAN)
    assert code == 0 and err == ""
    assert "my_config: transformer_engine [attn]" in out


def test_all_findings_at_once_each_with_its_line_mend_and_source(run):
    code, out, _ = run(BROKEN, "--json")
    assert code == 1
    (function,) = json.loads(out)["functions"]
    blocking = [f for f in function["findings"] if f["severity"] == "error" and not f["needs"]]
    assert len(blocking) >= 3
    for finding in blocking:
        assert finding["mend"] and finding["upstream"] and finding["message"]
        assert all(location["path"].endswith("recipe.py") and location["line"] > 1 for location in finding["locations"])
    lines = {location["line"] for finding in blocking for location in finding["locations"]}
    assert {8, 9, 10} <= lines


def test_text_names_the_same_findings(run):
    codes = codes_of(run(BROKEN, "--json")[1])
    code, out, _ = run(BROKEN)
    assert code == 1
    assert codes <= set(re.findall(r"CG\d{3}", out))
    assert out.count("mend: ") >= len(codes) and "recipe.py:8" in out


def test_quiet_leaves_only_what_blocks(run):
    _, full, _ = run(BROKEN)
    _, quiet, _ = run(BROKEN, "--quiet")
    assert len(quiet) < len(full) and "facts:" not in quiet and "CG" in quiet


def test_sarif(run):
    code, out, _ = run(BROKEN, "--format", "sarif")
    log = json.loads(out)
    assert code == 1 and log["version"] == "2.1.0"
    (sarif_run,) = log["runs"]
    known = {rule["id"] for rule in sarif_run["tool"]["driver"]["rules"]}
    assert sarif_run["results"] and all(result["ruleId"] in known for result in sarif_run["results"])
    regions = [
        location["physicalLocation"]["region"] for result in sarif_run["results"] for location in result["locations"]
    ]
    assert all(region["startLine"] >= 1 and region["startColumn"] >= 1 for region in regions)


def test_github_annotations(run):
    code, out, _ = run(BROKEN, "--format", "github")
    assert code == 1
    assert all(
        re.match(r"::(error|warning|notice) file=[^,]+,line=\d+,title=CG\d{3}::\S", line) for line in out.splitlines()
    )
    assert any("recipe.py,line=" in line for line in out.splitlines())


def test_facts_only(run):
    code, out, _ = run(BROKEN, "--facts-only")
    facts = json.loads(out)["functions"]["my_config"]["facts"]
    assert code == 0
    assert facts["cpu_offloading"]["value"] is True and facts["cpu_offloading"]["source"] == "recipe.py:10"


def test_every_function_is_checked(run):
    code, out, _ = run(CLEAN + "\n\n" + BROKEN.removeprefix(HEADER).replace("my_config", "other_config"), "--json")
    assert code == 1
    assert [function["name"] for function in json.loads(out)["functions"]] == ["my_config", "other_config"]


def test_picking_functions(run):
    source = CLEAN + "\n\n" + BROKEN.removeprefix(HEADER).replace("my_config", "other_config")
    assert run(source, "--function", "my_*")[0] == 0
    assert run(source, "--function", "other_config")[0] == 1


def test_a_finding_on_one_side_of_a_branch_says_which(run):
    source = CLEAN.replace("my_config()", "my_config(offload: bool = False)").replace(
        "    return cfg", "    if offload:\n        cfg.model.cpu_offloading = True\n    return cfg"
    )
    code, out, _ = run(source)
    assert code == 1 and re.search(r"when `offload` is true \(recipe.py:\d+\)", out)


def test_what_is_unknown_is_asked_for_not_guessed(run):
    source = CLEAN.replace(
        "def my_config():\n    cfg = ConfigContainer(model=GPTModelProvider(num_layers=2, num_moe_experts=None))",
        "def my_config():\n    cfg = elsewhere.base_config()",
    ).replace(HEADER, "import elsewhere\n\n\n")
    code, out, _ = run(source, "--json")
    (function,) = json.loads(out)["functions"]
    open_findings = [f for f in function["findings"] if f["needs"]]
    assert code == 0 and open_findings
    assert all(f["severity"] == "info" for f in open_findings)
    assert function["settings"]["complete"] is False


def test_a_fact_that_is_given_decides(run):
    source = CLEAN.replace("num_moe_experts=None", "num_moe_experts=elsewhere.experts()").replace(
        '["attn"]', '["attn", "moe_router"]'
    )
    code, out, _ = run(source)
    assert code == 0 and "not decided for want of num_moe_experts" in out
    code, out, _ = run(None, "--set", "num_moe_experts=1")
    assert code == 1 and "CG103 error" in out
    assert run(None, "--set", "num_moe_experts=8")[0] == 0
    assert run(None, "--set", "num_moe_expert=8")[0] == 2


def test_the_version_decides(run):
    assert run(CLEAN)[0] == 0
    assert codes_of(run(None, "--json", versions=["--mcore", "0.17", "--te", "2.14"])[1])
    renamed = CLEAN.replace("cuda_graph_modules", "cuda_graph_scope")
    assert run(renamed, versions=["--mcore", "0.17", "--te", "2.14"])[0] == 0


# -- mends -------------------------------------------------------------------------------------------------------------

FIXES = [
    pytest.param('    cfg.model.cuda_graph_scope = "full"\n', "cuda_graph_scope = None", id="the old field beside the new one"),
    pytest.param("    cfg.model.use_te_rng_tracker = False\n    cfg.rng.te_rng_tracker = False\n", "te_rng_tracker = True", id="the random number tracker"),
]  # fmt: skip


@pytest.mark.parametrize("line, text", FIXES)
def test_fix_applies_safe_mends_and_then_has_nothing_left_to_do(run, tmp_path, line, text):
    code, out, _ = run(CLEAN.replace("    return cfg", f"{line}    return cfg"), "--fix")
    fixed = (tmp_path / "recipe.py").read_text()
    assert code == 0 and text in fixed and "mended: CG" in out
    assert run(None, "--fix")[0] == 0
    assert (tmp_path / "recipe.py").read_text() == fixed


def test_fix_leaves_a_clean_recipe_alone(run, tmp_path):
    run(CLEAN, "--fix")
    assert (tmp_path / "recipe.py").read_text() == CLEAN


def test_fix_ends_and_keeps_what_it_cannot_mend(run, tmp_path):
    code, out, _ = run(BROKEN, "--fix", "--json")
    (function,) = json.loads(out)["functions"]
    assert function["fixed"]
    left = {f["code"] for f in function["findings"] if f["severity"] in ("error", "runtime") and not f["needs"]}
    assert code == (1 if left else 0)
    assert not left & set(function["fixed"])


# -- rules -------------------------------------------------------------------------------------------------------------


def only(*arguments: str):
    return validate_constraints.main(list(arguments))


def test_list_rules(capsys):
    assert only("--list-rules") == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [rule.code for rule in REGISTRY]


@pytest.mark.parametrize("rule", list(REGISTRY), ids=lambda rule: rule.code)
def test_explain_by_code(capsys, rule):
    assert only("--explain", rule.code.lower()) == 0
    out = capsys.readouterr().out
    assert out.startswith(rule.code) and rule.title in out and rule.source in out


def test_explain_by_a_piece_of_upstreams_message(capsys):
    assert only("--explain", "full recompute is only supported with full iteration", "--json") == 0
    assert "CG" in json.loads(capsys.readouterr().out)["rules"][0]["code"]


def test_explain_what_nobody_said(capsys):
    assert only("--explain", "the moon is made of cheese") == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


# -- batch -------------------------------------------------------------------------------------------------------------

BATCH = [
    {"id": 1, "fields": {"cuda_graph_impl": "local"}},
    {"id": "two", "version": "0.17", "te": "2.8", "fields": {"cuda_graph_impl": "nonsense"}},
    {"id": 3, "fields": {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["moe"]}},
]


def answers(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_batch(tmp_path, capsys):
    path = tmp_path / "fields.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in BATCH))
    assert only("--fields-jsonl", str(path), "--mcore", "0.19") == 0
    first, second, third = answers(capsys.readouterr().out)
    assert (first["id"], first["verdict"], first["codes"]) == (1, "accepted", [])
    assert first["normalized"]["impl"] == "local"
    assert second["id"] == "two" and second["verdict"] == "rejected" and second["codes"]
    assert third["verdict"] == "rejected"


def test_batch_from_stdin(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(BATCH[0]) + "\n"))
    assert only("--fields-jsonl", "-", "--mcore", "0.19") == 0
    assert answers(capsys.readouterr().out)[0]["verdict"] == "accepted"


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("not json", id="no JSON"),
        pytest.param("[1, 2]", id="no object"),
        pytest.param('{"id": 1}', id="no fields"),
        pytest.param('{"id": 1, "fields": 3}', id="fields that are none"),
        pytest.param('{"id": 1, "version": "twelve", "fields": {}}', id="no version"),
        pytest.param('{"id": 1, "version": "0.3", "fields": {}}', id="a version that is not covered"),
    ],
)
def test_batch_with_a_bad_line_names_it(tmp_path, line):
    path = tmp_path / "fields.jsonl"
    path.write_text(json.dumps(BATCH[0]) + "\n" + line + "\n")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--fields-jsonl", str(path), "--mcore", "0.19"], capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr
    said = done.stdout.splitlines()[1:] + done.stderr.splitlines()
    assert said and any("2" in text for text in said)
    assert done.returncode in (0, 2)


# -- bad input ---------------------------------------------------------------------------------------------------------

BAD = [
    pytest.param([], "name a recipe", id="nothing asked for"),
    pytest.param(["nowhere.py"], "no such file", id="a missing file"),
    pytest.param(["."], "", id="a directory"),
    pytest.param(["--fields-jsonl", "nowhere.jsonl"], "cannot be read", id="a missing batch file"),
    pytest.param(["recipe.py", "--format", "xml"], "invalid choice", id="an unknown format"),
    pytest.param(["recipe.py", "--function", "no*"], "no function matches", id="a function that is not there"),
    pytest.param(["recipe.py", "--mcore", "x"], "is not a version", id="no version"),
]


@pytest.mark.parametrize("arguments, message", BAD)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.py").write_text(CLEAN)
    assert validate_constraints.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and len(err.strip().splitlines()) == 1


BAD_FILES = [
    pytest.param(b"", id="empty"),
    pytest.param(b"def f(:\n", id="a syntax error"),
    pytest.param(b"x = 1\n", id="no recipe function"),
    pytest.param(b"x = 1\0", id="null bytes"),
    pytest.param(b"#" * 10_000_000, id="ten megabytes"),
    pytest.param(b"\xff\xfex\x00", id="UTF-16"),
]


@pytest.mark.parametrize("content", BAD_FILES)
@pytest.mark.parametrize("flags", [[], ["--fix"], ["--facts-only"], ["--format", "sarif"]], ids=" ".join)
def test_bad_files(tmp_path, monkeypatch, capsys, content, flags):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.py").write_bytes(content)
    assert validate_constraints.main(["recipe.py", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("validate_constraints: recipe.py") and len(err.strip().splitlines()) == 1
    assert (tmp_path / "recipe.py").read_bytes() == content


def test_fix_of_a_read_only_file_is_refused(run, tmp_path):
    (tmp_path / "recipe.py").write_text(BROKEN)
    (tmp_path / "recipe.py").chmod(0o444)
    code, _, err = run(None, "--fix")
    assert code == 2 and "is read-only" in err and (tmp_path / "recipe.py").read_text() == BROKEN


def test_a_process_run_by_path_with_a_C_locale(tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(CLEAN.replace("my_config", "größe_config"), encoding="utf-8")
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(path), *VERSIONS], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr


NAMED = """
from megatron.bridge import AutoBridge
from megatron.bridge.training.config import ConfigContainer


def recipe():
    cfg = ConfigContainer(model=AutoBridge.from_hf_pretrained({checkpoint}).to_megatron_provider())
    cfg.model.cuda_graph_impl = "transformer_engine"
    cfg.model.cuda_graph_modules = {scopes}
    cfg.model.use_te_rng_tracker = True
    cfg.rng.te_rng_tracker = True
    {more}
    return cfg
"""
MOE, DENSE = '"Qwen/Qwen3-30B-A3B"', '"meta-llama/Llama-3-8B"'


@pytest.mark.parametrize(
    "checkpoint,scopes,would",
    [
        (MOE, ["attn", "moe"], ["CG105"]),
        (MOE, ["attn", "moe_router"], []),
        (DENSE, ["attn", "moe_router"], ["CG103"]),
    ],
)
def test_kind_that_the_name_tells_is_said_and_decides_nothing(tmp_path, capsys, checkpoint, scopes, would):
    import apply_overrides
    from cudagraphs import rules, versions
    from cudagraphs.formats import open_recipe

    path = tmp_path / "recipe.py"
    path.write_text(NAMED.format(checkpoint=checkpoint, scopes=scopes, more=""))
    flags = [str(path), "--bridge", "0.6.2"]
    assert validate_constraints.main(flags) == 0
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if line.startswith("  kind of model:")]
    assert checkpoint.strip('"') in line and line.endswith(f"{would[0]} would stand" if would else "no error would stand")
    assert validate_constraints.main([*flags, "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["functions"]
    assert run["by_name"]["would_stand"] == would
    # the same that apply_overrides.py judges by
    settings = open_recipe(path, versions.resolve(bridge="0.6.2")).run("recipe").settings
    judged = apply_overrides.assumed(settings)
    assert [f.code for f in rules.check(judged) if apply_overrides.report.is_blocking(f)] == would
    given = "null" if checkpoint == DENSE else "128"
    assert validate_constraints.main([*flags, "--set", f"num_moe_experts={given}"]) == (1 if would else 0)
    assert "kind of model" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "checkpoint,scopes,more",
    [
        ("name", ["attn", "moe_router"], ""),
        (MOE, ["attn", "moe_router"], "cfg.model.num_moe_experts = 8"),
        (MOE, ["attn"], ""),
    ],
    ids=["no name", "told by the recipe", "no rule waits for it"],
)
def test_kind_is_not_spoken_of_where_nothing_hangs_on_it(tmp_path, capsys, checkpoint, scopes, more):
    path = tmp_path / "recipe.py"
    path.write_text(NAMED.format(checkpoint=checkpoint, scopes=scopes, more=more))
    assert validate_constraints.main([str(path), "--bridge", "0.6.2"]) == 0
    assert "kind of model" not in capsys.readouterr().out


@pytest.mark.parametrize("length, warned", [("320", True), ("4096", False)])
def test_the_sequence_length_of_a_command_line_is_judged(length, warned, capsys):
    """cuDNN's attention in a full-iteration graph."""
    words = f"--cuda-graph-impl full_iteration --te-rng-tracker --no-check-for-nan-in-loss-and-grad --seq-length {length}"
    validate_constraints.main(["--framework", "megatron-lm", "--mcore", "0.19", "--", *words.split()])
    assert ("CG731" in capsys.readouterr().out) is warned
