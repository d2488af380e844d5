# SPDX-License-Identifier: Apache-2.0
"""Python recipes: settings are written where they take effect, and nothing else is touched.

The interpreter reads an edited recipe again before it is returned, so every case below also says that the settings
really hold at the end of the function; tests/test_recipe_corpus.py checks the same by execution on released recipes.
"""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest
from cudagraphs import versions
from cudagraphs.formats.python_recipe import SCRIPT, PythonRecipe, RecipeError
from cudagraphs.settings import Choice, Known, Unknown

VERSIONS = versions.resolve(bridge="0.6.2", mcore="0.19.2", te="2.14", torch="2.11")
IMPORTS = (
    "from megatron.bridge.models.gpt_provider import GPTModelProvider\n"
    "from megatron.bridge.training.config import ConfigContainer\n\n\n"
)
GRAPHS = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]}


def recipe_of(folder: Path, source: str, name: str = "recipe.py") -> PythonRecipe:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    return PythonRecipe(path, VERSIONS)


def only(recipe: PythonRecipe) -> str:
    (name,) = recipe.select([])
    return name


def edited(folder: Path, body: str, overrides: dict, imports: str = IMPORTS) -> str:
    """The text after the edit, without the imports; a second edit must change nothing."""
    recipe = recipe_of(folder, imports + textwrap.dedent(body))
    after, skipped = recipe.edited(only(recipe), overrides)
    assert not skipped
    again, _ = after.edited(only(after), overrides)
    assert again.file.raw == after.file.raw
    ast.parse(after.file.raw)
    return after.file.text.removeprefix(imports)


