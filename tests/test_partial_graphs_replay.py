# SPDX-License-Identifier: Apache-2.0
"""Replay: results and gradients equal eager ones to the last bit, whatever the caller does with them in the meantime.

The graphs are the fake ones of `fake_graphs`: static buffers are really overwritten, so a slot that is reused too early
gives wrong numbers here as it would on a GPU.
"""

import copy
import re

import pytest
import torch
from cudagraphs.partial import gradients
from fake_graphs import FakeBackend, every_way  # noqa: F401
from partial_graphs import PartialCudaGraphManager, StaleGraphError
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width=8, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask=None):
        hidden = self.down(torch.relu(self.up(self.norm(x))))
        return x + self.dropout(hidden if mask is None else hidden * mask)


class Straight(Block):
    """No residual path: its input has one use, so gradients meet in one place only, outside of it."""

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, count=3, dropout=0.0, width=8, block=Block):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList(block(width, dropout) for _ in range(count))
        self.head = nn.Linear(width, 11)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tokens(seed=0, batch=2):
    return torch.randint(0, 11, (batch, 5), generator=torch.Generator().manual_seed(seed))


def loss_of(model, seed=0, batch=2):
    data = tokens(seed, batch)
    return nn.functional.cross_entropy(model(data).flatten(0, 1), data.flatten())


class Pair:
    """A model that is captured and its eager twin, driven by the same function."""

    def __init__(self, model, select, record, **options):
        torch.manual_seed(1)
        self.graphed, self.eager = model, copy.deepcopy(model)
        self.backend = FakeBackend()
        self.manager = PartialCudaGraphManager.from_modules(model, select, backend=self.backend, **options)
        self.same(record)
        self.manager.capture()

    def same(self, run, seed=3):
        """Run on both; assert that the results, all gradients and all buffers are the same bits."""
        results = []
        for model in (self.eager, self.graphed):
            torch.manual_seed(seed)
            results.append(run(model))
        assert_same(*results)
        for (name, expected), actual in zip(self.eager.named_parameters(), self.graphed.parameters()):
            assert_same(expected.grad, actual.grad, name)
        assert_same(list(self.eager.buffers()), list(self.graphed.buffers()))
        return results[1]

    def stats(self):
        return self.manager.stats()


def assert_same(expected, actual, where=""):
    if isinstance(expected, torch.Tensor):
        assert torch.equal(expected, actual), where
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(actual)
        for one, other in zip(expected, actual):
            assert_same(one, other, where)
    else:
        assert expected == actual, where


def train(model, seed=0, microbatches=1, clear=True):
    if clear:
        model.zero_grad()
    losses = []
    for index in range(microbatches):
        loss = loss_of(model, seed * 10 + index)
        loss.backward()
        losses.append(loss.item())
    return losses


# Gradients


@pytest.mark.parametrize("microbatches", [1, 4])
def test_training_with_an_optimizer_equals_eager(microbatches):
    pair = Pair(Model(dropout=0.1), "layers.*", lambda model: train(model, 0, microbatches))
    optimizers = {id(model): torch.optim.AdamW(model.parameters(), 1e-2) for model in (pair.graphed, pair.eager)}

    def step(seed):
        def run(model):
            optimizers[id(model)].step()
            return train(model, seed, microbatches)
        return run

    for seed in range(1, 5):
        pair.same(step(seed), seed)
    assert pair.stats() == {"captured": 3, "replayed": 3 * 4 * microbatches, "fallback": 0}


def test_gradients_accumulate_onto_those_of_earlier_steps():
    pair = Pair(Model(), "layers.*", train)
    for seed in range(3):
        pair.same(lambda model, seed=seed: train(model, seed, clear=False))
    assert pair.stats()["fallback"] == 0


@pytest.mark.parametrize("way", ["foreach", "allocated raw", "allocated"])
def test_a_first_gradient_is_never_the_static_buffer(way, monkeypatch):
    if way != "foreach":  # releases of torch without _foreach_clone
        monkeypatch.setattr(gradients, "foreach_clone", None)
        monkeypatch.setattr(gradients, "raw_empty", gradients.raw_empty if way == "allocated raw" else {})
    pair = Pair(Model(), "layers.*", train)
    pair.same(lambda model: train(model, 1))
    kept = [parameter.grad for parameter in pair.graphed.parameters()]
    values = [gradient.clone() for gradient in kept]
    pair.same(lambda model: train(model, 2))
    assert_same(values, kept)
    assert pair.stats()["fallback"] == 0


