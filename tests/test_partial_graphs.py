# SPDX-License-Identifier: Apache-2.0
"""The manager's life: selection, recording, the capture transaction, counters, strict mode, close."""

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
from fake_graphs import FakeBackend
from partial_graphs import (
    CaptureError,
    FallbackError,
    PartialCudaGraphManager,
    PartialGraphEntry,
    PartialGraphError,
)
from torch import nn


def linear_stack(count=3):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def captured(model, select="*", calls=1, **options):
    """A manager over `model` after one recorded forward and backward, captured."""
    backend = options.pop("backend", None) or FakeBackend()
    manager = PartialCudaGraphManager.from_modules(model, select, backend=backend, **options)
    for _ in range(calls):
        model(torch.ones(2, 4)).sum().backward()
    manager.capture()
    return manager, backend


# Selection


@pytest.mark.parametrize(("select", "names"), [
    ("layers.*", ["layers.0", "layers.1"]),
    ("layers.*.mlp", ["layers.0.mlp", "layers.1.mlp"]),
    ("**.attn", ["layers.0.attn", "layers.1.attn", "extra.deep.attn"]),
    ("layers.[0].mlp", ["layers.0.mlp"]),
    (nn.Linear, ["layers.0.attn", "layers.1.attn", "extra.deep.attn"]),
    (lambda name, module: name.endswith("1"), ["layers.1"]),
    (["layers.0", "extra.**.attn"], ["layers.0", "extra.deep.attn"]),
    (["layers.0", "layers.*.mlp"], ["layers.0", "layers.1.mlp"]),  # the outer graph covers its own inner module
])
def test_select_by_pattern_class_and_predicate(select, names):
    model = nn.Module()
    model.layers = nn.ModuleList(
        nn.ModuleDict({"attn": nn.Linear(2, 2), "mlp": nn.ReLU()}) for _ in range(2))
    model.extra = nn.ModuleDict({"deep": nn.ModuleDict({"attn": nn.Linear(2, 2)})})
    manager = PartialCudaGraphManager.from_modules(model, select, backend=FakeBackend())
    assert [entry.name for entry in manager.entries] == names
    manager.close()


@pytest.mark.parametrize("select", ["nothing.*", [], ["0", "9"], nn.Conv2d])
def test_a_selection_that_matches_nothing_is_an_error(select):
    with pytest.raises(PartialGraphError, match="select"):
        PartialCudaGraphManager.from_modules(linear_stack(), select, backend=FakeBackend())


def test_entries_that_repeat_or_contain_each_other_are_refused():
    model = linear_stack()
    with pytest.raises(PartialGraphError, match="same module"):
        PartialCudaGraphManager([PartialGraphEntry("a", model[0]), PartialGraphEntry("b", model[0])])
    with pytest.raises(PartialGraphError, match="b is inside a"):
        PartialCudaGraphManager([PartialGraphEntry("a", model), PartialGraphEntry("b", model[0])])


@pytest.mark.parametrize("options", [{"max_signatures": 0}, {"max_slots": 0}])
def test_bounds_must_be_positive(options):
    with pytest.raises(ValueError, match="at least 1"):
        PartialCudaGraphManager.from_modules(linear_stack(), "*", backend=FakeBackend(), **options)


# Recording and capture


def test_recording_leaves_the_model_eager_and_capture_replays():
    model = linear_stack()
    expected = copy.deepcopy(model)(torch.ones(2, 4))
    manager, backend = captured(model)
    assert manager.stats() == {"captured": 3, "replayed": 0, "fallback": 0}
    assert backend.replays == 0
    assert torch.equal(model(torch.ones(2, 4)), expected)
    assert manager.stats() == {"captured": 3, "replayed": 3, "fallback": 0}
    assert backend.replays == 3
    assert backend.pools == 3, "one memory pool a slot: forward and backward share it, neighbours do not"


def test_graphs_are_captured_in_the_order_of_the_calls_and_backwards_in_reverse():
    class Reversed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.a(self.b(self.c(x)))

    model = Reversed()
    order = []

    class Watching(FakeBackend):
        def capture(self, run, pool, source=None, **copies):
            order.append("forward" if source is None else "backward")
            return super().capture(run, pool, source, **copies)

    manager, backend = captured(model, backend=Watching())
    assert order == ["forward"] * 3 + ["backward"] * 3
    slots = [entry.variants[0].slots[0] for entry in manager.entries]
    assert [slot.forward_graph for slot in slots] == [backend.graphs[i] for i in (2, 1, 0)]
    assert [slot.write_graph for slot in slots] == [backend.graphs[i] for i in (3, 4, 5)]