WRITES = [
    pytest.param(
        """
        def my_config():
            cfg = ConfigContainer(model=GPTModelProvider(num_layers=2))
            cfg.model.cuda_graph_impl = "none"  # for now
            return cfg
        """,
        """
        def my_config():
            cfg = ConfigContainer(model=GPTModelProvider(num_layers=2))
            cfg.model.cuda_graph_impl = "transformer_engine"  # for now
            cfg.model.cuda_graph_modules = ["attn"]
            return cfg
        """,
        id="an assignment is changed in place, and what is missing goes below it",
    ),
    pytest.param(
        """
        def my_config():
            c = ConfigContainer(model=GPTModelProvider(num_layers=2))
            m = c.model
            m.cuda_graph_impl = "none"
            m.cuda_graph_impl = "local"
            return c
        """,
        """
        def my_config():
            c = ConfigContainer(model=GPTModelProvider(num_layers=2))
            m = c.model
            m.cuda_graph_impl = "none"
            m.cuda_graph_impl = "transformer_engine"
            # CUDA graphs
            c.model.cuda_graph_modules = ["attn"]
            return c
        """,
        id="the last of several assignments, under whatever name, is the one that is changed",
    ),
    pytest.param(
        """
        def my_config():
            return ConfigContainer(
                model=GPTModelProvider(num_layers=2, cuda_graph_impl="none"),
            )
        """,
        """
        def my_config():
            cfg = ConfigContainer(
                model=GPTModelProvider(num_layers=2, cuda_graph_impl="transformer_engine"),
            )
            # CUDA graphs
            cfg.model.cuda_graph_modules = ["attn"]
            return cfg
        """,
        id="constructor keywords are changed in place, and `return call(...)` gets a name for the rest",
    ),
    pytest.param(
        """
        def my_config():
            c = ConfigContainer(model=GPTModelProvider(num_layers=2))
            setattr(c.model, "cuda_graph_impl", "none")
            setattr(c.model, "cuda_graph_modules", ["attn", "mlp"])
            return c
        """,
        """
        def my_config():
            c = ConfigContainer(model=GPTModelProvider(num_layers=2))
            setattr(c.model, "cuda_graph_impl", "transformer_engine")
            setattr(c.model, "cuda_graph_modules", ["attn"])
            return c
        """,
        id="setattr with a literal name",
    ),
    pytest.param(
        """
        def my_config():
            options = dict(num_layers=2, cuda_graph_impl="none")
            options.update({"cuda_graph_modules": []})
            return ConfigContainer(model=GPTModelProvider(**options))
        """,
        """
        def my_config():
            options = dict(num_layers=2, cuda_graph_impl="transformer_engine")
            options.update({"cuda_graph_modules": ["attn"]})
            return ConfigContainer(model=GPTModelProvider(**options))
        """,
        id="dictionaries with literal keys that become keywords",
    ),
    pytest.param(
        """
        def my_config():
            options = {"num_layers": 2}
            options["cuda_graph_impl"] = "local"
            options |= {"cuda_graph_modules": ["mlp"]}
            return ConfigContainer(model=GPTModelProvider(**options))
        """,
        """
        def my_config():
            options = {"num_layers": 2}
            options["cuda_graph_impl"] = "transformer_engine"
            options |= {"cuda_graph_modules": ["attn"]}
            return ConfigContainer(model=GPTModelProvider(**options))
        """,
        id="keys that are assigned, and dictionaries joined by |=",
    ),
    pytest.param(
        """
        def my_config(graphs: bool = False):
            c = ConfigContainer(model=GPTModelProvider(num_layers=2))
            if graphs:
                c.model.cuda_graph_impl = "local"
            else:
                c.model.cuda_graph_impl = "none"
            return c
        """,
        """
        def my_config(graphs: bool = False):
            c = ConfigContainer(model=GPTModelProvider(num_layers=2))
            if graphs:
                c.model.cuda_graph_impl = "local"
            else:
                c.model.cuda_graph_impl = "none"
            # CUDA graphs
            c.model.cuda_graph_impl = "transformer_engine"
            c.model.cuda_graph_modules = ["attn"]
            return c
        """,
        id="a branch on an argument stays, and both its sides are overruled behind it",
    ),
    pytest.param(
        """
        def my_config(big: bool = False):
            c = ConfigContainer(model=GPTModelProvider(num_layers=2))
            if big:
                c.model.num_layers = 4
                return c
            return c
        """,
        """
        def my_config(big: bool = False):
            c = ConfigContainer(model=GPTModelProvider(num_layers=2))
            if big:
                c.model.num_layers = 4
                # CUDA graphs
                c.model.cuda_graph_impl = "transformer_engine"
                c.model.cuda_graph_modules = ["attn"]
                return c
            # CUDA graphs
            c.model.cuda_graph_impl = "transformer_engine"
            c.model.cuda_graph_modules = ["attn"]
            return c
        """,
        id="every return gets the settings",
    ),
    pytest.param(
        """
        def my_config(big: bool = False):
            small_cfg = ConfigContainer(model=GPTModelProvider(num_layers=2))
            big_cfg = ConfigContainer(model=GPTModelProvider(num_layers=4))
            return big_cfg if big else small_cfg
        """,
        """
        def my_config(big: bool = False):
            small_cfg = ConfigContainer(model=GPTModelProvider(num_layers=2))
            big_cfg = ConfigContainer(model=GPTModelProvider(num_layers=4))
            cfg = big_cfg if big else small_cfg
            # CUDA graphs
            cfg.model.cuda_graph_impl = "transformer_engine"
            cfg.model.cuda_graph_modules = ["attn"]
            return cfg
        """,
        id="a choice between two configurations",
    ),
    pytest.param(
        """
        def off(cfg):
            cfg.model.cuda_graph_impl = "none"


        def my_config():
            cfg = ConfigContainer(model=GPTModelProvider(num_layers=2))
            cfg.model.cuda_graph_impl = "local"
            off(cfg)
            return cfg
        """,
        """
        def off(cfg):
            cfg.model.cuda_graph_impl = "none"


        def my_config():
            cfg = ConfigContainer(model=GPTModelProvider(num_layers=2))
            cfg.model.cuda_graph_impl = "local"
            cfg.model.cuda_graph_modules = ["attn"]
            off(cfg)
            # CUDA graphs
            cfg.model.cuda_graph_impl = "transformer_engine"
            return cfg
        """,
        id="what a helper sets later is overruled behind it, and the helper, which others may call, stays as it is",
    ),
    pytest.param(
        """
        def my_config():
            cfg = ConfigContainer(model=GPTModelProvider(num_layers=2))
            cfg.model.cuda_graph_impl, cfg.model.num_layers = "none", 4
            return cfg
        """,
        """
        def my_config():
            cfg = ConfigContainer(model=GPTModelProvider(num_layers=2))
            cfg.model.cuda_graph_impl, cfg.model.num_layers = "none", 4
            # CUDA graphs
            cfg.model.cuda_graph_impl = "transformer_engine"
            cfg.model.cuda_graph_modules = ["attn"]
            return cfg
        """,
        id="an unpacking assignment stays and is overruled",
    ),
    pytest.param(
        """
        def my_config():
            cfg = ConfigContainer(model=GPTModelProvider(num_layers=2))
            for name, value in {"cuda_graph_impl": "none"}.items():
                setattr(cfg.model, name, value)
            return cfg
        """,
        """
        def my_config():
            cfg = ConfigContainer(model=GPTModelProvider(num_layers=2))
            for name, value in {"cuda_graph_impl": "none"}.items():
                setattr(cfg.model, name, value)
            # CUDA graphs
            cfg.model.cuda_graph_impl = "transformer_engine"
            cfg.model.cuda_graph_modules = ["attn"]
            return cfg
        """,
        id="setattr in a loop stays and is overruled",
    ),
    pytest.param(
        """
        def my_config():
            return (  # the brackets
                ConfigContainer(model=GPTModelProvider(num_layers=2))
            )
        """,
        """
        def my_config():
            cfg = (  # the brackets
                ConfigContainer(model=GPTModelProvider(num_layers=2))
            )
            # CUDA graphs
            cfg.model.cuda_graph_impl = "transformer_engine"
            cfg.model.cuda_graph_modules = ["attn"]
            return cfg
        """,
        id="a return in brackets keeps them",
    ),
    pytest.param(
        """
        def my_config():
            cfg = GPTModelProvider(num_layers=2)
            return(ConfigContainer(model=cfg))
        """,
        """
        def my_config():
            cfg = GPTModelProvider(num_layers=2)
            config = (ConfigContainer(model=cfg))
            # CUDA graphs
            config.model.cuda_graph_impl = "transformer_engine"
            config.model.cuda_graph_modules = ["attn"]
            return config
        """,
        id="a new name is one that the function does not use",
    ),
    pytest.param(
        """
        def my_config():
        \tcfg = ConfigContainer(model=GPTModelProvider(num_layers=2))
        \tif True:
        \t\treturn cfg
        """,
        """
        def my_config():
        \tcfg = ConfigContainer(model=GPTModelProvider(num_layers=2))
        \tif True:
        \t\t# CUDA graphs
        \t\tcfg.model.cuda_graph_impl = "transformer_engine"
        \t\tcfg.model.cuda_graph_modules = ["attn"]
        \t\treturn cfg
        """,
        id="tabs stay tabs",
    ),
    pytest.param(
        """
        def apply_mine(cfg):
            cfg.model.num_layers = 2
            return cfg


        def my_config():
            return apply_mine(ConfigContainer(model=GPTModelProvider(cuda_graph_modules=["mlp"])))
        """,
        """
        def apply_mine(cfg):
            cfg.model.num_layers = 2
            return cfg


        def my_config():
            cfg = apply_mine(ConfigContainer(model=GPTModelProvider(cuda_graph_modules=["attn"])))
            # CUDA graphs
            cfg.model.cuda_graph_impl = "transformer_engine"
            return cfg
        """,
        id="a configuration that passes through a helper",
    ),
    pytest.param(
        """
        cfg = ConfigContainer(model=GPTModelProvider(num_layers=2))
        cfg.model.cuda_graph_impl = "none"

        if __name__ == "__main__":
            pretrain(cfg, forward_step)
        """,
        """
        cfg = ConfigContainer(model=GPTModelProvider(num_layers=2))
        cfg.model.cuda_graph_impl = "transformer_engine"

        if __name__ == "__main__":
            cfg.model.cuda_graph_modules = ["attn"]
            pretrain(cfg, forward_step)
        """,
        id="a script gets its settings before training starts",
    ),
    pytest.param(
        """
        def main():
            cfg = ConfigContainer(model=GPTModelProvider(num_layers=2))
            report = pretrain(config=cfg, forward_step_func=forward_step)


        main()
        """,
        """
        def main():
            cfg = ConfigContainer(model=GPTModelProvider(num_layers=2))
            cfg.model.cuda_graph_impl = "transformer_engine"
            cfg.model.cuda_graph_modules = ["attn"]
            report = pretrain(config=cfg, forward_step_func=forward_step)


        main()
        """,
        id="a main function that trains gets them before the call",
    ),
    pytest.param(
        """
        def model_provider():
            config = TransformerConfig(num_layers=2, cuda_graph_impl="local")
            return GPTModel(config=config, vocab_size=100)
        """,
        """
        def model_provider():
            config = TransformerConfig(num_layers=2, cuda_graph_impl="transformer_engine")
            config.cuda_graph_modules = ["attn"]
            return GPTModel(config=config, vocab_size=100)
        """,
        id="a Megatron-Core function that builds the model from a TransformerConfig",
    ),
]  # fmt: skip