@pytest.mark.parametrize("way", ["foreach", "allocated raw", "allocated"])
def test_copies_of_gradients_have_the_layout_of_clones(way, monkeypatch):
    if way != "foreach":
        monkeypatch.setattr(gradients, "foreach_clone", None)
        monkeypatch.setattr(gradients, "raw_empty", gradients.raw_empty if way == "allocated raw" else {})
    tensors = [torch.randn(3, 4), torch.randn(3, 4).t(), torch.randn(4).expand(3, 4), torch.randn(6, 4)[::2],
               torch.randn(()), torch.randn(0, 2), torch.randn(3, dtype=torch.float64)]
    copies, again = gradients.make_cloner(tensors)(), gradients.make_cloner(tensors)()
    for tensor, first, other in zip(tensors, copies, again, strict=True):
        expected = tensor.clone()
        assert (first.dtype, first.shape, first.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert torch.equal(first, expected)
        assert not first.numel() or len({one.data_ptr() for one in (tensor, first, other)}) == 3


@pytest.mark.parametrize("hooked", [False, True])
def test_a_mixture_of_missing_and_present_gradients(hooked):
    pair = Pair(Model(), "layers.*", train)
    if hooked:  # more references to the incoming gradient inside the engine
        for model in (pair.graphed, pair.eager):
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: None)

    def run(model):
        train(model, 1)
        model.layers[1].up.weight.grad = None
        next(model.layers[0].parameters()).grad = None
        return train(model, 2, clear=False) + train(model, 3, clear=False)

    pair.same(run)


def test_frozen_parameters_get_no_gradient():
    model = Model()
    for parameter in model.layers[1].parameters():
        parameter.requires_grad_(False)
    model.layers[2].up.weight.requires_grad_(False)
    pair = Pair(model, "layers.*", train)
    pair.same(lambda model: train(model, 1))
    assert pair.graphed.layers[2].up.weight.grad is None
    assert pair.stats()["fallback"] == 0


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return {"left": self.left(x), "rest": (self.right(x), x.argmax(-1), None, 3)}


