# SPDX-License-Identifier: Apache-2.0
"""Gradients that autograd makes one tensor, passes on, or returns in odd forms each get memory of their own, and what
graphs cannot see (hooks between merged entries, lazy values) is left to eager calls."""

import copy

import pytest
import torch
from fake_graphs import FakeBackend, FakeNode, every_way  # noqa: F401
from partial_graphs import PartialCudaGraphManager
from torch import nn

MODES = pytest.mark.parametrize("mode", [{}, {"accumulate_in_graph": True}, {"merge": True},
                                         {"merge": True, "accumulate_in_graph": True}],
                                ids=["default", "accumulate", "merge", "both"])


class Of(nn.Module):
    """A model whose entries are `layers`; `forward` is what `run(layers, x, y)` returns."""

    def __init__(self, run, *layers):
        super().__init__()
        self.layers, self.run = nn.ModuleList(layers), run

    def forward(self, x, y):
        return self.run(self.layers, x, y)


class Calls(nn.Module):
    """`call(module, *arguments)` over a linear layer and two parameters."""

    def __init__(self, call):
        super().__init__()
        self.linear, self.call = nn.Linear(4, 4), call
        self.a, self.b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))

    def forward(self, *arguments):
        return self.call(self, *arguments)


def gradients(model, loss, steps, graphs, mode):
    manager = PartialCudaGraphManager.from_modules(model, "layers.*", backend=FakeBackend(), **mode) if graphs else None
    found = []
    for index in range(steps):
        model.zero_grad()
        generator = torch.Generator().manual_seed(index)
        x, y = (torch.randn(3, 4, generator=generator).requires_grad_() for _ in range(2))
        loss(model, index, model(x * 1, y * 1)).backward()
        found.append([None if t.grad is None else t.grad.clone() for t in (x, y, *model.parameters())])
        if manager and index == 0:
            model.zero_grad()
            manager.capture()
    if manager:
        assert manager.stats()["replayed"] > 0
    return found


def assert_like_eager(model, loss, mode, steps=4):
    eager, ours = (gradients(copy.deepcopy(model), loss, steps, graphs, mode) for graphs in (False, True))
    for index, (expected, actual) in enumerate(zip(eager, ours)):
        for one, other in zip(expected, actual):
            assert (one is None) == (other is None), index
            assert one is None or torch.equal(one, other), index


@MODES
def test_two_parameters_with_one_gradient(mode):
    model = Of(lambda layers, x, y: layers[0](x), Calls(lambda m, x: torch.tanh(m.linear(x) + m.a + m.b)))
    assert_like_eager(model, lambda model, index, out: out.square().sum(), mode)


@MODES
@pytest.mark.parametrize("further", [None, "hidden", "residual"])
def test_two_arguments_with_one_gradient(mode, further):
    """The consumer adds them; the producer's other uses differ from step to step."""
    def run(layers, x, y):
        hidden, residual = layers[0](x)
        return layers[1](hidden, residual), {"hidden": hidden, "residual": residual, None: None}[further]

    def loss(model, index, result):
        out, more = result
        return out.sum() + more.square().sum() if more is not None and index != 2 else out.sum()

    model = Of(run, Calls(lambda m, x: (m.linear(x), x * m.a)),
               Calls(lambda m, hidden, residual: torch.tanh(m.linear(hidden + residual))))
    assert_like_eager(model, loss, mode)


@MODES
@pytest.mark.parametrize("what", ["arguments", "parameters"])
def test_gradients_that_are_one_tensor_until_a_further_output_is_used(mode, what):
    first = Calls({"arguments": lambda m, x, y: (x + y, x * 2),
                   "parameters": lambda m, x, y: (x * y + (m.a + m.b), m.a * 2)}[what])
    model = Of(lambda layers, x, y: (lambda h, more: (layers[1](h), more))(*layers[0](x, y)), first,
               Calls(lambda m, h: torch.tanh(m.linear(h))))

    def loss(model, index, result):
        out, more = result
        return out.sum() + more.square().sum() * (index % 2)

    assert_like_eager(model, loss, mode)


def test_a_kept_gradient_that_was_the_incoming_one_survives():
    torch.manual_seed(0)
    model = Of(None, Calls(lambda m, x: x + m.a))
    manager = PartialCudaGraphManager.from_modules(model, "layers.*", backend=FakeBackend())

    def kept(scale):
        x = torch.randn(3, 4).requires_grad_()
        output = model.layers[0](x * 1)
        (gradient,) = torch.autograd.grad(output, x, torch.full((3, 4), scale))
        return gradient

    kept(1.0)
    manager.capture()
    held = kept(1.5)
    kept(9.0)
    assert torch.equal(held, torch.full((3, 4), 1.5))