@pytest.mark.parametrize("source, expected", WRITES)
def test_writes(tmp_path, source, expected):
    imports = IMPORTS
    if "TransformerConfig" in source:
        imports += (
            "from megatron.core.models.gpt import GPTModel\nfrom megatron.core.transformer import TransformerConfig\n"
        )
    assert edited(tmp_path, source, GRAPHS, imports) == textwrap.dedent(expected)


LEAVES_ALONE = [
    pytest.param(
        'cfg.model.cuda_graph_impl = "transformer_engine"',
        {"cuda_graph_impl": "transformer_engine"},
        id="a value that holds",
    ),
    pytest.param('cfg.model.cuda_graph_modules = ("attn",)', {"cuda_graph_modules": ["attn"]}, id="a tuple for a list"),
    pytest.param(
        "cfg.model.cuda_graph_modules = [CudaGraphModule.attn]", {"cuda_graph_modules": ["attn"]}, id="an enum member"
    ),
    pytest.param(
        "cfg.model.cuda_graph_modules = 'attn,mlp'.split(',')",
        {"cuda_graph_modules": ["attn", "mlp"]},
        id="a computed value",
    ),
    pytest.param(
        "cfg.rng.te_rng_tracker = not False", {"rng.te_rng_tracker": True}, id="an expression that gives the value"
    ),
    pytest.param(
        'cfg.env_vars = {"NCCL_GRAPH_REGISTER": 0}', {"env.NCCL_GRAPH_REGISTER": "0"}, id="a number for its text"
    ),
    pytest.param("cfg.model.cuda_graph_scope = None", {"cuda_graph_scope": None}, id="None"),
    pytest.param("", {"rerun_state_machine.check_for_nan_in_loss": True}, id="the default of Bridge's own section"),
    pytest.param("", {}, id="nothing asked for"),
]


