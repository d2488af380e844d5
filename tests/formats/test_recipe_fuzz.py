# SPDX-License-Identifier: Apache-2.0
"""Random small recipes, read and edited, against what they do when they run.

Every recipe takes two switches. For each setting of the switches it is executed with plain stand-ins for the
configuration classes, and what reading says for that setting must be what execution gives, unless reading says that it
does not know. After an edit, execution must give the wanted values and leave every other value alone.
"""

from __future__ import annotations

import ast
import itertools
import types
from pathlib import Path

import pytest
from cudagraphs import versions
from cudagraphs.formats.python_recipe import PythonRecipe
from cudagraphs.settings import Choice, Known
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

VERSIONS = versions.resolve(bridge="0.6.2", mcore="0.19.2", te="2.14", torch="2.11")
VALUES = {
    "cuda_graph_impl": ('"none"', '"local"', '"transformer_engine"'),
    "cuda_graph_modules": ("[]", '["attn"]', '["attn", "mlp"]', '("moe_router",)'),
    "cuda_graph_warmup_steps": ("0", "3", "2 + 1"),
    "recompute_granularity": ("None", '"selective"', '"fu" + "ll"'),
    "num_moe_experts": ("None", "8", "4 * 2"),
}
WANTED = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn", "mlp"], "cuda_graph_warmup_steps": 5}
HEADER = """\
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.config import ConfigContainer


def helper(cfg, name, value):
    setattr(cfg.model, name, value)
    return cfg


def tune(model, *, impl="local", **more):
    model.cuda_graph_impl = impl
    for key, value in more.items():
        setattr(model, key, value)


"""

fields = st.sampled_from(sorted(VALUES))
switches = st.sampled_from(["big", "not big", "fast", "big and fast", "big or not fast", "size > 2", "size == 1"])


@st.composite
def assignment(draw) -> str:
    name = draw(fields)
    value = draw(st.sampled_from(VALUES[name]))
    other = draw(st.sampled_from(VALUES[name]))
    switch = draw(switches)
    return draw(
        st.sampled_from(
            [
                f"cfg.model.{name} = {value}",
                f"m.{name} = {value}  # a comment",
                f'setattr(m, "{name}", {value})',
                f'helper(cfg, "{name}", {value})',
                f'helper(value={value}, name="{name}", cfg=cfg)',
                f"tune(cfg.model, {name}={value})" if name != "cuda_graph_impl" else f"tune(cfg.model, impl={value})",
                f"cfg.model.{name} = {value} if {switch} else {other}",
                f"cfg.model.{name}, cfg.model.num_layers = {value}, 4",
                f"for item in ({other}, {value}):\n    m.{name} = item",
                f"old = m.{name}\nm.{name} = {value}\nm.{name} = old if {switch} else m.{name}",
                f"if m.{name} == {value}:\n    m.{name} = {other}",
                f'vals = dict({name}={value})\nvals["{name}"] = {other}\ntune(m, impl="none", **vals)'
                if name != "cuda_graph_impl" else f"m.{name} = {value}",
                "m = cfg.model",
                f"m.cuda_graph_modules = [*m.cuda_graph_modules]\nm.{name} = {value}",
                f"while m.{name} != {value}:\n    m.{name} = {value}",
                f"try:\n    m.{name} = {value}\nfinally:\n    pass",
            ]
        )
    )  # fmt: skip


def indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def block(depth: int):
    if depth == 0:
        return assignment()
    inner = st.lists(block(depth - 1), min_size=1, max_size=3).map("\n".join)
    either = st.builds(
        lambda switch, body, other: f"if {switch}:\n{indented(body)}\nelse:\n{indented(other)}", switches, inner, inner
    )
    alone = st.builds(lambda switch, body: f"if {switch}:\n{indented(body)}", switches, inner)
    leaving = st.builds(lambda switch, body: f"if {switch}:\n{indented(body)}\n    return cfg", switches, inner)
    return st.one_of(assignment(), assignment(), either, alone, leaving)


@st.composite
def recipes(draw) -> str:
    first = "".join(f", {name}={draw(st.sampled_from(VALUES[name]))}" for name in sorted(VALUES))
    body = "\n".join(draw(st.lists(block(2), min_size=1, max_size=6)))
    end = draw(st.sampled_from(["return cfg", "return helper(cfg, 'num_layers', 3)", "result = cfg\nreturn result"]))
    lines = f"cfg = ConfigContainer(model=GPTModelProvider(num_layers=2{first}))\nm = cfg.model\n{body}\n{end}"
    return f"{HEADER}def my_config(big: bool = False, fast: bool = True, size: int = 1):\n{indented(lines)}\n"


def executed(source: str, world: dict) -> dict:
    """What the recipe's model holds when it runs with these arguments."""
    body = source.split("\n", 2)[2]
    names = {"GPTModelProvider": types.SimpleNamespace, "ConfigContainer": types.SimpleNamespace}
    exec(compile(body, "recipe", "exec"), names)
    return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(names["my_config"](**world).model).items()}


def decided(fact, world: dict):
    while isinstance(fact, Choice):
        try:
            side = eval(fact.branch.text, {}, dict(world))
        except (NameError, SyntaxError):
            return None  # it depends on more than the switches: reading did not claim to know
        fact = fact.if_true if side else fact.if_false
    return fact


WORLDS = [
    {"big": big, "fast": fast, "size": size}
    for big, fast, size in itertools.product((False, True), (False, True), (1, 3))
]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "recipe.py"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(source=recipes())
def test_reading_agrees_with_execution_and_edits_take_effect(path, source):
    path.write_text(source)
    recipe = PythonRecipe(path, VERSIONS)
    facts = recipe.run("my_config").settings.facts
    for world in WORLDS:
        real = executed(source, world)
        for name in (*VALUES, "num_layers"):
            fact = decided(facts.get(name), world)
            if isinstance(fact, Known):
                assert fact.value == real[name], f"{name} with {world}"

    edited, skipped = recipe.edited("my_config", WANTED)
    assert not skipped
    ast.parse(edited.file.raw)
    assert edited.edited("my_config", WANTED)[0].file.raw == edited.file.raw
    for world in WORLDS:
        before, after = executed(source, world), executed(edited.file.text, world)
        for name in {**before, **after}:
            if name in WANTED:
                assert after[name] == WANTED[name], f"{name} with {world}"
            elif not depends_on_wanted(source, name):
                assert after[name] == before[name], f"{name} with {world}"


def depends_on_wanted(source: str, name: str) -> bool:
    """Whether a condition of the recipe asks for a graph setting, so that an edit may change other values through
    it."""
    return any(f"m.{wanted} {comparison}" in source for wanted in WANTED for comparison in ("==", "!="))