@pytest.mark.parametrize("mode", [{"merge": True}, {"merge": True, "accumulate_in_graph": True}])
@pytest.mark.parametrize("from_the_start", [True, False])
@pytest.mark.parametrize("how", ["hook", "retain_grad"])
def test_a_gradient_that_is_watched_between_merged_entries_is_seen(mode, from_the_start, how):
    seen = []

    def run(layers, x, y):
        hidden = layers[0](x)
        if from_the_start or run.on:
            if how == "hook":
                hidden.register_hook(lambda gradient: gradient * 10)
            else:
                hidden.retain_grad()
                seen.append(hidden)
        return layers[1](hidden)

    run.on = False

    def loss(model, index, out):
        run.on = index < 3  # off again for the next model
        return out.square().sum()

    def layer():
        return Calls(lambda m, x: torch.tanh(m.linear(x)))

    assert_like_eager(Of(run, layer(), layer()), loss, mode)
    assert all(hidden.grad is not None for hidden in seen)


@MODES
def test_hooks_on_a_parameter_that_the_module_does_not_use_are_never_called(mode):
    model = Of(lambda layers, x, y: layers[0](x), Calls(lambda m, x: torch.tanh(m.linear(x) * m.a)))
    manager = PartialCudaGraphManager.from_modules(model, "layers.*", backend=FakeBackend(), **mode)
    calls = []
    model.layers[0].b.register_hook(calls.append)
    model.layers[0].b.register_post_accumulate_grad_hook(calls.append)
    for index in range(3):
        model(torch.randn(3, 4).requires_grad_() * 1, None).sum().backward()
        if index == 0:
            model.zero_grad()
            manager.capture()
    assert manager.stats() == {"captured": 1, "replayed": 2, "fallback": 0} and not calls


def test_lazily_conjugated_values_at_the_same_address_are_no_match():
    class Double(nn.Module):
        def forward(self, x):
            return x * 2j

    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList([Double(), Double()])
    manager = PartialCudaGraphManager.from_modules(model, "layers.*", backend=FakeBackend())
    x = torch.randn(3, dtype=torch.complex64)
    model.layers[1](model.layers[0](x))
    manager.capture()
    for change in (lambda t: t, torch.conj, lambda t: t):
        assert torch.equal(model.layers[1](change(model.layers[0](x))).resolve_conj(), change(x * 2j) * 2j)
    assert manager.fallback_reasons() == {"lazy values": 1}


class Overlapping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return torch.arange(9.0).as_strided((3, 3), (2, 2))


def test_a_gradient_whose_elements_overlap():
    model = Of(lambda layers, x, y: layers[0](x), Calls(lambda m, x: Overlapping.apply(m.c) * x[:, :3]))
    model.layers[0].c = nn.Parameter(torch.randn(3, 3))
    assert_like_eager(model, lambda model, index, out: out.sum(), {})


def test_an_incoming_sparse_gradient():
    model = Of(lambda layers, x, y: layers[0](x), Calls(lambda m, x: x * 2.0))

    def loss(model, index, out):
        return nn.functional.embedding(torch.tensor([0, 2, 2]), out, sparse=True).square().sum()

    eager, ours = (gradients(copy.deepcopy(model), loss, 3, graphs, {}) for graphs in (False, True))
    for expected, actual in zip(eager, ours):
        for one, other in zip(expected, actual):
            assert one is None or torch.allclose(one.to_dense(), other.to_dense())


def test_a_refused_address_is_copied_outside_of_the_graph(monkeypatch, caplog):
    """Memory of another kind, for arguments and for fresh gradients: right all the same, and said once a node."""
    if not FakeBackend.copy_nodes:
        pytest.skip("nothing to refuse")

    def refuse(self, address):
        raise RuntimeError("invalid argument")

    monkeypatch.setattr(FakeNode, "aim", refuse)
    model = Of(lambda layers, x, y: layers[0](x), Calls(lambda m, x: torch.tanh(m.linear(x) * m.a)))
    assert_like_eager(model, lambda model, index, out: out.square().sum(), {})
    refusals = [record for record in caplog.records if "outside of a graph" in record.message]
    assert 1 <= len(refusals) <= 3


def test_a_backend_of_ones_own_needs_no_copy_nodes():
    class Plain:
        device_type = "cpu"

        def __init__(self):
            self.inner = FakeBackend()

        def __getattr__(self, name):
            if name == "copy_nodes":
                raise AttributeError(name)
            return getattr(self.inner, name)

        def capture(self, run, pool, source=None):
            return self.inner.capture(run, pool, source)

    model = Of(lambda layers, x, y: layers[0](x), Calls(lambda m, x: m.linear(x)))
    manager = PartialCudaGraphManager.from_modules(model, "layers.*", backend=Plain())
    model(torch.randn(3, 4), None).sum().backward()
    manager.capture()
    model(torch.randn(3, 4), None).sum().backward()
    assert manager.stats()["replayed"] == 1