@pytest.mark.parametrize("line, overrides", LEAVES_ALONE)
def test_leaves_alone(tmp_path, line, overrides):
    recipe = recipe_of(
        tmp_path,
        IMPORTS + f"from megatron.core.transformer.enums import CudaGraphModule\n\n\ndef my_config():\n"
        f"    cfg = ConfigContainer(model=GPTModelProvider(num_layers=2))\n    {line}\n    return cfg\n",
    )
    after, skipped = recipe.edited("my_config", overrides)
    assert after.file.raw == recipe.file.raw and not skipped


def test_true_is_not_one(tmp_path):
    text = edited(
        tmp_path,
        """
        def my_config():
            cfg = ConfigContainer(model=GPTModelProvider(num_layers=2))
            cfg.model.use_te_rng_tracker = 1
            return cfg
        """,
        {"use_te_rng_tracker": True},
    )
    assert "use_te_rng_tracker = True" in text


ENVIRONMENT = [
    pytest.param('{"A": 1}', '{"A": 1, "NCCL_GRAPH_REGISTER": 0}', id="on one line"),
    pytest.param('{"A": 1,}', '{"A": 1, "NCCL_GRAPH_REGISTER": 0}', id="on one line with a comma at the end"),
    pytest.param(
        '{\n        "A": 1,\n    }', '{\n        "A": 1,\n        "NCCL_GRAPH_REGISTER": 0,\n    }', id="one entry a line"
    ),
    pytest.param(
        '{\n        "A": 1  # why\n    }',
        '{\n        "A": 1,  # why\n        "NCCL_GRAPH_REGISTER": 0,\n    }',
        id="one entry a line, no comma, a comment",
    ),
    pytest.param(
        '{\n        **COMMON,\n        "A": 1}', '{\n        **COMMON,\n        "A": 1,\n        "NCCL_GRAPH_REGISTER": 0}', id="bracket on the last line"
    ),
    pytest.param('{"NCCL_GRAPH_REGISTER": 1}', '{"NCCL_GRAPH_REGISTER": 0}', id="another value"),
    pytest.param('dict(A=1)', 'dict(A=1)', id="a call of dict stays, and a line behind it adds to it"),
]  # fmt: skip


