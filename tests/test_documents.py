# SPDX-License-Identifier: Apache-2.0
"""What the Markdown files say is true: limits, files, commands, settings and rule codes."""

import ast
import json
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from cudagraphs.rules import REGISTRY
from cudagraphs.rules.defaults import FIELDS

ROOT = Path(__file__).resolve().parents[1]
SKILL = ROOT / "SKILL.md"
PAGES = [SKILL, ROOT / "README.md", *sorted((ROOT / "references").glob("*.md"))]
HELPERS = sorted(path.name for path in (ROOT / "helpers").glob("*.py"))
# commands that need a GPU, a training script or a network: they are checked for their file and flags only
NOT_RUN_HERE = ("smoke_capture.py", "delete_graphs.py", "torchrun", "pip", "pytest")


def text(path):
    return path.read_text(encoding="utf-8")


def commands():
    """Every command line in an indented or inline code span that calls one of the helpers."""
    found = []
    for page in PAGES:
        for line in re.findall(r"(?:^ {4,}|`)((?:python|torchrun)[^`\n]*helpers/[^`\n]*)", text(page), re.M):
            # the form for use from elsewhere names the folder; what is tested is the same script
            found.append((page.name, line.strip().replace("/path/to/nemo-cuda-graphs/", "")))
    return sorted(set(found))


def test_skill_is_short_enough():
    body = text(SKILL)
    assert len(body.splitlines()) < 300
    # four characters a token is what English Markdown with code has at most; 4,000 tokens
    assert len(body) / 4 < 4000


