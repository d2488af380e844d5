# SPDX-License-Identifier: Apache-2.0
"""The interpreter: what a recipe's configuration holds, construct by construct, and what it does not claim to know.

Every body runs for real as well: where reading gives a value, execution must give the same.
"""

from __future__ import annotations

import ast
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest
from cudagraphs import versions
from cudagraphs.formats.python_recipe import PythonRecipe
from cudagraphs.settings import Choice, Known, Unknown

VERSIONS = versions.resolve(bridge="0.6.2", mcore="0.19.2", te="2.14", torch="2.11")
IMPORTS = (
    "import copy\nimport dataclasses\nimport functools\n"
    "from megatron.bridge.models.gpt_provider import GPTModelProvider\n"
    "from megatron.bridge.training.config import ConfigContainer\n"
)


class Config(types.SimpleNamespace):
    """Stands in for upstream's classes when a body runs for real."""


def read(folder: Path, source: str):
    path = folder / "recipe.py"
    path.write_text(IMPORTS + textwrap.dedent(source), encoding="utf-8")
    return PythonRecipe(path, VERSIONS).run("my_config").settings


def execute(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {"GPTModelProvider": Config, "ConfigContainer": Config}
    exec("import copy\nimport dataclasses\nimport functools\n" + textwrap.dedent(source), names)
    return vars(names["my_config"]().model)


def body(lines: str) -> str:
    inner = textwrap.indent(textwrap.dedent(lines).strip("\n"), "    ")
    return (
        "def my_config():\n    cfg = ConfigContainer(model=GPTModelProvider(num_layers=2))\n    m = cfg.model\n"
        f"{inner}\n    return cfg\n"
    )


# what `m.answer` is, by reading and by execution alike
FOLLOWED = [
    pytest.param("m.answer = 1\nm.answer = 2", 2, id="the last assignment wins"),
    pytest.param("m.answer = 2 ** 3 + 7 // 2 - -1", 12, id="arithmetic"),
    pytest.param("m.answer = 'a' + 'b' * 2", "abb", id="text"),
    pytest.param("x = 3\nm.answer = f'{x}-{x + 1}'", "3-4", id="f-strings"),
    pytest.param("m.answer = 'Attn,MLP'.lower().split(',')", ["attn", "mlp"], id="methods of text"),
    pytest.param("m.answer = 5 if m.num_layers > 1 else 6", 5, id="a conditional expression"),
    pytest.param("m.answer = None or 'x' and 3", 3, id="or and and give values"),
    pytest.param("m.answer = 1 < m.num_layers <= 2", True, id="chained comparison"),
    pytest.param("m.answer = 'a' in ['a', 'b'] and 'c' not in {'a': 1}", True, id="membership"),
    pytest.param("m.answer = [] == () or None is None", True, id="a list is no tuple"),
    pytest.param("names = ['attn']\nnames.append('mlp')\nm.answer = names", ["attn", "mlp"], id="append"),
    pytest.param("names = ['attn']\nm.answer = names\nnames += ['mlp']", ["attn", "mlp"], id="+= changes the list that others see"),
    pytest.param("names = ['a']\nm.answer = names\nnames.extend(('b', 'c'))", ["a", "b", "c"], id="an alias sees changes"),
    pytest.param("a, (b, c) = 1, (2, 3)\nm.answer = [c, b, a]", [3, 2, 1], id="unpacking"),
    pytest.param("m.answer = [x * 2 for x in range(4) if x % 2]", [2, 6], id="a list comprehension"),
    pytest.param("m.answer = {k: v for k, v in [('a', 1)]}['a']", 1, id="a dictionary comprehension"),
    pytest.param("m.answer = 0\nfor x in (1, 2, 3):\n    m.answer += x", 6, id="a loop"),
    pytest.param("for x in range(9):\n    if x == 3:\n        break\nm.answer = x", 3, id="break"),
    pytest.param("m.answer = 0\nfor x in range(4):\n    if x < 3:\n        continue\n    m.answer = x", 3, id="continue"),
    pytest.param("for x in (1, 2):\n    if x == 5:\n        break\nelse:\n    m.answer = 9", 9, id="the else of a loop that ran out"),
    pytest.param("m.answer = 1\nfor x in (1, 2):\n    break\nelse:\n    m.answer = 9", 1, id="the else of a loop that was left"),
    pytest.param("m.answer = 0\nwhile m.answer < 9:\n    m.answer += 1\n    if m.answer == 5:\n        break", 5, id="break in a while loop"),
    pytest.param("m.answer = 1\nwhile m.answer < 10:\n    m.answer *= 3", 27, id="a while loop"),
    pytest.param("try:\n    m.answer = 1\nexcept ValueError:\n    m.answer = 2\nelse:\n    m.answer = 3", 3, id="try"),
    pytest.param("try:\n    raise ValueError\nexcept ValueError:\n    m.answer = 2\nfinally:\n    m.more = 1", 2, id="a handler"),
    pytest.param("if (n := 4) > 3:\n    m.answer = n", 4, id="a named expression"),
    pytest.param("match m.num_layers:\n    case 1:\n        m.answer = 'one'\n    case 2:\n        m.answer = 'two'\n    case _:\n        m.answer = 'many'", "two", id="match"),
    pytest.param("setattr(m, 'answer', getattr(m, 'num_layers'))", 2, id="setattr and getattr"),
    pytest.param("m.answer = getattr(m, 'nothing_like_it', 7) if False else 7", 7, id="a side that is not taken"),
    pytest.param("d = dict(a=1)\nd.update({'b': 2}, c=3)\nm.answer = d.get('b') + d.pop('c') + d.setdefault('z', 4)", 9, id="methods of dictionaries"),
    pytest.param("d = {**{'a': 1}, 'b': 2} | {'a': 5}\nm.answer = sorted(d.values())", [2, 5], id="dictionaries joined"),
    pytest.param("d = {'a': 1}\ne = copy.deepcopy(d)\nd['a'] = 2\nm.answer = e['a']", 1, id="a copy is another dictionary"),
    pytest.param("m.answer = (lambda x, y=2: x * y)(3)", 6, id="lambda"),
    pytest.param("m.answer = functools.partial(max, 3)(2)", 3, id="partial"),
    pytest.param("def f(*a, k=1, **kw):\n    return len(a) + k + kw['z']\nm.answer = f(1, 2, k=3, z=4)", 9, id="all kinds of arguments"),
    pytest.param("def f(x):\n    if x:\n        return 1\n    return 2\nm.answer = f(0) * 10 + f(1)", 21, id="early returns"),
    pytest.param("def f(n):\n    return 1 if n < 2 else n * f(n - 1)\nm.answer = f(2)", 2, id="recursion, a little"),
    pytest.param("x = 1\ndef f():\n    return x + 1\nm.answer = f()", 2, id="a closure"),
    pytest.param("args = [1, 2]\nkw = {'c': 3}\ndef f(a, b, c):\n    return a + b * c\nm.answer = f(*args, **kw)", 7, id="unpacked arguments"),
    pytest.param("m.answer = 1\ndel m.answer\nm.answer = 4", 4, id="del"),
    pytest.param("m.answer = len('abc'[1:]) + [4, 5][-1]", 7, id="slices and indices"),
    pytest.param("assert m.num_layers == 2, 'two'\nm.answer = 1", 1, id="assert"),
    pytest.param("m.answer: int = 3", 3, id="an annotated assignment"),
    pytest.param("m.answer = m.other = 8", 8, id="a chain of assignments"),
    pytest.param("m.answer = int('12') + abs(-1) + sum([1, 2]) + max(1, 2)", 18, id="builtins"),
    pytest.param("m.answer = [a + b for a, b in zip([1, 2], [3, 4])] + [i for i, _ in enumerate('ab')]", [4, 6, 0, 1], id="zip and enumerate"),
    pytest.param("m.answer = bool([]) or not {} and bool('x')", True, id="truth of containers"),
]  # fmt: skip


@pytest.mark.parametrize("lines, value", FOLLOWED)
def test_followed(tmp_path, lines, value):
    source = body(lines)
    fact = read(tmp_path, source).facts["model.answer"]
    assert isinstance(fact, Known), fact
    assert fact.value == value
    assert execute(source)["answer"] == value


# what run time decides: reading must not claim a value
NOT_CLAIMED = [
    pytest.param("import os\nm.answer = os.environ.get('X')", id="the environment"),
    pytest.param("import random\nm.answer = random.random()", id="chance"),
    pytest.param("m.answer = elsewhere(m)", id="a function that is not defined"),
    pytest.param("def g():\n    yield 1\nm.answer = list(g())", id="a generator"),
    pytest.param("m.answer = open('x').read()", id="a file"),
    pytest.param("m.answer = 1 / 0", id="what raises"),
    pytest.param("m.answer = [1, 2][5]", id="an index that is not there"),
    pytest.param("m.answer = {}['a']", id="a key that is not there"),
    pytest.param("m.answer = await_me.result", id="an attribute of what is not known"),
    pytest.param("names = ['a']\nnames.sort(key=lambda x: x)\nm.answer = names", id="a method of lists that is not modelled"),
    pytest.param("m.answer = 1\nunknown_function(m)", id="a value that something unknown may change"),
    pytest.param("m.answer = 1\nfor x in unknown_items():\n    m.answer = x", id="a loop over what is not known"),
    pytest.param("m.answer = 0\nfor x in (1, 2, 3):\n    if unknown(x):\n        break\n    m.answer = x", id="a loop that may end early"),
    pytest.param("m.answer = 0\nfor x in (1, 2, 3):\n    if unknown(x):\n        continue\n    m.answer = x", id="turns that may end early"),
    pytest.param(
        "for x in (1, 2):\n    if unknown(x):\n        break\n    m.answer = x\n    for y in unknown(x):\n        pass",
        id="a loop of unknown range inside one that may end early",
    ),
    pytest.param("m.answer = 1\nwhile unknown():\n    m.answer += 1", id="a loop of unknown length"),
]


@pytest.mark.parametrize("lines", NOT_CLAIMED)
def test_not_claimed(tmp_path, lines):
    fact = read(tmp_path, body(lines)).facts.get("model.answer")
    assert not isinstance(fact, Known), fact
    if isinstance(fact, Unknown):
        assert fact.reason


def test_a_recipe_that_never_ends_is_left_alone(tmp_path):
    settings = read(tmp_path, body("x = 0\nwhile True:\n    x += 1\nm.answer = x"))
    assert not isinstance(settings.facts.get("model.answer"), Known)


def test_endless_recursion_is_left_alone(tmp_path):
    settings = read(tmp_path, body("def f(x):\n    return f(x)\nm.answer = f(1)"))
    assert not isinstance(settings.facts["model.answer"], Known)


# -- branches ----------------------------------------------------------------------------------------------------------


def test_branches_inside_branches(tmp_path):
    source = """
        def my_config(a: bool = False, b: bool = True):
            cfg = ConfigContainer(model=GPTModelProvider(num_layers=2))
            if a:
                if b:
                    cfg.model.answer = "ab"
                else:
                    cfg.model.answer = "a"
            elif b:
                cfg.model.answer = "b"
            else:
                cfg.model.answer = "none"
            return cfg
        """
    fact = read(tmp_path, source).facts["model.answer"]
    found = {(a, b): decided(fact, {"a": a, "b": b}) for a in (True, False) for b in (True, False)}
    assert found == {(True, True): "ab", (True, False): "a", (False, True): "b", (False, False): "none"}


def decided(fact, world: dict):
    while isinstance(fact, Choice):
        fact = fact.if_true if eval(fact.branch.text, {}, dict(world)) else fact.if_false
    return fact.value


def test_one_line_of_a_helper_called_twice_is_two_branches(tmp_path):
    source = """
        def tune(model, name, flag):
            setattr(model, name, 1 if flag else 2)


        def my_config(a: bool = False, b: bool = False):
            cfg = ConfigContainer(model=GPTModelProvider(num_layers=2))
            tune(cfg.model, "first", a)
            tune(cfg.model, "second", b)
            return cfg
        """
    facts = read(tmp_path, source).facts
    assert facts["model.first"].branch != facts["model.second"].branch


def test_a_side_that_raises_does_not_count(tmp_path):
    source = """
        def my_config(size: str = "8b"):
            cfg = ConfigContainer(model=GPTModelProvider(num_layers=2))
            if size not in ("8b", "70b"):
                raise ValueError(size)
            cfg.model.answer = 1
            return cfg
        """
    assert read(tmp_path, source).facts["model.answer"].value == 1


def test_returns_on_undecided_branches_are_joined(tmp_path):
    source = """
        def my_config(quick: bool = False):
            cfg = ConfigContainer(model=GPTModelProvider(num_layers=2))
            if quick:
                cfg.model.answer = "quick"
                return cfg
            cfg.model.answer = "full"
            return cfg
        """
    fact = read(tmp_path, source).facts["model.answer"]
    assert (decided(fact, {"quick": True}), decided(fact, {"quick": False})) == ("quick", "full")


def test_the_default_of_an_argument_and_that_a_caller_may_change_it(tmp_path):
    fact = read(
        tmp_path,
        """
        def my_config(steps: int = 3):
            cfg = ConfigContainer(model=GPTModelProvider(num_layers=2))
            cfg.model.answer = steps + 1
            return cfg
        """,
    ).facts["model.answer"]
    assert isinstance(fact, Choice) and fact.branch.default is True
    assert fact.if_true.value == 4 and isinstance(fact.if_false, Unknown)


# -- where a value comes from ------------------------------------------------------------------------------------------


def test_the_source_is_the_line_of_the_assignment_that_won(tmp_path):
    settings = read(tmp_path, body("m.answer = 1\n\nm.answer = 2  # this one"))
    source = settings.facts["model.answer"].source
    text = (tmp_path / "recipe.py").read_text().splitlines()[source.line - 1]
    assert text.strip() == source.text == "m.answer = 2  # this one"


def test_nothing_of_the_recipe_runs(tmp_path):
    marker = tmp_path / "ran"
    read(tmp_path, f"open({str(marker)!r}, 'w').close()\n" + body(f"open({str(marker)!r}, 'w').close()\nm.answer = 1"))
    assert not marker.exists()


def test_every_followed_body_is_valid_python():
    for case in (*FOLLOWED, *NOT_CLAIMED):
        ast.parse(body(case.values[0]))
