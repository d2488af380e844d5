# SPDX-License-Identifier: Apache-2.0
"""The two opt-in modes: neighbours merged into one graph, and gradients accumulated inside the graph. As in eager."""

import pytest
import torch
from cudagraphs.partial import replay
from fake_graphs import FakeBackend, every_way  # noqa: F401
from partial_graphs import FallbackError, PartialCudaGraphManager
from test_partial_graphs_replay import Block, Model, Pair, Repeats, Straight, assert_same, loss_of, tokens, train
from torch import nn
from torch.utils.checkpoint import checkpoint

MERGE, ACCUMULATE = {"merge": True}, {"accumulate_in_graph": True}
BOTH = {**MERGE, **ACCUMULATE}
MODES = pytest.mark.parametrize("mode", [MERGE, ACCUMULATE, BOTH], ids=["merge", "accumulate", "both"])


@pytest.fixture(autouse=True, params=[replay.LARGE, 0], ids=["gradients at the end", "gradients at once"])
def large(request, monkeypatch):
    """Graphs that accumulate put small gradients away at the end of the pass, large ones as they come."""
    monkeypatch.setattr(replay, "LARGE", request.param)


def launches(pair, run):
    before = pair.backend.replays
    pair.same(run)
    return pair.backend.replays - before


@MODES
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_training_equals_eager(mode, microbatches, set_to_none):
    pair = Pair(Model(), "layers.*", lambda model: train(model, 0, microbatches), **mode)
    optimizers = {id(model): torch.optim.AdamW(model.parameters(), 1e-2) for model in (pair.graphed, pair.eager)}

    def step(seed):
        def run(model):
            optimizers[id(model)].step()
            model.zero_grad(set_to_none=set_to_none)
            return train(model, seed, microbatches, clear=False)
        return run

    for seed in range(1, 5):
        pair.same(step(seed), seed)
    assert pair.stats() == {"captured": 3, "replayed": 3 * 4 * microbatches, "fallback": 0}


@pytest.mark.parametrize(("mode", "per_step"), [({}, 6), (MERGE, 2), (ACCUMULATE, 6), (BOTH, 2)])
def test_how_many_graphs_a_step_launches(mode, per_step):
    pair = Pair(Model(), "layers.*", train, **mode)
    assert launches(pair, lambda model: train(model, 1)) == per_step


@MODES
def test_microbatches_in_flight(mode):
    def pipelined(model):
        model.zero_grad()
        losses = [loss_of(model, seed) for seed in range(3)]
        for loss in losses:
            loss.backward()

    pair = Pair(Model(), "layers.*", pipelined, **mode)
    for _ in range(2):
        pair.same(pipelined)
    assert pair.stats() == {"captured": 3, "replayed": 18, "fallback": 0}


@MODES
def test_beyond_the_bound_gradients_are_right(mode):
    def pipelined(model):
        model.zero_grad()
        losses = [loss_of(model, seed) for seed in range(4)]
        for loss in losses:
            loss.backward()

    pair = Pair(Model(), "layers.*", pipelined, max_slots=2, **mode)
    for _ in range(2):
        pair.same(pipelined)
    assert pair.stats()["fallback"] == 12


@MODES
def test_repeated_modules_and_tied_and_frozen_parameters(mode):
    pair = Pair(Repeats(3), "block", train, **mode)
    pair.same(lambda model: train(model, 1, 2))
    model = Model()
    model.layers[1].up.weight = model.layers[0].up.weight
    for parameter in model.layers[2].parameters():
        parameter.requires_grad_(False)
    pair = Pair(model, "layers.*", train, **mode)
    pair.same(lambda model: train(model, 1, 2))
    pair.same(lambda model: train(model, 2))
    assert pair.stats()["fallback"] == 0


@MODES
def test_a_module_called_in_two_ways_within_one_forward(mode):
    """Autograd adds both gradients of a parameter before it adds their sum to what is there."""
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

        def forward(self, x):
            return self.block(self.block(x))  # on data, then on what needs a gradient

    def run(model, seed=0):
        model.zero_grad()
        for index in range(3):
            model(torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * seed + index))).square().mean().backward()

    pair = Pair(Twice(), "block", run, **mode)
    for seed in range(1, 6):
        pair.same(lambda model, seed=seed: run(model, seed))
    assert pair.stats()["fallback"] == 0


@MODES
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(mode, reentrant):
    class Checkpointed(Model):
        def forward(self, data):
            x = self.embed(data)
            for layer in self.layers:
                x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=reentrant)
            return self.head(x)

    pair = Pair(Checkpointed(), "layers.*", train, **mode)
    for seed in range(3):
        pair.same(lambda model, seed=seed: train(model, seed, 2))
    assert pair.stats()["fallback"] == 0