def test_an_entry_without_a_sample_fails_closed():
    model = linear_stack()
    manager = PartialCudaGraphManager.from_modules(model, "*", backend=FakeBackend())
    model[0](torch.ones(2, 4))
    with pytest.raises(PartialGraphError, match="iteration-0 sample.*'1', '2'"):
        manager.capture()
    assert all("forward" not in vars(module) for module in model)


@pytest.mark.parametrize("fail_at", range(6))
def test_a_failed_capture_names_the_entry_frees_everything_and_leaves_the_model_eager(fail_at):
    model = linear_stack()
    backend = FakeBackend(fail_at=fail_at)
    manager = PartialCudaGraphManager.from_modules(model, "*", backend=backend)
    model(torch.ones(2, 4)).sum().backward()
    name = "012210"[fail_at]
    with pytest.raises(CaptureError, match=f"capture failed for {name}: operation not permitted") as caught:
        manager.capture()
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert all(graph.resets == 1 for graph in backend.graphs)
    assert all("forward" not in vars(module) for module in model)
    assert manager.stats() == {"captured": 0, "replayed": 0, "fallback": 0}
    model(torch.ones(2, 4)).sum().backward()
    manager.close()


def test_a_failed_capture_can_be_recorded_and_captured_again():
    model = linear_stack()
    backend = FakeBackend(fail_at=4)
    manager = PartialCudaGraphManager.from_modules(model, "*", backend=backend)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(CaptureError):
        manager.capture()
    backend.fail_at = None
    manager.start_recording()
    model(torch.ones(2, 4)).sum().backward()
    manager.capture()
    model(torch.ones(2, 4))
    assert manager.stats() == {"captured": 3, "replayed": 3, "fallback": 0}


def test_a_failed_reset_after_a_failed_capture_does_not_hide_the_first_error(caplog):
    model = linear_stack()
    backend = FakeBackend(fail_at=2)
    backend.fail_resets = 1
    manager = PartialCudaGraphManager.from_modules(model, "*", backend=backend)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(CaptureError, match="operation not permitted"):
        manager.capture()
    assert "could not free a graph of 0" in caplog.text


def test_capture_leaves_parameters_gradients_buffers_modes_and_random_state_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    manager = PartialCudaGraphManager.from_modules(model, "*", backend=FakeBackend())
    model(torch.randn(8, 4)).sum().backward()
    before = copy.deepcopy(model.state_dict())
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    random_state = torch.get_rng_state()
    model[2].eval()
    manager.capture()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients))
    assert (model[0].training, model[2].training) == (True, False)


def test_capture_is_idempotent_and_recording_after_it_is_an_error():
    manager, backend = captured(linear_stack())
    manager.capture()
    assert len(backend.graphs) == 6
    with pytest.raises(PartialGraphError, match="captured already"):
        manager.start_recording()


# Counters, log, strict mode


def test_fallbacks_are_counted_by_reason_and_logged_once_a_reason(caplog):
    model = linear_stack()
    manager, _ = captured(model)
    with caplog.at_level(logging.WARNING, "partial_graphs"):
        for _ in range(3):
            model(torch.ones(3, 4))
        with torch.no_grad():
            model(torch.ones(2, 4))
    # A changed input makes its consumers' inputs change too: all three fall back.
    assert manager.stats() == {"captured": 3, "replayed": 0, "fallback": 12}
    assert manager.fallback_reasons() == {"shape": 9, "requires_grad": 2, "grad mode": 1}
    assert sorted(record.getMessage().split(",")[1].split(":")[0].strip() for record in caplog.records) == [
        "grad mode", "requires_grad", "shape"]


def test_strict_mode_turns_a_fallback_into_an_error():
    model = linear_stack()
    manager, _ = captured(model, strict=True)
    model(torch.ones(2, 4))
    with pytest.raises(FallbackError, match=r"0: not replayed, shape \(args\[0\]\)"):
        model(torch.ones(3, 4))
    assert manager.stats()["fallback"] == 0


