# SPDX-License-Identifier: Apache-2.0
"""The Transformer Engine backend against a stand-in for `make_graphed_callables`: flags, slots, leaves, release."""

import pytest
import torch
from cudagraphs.partial.transformer_engine import TransformerEngineBackend
from partial_graphs import PartialCudaGraphManager, PartialGraphEntry
from torch import nn


class StandIn(TransformerEngineBackend):
    """Static outputs as Transformer Engine has them: aliases of one buffer that every replay overwrites."""

    device_type = "cpu"

    def __init__(self, cache_quantized_params=False, fail_at=None):
        self.recipe, self.cache_quantized_params, self.first_microbatch = None, cache_quantized_params, None
        self.flags, self.made, self.resets, self.fail_at = [], 0, 0, fail_at

    def stream(self):
        return 0

    def _make(self, modules, sample_args, **options):
        if self.made == self.fail_at:
            raise RuntimeError("capture is not possible")
        self.made += 1
        backend, (adapter,), (sample,) = self, modules, sample_args
        target = adapter.target
        captured_forward, run_adapter = target.forward, adapter.forward

        def eager(*tensors):
            """The work as it was captured, whatever is installed on the module by now."""
            installed = vars(target).pop("forward", None)
            try:
                target.forward = captured_forward
                return run_adapter(*tensors)
            finally:
                vars(target).pop("forward", None)
                if installed is not None:
                    target.forward = installed

        static = [output.detach().clone() for output in eager(*sample)]

        class Replay(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *tensors):
                with torch.enable_grad():
                    ctx.inner = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
                    ctx.results = eager(*ctx.inner)
                for buffer, result in zip(static, ctx.results):
                    buffer.copy_(result)
                return tuple(buffer.detach() for buffer in static)

            @staticmethod
            def backward(ctx, *gradients):
                torch.autograd.backward(ctx.results, gradients)
                return tuple(tensor.grad for tensor in ctx.inner)

        def graphed(*tensors, **flags):
            backend.flags.append(flags)
            result = Replay.apply(*tensors)
            return result[0] if len(result) == 1 else result

        def reset():
            backend.resets += 1

        adapter.forward, adapter.reset = graphed, reset
        return (adapter,)


def manager_of(layer, backend, calls):
    manager = PartialCudaGraphManager([PartialGraphEntry("layer", layer)], backend=backend)
    manager.start_recording()
    calls()
    manager.capture()
    return manager


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, is_first_microbatch=None):
        return self.linear(x)


def inner(value=1.0):
    return torch.full((2, 4), value, requires_grad=True) * 1


def test_replays_pass_the_microbatch_flag_on_and_it_is_no_part_of_the_signature():
    layer, backend = Layer(), StandIn(cache_quantized_params=True)
    manager = manager_of(layer, backend, lambda: layer(inner(), is_first_microbatch=True).sum().backward())
    for first in (True, False):
        layer(inner(), is_first_microbatch=first).sum().backward()
    assert backend.flags == [{"is_first_microbatch": True}, {"is_first_microbatch": False}]
    layer(inner())
    assert manager.stats() == {"captured": 1, "replayed": 2, "fallback": 1}
    manager.close()
    manager.close()
    assert backend.resets == 1


def test_results_and_gradients_equal_eager():
    torch.manual_seed(0)
    layer, backend = Layer(), StandIn()
    expected = layer(inner(2.0)).detach()
    manager = manager_of(layer, backend, lambda: layer(inner()).sum().backward())
    layer.zero_grad()
    result = layer(inner(2.0))
    assert torch.equal(result, expected)
    result.sum().backward()
    assert torch.equal(layer.linear.weight.grad, torch.full((4, 4), 4.0))
    assert manager.stats()["replayed"] == 1


def test_an_output_that_is_kept_takes_the_slot_and_a_spent_one_frees_it():
    layer, backend = Layer(), StandIn()
    manager = manager_of(layer, backend, lambda: layer(inner()).sum().backward())
    layer(inner()).sum().backward()
    kept = layer(inner(2.0)).detach()
    value = kept.clone()
    layer(inner(3.0)).sum().backward()
    assert torch.equal(kept, value)
    assert manager.fallback_reasons() == {"in flight": 1}
    del kept
    waiting = layer(inner(4.0)).sum()
    layer(inner(5.0)).sum().backward()
    assert manager.fallback_reasons() == {"in flight": 2}
    waiting.backward()
    layer(inner()).sum().backward()
    assert manager.stats() == {"captured": 1, "replayed": 4, "fallback": 2}


def test_a_leaf_input_would_keep_static_memory_as_its_gradient_and_runs_eagerly():
    layer, backend = Layer(), StandIn()
    manager = manager_of(layer, backend, lambda: layer(inner()).sum().backward())
    layer(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert manager.fallback_reasons() == {"leaf input": 1}


def test_calls_without_gradients_are_refused_and_failures_free_what_was_made():
    layer, backend = Layer(), StandIn()
    with torch.no_grad():
        manager = manager_of(layer, backend, lambda: layer(inner()))
    assert "no gradients" in manager.entries[0].signatures[0].refusal
    layers = nn.ModuleList([Layer(), Layer()])
    backend = StandIn(fail_at=1)
    manager = PartialCudaGraphManager([PartialGraphEntry(str(i), one) for i, one in enumerate(layers)], backend=backend)
    manager.start_recording()
    layers[1](layers[0](inner())).sum().backward()
    with pytest.raises(RuntimeError, match="capture failed for 1: capture is not possible"):
        manager.capture()
    assert backend.resets == 1
    assert all("forward" not in vars(one) for one in layers)