@MODES
def test_evaluation_in_between_and_a_second_batch_size(mode):
    pair = Pair(Model(), "layers.*", train, **mode)

    def evaluate(model):
        model.eval()
        with torch.no_grad():
            result = model(tokens(7))
        model.train()
        return result

    for seed in range(2):
        pair.same(lambda model, seed=seed: train(model, seed))
        pair.same(evaluate)
        pair.same(lambda model: loss_of(model, 3, batch=4).backward())
    assert pair.stats() == {"captured": 3, "replayed": 6, "fallback": 12}


@MODES
def test_retain_graph_and_two_backwards(mode):
    def run(model):
        model.zero_grad()
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()

    pair = Pair(Model(), "layers.*", run, **mode)
    for _ in range(2):
        pair.same(run)


# Accumulation


def test_mixed_gradients_end_up_as_autograd_would_leave_them():
    pair = Pair(Model(), "layers.*", train, **ACCUMULATE)

    def run(model):
        train(model, 1)
        model.layers[0].up.weight.grad = None
        model.layers[1].up.bias.grad = torch.ones_like(model.layers[1].up.bias)
        return train(model, 2, clear=False) + train(model, 3, clear=False)

    for _ in range(2):
        pair.same(run)


def test_gradients_kept_from_an_earlier_step_are_not_overwritten():
    pair = Pair(Model(), "layers.*", train, **ACCUMULATE)
    pair.same(lambda model: train(model, 1, 2))
    kept = [parameter.grad for parameter in pair.graphed.parameters()]
    values = [gradient.clone() for gradient in kept]
    for seed in (2, 3):
        pair.same(lambda model, seed=seed: train(model, seed, 2))
        assert_same(values, kept)
    del kept
    pair.same(lambda model: train(model, 4, 2))


def test_the_gradient_lives_at_one_address_from_step_to_step():
    pair = Pair(Model(1), "layers.*", train, **ACCUMULATE)
    addresses = set()
    for seed in range(3):
        pair.same(lambda model, seed=seed: train(model, seed, 2))
        addresses.add(pair.graphed.layers[0].up.weight.grad.data_ptr())
    assert len(addresses) == 1


def test_hooks_on_parameters_keep_the_way_through_autograd():
    seen = []

    def hook(model):
        model.layers[0].up.weight.register_hook(lambda gradient: seen.append(1))
        model.layers[1].up.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(2))
        return model

    pair = Pair(hook(Model()), "layers.*", train, **ACCUMULATE)
    seen.clear()
    train(pair.graphed, 1)
    assert seen == [2, 1]
    accumulators = [entry.variants[0].accumulators for entry in pair.manager.entries]
    assert accumulators[0] is None and accumulators[1] is None and accumulators[2] is not None


def test_a_hook_registered_later_makes_the_call_eager():
    pair = Pair(Model(1), "layers.*", train, **ACCUMULATE)
    for model in (pair.graphed, pair.eager):
        model.layers[0].up.weight.register_hook(lambda gradient: gradient * 2)
    pair.same(lambda model: train(model, 1))
    assert pair.manager.fallback_reasons() == {"hooks": 1}


def test_an_entry_whose_input_needs_no_gradient_still_trains():
    def run(model):
        model.zero_grad()
        model.layers[0](torch.ones(2, 8)).square().sum().backward()

    pair = Pair(Model(1), "layers.*", run, **ACCUMULATE)
    for _ in range(2):
        pair.same(run)
    assert pair.stats()["fallback"] == 0


# Merging


class WithSide(nn.Module):
    """Blocks that share a second argument, as decoder layers share their rotary tables."""

    def __init__(self, between=None):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.between = between

    def forward(self, data):
        x, mask = self.embed(data), torch.full((2, 5, 8), 0.5)
        for layer in self.layers:
            x = layer(x, mask=mask)
            if self.between is not None:
                x = self.between(x)
        return self.head(x)


def chains(pair):
    return [len(followers) for followers in
            ([other for other in pair.manager.entries if not other.variants and other.capture_count],) if followers]


def test_arguments_shared_by_all_members_are_known_by_identity():
    pair = Pair(WithSide(), "layers.*", train, **MERGE)
    assert chains(pair) == [2]
    assert launches(pair, lambda model: train(model, 1)) == 2
    assert pair.stats() == {"captured": 3, "replayed": 3, "fallback": 0}


