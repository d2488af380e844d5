# SPDX-License-Identifier: Apache-2.0
"""Modules as arguments of a captured module, as NeMo AutoModel's router core is called with the gate around it."""

import pytest
import torch
from fake_graphs import every_way  # noqa: F401
from test_partial_graphs_replay import Pair
from torch import nn


class Core(nn.Module):
    def forward(self, scores, gate):
        return gate.route(scores)


class Gate(nn.Module):
    def __init__(self, way="plain"):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6, 8))
        self.register_buffer("bias", torch.rand(6))
        self.register_buffer("load", torch.zeros(6))
        self.core, self.top, self.scale, self.kind, self.way = Core(), 2, 1.5, torch.float64, way

    def route(self, scores):
        scores = scores.to(self.kind).softmax(-1) + self.bias
        if self.way == "reads":
            scores = scores * self.weight.detach().sum()
        if self.way == "shape":
            scores = scores * self.weight.shape[0] + float(self.weight.dtype is torch.float32)
        if self.way == "trains":
            scores = scores * self.weight.sum()
        if self.way == "counts":
            self.load += scores.detach().sum(0)
        if self.way == "keeps":
            self.last = scores.detach()
        if self.training:
            scores = scores * 2
        weights, indices = scores.topk(self.top, -1)
        return weights * self.scale, indices, scores

    def forward(self, x):
        weights, indices, scores = self.core(x @ self.weight.t(), self)
        return weights.sum() + 0.1 * scores.square().mean(), indices


def train(model, seed=0):
    model.zero_grad()
    results = []
    for index in range(2):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * seed + index))
        loss, indices = model(x)
        loss.backward()
        results += [loss.detach().clone(), indices.clone()]
    return results


def evaluate(model):
    model.eval()
    with torch.no_grad():
        loss, indices = model(torch.ones(5, 8))
        results = [loss.clone(), indices.clone()]
    model.train()
    return results


@pytest.mark.parametrize("way", ["plain", "shape"])
def test_a_module_whose_attributes_are_read(way):
    pair = Pair(Gate(way), "core", train)
    with pair.manager:
        for seed in (1, 2):
            pair.same(lambda model, seed=seed: train(model, seed))
        assert pair.stats() == {"captured": 1, "replayed": 4, "fallback": 0}


def test_each_mode_of_the_module_has_a_graph_of_its_own():
    def both(model, seed=0):
        return train(model, seed) + evaluate(model)

    pair = Pair(Gate(), "core", both)
    with pair.manager:
        for seed in (1, 2):
            pair.same(lambda model, seed=seed: both(model, seed))
        assert pair.stats() == {"captured": 2, "replayed": 6, "fallback": 0}
        # the core's own mode says nothing about that of the module around it
        for model in (pair.eager, pair.graphed):
            model.training = False
        pair.same(train)
        assert pair.stats()["fallback"] == 2 and "training mode" in str(pair.manager.fallback_reasons())


@pytest.mark.parametrize("change", [
    lambda gate: setattr(gate, "top", 3), lambda gate: setattr(gate, "scale", 2.5),
    lambda gate: setattr(gate, "kind", torch.float32), lambda gate: setattr(gate, "bias", gate.bias + 1),
], ids=["integer", "number", "dtype", "buffer"])
def test_what_the_module_holds_is_watched(change):
    pair = Pair(Gate(), "core", train)
    with pair.manager:
        for model in (pair.eager, pair.graphed):
            change(model)
        pair.same(train)
        assert pair.stats() == {"captured": 1, "replayed": 0, "fallback": 2}


def test_buffers_are_read_where_they_are_and_parameters_may_move():
    pair = Pair(Gate(), "core", train)
    with pair.manager:
        for model in (pair.eager, pair.graphed):
            model.bias.mul_(3)
            model.weight.data = model.weight.data.clone()
        pair.same(train)
        assert pair.stats() == {"captured": 1, "replayed": 2, "fallback": 0}


def test_another_module_is_another_call():
    pair = Pair(nn.ModuleList([Gate(), Gate()]), "0.core", lambda model: train(model[0]))
    with pair.manager:
        def swapped(model):
            weights, _, _ = model[0].core(torch.ones(5, 6), model[1])
            return weights.detach().clone()

        pair.same(swapped)
        assert pair.stats() == {"captured": 1, "replayed": 0, "fallback": 1}


@pytest.mark.parametrize("way, reason", [
    ("reads", "forward reads args[1].weight, a parameter of a module that it is called with"),
    ("trains", "forward reads args[1].weight"),
    ("counts", "forward changes args[1].load, a buffer of a module that it is called with"),
    ("keeps", "the attribute 'args[1].last'"),
])
def test_what_no_guard_can_see_is_refused_and_leaves_no_trace(way, reason):
    pair = Pair(Gate(way), "core", train)
    with pair.manager:
        assert pair.stats()["captured"] == 0
        assert reason in pair.manager.entries[0].signatures[0].refusal
        pair.same(train)


def test_a_graph_of_no_grad_calls_must_not_read_parameters_either():
    pair = Pair(Gate("reads"), "core", evaluate)
    with pair.manager:
        assert "forward reads args[1].weight" in pair.manager.entries[0].signatures[0].refusal
