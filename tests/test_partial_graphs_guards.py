# SPDX-License-Identifier: Apache-2.0
"""Guards: every change that a graph cannot stand for is seen, named, and run eagerly with the right result."""

import contextlib
import copy
import enum
from collections import namedtuple

import pytest
import torch
from cudagraphs.partial.errors import Unsupported
from cudagraphs.partial.guards import CallGuard
from fake_graphs import FakeBackend
from partial_graphs import PartialCudaGraphManager, PartialGraphEntry
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

Pair = namedtuple("Pair", "left right")


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Flexible(nn.Module):
    """Takes anything, and computes with every tensor in it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))
        self.register_buffer("offset", torch.ones(4))
        self.scale = 1.5
        self.table = torch.ones(4)

    def forward(self, x, *rest, **options):
        total = self.inner(x) * self.scale + self.offset + self.table
        for value in _tensors((rest, options)):
            total = total + value.to(total.dtype).sum()
        return total


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def capture(module, *args, **kwargs):
    backend = FakeBackend()
    manager = PartialCudaGraphManager([PartialGraphEntry("one", module)], backend=backend)
    manager.start_recording()
    module(*args, **kwargs)
    manager.capture()
    return manager, backend


def ones(*shape, **options):
    return torch.ones(*shape or (2, 4), **options)


X = ones()
CHANGED_CALLS = {
    "another batch": ("shape", (ones(),), (ones(3, 4),)),
    "another rank": ("shape", (ones(),), (ones(1, 2, 4),)),
    "another dtype": ("dtype", (ones(), ones()), (ones(), ones(dtype=torch.float64))),
    "transposed memory": ("strides", (ones(4, 4),), (ones(4, 4).t(),)),
    "a gradient wanted": ("requires_grad", (ones(),), (ones(requires_grad=True),)),
    "no gradient wanted": ("requires_grad", (ones(requires_grad=True),), (ones(),)),
    "a parameter for a tensor": ("structure", (ones(), ones(requires_grad=True)), (ones(), nn.Parameter(ones()))),
    "same tensor twice, then two": ("aliasing", (X, X), (ones(), ones())),
    "two tensors, then one twice": ("aliasing", (ones(), ones()), (X, X)),
    "one more argument": ("structure", (ones(),), (ones(), ones())),
    "a list for a tuple": ("structure", (ones(), (ones(),)), (ones(), [ones()])),
    "a longer list": ("structure", (ones(), [ones()]), (ones(), [ones(), ones()])),
    "another named tuple": ("structure", (ones(), Pair(ones(), 1)), (ones(), (ones(), 1))),
    "a dict with another key": ("structure", (ones(), {"a": ones()}), (ones(), {"b": ones()})),
    "a tensor for None": ("argument", (ones(), None), (ones(), ones())),
    "None for a tensor": ("structure", (ones(), ones()), (ones(), None)),
    "another int": ("argument", (ones(), 1), (ones(), 2)),
    "a bool for an int": ("argument", (ones(), 1), (ones(), True)),
    "a float for an int": ("argument", (ones(), 1), (ones(), 1.0)),
    "minus zero": ("argument", (ones(), 0.0), (ones(), -0.0)),
    "not a number": ("argument", (ones(), float("nan")), (ones(), 1.0)),
    "another string": ("argument", (ones(), "a"), (ones(), "b")),
    "another enum": ("argument", (ones(), Color.RED), (ones(), Color.BLUE)),
    "another dtype as argument": ("argument", (ones(), torch.float32), (ones(), torch.float16)),
    "another function": ("argument", (ones(), len), (ones(), sum)),
    "nested argument": ("argument", (ones(), ({"a": [1, 2]},)), (ones(), ({"a": [1, 3]},))),
}


@pytest.mark.parametrize("name", CHANGED_CALLS)
def test_a_changed_call_runs_eagerly_for_its_reason(name):
    reason, recorded, changed = CHANGED_CALLS[name]
    module = Flexible()
    eager = copy.deepcopy(module)
    manager, backend = capture(module, *recorded)
    assert torch.equal(module(*recorded), eager(*recorded))
    assert manager.stats() == {"captured": 1, "replayed": 1, "fallback": 0}
    assert torch.equal(module(*changed), eager(*changed))
    assert manager.fallback_reasons() == {reason: 1}
    assert backend.replays == 1


SAME_CALLS = {
    "keywords in another order": (((ones(),), {"a": 1, "b": ones()}), ((ones(),), {"b": ones(), "a": 1})),
    "an equal string": (((ones(), "mode_1"), {}), ((ones(), "_".join(["mode", "1"])), {})),
    "not a number again": (((ones(), float("nan")), {}), ((ones(), float("nan")), {})),
    "an equal nested structure": (((ones(), Pair([1, (2,)], {"k": ones()})), {}),
                                  ((ones(), Pair([1, (2,)], {"k": ones()})), {})),
    "an offset view": (((ones(),), {}), ((ones(4, 4)[2:],), {})),
    "a broadcast tensor": (((ones(), ones(1, 4).expand(3, 4)), {}), ((ones(), ones(1, 4).expand(3, 4)), {})),
    "an empty tensor": (((ones(), ones(0, 4)), {}), ((ones(), ones(0, 4)), {})),
}


@pytest.mark.parametrize("name", SAME_CALLS)
def test_a_call_that_only_looks_different_is_replayed(name):
    (args, kwargs), (again, again_kwargs) = SAME_CALLS[name]
    module = Flexible()
    manager, _ = capture(module, *args, **kwargs)
    again = (again[0] * 3, *again[1:])
    assert torch.equal(module(*again, **again_kwargs), copy.deepcopy(module)(*again, **again_kwargs))
    assert manager.stats() == {"captured": 1, "replayed": 1, "fallback": 0}


class NothingMode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_transforms_of_torch_func_run_eagerly():
    module = Flexible()
    manager, _ = capture(module, ones())
    batch = torch.arange(24.0).reshape(3, 2, 4)
    mapped = torch.func.vmap(module)(batch)
    assert torch.allclose(mapped, torch.stack([module(x) for x in batch]))
    assert torch.equal(torch.func.grad(lambda x: module(x).sum())(batch[0]),
                       torch.autograd.functional.jacobian(lambda x: module(x).sum(), batch[0]))
    assert manager.fallback_reasons()["transform"] == 1
    manager.close()


def replace(path, value):
    """Rebind what a dotted path names; numbers index into containers, the last parent may be a parameter."""
    def change(module, backend):
        *parents, last = path.split(".")
        target = module
        for part in parents:
            target = target[int(part)] if part.isdigit() else getattr(target, part)
        setattr(target, last, value() if callable(value) else value)
        return contextlib.nullcontext()
    return change


def hook_inside(module, backend):
    module.inner[0].register_forward_hook(lambda *_: None)
    return contextlib.nullcontext()


def move_parameter(module, backend):
    module.inner[0].weight.data = module.inner[0].weight.data.clone()
    return contextlib.nullcontext()


def other_stream(module, backend):
    backend.current_stream = 7
    return contextlib.nullcontext()


def global_hook(module, backend):
    return nn.modules.module.register_module_forward_hook(lambda *_: None)


@contextlib.contextmanager
def removing(handle):
    try:
        yield
    finally:
        handle.remove()


CHANGED_STATE = {
    "evaluation mode": ("training mode", lambda module, _: (module.eval(), contextlib.nullcontext())[1]),
    "one submodule in evaluation": ("training mode", replace("inner.1.training", False)),
    "no gradients": ("grad mode", lambda *_: torch.no_grad()),
    "inference": ("grad mode", lambda *_: torch.inference_mode()),
    "autocast": ("autocast", lambda *_: torch.autocast("cpu", torch.bfloat16)),
    "a parameter's memory moved": ("parameter storage", move_parameter),
    "a parameter replaced": ("parameter storage", replace("inner.0.weight", lambda: nn.Parameter(torch.zeros(4, 4)))),
    "a parameter frozen": ("requires_grad", replace("inner.0.weight.requires_grad", False)),
    "a buffer replaced": ("buffer storage", replace("offset", lambda: torch.zeros(4))),
    "a tensor attribute replaced": ("tensor attribute", replace("table", lambda: torch.zeros(4))),
    "a number changed": ("attribute", replace("scale", 2.5)),
    "dropout changed": ("attribute", replace("inner.1.p", 1.0)),
    "a submodule replaced": ("submodules", replace("inner.1", lambda: nn.Identity())),
    "a hook on a submodule": ("hooks", hook_inside),
    "a global hook": ("hooks", lambda *a: removing(global_hook(*a))),
    "another stream": ("stream", other_stream),
    "a dispatch mode": ("dispatch mode", lambda *_: NothingMode()),
}


@pytest.mark.parametrize("name", CHANGED_STATE)
def test_a_changed_state_runs_eagerly_for_its_reason(name):
    reason, change = CHANGED_STATE[name]
    module = Flexible()
    manager, backend = capture(module, ones())
    module(ones())
    assert backend.replays == 1
    with change(module, backend):
        result = module(ones(2, 4))
        expected = manager.entries[0].original_forward(ones(2, 4))
    assert torch.equal(result, expected)
    assert manager.fallback_reasons() == {reason: 1}
    assert backend.replays == 1


@pytest.mark.parametrize(("dtype", "replayed"), [(torch.bfloat16, 1), (torch.float16, 0)])
def test_the_autocast_dtype_is_part_of_the_signature(dtype, replayed):
    module = Flexible()
    backend = FakeBackend()
    manager = PartialCudaGraphManager([PartialGraphEntry("one", module)], backend=backend)
    manager.start_recording()
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(ones())
    manager.capture()
    with torch.autocast("cpu", dtype):
        result = module(ones())
    assert manager.stats()["replayed"] == replayed
    if replayed:
        assert torch.equal(result, expected)
    else:
        assert manager.fallback_reasons() == {"autocast": 1}


def test_device_and_layout_are_checked():
    guard = CallGuard((ones(),), {}, "cpu").builder.build()
    assert guard.explain((ones(device="meta"),), {}).reason == "device"
    assert guard.explain((ones().to_sparse(),), {}).reason == "layout"
    assert guard.match((ones(device="meta"),), {}) is None


def test_a_new_parameter_or_submodule_is_seen():
    for name, value, reason in (("extra", nn.Parameter(torch.ones(1)), "parameter storage"),
                                ("more", nn.Identity(), "submodules")):
        module = Flexible()
        manager, _ = capture(module, ones())
        setattr(module, name, value)
        module(ones())
        assert manager.fallback_reasons() == {reason: 1}


def test_match_and_explain_agree_on_every_change():
    for reason, recorded, changed in CHANGED_CALLS.values():
        guard = CallGuard(recorded, {}, "cpu").builder.build()
        assert guard.explain(recorded, {}) is None and guard.match(recorded, {}) is not None
        assert guard.match(changed, {}) is None
        assert guard.explain(changed, {}).reason == reason


class Cache:
    def __init__(self):
        self.keys = [torch.ones(1)]


class Options:
    def __init__(self):
        self.mode = "a"


@pytest.mark.parametrize(("argument", "message"), [
    (Cache(), "Cache that holds tensors"),
    ({1, 2}, "is a set"),
    (iter([1]), "cannot be guarded"),
    (torch.ones(2).to_sparse(), "layout"),
    (torch.ones(2, device="meta"), "is on meta"),
    (torch.ones(6).as_strided((3, 3), (1, 1)), "share memory"),
    ({("a", 1): 1}, "keys are not strings"),
])
def test_arguments_that_no_guard_can_watch_are_refused(argument, message):
    with pytest.raises(Unsupported, match=message):
        CallGuard((torch.ones(2), argument), {}, "cpu")


def test_an_object_counts_as_the_same_while_none_of_its_attributes_was_rebound():
    options = Options()
    module = Flexible()
    manager, _ = capture(module, ones(), options=options)
    module(ones(), options=options)
    options.mode = "b"
    module(ones(), options=options)
    module(ones(), options=Options())
    assert manager.stats()["replayed"] == 1
    assert manager.fallback_reasons() == {"argument": 2}


def test_hooks_on_the_captured_module_itself_run_around_the_graph():
    module = Flexible()
    calls = []
    module.register_forward_pre_hook(lambda *_: calls.append("before"))
    module.register_forward_hook(lambda _module, _args, result: result * 2)
    eager = copy.deepcopy(module)
    manager, _ = capture(module, ones())
    calls.clear()
    assert torch.equal(module(ones()), eager(ones()))
    assert manager.stats()["replayed"] == 1
    assert calls == ["before", "before"]


def test_several_signatures_are_captured_up_to_the_bound():
    module = Flexible()
    manager = PartialCudaGraphManager([PartialGraphEntry("one", module, max_signatures=2)], backend=FakeBackend())
    manager.start_recording()
    for length in (2, 3, 4):
        module(ones(length, 4))
    manager.capture()
    for length in (3, 2, 4, 5):
        module(ones(length, 4))
    assert manager.stats() == {"captured": 2, "replayed": 2, "fallback": 2}
    assert manager.fallback_reasons() == {"shape": 2}


def test_training_and_evaluation_can_both_be_captured():
    module = nn.Dropout(0.5)
    manager = PartialCudaGraphManager([PartialGraphEntry("one", module)], backend=FakeBackend())
    manager.start_recording()
    module(ones())
    module.eval()
    module(ones())
    module.train()
    manager.capture()
    module.eval()
    assert torch.equal(module(ones()), ones())
    module.train()
    assert not torch.equal(module(ones(8, 8)[:2, :4].contiguous()), ones())
    assert manager.stats() == {"captured": 2, "replayed": 2, "fallback": 0}
