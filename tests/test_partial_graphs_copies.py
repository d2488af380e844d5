# SPDX-License-Identifier: Apache-2.0
"""Copies at the edge of a graph: whatever the arguments and gradients look like and wherever they lie, every replay
reads and writes the right memory. With copy nodes in the graphs, and without."""

import copy
from functools import partial

import pytest
import torch
from fake_graphs import FakeBackend, every_way  # noqa: F401
from partial_graphs import PartialCudaGraphManager
from torch import nn

MODES = pytest.mark.parametrize("mode", [{}, {"accumulate_in_graph": True}, {"merge": True},
                                         {"merge": True, "accumulate_in_graph": True}],
                                ids=["default", "accumulate", "merge", "both"])


class Layers(nn.Module):
    """Two neighbours; `scale` is a parameter whose gradient is expanded, as is that of `offset`, an argument."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4, 4))

        def forward(self, x, offset):
            return torch.tanh(self.linear(x)) + self.scale.sum() + offset.sum(), x.sum() * 2

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(), self.Layer()])

    def forward(self, x, offset):
        x, first = self.layers[0](x, offset)
        x, second = self.layers[1](x, offset)
        return x, first + second


def trained(model, steps, graphs, mode, step, backend):
    """What `step(model, index)` returned, and every gradient, after each of `steps`."""
    found, manager = [], None
    if graphs:
        manager = PartialCudaGraphManager.from_modules(model, "layers.*", backend=backend(), **mode)
    for index in range(steps):
        model.zero_grad(set_to_none=index % 3 != 2)
        results = step(model, index)
        found.append([*results, *(None if p.grad is None else p.grad.clone() for p in model.parameters())])
        if manager and index == 0:
            manager.capture()
    if manager:
        assert manager.stats()["replayed"] > 0
        assert not manager.stats()["fallback"], manager.fallback_reasons()
        manager.close()
    return found


def assert_equal_training(model, mode, step, steps=6, backend=FakeBackend):
    torch.manual_seed(5)
    expected, actual = (trained(copy.deepcopy(model), steps, graphs, mode, step, backend) for graphs in (False, True))
    for index, (one, other) in enumerate(zip(expected, actual)):
        for left, right in zip(one, other):
            assert (left is None) == (right is None), index
            assert left is None or torch.equal(left, right), index


def inputs(index, device="cpu"):
    generator = torch.Generator().manual_seed(index)
    return [torch.randn(3, 4, generator=generator).to(device).requires_grad_() for _ in range(2)]


def expanded_step(model, index, microbatches=2):
    results = []
    for microbatch in range(microbatches):
        x, offset = inputs(10 * index + microbatch, next(model.parameters()).device)
        output, extra = model(x * 1, offset * 1)
        (output.square().sum() + extra).backward()
        results += [output.detach().clone(), x.grad, offset.grad]
        del output, extra
    return results


@MODES
@pytest.mark.parametrize("microbatches", [1, 3])
def test_gradients_that_are_expanded_tensors(mode, microbatches):
    assert_equal_training(Layers(), mode, partial(expanded_step, microbatches=microbatches))


def every_layout(value, index):
    """The values of `value` as tensors of several kinds and places."""
    kinds = [lambda t: t.clone(), lambda t: t.t().contiguous().t(), lambda t: torch._neg_view(-t),
             lambda t: torch.stack([t, t])[1], lambda t: t.repeat(1, 2)[:, ::2], lambda t: t.clone()]
    return kinds[index % len(kinds)](value)


class Single(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x):
        return self.layers[0](x)


@MODES
def test_incoming_gradients_of_every_layout(mode):
    def step(model, index):
        x, weight = inputs(index)
        output = model(x * 1)
        gradient = every_layout(weight.detach(), index)
        output.backward(gradient)
        expanded = model(x * 1)
        expanded.sum().backward()
        return [output.detach().clone(), x.grad]

    assert_equal_training(Single(), mode, step, steps=13)


def test_an_argument_with_a_negative_bit_is_no_match():
    """Its memory holds other values than it has; copying bytes would not do."""
    torch.manual_seed(5)
    model = Single()
    manager = PartialCudaGraphManager.from_modules(model, "layers.*", backend=FakeBackend())
    x = torch.randn(3, 4)
    model(x).sum().backward()
    manager.capture()
    expected = torch.nn.functional.linear(-x, model.layers[0].weight, model.layers[0].bias)
    assert torch.equal(model(torch._neg_view(x)), expected)
    assert manager.fallback_reasons() == {"lazy values": 1}


@MODES
def test_the_same_memory_with_new_values_and_new_memory_with_the_same_values(mode):
    """What tells a replay where to read is the address of this call, not that of the last one."""
    memory = torch.empty(3, 4)

    def step(model, index):
        x = inputs(index // 2)[0].detach()
        if index % 3 == 0:
            memory.copy_(x)
            x = memory
        output = model(x)
        output.square().sum().backward()
        return [output.detach().clone()]

    assert_equal_training(Single(), mode, step, steps=9)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_handed_out_earlier_are_never_written_again(microbatches):
    """The first gradient of a step lies where the graph put it; later replays must leave that memory alone."""
    torch.manual_seed(3)
    model = Single()
    manager = PartialCudaGraphManager.from_modules(model, "layers.*", backend=FakeBackend())
    kept = []
    for index in range(6):
        model.zero_grad(set_to_none=True)
        for microbatch in range(microbatches):
            model(inputs(10 * index + microbatch)[0] * 1).square().sum().backward()
        if index == 0:
            manager.capture()
        for parameter in model.parameters():
            kept.append((parameter.grad, parameter.grad.clone()))
    assert manager.stats()["replayed"] == 5 * microbatches
    for gradient, value in kept:
        assert torch.equal(gradient, value)


def test_memory_that_was_a_gradient_is_not_written_once_it_is_somebody_elses():
    """A gradient is freed, its memory becomes another tensor's, and a backward that needs no fresh memory runs."""
    torch.manual_seed(3)
    model = Single()
    manager = PartialCudaGraphManager.from_modules(model, "layers.*", backend=FakeBackend())
    model(inputs(0)[0] * 1).sum().backward()
    manager.capture()
    model.zero_grad()
    model(inputs(1)[0] * 1).sum().backward()
    addresses = [parameter.grad.data_ptr() for parameter in model.parameters()]
    held = [parameter.grad for parameter in model.parameters()]  # stands for the new owner of that memory
    values = [torch.full_like(tensor, 7.0) for tensor in held]
    for tensor, value, parameter in zip(held, values, model.parameters()):
        tensor.copy_(value)
        parameter.grad = torch.zeros_like(parameter)
    model(inputs(2)[0] * 1).sum().backward()  # accumulates, so its graph has nothing to write there
    assert [tensor.data_ptr() for tensor in held] == addresses
    for tensor, value in zip(held, values):
        assert torch.equal(tensor, value)


def test_a_step_launches_nothing_but_graphs(monkeypatch):
    """With copy nodes neither the arguments nor the gradients are copied by operations of their own."""
    if not FakeBackend.copy_nodes:
        pytest.skip("copies are operations of their own then")
    torch.manual_seed(3)
    model = Single()
    manager = PartialCudaGraphManager.from_modules(model, "layers.*", backend=FakeBackend())
    x = inputs(0)[0]
    gradient = torch.ones(3, 4)
    model(x.view_as(x)).backward(gradient)
    manager.capture()
    slot = manager.entries[0].variants[0].slots[0]
    for graph in (slot.forward_graph, slot.write_graph):
        monkeypatch.setattr(graph, "_run", lambda *_, outputs=graph.outputs: outputs)
    model.zero_grad()
    x.grad = None
    argument = x.view_as(x)
    with torch.profiler.profile() as profile:
        model(argument).backward(gradient)
    names = {event.key for event in profile.key_averages()}
    assert not names & {"aten::copy_", "aten::clone", "aten::_foreach_copy_", "aten::_foreach_clone"}, names
