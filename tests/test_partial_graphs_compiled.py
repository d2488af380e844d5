# SPDX-License-Identifier: Apache-2.0
"""Captured modules with functions compiled by torch.compile inside, whose backward writes over what it was given."""

import pytest
import torch
from fake_graphs import FakeBackend, every_way  # noqa: F401
from functorch.compile import make_boxed_func
from partial_graphs import PartialCudaGraphManager, PartialGraphError, StaleGraphError
from test_partial_graphs_replay import Pair, assert_same
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext


def consuming(graph, _):
    """A compiler of backwards that destroys the buffers donated to it, as one that computes in place may."""
    context = TracingContext.try_get()
    donated = context.fw_metadata.bw_donated_idxs or []

    def run(*arguments):
        results = graph(*arguments)
        for index in donated:
            arguments[index].data.fill_(float("nan"))  # a kernel leaves the version as it is
        return results

    return make_boxed_func(run)


def plain(graph, _):
    return make_boxed_func(graph.forward)


BACKEND = aot_autograd(fw_compiler=plain, bw_compiler=consuming)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@torch.compile(backend=BACKEND)
def fused(x, scale):
    return torch.tanh(torch.sin(x) * torch.exp(scale)).square()


@pytest.fixture(autouse=True, params=["another variant", "the same variant"])
def compiled_once(request):
    """Modules are captured without autocast's cache, for which torch.compile compiles another variant; unless there is
    none already, as without this setting where its own cache across compilations hits."""
    with torch.autocast("cpu", enabled=False, cache_enabled=request.param == "another variant"):
        yield request.param


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x):
        return x + self.outer(fused(self.inner(x), self.scale))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def train(model, seed=0, microbatches=2):
    model.zero_grad()
    losses = []
    for index in range(microbatches):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * seed + index)).requires_grad_()
        loss = model(x).square().mean()
        loss.backward()
        losses += [loss.detach().clone(), x.grad]
    return losses


def test_the_compiled_backward_does_consume():
    x = torch.randn(4, 8, requires_grad=True)
    y = fused(x, torch.rand(8, requires_grad=True)).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="donated"):
        y = fused(x, torch.rand(8, requires_grad=True)).sum()
        y.backward(retain_graph=True)


@pytest.mark.parametrize("mode", [{}, {"merge": True}, {"accumulate_in_graph": True},
                                  {"merge": True, "accumulate_in_graph": True}],
                         ids=["default", "merge", "accumulate", "both"])
def test_training_equals_eager(mode):
    pair = Pair(Stack(), "layers.*", train, **mode)
    with pair.manager:
        for seed in range(1, 4):
            pair.same(lambda model, seed=seed: train(model, seed))
        assert pair.stats() == {"captured": 3, "replayed": 3 * 3 * 2, "fallback": 0}


def test_several_microbatches_in_flight():
    def run(model):
        model.zero_grad()
        outputs = [model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))) for seed in range(3)]
        for output in outputs:
            output.square().mean().backward()
        return [output.detach().clone() for output in outputs]

    pair = Pair(Stack(), "layers.*", run)
    with pair.manager:
        for _ in range(2):
            pair.same(run)
        assert pair.stats()["fallback"] == 0


def test_a_second_backward_is_refused_as_in_eager_and_training_goes_on(compiled_once):
    pair = Pair(Stack(), "layers.*", train)
    with pair.manager:
        loss = pair.eager(torch.ones(4, 8).requires_grad_()).sum()
        with pytest.raises(RuntimeError, match="donated"):
            loss.backward(retain_graph=True)
        loss = pair.graphed(torch.ones(4, 8).requires_grad_()).sum()
        if compiled_once == "the same variant":
            with pytest.raises(StaleGraphError, match="donated"):
                loss.backward(retain_graph=True)
        else:  # compiled for the capture, which keeps its graphs
            loss.backward(retain_graph=True)
            loss.backward()
        del loss
        pair.same(train)
        assert pair.stats()["fallback"] == 0


def test_a_backward_compiled_for_kept_graphs_may_run_twice():
    def twice(model, seed=0):
        model.zero_grad()
        loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return loss.detach().clone()

    pair = Pair(Stack(), "layers.*", twice)
    with pair.manager:
        for seed in (1, 2):
            pair.same(lambda model, seed=seed: twice(model, seed))
        assert pair.stats() == {"captured": 3, "replayed": 6, "fallback": 0}


def test_eager_keeps_its_refusal_after_a_capture():
    model = Stack()
    manager = PartialCudaGraphManager.from_modules(model, "layers.0", backend=Pair(Stack(), "layers.0", train).backend)
    with manager:
        train(model)
        manager.capture()
    loss = model(torch.ones(4, 8)).sum()
    with pytest.raises(RuntimeError, match="donated"):
        loss.backward(retain_graph=True)


def manager_of(model):
    manager = PartialCudaGraphManager.from_modules(model, "layers.*", backend=FakeBackend())
    train(model)
    return manager


@pytest.mark.parametrize("way", ["in place", "wrapped"])
def test_modules_that_were_compiled_as_a_whole(way):
    model = Stack()
    expected = [train(model, seed) for seed in (1, 2)]
    for index, layer in enumerate(model.layers):
        if way == "in place":
            layer.compile(backend=BACKEND)
        else:
            model.layers[index] = torch.compile(layer, backend=BACKEND)
    ways_in = [(layer.forward, layer._compiled_call_impl) for layer in model.layers]
    with manager_of(model) as manager:
        manager.capture()
        assert_same(expected, [train(model, seed) for seed in (1, 2)])
        assert manager.stats() == {"captured": 3, "replayed": 3 * 2 * 2, "fallback": 0}
    assert [(layer.forward, layer._compiled_call_impl) for layer in model.layers] == ways_in
    assert_same(expected[0], train(model, 1))


@pytest.mark.parametrize("way", ["in place", "wrapped"])
def test_a_model_compiled_around_the_modules_is_told(way):
    model = Stack()
    expected = train(model)
    called = model
    if way == "in place":
        model.compile(backend=BACKEND)
    else:
        called = torch.compile(model, backend=BACKEND)
    with PartialCudaGraphManager.from_modules(model, "layers.*", backend=FakeBackend()) as manager:
        assert_same(expected, train(called))
        with pytest.raises(PartialGraphError, match="torch.compile"):
            manager.capture()


def test_a_model_compiled_around_captured_modules_goes_on_without_them():
    model = Stack()
    expected = train(model)
    with manager_of(model) as manager:
        manager.capture()
        assert_same(expected, train(torch.compile(model, backend=BACKEND)))
        assert manager.stats() == {"captured": 3, "replayed": 0, "fallback": 0}
        assert_same(expected, train(model))
        assert manager.stats()["replayed"] == 6