@pytest.mark.parametrize("block, expected", ENVIRONMENT)
def test_environment_block(tmp_path, block, expected):
    body = "COMMON = {'B': 1}\n\n\ndef my_config():\n    cfg = ConfigContainer(model=GPTModelProvider(num_layers=2))\n"
    text = edited(tmp_path, body + f"    cfg.env_vars = {block}\n    return cfg\n", {"env.NCCL_GRAPH_REGISTER": "0"})
    assert f"cfg.env_vars = {expected}\n" in text


def test_a_shared_environment_is_copied_not_changed(tmp_path):
    text = edited(
        tmp_path,
        """
        COMMON = {"A": 1}


        def my_config():
            return ConfigContainer(model=GPTModelProvider(num_layers=2), env_vars=COMMON)
        """,
        {"env.NCCL_GRAPH_REGISTER": "0"},
    )
    assert 'COMMON = {"A": 1}\n' in text
    assert 'cfg.env_vars = {**cfg.env_vars, "NCCL_GRAPH_REGISTER": 0}' in text


def test_without_an_environment_block_variables_are_reported(tmp_path):
    recipe = recipe_of(
        tmp_path, IMPORTS + "def my_config():\n    return ConfigContainer(model=GPTModelProvider(num_layers=2))\n"
    )
    after, skipped = recipe.edited("my_config", {"env.NCCL_GRAPH_REGISTER": "0"})
    assert after.file.raw == recipe.file.raw
    assert skipped == {"env.NCCL_GRAPH_REGISTER": "the recipe has no env_vars block"}


# -- several files -----------------------------------------------------------------------------------------------------

BASE = (
    IMPORTS
    + """\
def base_config():
    cfg = ConfigContainer(model=GPTModelProvider(num_layers=2, num_moe_experts=8))
    cfg.model.cuda_graph_scope = "full"
    return cfg


def tune(cfg, modules=("attn",)):
    cfg.model.cuda_graph_impl = "transformer_engine"
    cfg.model.cuda_graph_modules = list(modules)
"""
)
INHERITS = [
    pytest.param("my/base.py", "from base import base_config, tune", "my/recipe.py", id="a file beside it"),
    pytest.param("my/pack/base.py", "from .base import base_config, tune", "my/pack/recipe.py", id="a relative import in a package"),
    pytest.param("my/pack/base.py", "from ..base import base_config, tune", "my/pack/sub/recipe.py", id="a relative import from the folder above"),
    pytest.param("my/pack/base.py", "from pack.base import base_config, tune", "my/pack/sub/recipe.py", id="an absolute import of its own package"),
    pytest.param("my/base.py", "import base\nbase_config, tune = base.base_config, base.tune", "my/recipe.py", id="names of an imported module"),
]  # fmt: skip


@pytest.mark.parametrize("base, statement, name", INHERITS)
def test_follows_a_base_recipe_and_a_helper_in_another_file(tmp_path, base, statement, name):
    recipe_of(tmp_path, BASE, base)
    for folder in ("my/pack", "my/pack/sub"):
        if (tmp_path / folder).is_dir() or f"{folder}/" in name:
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / "__init__.py").touch()
    recipe = recipe_of(
        tmp_path,
        f"{statement}\n\n\ndef my_config():\n    cfg = base_config()\n    tune(cfg, modules=['attn', 'moe_router'])\n    return cfg\n",
        name,
    )
    settings = recipe.run("my_config").settings
    assert settings.facts["cuda_graph_scope"].value == "full"
    assert settings.facts["cuda_graph_scope"].source.path.endswith("base.py")
    assert settings.facts["cuda_graph_modules"].value == ["attn", "moe_router"]
    assert settings.facts["num_moe_experts"].value == 8
    after, _ = recipe.edited("my_config", {"cuda_graph_scope": None, "cuda_graph_modules": ["attn"]})
    assert '    cfg.model.cuda_graph_modules = ["attn"]\n    return cfg' in after.file.text
    assert (tmp_path / base).read_text() == BASE


