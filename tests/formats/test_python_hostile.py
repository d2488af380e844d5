# SPDX-License-Identifier: Apache-2.0
"""What changes a configuration behind the reader's back is unknown, never known; what an edit would break is refused."""

from __future__ import annotations

import textwrap

import pytest

from cudagraphs import versions
from cudagraphs.formats.python_recipe import PythonRecipe, RecipeError
from cudagraphs.formats.source import SourceError, load
from cudagraphs.settings import Known

BASE = """
from megatron.bridge.training.config import ConfigContainer


def pretrain_base():
    return ConfigContainer(model=GPTModelProvider(num_layers=2), train=TrainingConfig(micro_batch_size=1))
"""
HEAD = "from base import pretrain_base\n"
V = versions.resolve(mcore="0.19")


def recipe(folder, source):
    (folder / "base.py").write_text("from megatron.bridge.models.gpt_provider import GPTModelProvider\n"
                                    "from megatron.bridge.training.config import TrainingConfig\n" + BASE)  # fmt: skip
    path = folder / "recipe.py"
    path.write_text(source)
    return PythonRecipe(path, V)


def body(before: str, lines: str, decorator: str = "") -> str:
    return (
        f"{HEAD}{before}\n{decorator}def x_config():\n    cfg = pretrain_base()\n"
        '    cfg.model.cuda_graph_impl = "transformer_engine"\n    cfg.model.cuda_graph_modules = ["attn"]\n'
        + textwrap.indent(lines, "    ")
        + "\n    return cfg\n"
    )


OFF = 'c.model.cuda_graph_impl = "none"'
WRAP = f"def deco(f):\n    def g():\n        c = f()\n        {OFF}\n        return c\n    return g\n"
BEHIND = {
    "a decorator that changes what it wraps": body(WRAP, "pass", "@deco\n"),
    "an import that may fail": body("", f"c = cfg\ntry:\n    import zzz_missing\nexcept ImportError:\n    {OFF}"),
    "the instance dictionary": body("", 'cfg.model.__dict__["cuda_graph_impl"] = "none"'),
    "object.__setattr__": body("", 'object.__setattr__(cfg.model, "cuda_graph_impl", "none")'),
    "vars": body("", 'vars(cfg.model).update(cuda_graph_impl="none")'),
    "exec": body("", "exec('cfg.model.cuda_graph_impl = 1')"),
    "map over a function": body(f"def fix(c):\n    {OFF}\n", "list(map(fix, [cfg]))"),
    "a thread": body(f"import threading\n\n\ndef fix(c):\n    {OFF}\n", "threading.Thread(target=fix, args=(cfg,)).start()"),
    "a generator": body("", f"c = cfg\ndef fix():\n    {OFF}\n    yield 1\nlist(fix())"),
    "a context manager": body(
        f"class CM:\n    def __init__(self, c):\n        self.c = c\n    def __enter__(self):\n        return self\n"
        f"    def __exit__(self, *a):\n        c = self.c\n        {OFF}\n", "with CM(cfg):\n    pass"
    ),
    "a class that changes what it is given": body(f"class Fix:\n    def __init__(self, c):\n        {OFF}\n", "Fix(cfg)"),
    "suppressed exceptions": body("import contextlib\n", "with contextlib.suppress(Exception):\n    1 / 0\n    cfg.model.cuda_graph_impl = 'none'"),
}  # fmt: skip


@pytest.mark.parametrize("source", BEHIND.values(), ids=BEHIND)
def test_what_may_have_changed_is_not_known(source, tmp_path):
    fact = recipe(tmp_path, source).run("x_config").settings.facts["cuda_graph_impl"]
    assert not isinstance(fact, Known)


def test_a_deleted_element_makes_the_list_unknown(tmp_path):
    facts = recipe(tmp_path, body("", "del cfg.model.cuda_graph_modules[0]")).run("x_config").settings.facts
    assert not isinstance(facts["cuda_graph_modules"], Known)


