# SPDX-License-Identifier: Apache-2.0
"""card.yaml: it fits its schema, and every rule code, file, figure and command in it exists."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import yaml

from cudagraphs import __version__
from cudagraphs.rules import REGISTRY

ROOT = Path(__file__).resolve().parents[1]
CARD = yaml.safe_load((ROOT / "card.yaml").read_text(encoding="utf-8"))


def strings(value):
    if isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
    else:
        yield str(value)


def test_fits_its_schema():
    jsonschema.validate(CARD, json.loads((ROOT / "references" / "card.schema.json").read_text()))


def test_version_is_the_packs():
    assert CARD["version"] == __version__


def test_rule_codes_exist():
    codes = {code for text in strings(CARD) for code in re.findall(r"\bCG\d{3}\b", text)}
    assert codes and not [code for code in codes if code not in REGISTRY]


def test_files_exist():
    for text in strings(CARD):
        for name in re.findall(r"\b(?:evals|tests|helpers|references|templates)/[\w./-]+\b", text):
            assert (ROOT / name).exists(), name


def test_figures_are_those_of_the_result_files():
    for row in CARD["measured_results"]:
        source = json.dumps(json.loads((ROOT / row["file"]).read_text()), ensure_ascii=False)
        # a speed is left out where the times of the run say nothing
        assert all(part in source for part in row["result"].split(", ")), row


def test_generated_part_is_up_to_date():
    done = subprocess.run([sys.executable, str(ROOT / "evals" / "write_card.py"), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