@pytest.mark.parametrize(
    "statement, call",
    [
        pytest.param(
            "from missing_package.recipes import base_config", "base_config()", id="a package that is not there"
        ),
        pytest.param("from .nowhere import base_config", "base_config()", id="a relative import that leads nowhere"),
        pytest.param("import missing_package", "missing_package.base_config()", id="a module that is not there"),
    ],
)
def test_a_base_that_cannot_be_found_is_unknown_and_said_to_be(tmp_path, statement, call):
    recipe = recipe_of(
        tmp_path,
        f"{statement}\n\n\ndef my_config():\n    cfg = {call}\n    cfg.model.cuda_graph_impl = 'local'\n    return cfg\n",
    )
    settings = recipe.run("my_config").settings
    assert not settings.complete
    assert "base_config" in settings.incomplete_reason and "not found" in settings.incomplete_reason
    assert settings.facts["cuda_graph_impl"].value == "local"
    assert not isinstance(settings.facts.get("num_moe_experts"), Known)
    after, _ = recipe.edited("my_config", GRAPHS)
    assert 'cfg.model.cuda_graph_impl = "transformer_engine"' in after.file.text


def test_a_helper_that_cannot_be_found_makes_what_it_gets_unknown(tmp_path):
    recipe = recipe_of(
        tmp_path,
        IMPORTS
        + "from elsewhere import tweak\n\n\ndef my_config():\n    cfg = ConfigContainer(model=GPTModelProvider(num_layers=2))\n"
        "    cfg.model.cuda_graph_impl = 'local'\n    tweak(cfg)\n    return cfg\n",
    )
    settings = recipe.run("my_config").settings
    fact = settings.facts["cuda_graph_impl"]
    assert isinstance(fact, Unknown) and "tweak" in fact.reason
    after, _ = recipe.edited("my_config", GRAPHS)
    assert after.file.text.index("tweak(cfg)") < after.file.text.index('"transformer_engine"')


def test_a_base_file_that_does_not_parse_is_unknown_not_a_crash(tmp_path):
    (tmp_path / "base.py").write_text("def base_config(:\n")
    recipe = recipe_of(tmp_path, "from base import base_config\n\n\ndef my_config():\n    return base_config()\n")
    assert not recipe.run("my_config").settings.complete


# -- picking functions -------------------------------------------------------------------------------------------------

TWO = (
    IMPORTS
    + """\
def a_config():
    return ConfigContainer(model=GPTModelProvider(num_layers=2))


def _private_config():
    return ConfigContainer(model=GPTModelProvider(num_layers=2))


def b_config():
    cfg = a_config()
    return cfg


def helper(x):
    return x + 1
"""
)


def test_candidates_are_public_functions_that_return_a_configuration(tmp_path):
    recipe = recipe_of(tmp_path, TWO)
    assert recipe.candidates() == ["a_config", "b_config"]
    assert recipe.built_on("a_config") == ["b_config"]
    assert recipe.select([], everything=True) == ["a_config", "b_config"]
    assert recipe.select(["*_config"]) == ["a_config", "b_config"]
    assert recipe.select(["_private_config"]) == ["_private_config"]
    assert recipe.select(["b_*", "a_config"]) == ["a_config", "b_config"]


@pytest.mark.parametrize(
    "patterns, text",
    [
        pytest.param([], "2 recipe functions; pick with --function", id="several and none picked"),
        pytest.param(["c_*"], "no function matches --function 'c_*'", id="a glob that matches nothing"),
    ],
)
def test_select_says_what_there_is(tmp_path, patterns, text):
    with pytest.raises(RecipeError) as error:
        recipe_of(tmp_path, TWO).select(patterns)
    assert text in str(error.value) and "a_config" in str(error.value)


def test_a_function_that_returns_no_configuration_is_refused(tmp_path):
    recipe = recipe_of(tmp_path, TWO)
    with pytest.raises(RecipeError, match=r"recipe.py:\d+: helper returns no configuration"):
        recipe.run("helper")


def test_a_script_is_named_as_one(tmp_path):
    recipe = recipe_of(
        tmp_path, IMPORTS + "cfg = ConfigContainer(model=GPTModelProvider(num_layers=2))\npretrain(cfg)\n"
    )
    assert recipe.candidates() == [SCRIPT]


# -- both sides of a branch --------------------------------------------------------------------------------------------


def test_both_sides_of_a_branch_are_facts_and_the_default_is_told(tmp_path):
    recipe = recipe_of(
        tmp_path,
        IMPORTS
        + "def my_config(graphs: bool = False):\n    cfg = ConfigContainer(model=GPTModelProvider(num_layers=2))\n"
        "    cfg.model.cuda_graph_impl = 'local' if graphs else 'none'\n    return cfg\n",
    )
    fact = recipe.run("my_config").settings.facts["cuda_graph_impl"]
    assert isinstance(fact, Choice)
    assert fact.branch.text == "graphs" and fact.branch.default is False
    assert (fact.if_true.value, fact.if_false.value) == ("local", "none")