class Holder(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def test_outputs_without_gradients_leave_none_where_eager_does():
    def run(use):
        def go(model):
            model.zero_grad()
            result = model(torch.arange(8.0).reshape(2, 4))
            use(result).backward()
            return result["left"].detach(), result["rest"][1:]
        return go

    pair = Pair(Holder(TwoHeads()), "inner", run(lambda result: (result["left"] + result["rest"][0]).sum()))
    pair.same(run(lambda result: result["left"].sum()))
    assert pair.graphed.inner.right.weight.grad is None and pair.graphed.inner.unused.weight.grad is None
    pair.same(run(lambda result: result["rest"][0].sum()))
    assert pair.graphed.inner.left.weight.grad is None
    pair.same(run(lambda result: (result["left"] * result["rest"][0]).sum()))
    assert pair.stats()["fallback"] == 0


def test_an_output_used_twice_gets_the_sum_of_its_gradients():
    def run(model):
        model.zero_grad()
        x = model.embed(tokens())
        first = model.layers[0](x)
        second = model.layers[1](first)
        (first * second + first).sum().backward()
        return second.detach()

    pair = Pair(Model(2, block=Straight), "layers.*", run)
    pair.same(run)
    pair.same(run)
    assert pair.stats() == {"captured": 2, "replayed": 4, "fallback": 0}


def test_the_gradient_of_an_output_that_somebody_kept_survives():
    def run(model):
        model.zero_grad()
        kept = []
        first = model.layers[0](model.embed(tokens()))
        first.register_hook(kept.append)
        second = model.layers[1](first)
        second.register_hook(kept.append)
        (second.sum() + (first ** 2).sum()).backward()
        return kept

    pair = Pair(Model(2, block=Straight), "layers.*", run, max_slots=2)
    kept = pair.same(run)
    values = [gradient.clone() for gradient in kept]
    pair.same(run)
    assert_same(values, kept)


def test_gradients_of_leaf_inputs_and_retained_ones_are_their_own():
    inputs = {}

    def run(model):
        x = inputs.setdefault(id(model), torch.randn(2, 8, generator=torch.Generator().manual_seed(5)).requires_grad_())
        hidden = model.layers[0](x)
        hidden.retain_grad()
        model.layers[1](hidden).sum().backward()
        return x.grad, hidden.grad

    pair = Pair(Model(2), "layers.*", run)
    for _ in range(3):
        pair.same(run)
    assert pair.stats()["fallback"] == 0


def test_gradients_that_autograd_grad_returned_are_not_overwritten():
    def run(model):
        return torch.autograd.grad(loss_of(model, 1), list(model.parameters()))

    pair = Pair(Model(), "layers.*", lambda model: run(model))
    first = pair.same(run)
    values = [gradient.clone() for gradient in first]
    pair.graphed.zero_grad()
    for seed in range(2, 5):
        pair.same(lambda model, seed=seed: train(model, seed))
    assert_same(values, list(first))


def test_gradients_returned_while_grad_exists_hold_their_slot():
    pair = Pair(Model(1), "layers.*", train)

    def ask(model):
        return torch.autograd.grad(loss_of(model, 1), list(model.parameters()))

    pair.same(lambda model: train(model, 1))
    first = pair.same(ask)
    values = [gradient.clone() for gradient in first]
    pair.same(lambda model: train(model, 2, clear=False))
    assert_same(values, list(first))
    assert pair.manager.fallback_reasons() == {"in flight": 1}
    del first
    pair.same(lambda model: train(model, 3, clear=False))
    assert pair.stats()["fallback"] == 1


def test_retain_graph_allows_a_second_backward_and_its_absence_does_not():
    def run(model):
        model.zero_grad()
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss.detach()

    pair = Pair(Model(), "layers.*", run)
    pair.same(run)
    hidden = pair.graphed.layers[0](torch.randn(2, 5, 8, requires_grad=True).clone())
    hidden.sum().backward()
    with pytest.raises((RuntimeError, StaleGraphError), match="second time"):
        hidden.sum().backward()


def test_a_second_derivative_is_refused_clearly():
    pair = Pair(Model(1), "layers.*", train)
    loss = loss_of(pair.graphed)
    with pytest.raises(StaleGraphError, match="create_graph=True needs a second derivative"):
        torch.autograd.grad(loss, list(pair.graphed.layers.parameters()), create_graph=True)


# Microbatches in flight, repeated and shared modules


def test_several_microbatches_in_flight_each_get_a_slot():
    def pipelined(model):
        model.zero_grad()
        losses = [loss_of(model, seed) for seed in range(3)]
        for loss in losses:
            loss.backward()
        return [loss.item() for loss in losses]

    pair = Pair(Model(), "layers.*", pipelined)
    assert [len(entry.variants[0].slots) for entry in pair.manager.entries] == [3, 3, 3]
    for _ in range(3):
        pair.same(pipelined)
    assert pair.stats() == {"captured": 3, "replayed": 27, "fallback": 0}


def test_a_one_forward_one_backward_schedule_uses_as_many_slots_as_its_depth():
    def schedule(model):
        model.zero_grad()
        waiting = [loss_of(model, 0), loss_of(model, 1)]
        for seed in range(2, 6):
            waiting.pop(0).backward()
            waiting.append(loss_of(model, seed))
        for loss in waiting:
            loss.backward()

    pair = Pair(Model(), "layers.*", schedule)
    assert [len(entry.variants[0].slots) for entry in pair.manager.entries] == [2, 2, 2]
    pair.same(schedule)
    assert pair.stats() == {"captured": 3, "replayed": 18, "fallback": 0}


@pytest.mark.parametrize("order", [list, reversed])
def test_beyond_the_bound_calls_run_eagerly_with_the_right_gradients(order):
    def pipelined(model):
        model.zero_grad()
        losses = [loss_of(model, seed) for seed in range(5)]
        for loss in order(losses):
            loss.backward()
        return [loss.item() for loss in losses]

    pair = Pair(Model(), "layers.*", pipelined, max_slots=2)
    for _ in range(2):
        pair.same(pipelined)
    # The third microbatch finds no free slot in the first layer; its eager output is no static memory of that layer.
    assert pair.stats()["replayed"] >= 12 and pair.stats()["fallback"] >= 6
    assert set(pair.manager.fallback_reasons()) == {"in flight"}


def test_more_microbatches_than_recorded_are_right_too():
    pair = Pair(Model(), "layers.*", train)

    def pipelined(model):
        model.zero_grad()
        losses = [loss_of(model, seed) for seed in range(3)]
        for loss in losses:
            loss.backward()

    pair.same(pipelined)
    assert pair.manager.fallback_reasons() == {"in flight": 6}


class Repeats(nn.Module):
    def __init__(self, times):
        super().__init__()
        self.embed, self.block, self.head, self.times = nn.Embedding(11, 8), Block(), nn.Linear(8, 11), times

    def forward(self, data):
        x = self.embed(data)
        for _ in range(self.times):
            x = self.block(x)
        return self.head(x)


@pytest.mark.parametrize("slots", [8, 2])
def test_a_module_called_several_times_in_one_forward(slots):
    pair = Pair(Repeats(4), "block", train, max_slots=slots)
    for seed in range(3):
        pair.same(lambda model, seed=seed: train(model, seed))
    assert pair.stats() == {"captured": 1, "replayed": 3 * min(slots, 4), "fallback": 3 * (4 - min(slots, 4))}


def test_a_shared_module_is_one_entry():
    model = Model(3)
    model.layers[2] = model.layers[0]
    pair = Pair(model, "layers.*", train)
    assert [entry.name for entry in pair.manager.entries] == ["layers.0", "layers.1"]
    pair.same(lambda model: train(model, 4))
    assert pair.stats() == {"captured": 2, "replayed": 3, "fallback": 0}


def test_parameters_tied_within_and_across_entries():
    model = Model(3)
    model.layers[1].up.weight = model.layers[0].up.weight
    model.layers[2].norm.bias = model.layers[2].norm.weight
    model.head.weight = model.embed.weight
    pair = Pair(model, "layers.*", train)
    for seed in range(3):
        pair.same(lambda model, seed=seed: train(model, seed, microbatches=2))
    assert pair.stats()["fallback"] == 0


# What the caller keeps, and what changes in place


def test_outputs_and_views_that_the_caller_keeps_stay_as_they_were():
    kept = {}

    def run(seed):
        def go(model):
            with torch.no_grad():
                x = model.embed(tokens(seed))
                for layer in model.layers:
                    x = layer(x)
                    kept.setdefault(id(model), []).append(x[0, 1:3])
            return kept[id(model)]
        return go

    pair = Pair(Model(), "layers.*", run(0), max_slots=2)
    for seed in range(1, 4):
        pair.same(run(seed))
    assert pair.manager.fallback_reasons()["in flight"] > 0
    kept.clear()
    fallbacks = pair.stats()["fallback"]
    pair.same(lambda model: (run(9)(model), kept.clear())[1])
    assert pair.stats()["fallback"] == fallbacks


def test_a_detached_output_of_one_entry_feeds_the_next():
    def run(model):
        model.zero_grad()
        first = model.layers[0](model.embed(tokens()))
        seconds = [model.layers[1](first.detach()), model.layers[1](model.layers[0](model.embed(tokens(5))).detach())]
        (sum(second.sum() for second in seconds) + first.sum()).backward()

    pair = Pair(Model(2), "layers.*", run)
    for _ in range(2):
        pair.same(run)


def test_changing_an_output_in_place_is_right_where_backward_does_not_read_it():
    def run(model):
        model.zero_grad()
        x = model.embed(tokens())
        for layer in model.layers:
            x = layer(x)
            x += 1
        model.head(x).sum().backward()

    pair = Pair(Model(), "layers.*", run)
    for _ in range(2):
        pair.same(run)


def test_changing_an_output_in_place_raises_where_backward_reads_it():
    def run(model):
        model(torch.ones(2, 4, requires_grad=True).clone()).sum().backward()

    pair = Pair(Holder(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())), "inner", run)
    for model, error in ((pair.eager, RuntimeError), (pair.graphed, StaleGraphError)):
        result = model(torch.ones(2, 4, requires_grad=True).clone())
        result.mul_(2)
        with pytest.raises(error, match="in.?place"):
            result.sum().backward()


