# SPDX-License-Identifier: Apache-2.0
"""The table of named mixed precisions says what following the released source says."""

import wheels
import pytest

from cudagraphs.formats import bridge
from cudagraphs.formats.python_recipe import PythonRecipe
from cudagraphs.versions import resolve

# what rules read; the table leaves the rest out
FIELDS = ("fp8", "fp8_recipe", "fp4", "fp8_param_gather", "reuse_grad_buf_for_mxfp8_param_ag")
RECIPE = """
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.mixed_precision import bf16_mixed


def tiny_config() -> ConfigContainer:
    return ConfigContainer(model=None, mixed_precision="{name}")
"""


def facts(folder, name, roots):
    path = folder / f"{name}.py"
    path.write_text(RECIPE.format(name=name))
    run = PythonRecipe(path, resolve(mcore="0.19"), roots).run("tiny_config")
    return {field: getattr(run.settings.facts.get(field), "value", "unknown") for field in FIELDS}


@pytest.mark.wheels
@pytest.mark.parametrize("name", sorted(bridge.NAMED_PRECISIONS))
def test_table_agrees_with_the_source(name, tmp_path):
    released = wheels.fetch_or_skip("megatron-bridge", "0.6.2")
    without, followed = facts(tmp_path, name, []), facts(tmp_path, name, [released])
    assert "unknown" not in without.values()
    assert without == followed