def test_log_stats_names_the_phase_and_every_entry(caplog):
    manager, _ = captured(linear_stack())
    with caplog.at_level(logging.INFO, "partial_graphs"):
        manager.log_stats("after training")
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == "Partial CUDA graph stats (after training): captured=3 replayed=0 fallback=0"
    assert [message.split("name=")[1].split()[0] for message in messages[1:]] == ["0", "1", "2"]


# Close


def test_close_frees_every_graph_once_and_restores_forward():
    model = linear_stack()
    expected = model(torch.ones(2, 4))
    manager, backend = captured(model)
    replayed = model(torch.ones(2, 4))
    manager.close()
    manager.close()
    assert all(graph.resets == 1 for graph in backend.graphs)
    assert all("forward" not in vars(module) for module in model)
    assert torch.equal(model(torch.ones(2, 4)), expected)
    assert torch.equal(replayed, expected)
    assert manager.stats() == {"captured": 3, "replayed": 3, "fallback": 0}
    for call in (manager.capture, manager.start_recording):
        with pytest.raises(PartialGraphError, match="closed"):
            call()


def test_close_restores_a_forward_that_was_set_on_the_instance():
    module = nn.Identity()
    module.forward = special = lambda x: x * 2
    manager = PartialCudaGraphManager([PartialGraphEntry("one", module)], backend=FakeBackend())
    manager.start_recording()
    module(torch.ones(2))
    manager.capture()
    assert torch.equal(module(torch.ones(2)), torch.full((2,), 2.0))
    manager.close()
    assert module.forward is special


def test_close_tries_all_entries_raises_the_first_error_and_can_be_retried():
    model = linear_stack()
    manager, backend = captured(model)
    backend.fail_resets = 1
    with pytest.raises(RuntimeError, match="reset failed"):
        manager.close()
    assert all("forward" not in vars(module) for module in model)
    manager.close()
    assert all(graph.resets == 1 for graph in backend.graphs)


@pytest.mark.parametrize("error", [None, KeyError, KeyboardInterrupt, SystemExit])
def test_the_context_manager_closes_on_every_exit(error):
    model = linear_stack()
    manager, backend = captured(model)
    try:
        with manager:
            if error is not None:
                raise error
    except BaseException as raised:
        assert type(raised) is error
    assert all(graph.resets == 1 for graph in backend.graphs)


def test_close_during_recording_stops_it():
    model = linear_stack()
    manager = PartialCudaGraphManager.from_modules(model, "*", backend=FakeBackend())
    manager.close()
    assert all("forward" not in vars(module) for module in model)


def test_backward_after_close_says_so_instead_of_reading_freed_memory():
    model = linear_stack(1)
    manager, _ = captured(model)
    loss = model(torch.ones(2, 4)).sum()
    manager.close()
    with pytest.raises(PartialGraphError, match="second time|reused"):
        loss.backward()


def test_a_deep_copy_of_a_captured_model_is_eager_and_independent():
    model = linear_stack(1)
    manager, backend = captured(model)
    clone = copy.deepcopy(model)
    with torch.no_grad():
        clone[0].weight.zero_()
    replays = backend.replays
    assert torch.equal(clone(torch.ones(2, 4))[0], clone[0].bias)
    assert backend.replays == replays


# NeMo AutoModel's layout


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(4, 4, bias=False)
        self.attn_module = nn.Module()
        self.attn_module.fused_attention = Doubler()

    def forward(self, x):
        return self.attn_module.fused_attention(self.q_proj(x), fp8_meta={}, fp8=False)


class Doubler(nn.Module):
    def forward(self, x, fp8_meta=None, quantizers=None, fp8=False):
        return x * 2


class RouterCore(nn.Module):
    def forward(self, logits):
        return torch.topk(logits.softmax(-1), 2)


class Preprocess(nn.Module):
    permute_fusion = True

    def forward(self, indices):
        return indices + 1


class AutoModelLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = Attention()
        self.mlp = nn.Module()
        self.mlp.gate = nn.Module()
        self.mlp.gate.routing_core = RouterCore()
        self.mlp.experts = nn.Module()
        self.mlp.experts.token_dispatcher = SimpleNamespace(hybridep_metadata_processor=Preprocess())

    def forward(self, x):
        x = self.self_attn(x)
        weights, indices = self.mlp.gate.routing_core(x)
        self.mlp.experts.token_dispatcher.hybridep_metadata_processor(indices)
        return x * weights.sum(-1, keepdim=True)


class AutoModel(nn.Module):
    def __init__(self, *scopes, layers=2):
        super().__init__()
        self.config = SimpleNamespace(model_type="test_moe")
        self.backend = SimpleNamespace(cuda_graph=SimpleNamespace(modules=list(scopes)))
        self.model = nn.Module()
        self.model.layers = nn.ModuleDict({str(i): AutoModelLayer() for i in range(layers)})

    def forward(self, x):
        for layer in self.model.layers.values():
            x = layer(x)
        return x


def test_from_model_parts_selects_by_scope_block_by_block():
    scopes = ("te_dpa", "moe_router", "moe_preprocess")
    manager = PartialCudaGraphManager.from_model_parts([AutoModel(*scopes)], backend=FakeBackend())
    assert [entry.name for entry in manager.entries] == [
        f"test_moe.layers.{i}.{part}" for i in (0, 1) for part in ("fused_attention", "moe_router", "moe_preprocess")]
    manager.close()


def test_from_model_parts_returns_none_when_nothing_is_selected():
    assert PartialCudaGraphManager.from_model_parts([AutoModel(), nn.Linear(2, 2)], backend=FakeBackend()) is None


def test_from_model_parts_takes_several_parts_and_pipelines():
    parts = [AutoModel("attn", layers=1), AutoModel("attn", layers=1)]
    manager = PartialCudaGraphManager.from_model_parts(parts, True, True, backend=FakeBackend())
    assert [entry.name for entry in manager.entries] == [
        "part0.test_moe.layers.0.attention", "part1.test_moe.layers.0.attention"]
    manager.close()


@pytest.mark.parametrize(("scopes", "change", "message"), [
    (["mlp"], None, "contains \\['mlp'\\]"),
    (["moe_router"], lambda layer: delattr(layer.mlp.gate, "routing_core"), "no layer exposes a graphable moe_router"),
    (["moe_router"], lambda layer: setattr(layer.mlp.gate, "router_replay", object()), "router_replay"),
    (["moe_router"], lambda layer: setattr(layer.mlp.gate.routing_core, "weight", nn.Parameter(torch.ones(1))),
     "must be parameterless"),
])
def test_from_model_parts_refuses_what_cannot_be_captured(scopes, change, message):
    model = AutoModel(*scopes, layers=1)
    if change is not None:
        change(model.model.layers["0"])
    with pytest.raises(PartialGraphError, match=message):
        PartialCudaGraphManager.from_model_parts([model], backend=FakeBackend())


@pytest.mark.parametrize("scopes", [["attn"], ["te_dpa"], ["moe_router", "moe_preprocess"],
                                    ["te_dpa", "moe_router", "moe_preprocess"]])
def test_every_automodel_scope_trains_bitwise_like_eager(scopes):
    torch.manual_seed(0)
    model = AutoModel(*scopes)
    eager = copy.deepcopy(model)
    manager = PartialCudaGraphManager.from_model_parts([model], backend=FakeBackend())
    for step in range(4):
        x = torch.randn(3, 4)
        for one in (model, eager):
            one.zero_grad()
            one(x).sum().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters()))
        if step == 0:
            manager.capture()
    assert manager.stats() == {"captured": 2 * len(scopes), "replayed": 6 * len(scopes), "fallback": 0}
    manager.close()


def test_te_dpa_falls_back_when_fp8_is_switched_on():
    module = Doubler()
    model = AutoModel("te_dpa", layers=1)
    model.model.layers["0"].self_attn.attn_module.fused_attention = module
    manager = PartialCudaGraphManager.from_model_parts([model], backend=FakeBackend())
    module(torch.ones(2), fp8_meta={}, fp8=False)
    manager.capture()
    module(torch.ones(2), fp8_meta={"new": 1}, fp8=False)
    module(torch.ones(2), fp8_meta={}, fp8=True)
    assert manager.stats() == {"captured": 1, "replayed": 1, "fallback": 1}