def test_changing_an_input_after_the_call_does_not_reach_its_gradients():
    def run(change):
        def go(model):
            model.zero_grad()
            x = torch.ones(2, 8)
            result = model.layers[0](x)
            if change:
                x.fill_(7)
            result.sum().backward()
        return go

    pair = Pair(Model(1), "layers.*", run(False))
    expected = {name: p.grad.clone() for name, p in pair.eager.named_parameters() if p.grad is not None}
    run(True)(pair.graphed)
    assert all(torch.equal(dict(pair.graphed.named_parameters())[name].grad, value) for name, value in expected.items())


def test_changing_the_memory_between_two_entries_in_place_raises_where_backward_reads_it():
    pair = Pair(Model(2), "layers.*", train)
    first = pair.graphed.layers[0](pair.graphed.embed(tokens()))
    second = pair.graphed.layers[1](first)
    with torch.no_grad():
        first.mul_(2)
    with pytest.raises(StaleGraphError, match="changed in place"):
        second.sum().backward()


# What is refused, with its reason


class InPlace(nn.Module):
    def forward(self, x):
        return x.mul_(2) + 1


class ViewOfInput(nn.Module):
    def forward(self, x):
        return x[:1]


class ReturnsParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x * 2, self.weight


class CountsCalls(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


class RemembersTensors(nn.Module):
    def forward(self, x):
        self.last = x * 2
        return self.last + 1


class GrowsList(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(1)
        return x + 1


class HiddenLeaf(nn.Module):
    def __init__(self):
        super().__init__()
        self.leaves = [torch.ones(4, requires_grad=True)]

    def forward(self, x):
        return x * self.leaves[0]


class HostSync(nn.Module):
    backend = None

    def forward(self, x):
        if self.backend is not None:
            self.backend.host_sync()
        return x * 2


class SyncInBackward(nn.Module):
    backend = None

    def forward(self, x):
        result = x * 2
        if result.requires_grad and self.backend is not None:
            result.register_hook(lambda gradient: self.backend.host_sync())
        return result


class MutatesArgument(nn.Module):
    def forward(self, x, bag=None):
        if bag is not None:
            bag.append(1)
        return x + 1


class OddResult(nn.Module):
    class Box:
        pass

    def forward(self, x):
        box = self.Box()
        box.x = x + 1
        return box


class MainGrad(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.weight.main_grad = torch.zeros(4)

    def forward(self, x):
        return x * self.weight


@pytest.mark.parametrize(("make", "message"), [
    (InPlace, r"args\[0\] in place"),
    (ViewOfInput, "view of an input"),
    (ReturnsParameter, "view of a parameter|view of an input"),
    (CountsCalls, "attribute 'calls'"),
    (RemembersTensors, "attribute 'last'"),
    (GrowsList, r"attribute 'len\(seen\)'"),
    (HiddenLeaf, "neither an argument nor a registered parameter"),
    (HostSync, "waits for the device on the host"),
    (SyncInBackward, "backward waits for the device"),
    (OddResult, "returns a Box"),
    (MainGrad, "main_grad"),
])
def test_what_a_graph_cannot_stand_for_is_refused_and_runs_eagerly(make, message, caplog):
    module = make()
    backend = FakeBackend()
    manager = PartialCudaGraphManager.from_modules(Holder(module), "inner", backend=backend)
    if hasattr(module, "backend"):
        module.backend = backend
    x = torch.ones(2, 4, requires_grad=make is SyncInBackward)
    module(x.clone())
    manager.capture()
    assert manager.stats()["captured"] == 0
    assert re.search(message, caplog.text)
    expected = make()(torch.ones(2, 4)) if make in (ViewOfInput, InPlace) else None
    result = module(torch.ones(2, 4))
    if expected is not None:
        assert torch.equal(result, expected)
    assert manager.fallback_reasons() == {"refused": 1}
    assert backend.replays == 0


def test_a_changed_list_argument_is_refused():
    module = MutatesArgument()
    manager = PartialCudaGraphManager.from_modules(Holder(module), "inner", backend=FakeBackend())
    module(torch.ones(2), bag=[])
    manager.capture()
    assert manager.entries[0].signatures[0].refusal == "forward changes the lists or dicts it is called with"


def test_a_refused_signature_does_not_stop_the_others():
    class Sometimes(nn.Module):
        def forward(self, x, spoil=False):
            return x.add_(1) if spoil else x + 1

    module = Sometimes()
    manager = PartialCudaGraphManager.from_modules(Holder(module), "inner", backend=FakeBackend())
    module(torch.ones(2), spoil=True)
    module(torch.ones(2))
    manager.capture()
    x = torch.ones(2)
    module(x, spoil=True)
    assert torch.equal(x, torch.full((2,), 2.0))
    assert torch.equal(module(torch.ones(2)), torch.full((2,), 2.0))
    assert manager.stats() == {"captured": 1, "replayed": 1, "fallback": 1}


def test_attributes_that_settle_during_warmup_are_fine():
    class LazyTable(nn.Module):
        table = None

        def forward(self, x):
            if self.table is None:
                self.table = torch.arange(x.shape[-1], dtype=x.dtype)
            return x + self.table

    module = LazyTable()
    manager = PartialCudaGraphManager.from_modules(Holder(module), "inner", backend=FakeBackend())
    module(torch.ones(2, 4))
    manager.capture()
    assert torch.equal(module(torch.ones(2, 4)), torch.ones(2, 4) + torch.arange(4))
    assert manager.stats()["replayed"] == 1


# Inputs handed through, broadcast masks, buffers, random numbers


def test_an_input_returned_as_it_is_stays_the_callers_own_tensor():
    class Through(nn.Module):
        def forward(self, x, y):
            return y, x * 2, x

    module = Through()
    manager = PartialCudaGraphManager.from_modules(Holder(module), "inner", backend=FakeBackend())
    module(torch.ones(2), torch.ones(3))
    manager.capture()
    x, y = torch.full((2,), 5.0), torch.full((3,), 6.0)
    first, double, last = module(x, y)
    assert first is y and last is x and torch.equal(double, x * 2)
    assert manager.stats()["replayed"] == 1


def test_broadcast_inputs_are_copied_without_their_repetition():
    def run(value):
        def go(model):
            model.zero_grad()
            result = model.layers[0](torch.ones(2, 8), torch.full((2, 1), value).expand(2, 8))
            result.sum().backward()
            return result.detach()
        return go

    pair = Pair(Model(1), "layers.*", run(1.0))
    assert pair.manager.entries[0].variants[0].slots[0].inputs[1].stride() == (1, 0)
    pair.same(run(0.5))
    assert pair.stats()["fallback"] == 0


def test_batch_norm_statistics_advance_once_a_call():
    def run(seed):
        def go(model):
            model.zero_grad()
            model(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
        return go

    pair = Pair(Holder(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))), "inner", run(0))
    for seed in range(1, 4):
        pair.same(run(seed))
    assert pair.graphed.inner[1].num_batches_tracked == 4
    assert pair.stats()["fallback"] == 0


def test_dropout_draws_new_numbers_at_every_replay_and_the_same_as_eager():
    pair = Pair(Model(2, dropout=0.5), "layers.*", train)
    results = [pair.same(lambda model: train(model, 1), seed) for seed in (5, 6, 5)]
    assert results[0] == results[2] != results[1]
    assert pair.stats()["fallback"] == 0


# Around the training loop


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_activation_checkpointing_recomputes_through_graphs(reentrant, whole):
    class Checkpointed(Model):
        def forward(self, data):
            x = self.embed(data)
            for layer in self.layers:
                def run(x, layer=layer):
                    return layer(x) if whole else torch.tanh(layer(x)) * 2
                x = checkpoint(run, x, use_reentrant=reentrant)
            return self.head(x)

    pair = Pair(Checkpointed(dropout=0.3), "layers.*", train)
    for seed in range(1, 4):
        pair.same(lambda model, seed=seed: train(model, seed, microbatches=2), seed)
    assert pair.stats()["fallback"] == 0
    assert pair.stats()["replayed"] > 0


def test_evaluation_in_between_falls_back_and_training_goes_on():
    pair = Pair(Model(dropout=0.2), "layers.*", train)

    def evaluate(model):
        model.eval()
        with torch.no_grad():
            result = model(tokens(7))
        model.train()
        return result

    for seed in range(2):
        pair.same(lambda model, seed=seed: train(model, seed), seed)
        pair.same(evaluate)
    assert pair.stats() == {"captured": 3, "replayed": 6, "fallback": 6}


def test_loading_a_checkpoint_in_place_keeps_replaying_and_assigning_one_falls_back():
    pair = Pair(Model(), "layers.*", train)
    state = {key: value + 0.25 for key, value in pair.eager.state_dict().items()}
    for assign, replayed in ((False, 3), (True, 3)):
        for model in (pair.graphed, pair.eager):
            model.load_state_dict({key: value.clone() for key, value in state.items()}, assign=assign)
            for parameter in model.parameters():
                parameter.requires_grad_(True)
        pair.same(lambda model: train(model, 1))
        assert pair.stats()["replayed"] == replayed
    assert pair.manager.fallback_reasons() == {"parameter storage": 3}


def test_two_sequence_lengths_each_have_their_graphs():
    def run(seed):
        def go(model):
            model.zero_grad()
            for batch in (2, 3):
                loss_of(model, seed, batch).backward()
        return go

    pair = Pair(Model(), "layers.*", run(0))
    for seed in range(1, 3):
        pair.same(run(seed))
    assert pair.stats() == {"captured": 6, "replayed": 12, "fallback": 0}


def test_neighbours_share_memory_instead_of_copying():
    pair = Pair(Model(), "layers.*", train)
    first, second, third = (entry.variants[0].slots[0] for entry in pair.manager.entries)
    assert second.inputs[0].data_ptr() == first.outputs[0].data_ptr()
    assert third.inputs[0].data_ptr() == second.outputs[0].data_ptr()
    assert first.grad_outputs[0].data_ptr() == second.grad_inputs[0].data_ptr()


def test_calling_a_consumer_with_another_input_does_not_disturb_its_producer():
    pair = Pair(Model(2), "layers.*", train)

    def run(model):
        model.zero_grad()
        first = model.layers[0](model.embed(tokens(1)))
        other = model.layers[1](model.embed(tokens(2)))  # would have to be copied into the memory of `first`
        (first * other).sum().backward()
        return first.detach(), other.detach()

    for _ in range(2):
        pair.same(run)
    alone = pair.same(lambda model: model.layers[1](model.embed(tokens(3))).detach())
    assert alone.shape == (2, 5, 8)


def test_no_grad_calls_between_training_steps_use_their_own_graphs():
    def run(seed):
        def go(model):
            model.zero_grad()
            with torch.no_grad():
                before = loss_of(model, seed).item()
            loss = loss_of(model, seed)
            loss.backward()
            return before, loss.item()
        return go

    pair = Pair(Model(), "layers.*", run(0))
    pair.same(run(1))
    assert pair.stats() == {"captured": 6, "replayed": 6, "fallback": 0}


def test_parameters_of_an_fsdp_unit_are_copied_so_their_memory_may_move():
    class Unit(nn.Module):
        """Frees and re-creates the memory of its parameters around every use, as FSDP2 does."""

        def __init__(self, inner):
            super().__init__()
            self.inner, self.events = inner, []

        def unshard(self, *, async_op):
            self.events.append("unshard")

        def reshard(self):
            self.events.append("reshard")
            for parameter in self.inner.parameters():
                parameter.data = parameter.data.clone()

        def forward(self, x):
            return self.inner(x)

    model = Unit(Block())
    eager = copy.deepcopy(model.inner)
    from partial_graphs import PartialGraphEntry
    manager = PartialCudaGraphManager([PartialGraphEntry("unit", model.inner, owner=model)], backend=FakeBackend())
    manager.start_recording()
    x = torch.randn(2, 8)
    model(x).sum().backward()
    manager.capture()
    assert model.events == ["unshard", "reshard"]
    for step in range(3):
        model.reshard()
        with torch.no_grad():
            for parameter, other in zip(model.inner.parameters(), eager.parameters()):
                parameter.mul_(0.9)
                other.mul_(0.9)
        model.zero_grad()
        eager.zero_grad()
        assert torch.equal(model(x), eager(x))
        model(x).sum().backward()
        eager(x).sum().backward()
        for parameter, other in zip(model.inner.parameters(), eager.parameters()):
            assert torch.equal(parameter.grad, other.grad)
    assert manager.stats()["fallback"] == 0
    manager.close()


def test_with_one_pool_a_kept_result_of_a_later_entry_makes_earlier_ones_eager():
    """A replay of an earlier graph could write over it; once it is let go, everything replays again."""
    pair = Pair(Model(), "layers.*", train, share_pool=True)
    kept = {id(pair.eager): [], id(pair.graphed): []}

    def run(model):
        hidden = model.embed(tokens(4))
        for layer in model.layers:
            hidden = layer(hidden)
        kept[id(model)].append(hidden.detach())
        hidden.square().sum().backward()
        return [value.clone() for value in kept[id(model)]]

    pair.same(run)
    assert pair.stats()["fallback"] == 0
    pair.same(run)
    assert pair.manager.fallback_reasons() == {"in flight": 3}
    for values in kept.values():
        values.clear()
    pair.same(run)
    assert pair.stats()["fallback"] == 3
