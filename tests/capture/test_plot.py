# SPDX-License-Identifier: Apache-2.0
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")

from cudagraphs.capture import plot, report  # noqa: E402
from test_report import assessed, failed, outcome  # noqa: E402

SHAPE = {"layers": 8, "hidden": 1024, "sequence": 512}


def result(variant):
    return {
        "stack": "torch",
        "model": "dense",
        "precision": "bf16",
        "shape": SHAPE,
        "machine": {},
        "variants": assessed(variant)[0],
    }


def test_a_plot_names_every_variant_that_was_timed(tmp_path):
    target = tmp_path / "out.svg"
    plot.draw(result(outcome("v", step_ms=5.0)), target)
    assert ElementTree.parse(target).getroot().tag.endswith("svg") and target.stat().st_size > 5000


def test_a_run_in_which_a_variant_failed_is_drawn_all_the_same(tmp_path):
    plot.draw(result(failed()), tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_other_formats_are_refused(tmp_path):
    with pytest.raises(ValueError, match="png or .svg"):
        plot.draw(result(outcome("v")), tmp_path / "out.pdf")


def test_colours_tell_eager_graph_and_fault_apart():
    results, good = assessed(outcome("v"))
    assert len({plot._colour(results[0]), plot._colour(good), plot._colour(assessed(failed())[1])}) == 3
    assert report.works(good)