def test_a_choice_of_models_is_a_choice_of_facts(tmp_path):
    recipe = recipe_of(
        tmp_path,
        IMPORTS
        + "def my_config(moe: bool = False):\n    dense = GPTModelProvider(num_layers=2, num_moe_experts=None)\n"
        "    sparse = GPTModelProvider(num_layers=2, num_moe_experts=8)\n    return ConfigContainer(model=sparse if moe else dense)\n",
    )
    facts = recipe.run("my_config").settings.facts
    assert facts["num_layers"].value == 2
    assert (facts["num_moe_experts"].if_true.value, facts["num_moe_experts"].if_false.value) == (8, None)


# -- what cannot be written --------------------------------------------------------------------------------------------


def test_a_return_that_shares_its_line_is_refused_with_its_line(tmp_path):
    recipe = recipe_of(
        tmp_path, IMPORTS + "def my_config(): return ConfigContainer(model=GPTModelProvider(num_layers=2))\n"
    )
    with pytest.raises(RecipeError, match=r"recipe.py:\d+: the return shares its line"):
        recipe.edited("my_config", GRAPHS)


def test_settings_of_the_loop_cannot_stand_in_a_bare_provider(tmp_path):
    recipe = recipe_of(tmp_path, IMPORTS + "def my_provider():\n    return GPTModelProvider(num_layers=2)\n")
    after, skipped = recipe.edited("my_provider", {"cuda_graph_impl": "local", "rng.te_rng_tracker": True})
    assert 'cfg.cuda_graph_impl = "local"' in after.file.text
    assert list(skipped) == ["rng.te_rng_tracker"]


RENAMED = [
    (
        "modules become scope before 0.18",
        "0.17",
        'cfg.model.cuda_graph_impl = "transformer_engine"\n    cfg.model.cuda_graph_modules = ["attn", "mlp"]',
        'cfg.model.cuda_graph_impl = "transformer_engine"\n    cfg.model.cuda_graph_scope = ["attn", "mlp"]',
    ),
    (
        "both names: the one that stays takes the value",
        "0.17",
        'cfg.model.cuda_graph_modules = ["attn"]  # scopes\n    cfg.model.cuda_graph_scope = None',
        'cfg.model.cuda_graph_scope = ["attn"]',
    ),
    (
        "an implementation becomes the flag that means it before 0.15",
        "0.14",
        'cfg.model.cuda_graph_impl = "transformer_engine"',
        "cfg.model.external_cuda_graph = True",
    ),
    (
        "names of the version stay",
        "0.19",
        'cfg.model.cuda_graph_modules = ["attn"]',
        'cfg.model.cuda_graph_modules = ["attn"]',
    ),
]


@pytest.mark.parametrize("mcore,before,after", [row[1:] for row in RENAMED], ids=[row[0] for row in RENAMED])
def test_names_of_another_version(mcore, before, after, tmp_path):
    source = "from base import pretrain_base\n\n\ndef a_config():\n    cfg = pretrain_base()\n    {}\n    return cfg\n"
    path = tmp_path / "recipe.py"
    path.write_text(source.format(before))
    recipe, _ = PythonRecipe(path, versions.resolve(mcore=mcore)).with_version_names("a_config")
    assert recipe.file.text == source.format(after)


UNDECLARED = """
from base import house_defaults


def _graphs(cfg):
    cfg.model.cuda_graph_impl = "transformer_engine"


def packed():
    cfg = house_defaults("x")
    _graphs(cfg)
    return cfg


def short():
    cfg = packed()
    cfg.train.train_iters = 10
    return cfg


def sized(size):
    cfg = packed()
    cfg.model.hidden_size = size
    return cfg


def layout():
    return [1, 2]
"""


def test_functions_that_only_helpers_configure_are_recipes_too(tmp_path):
    (tmp_path / "base.py").write_text(
        "from megatron.bridge.training.config import ConfigContainer\n\n\n"
        "def house_defaults(name):\n    return ConfigContainer(model=None)\n"
    )
    assert recipe_of(tmp_path, UNDECLARED).candidates() == ["packed", "short"]