def test_skill_frontmatter():
    front = yaml.safe_load(text(SKILL).split("---")[1])
    assert set(front) <= {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
    assert front["name"] == "nemo-cuda-graphs"
    assert len(front["description"]) <= 200
    assert "<!--" not in text(SKILL)


def test_validator_accepts_the_packaged_tree(tmp_path):
    import package_skill

    target = package_skill.unpack(package_skill.archive(package_skill.install_files()), tmp_path)
    validator = Path(sys.executable).with_name("agentskills")
    done = subprocess.run([str(validator), "validate", str(target)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    for name in re.findall(r"\b((?:helpers|references|templates|tests|evals)/[\w./-]+\.(?:py|md|json|yaml))", text(page)):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_of_a_readable_length(page):
    assert len(text(page).splitlines()) < 400


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_machine_paths(page):
    assert not re.search(r"/(?:root|home|work|tmp)/\w", text(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_rule_codes_exist(page):
    for code in re.findall(r"\bCG\d{3}\b", text(page)):
        assert code in REGISTRY, code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_are_spelled_as_upstream_spells_them(page):
    for name in re.findall(r"\b((?:cuda_graph|recompute|moe|cpu_offloading|fine_grained)_\w+)\b", text(page)):
        assert name in FIELDS or name.startswith(KNOWN_OTHER), name


# scope names, keys of performance scripts and AutoModel, and helpers of upstream that share a prefix with fields
KNOWN_OTHER = ("moe_router", "moe_preprocess", "cuda_graph_set_manual_hooks", "cuda_graph_helper")


@pytest.mark.parametrize("page,command", commands(), ids=lambda value: value[:60])
def test_commands_call_scripts_and_flags_that_exist(page, command):
    words = shlex.split(command.split("  ")[0])
    (script,) = [word for word in words if word.startswith("helpers/")][:1] or [None]
    assert script and (ROOT / script).is_file(), command
    own = words[words.index(script) + 1 :]
    if "--" in own:
        own = own[: own.index("--")]
    flags = {word.split("=")[0] for word in own if word.startswith("--")}
    if flags:
        help_text = subprocess.run([sys.executable, str(ROOT / script), "--help"], capture_output=True, text=True, check=False).stdout
        assert all(flag in help_text for flag in flags), (command, flags)


@pytest.mark.parametrize("page,command", commands(), ids=lambda value: value[:60])
def test_commands_that_can_run_here_run(page, command, tmp_path):
    if any(word in command for word in NOT_RUN_HERE) or "..." in command or "package_skill" in command:
        return
    words = shlex.split(command)
    if any(word.isupper() and word not in ("RECIPE", "TEXT") for word in words):
        return
    for name in ("base.py", "recipe.py"):
        (tmp_path / name).write_bytes((ROOT / "templates" / "example_recipe" / name).read_bytes())
    (tmp_path / "facts.yaml").write_text("framework: pytorch\nfacts:\n  torch.optimizer_in_graph: false\n")
    replaced = [str(ROOT / word) if word.startswith("helpers/") else word.replace("RECIPE", "recipe.py") for word in words]
    replaced[0] = sys.executable
    if replaced[-1:] == ["config.yaml"] or "train.sh" in replaced or "config.yaml" in replaced:
        return
    done = subprocess.run(replaced, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), (command, done.stderr)


def quoted_messages():
    """(message, codes of its row) of the troubleshooting tables: texts in quotes, and names of errors."""
    rows = re.findall(r"^\| (.*?) \| (.*?) \| .* \|$", text(ROOT / "references" / "troubleshooting.md"), re.M)
    return [
        (quoted or name, re.findall(r"\bCG\d{3}\b", cause))
        for symptom, cause in rows
        for quoted, name in re.findall(r'^"(.*)"$|^(cudaError\w+|KeyError|TypeError: unexpected keyword)', symptom)
    ]


def test_troubleshooting_quotes_messages():
    assert len(quoted_messages()) >= 11


@pytest.mark.parametrize("message,codes", quoted_messages(), ids=lambda value: str(value)[:40])
def test_a_quoted_message_leads_to_the_rules_that_it_is_listed_under(capsys, message, codes):
    import validate_constraints

    if message == "cudaErrorStreamCaptureUnsupported":
        assert not codes, "any host synchronization ends in it: no rule in particular"
        return
    assert codes, message
    assert validate_constraints.main(["--explain", message, "--json"]) == 0
    found = [rule["code"] for rule in json.loads(capsys.readouterr().out)["rules"]]
    assert set(codes) <= set(found), found
    assert found[0] == codes[0]


def test_facts_in_the_example_are_read_and_judged(tmp_path, capsys):
    import validate_constraints

    (example,) = re.findall(r"^    framework: .*\n(?:    .*\n)+", text(ROOT / "references" / "pytorch.md"), re.M)
    written = textwrap.dedent(example)
    path = tmp_path / "facts.yaml"
    path.write_text(written)
    assert validate_constraints.main(["--facts", str(path), "--facts-only"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["functions"].values()
    facts = {name: fact["value"] for name, fact in run["facts"].items()}
    assert {name: facts.pop(name) for name in list(facts) if name.startswith("env.")}
    assert facts == yaml.safe_load(written)["facts"] and len(facts) > 4
    assert validate_constraints.main(["--facts", str(path)]) == 0
    assert "no findings" in capsys.readouterr().out
    path.write_text(written.replace("capturable: true", "capturable: false"))
    assert validate_constraints.main(["--facts", str(path)]) == 1


def test_every_helper_is_in_the_tables_and_explains_itself():
    for name in HELPERS:
        assert f"helpers/{name}" in text(ROOT / "README.md"), name
        source = text(ROOT / "helpers" / name)
        assert source.startswith("#!/usr/bin/env python3\n# SPDX-License-Identifier: Apache-2.0\n"), name
        docstring = ast.get_docstring(ast.parse(source))
        assert docstring and "Usage" in docstring, name
    for name in HELPERS:
        if name != "package_skill.py":
            assert f"helpers/{name}" in text(SKILL), name


def test_generated_reference_pages_are_up_to_date(tmp_path):
    from cudagraphs import references

    for fresh in references.write(tmp_path):
        assert fresh.read_text() == text(ROOT / "references" / fresh.name), fresh.name


def test_flags_in_the_table_of_scripts_are_in_each_help():
    table = text(SKILL).split("## Available Scripts")[1].split("## Examples")[0]
    rows = re.findall(r"^\| `(helpers/[\w.]+)` \| (.*?) \| ", table, re.M)
    assert len(rows) >= 6
    for script, arguments in rows:
        flags = set(re.findall(r"--[a-z][\w-]*", arguments))
        if flags:
            done = subprocess.run([sys.executable, str(ROOT / script), "--help"], capture_output=True, text=True, check=False)
            assert done.returncode == 0 and all(flag in done.stdout for flag in flags), (script, flags)


def test_plugin_manifest_names_this_version():
    import json

    from cudagraphs import __version__

    manifest = json.loads(text(ROOT / ".claude-plugin" / "marketplace.json"))
    (plugin,) = manifest["plugins"]
    assert plugin["version"] == manifest["metadata"]["version"] == __version__
    assert plugin["name"] == "nemo-cuda-graphs"
