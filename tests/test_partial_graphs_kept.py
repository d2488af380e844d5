# SPDX-License-Identifier: Apache-2.0
"""Results that the training loop still holds when the next step begins."""

import pytest
import torch
from fake_graphs import FakeBackend, every_way  # noqa: F401
from partial_graphs import PartialCudaGraphManager
from test_partial_graphs_replay import assert_same
from torch import nn


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])


def loop(model, steps, after_the_first=lambda: None):
    """A usual training loop: `output` and `loss` of a step are still there while the next one computes its own."""
    losses = []
    for step in range(steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        output = model(x)
        loss = output.square().mean()
        model.zero_grad()
        loss.backward()
        losses.append((loss.item(), [parameter.grad.clone() for parameter in model.parameters()]))
        if step == 0:
            after_the_first()
    return losses


@pytest.mark.parametrize("mode", [{}, {"merge": True}, {"accumulate_in_graph": True},
                                  {"merge": True, "accumulate_in_graph": True}],
                         ids=["default", "merge", "accumulate", "both"])
def test_an_output_in_a_variable_of_the_loop_costs_no_replay(mode):
    expected = loop(layers(), 6)
    model = layers()
    with PartialCudaGraphManager.from_modules(model, "*", backend=FakeBackend(), **mode) as manager:
        assert_same(expected, loop(model, 6, manager.capture))
        assert manager.stats() == {"captured": 3, "replayed": 3 * 5, "fallback": 0}


def test_only_what_is_kept_has_another_slot():
    model = layers()
    with PartialCudaGraphManager.from_modules(model, "*", backend=FakeBackend()) as manager:
        loop(model, 1, manager.capture)
        assert [len(entry.variants[0].slots) for entry in manager.entries] == [1, 1, 2]


def test_the_bound_on_slots_holds_for_kept_results_too():
    model = layers()
    kept = []
    with PartialCudaGraphManager.from_modules(model, "*", backend=FakeBackend(), max_slots=2) as manager:
        for _ in range(4):
            kept.append(model(torch.ones(4, 8)))
        del kept[2:]
        manager.capture()
        assert [len(entry.variants[0].slots) for entry in manager.entries] == [2, 2, 2]