@pytest.mark.parametrize("between", [lambda x: x * 2, lambda x: x.detach(), lambda x: x.add_(1),
                                     lambda x: x.view_as(x)],
                         ids=["work", "detach", "in place", "view"])
def test_entries_with_something_in_between_are_not_merged(between):
    pair = Pair(WithSide(between), "layers.*", train, **MERGE)
    assert chains(pair) == []
    pair.same(lambda model: train(model, 1))
    assert pair.stats()["fallback"] == 0


@pytest.mark.parametrize("between", [lambda x: x * 2, lambda x: x.detach() * 1, lambda x: x.clone()],
                         ids=["work", "detach", "clone"])
def test_when_something_runs_in_between_later_the_rest_runs_eagerly(between):
    pair = Pair(WithSide(), "layers.*", train, **MERGE)
    for model in (pair.graphed, pair.eager):
        model.between = between
    pair.same(lambda model: train(model, 1, 2))
    assert pair.manager.fallback_reasons() == {"merged graph": 4}
    for model in (pair.graphed, pair.eager):
        model.between = None
    pair.same(lambda model: train(model, 2))
    assert pair.stats() == {"captured": 3, "replayed": 5, "fallback": 4}


@pytest.mark.parametrize("mode", [MERGE, BOTH], ids=["merge", "both"])
def test_intermediate_outputs_may_be_used_elsewhere(mode):
    def run(use):
        def go(model):
            model.zero_grad()
            x = model.embed(tokens())
            outputs = []
            for layer in model.layers:
                x = layer(x)
                outputs.append(x)
            use(outputs).backward()
            return [output.detach().clone() for output in outputs]
        return go

    def last(outputs):
        return outputs[-1].square().sum()

    pair = Pair(Model(block=Straight), "layers.*", run(last), **mode)
    pair.same(run(last))
    pair.same(run(lambda outputs: outputs[0].square().sum() + outputs[-1].sin().sum()))
    pair.same(run(lambda outputs: outputs[1].square().sum()))
    assert pair.graphed.layers[2].up.weight.grad is None
    pair.same(run(lambda outputs: sum(output.square().sum() for output in outputs)))
    pair.same(run(last))
    assert pair.stats()["fallback"] == 0


def test_entries_that_draw_random_numbers_are_not_merged():
    pair = Pair(Model(dropout=0.5), "layers.*", train, **MERGE)
    assert chains(pair) == []
    pair.same(lambda model: train(model, 1))


def test_a_member_left_out_of_a_step_leaves_no_gradient():
    pair = Pair(Model(), "layers.*", train, **MERGE)

    def run(model):
        model.zero_grad()
        model.head(model.layers[0](model.embed(tokens()))).square().sum().backward()

    pair.same(run)
    assert pair.graphed.layers[1].up.weight.grad is None
    pair.same(lambda model: train(model, 1))
    assert pair.stats() == {"captured": 3, "replayed": 4, "fallback": 0}


def test_members_called_without_their_first_one_run_eagerly():
    pair = Pair(Model(), "layers.*", train, **MERGE)
    x = torch.randn(2, 5, 8)
    assert torch.equal(pair.graphed.layers[1](x), pair.eager.layers[1](x))
    assert pair.manager.fallback_reasons() == {"merged graph": 1}
    pair.manager.strict = True
    with pytest.raises(FallbackError, match="layers.2: not replayed, merged graph"):
        pair.graphed.layers[2](x)


def test_a_changed_member_is_seen_though_the_chain_was_replayed():
    pair = Pair(Model(), "layers.*", train, **MERGE)
    for model in (pair.graphed, pair.eager):
        model.layers[2].down.weight = nn.Parameter(model.layers[2].down.weight.detach() * 2)
    pair.same(lambda model: train(model, 1))
    assert pair.stats() == {"captured": 3, "replayed": 2, "fallback": 1}


def test_no_grad_chains_are_merged_too():
    model = Model()

    def run(model):
        with torch.no_grad():
            return model(tokens())

    pair = Pair(model, "layers.*", run, **MERGE)
    assert launches(pair, run) == 1


def test_a_failed_capture_of_a_chain_leaves_the_model_eager():
    model = Model()
    backend = FakeBackend(fail_at=1)
    manager = PartialCudaGraphManager.from_modules(model, "layers.*", backend=backend, **BOTH)
    train(model)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match="capture failed for layers.0"):
        manager.capture()
    assert all(graph.resets == 1 for graph in backend.graphs)
    assert_same(gradients, [parameter.grad for parameter in model.parameters()])
    train(model, 1)