def test_a_decorator_that_only_registers_changes_nothing(tmp_path):
    source = body("ALL = []\n\n\ndef register(f):\n    ALL.append(f)\n    return f\n", "pass", "@register\n")
    assert recipe(tmp_path, source).run("x_config").settings.facts["cuda_graph_impl"].value == "transformer_engine"


@pytest.mark.parametrize("declared", ["global RC", "nonlocal RC"])
def test_variables_of_outer_scopes_are_followed(declared, tmp_path):
    if declared.startswith("global"):
        source = body(f"RC = None\n\n\ndef s():\n    {declared}\n    RC = 'full'\n", "s()\ncfg.model.recompute_granularity = RC")
    else:
        source = body("", f"RC = None\ndef s():\n    {declared}\n    RC = 'full'\ns()\ncfg.model.recompute_granularity = RC")
    assert recipe(tmp_path, source).run("x_config").settings.facts["recompute_granularity"].value == "full"


@pytest.mark.parametrize(
    "value", ["('expandable_segments:True')", "(\n'expandable_segments:True'\n    )", "('expandable_segments:True'  # x\n)"]
)
@pytest.mark.parametrize("comma", ["", ","])
def test_values_in_brackets_stay_what_they_are(value, comma, tmp_path):
    source = f"{HEAD}def x_config():\n    cfg = pretrain_base()\n    cfg.env_vars = {{\n        'A': {value}{comma}\n    }}\n    return cfg\n"
    edited, _ = recipe(tmp_path, source).edited("x_config", {"env.B": "0"})
    facts = edited.run("x_config").settings.facts
    assert facts["env.A"].value == "expandable_segments:True" and facts["env.B"].value == "0"


def test_a_setting_that_reads_the_edited_one_keeps_its_value(tmp_path):
    source = (
        f"{HEAD}def x_config():\n    cfg = pretrain_base()\n    cfg.model.cuda_graph_impl = 'none'\n"
        "    cfg.train.micro_batch_size = 4 if cfg.model.cuda_graph_impl == 'none' else 1\n    return cfg\n"
    )
    edited, _ = recipe(tmp_path, source).edited("x_config", {"cuda_graph_impl": "transformer_engine"})
    facts = edited.run("x_config").settings.facts
    assert facts["train.micro_batch_size"].value == 4 and facts["cuda_graph_impl"].value == "transformer_engine"


PRETRAIN = "from megatron.bridge.training.pretrain import pretrain\n"
REFUSED = {
    "training starts on the line of its guard": f"{HEAD}{PRETRAIN}cfg = pretrain_base()\nif __name__ == '__main__': pretrain(cfg)\n",
    "training starts in two places": (
        f"{HEAD}{PRETRAIN}import os\ncfg = pretrain_base()\nif os.environ.get('Q'):\n    pretrain(cfg)\nelse:\n    pretrain(cfg)\n"
    ),
}


@pytest.mark.parametrize("source", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_written_safely_is_refused(source, tmp_path):
    found = recipe(tmp_path, source)
    with pytest.raises(RecipeError, match="training"):
        found.edited("<script>", {"cuda_graph_impl": "transformer_engine"})


@pytest.mark.parametrize("coding,tail", [("cp932", b"x = '\x87\x90'\n"), ("rot13", b"\n"), ("hex", b"\n"), ("utf-7", b"x = '+AGE-'\n")])
def test_encodings_that_do_not_give_the_bytes_back_are_refused(coding, tail, tmp_path):
    path = tmp_path / "recipe.py"
    path.write_bytes(f"# -*- coding: {coding} -*-\n".encode() + tail)
    with pytest.raises(SourceError, match="encoding|unreadable"):
        load(path)


def test_what_is_no_regular_file_is_refused(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(SourceError, match="not a regular file"):
        load(tmp_path / "pipe.py")
