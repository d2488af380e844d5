# SPDX-License-Identifier: Apache-2.0
"""Capture through Transformer Engine's `make_graphed_callables`, for modules that keep FP8 state.

Transformer Engine carries amax history, scales and cached FP8 weights across replays, which torch's own capture does
not know (transformer_engine/pytorch/graph.py, 2.20.2). It brings its own static buffers; the guards, slots, counters
and the transaction are the manager's.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import nn

from cudagraphs.partial.backends import CudaBackend
from cudagraphs.partial.body import OutputPlan
from cudagraphs.partial.errors import PartialGraphError, Unsupported
from cudagraphs.partial.gradients import keeps_graph, use_count
from cudagraphs.partial.guards import GuardBuilder
from cudagraphs.partial.recording import Signature, output_tensors


class TransformerEngineBackend(CudaBackend):
    """Capture every entry with Transformer Engine.

    Args:
        recipe: FP8 or FP4 recipe (`transformer_engine.common.recipe`); None captures in the precision of the module.
        cache_quantized_params: keep quantised weights across the microbatches of a step. Calls must then pass
            `is_first_microbatch`, a bool, which replays turn into Transformer Engine's skip-update flag.

    Raises:
        PartialGraphError: without Transformer Engine, or with one that hands out static gradients of parameters
            (it must know `clone_param_grads_on_return`).
    """

    def __init__(self, recipe: Any = None, cache_quantized_params: bool = False):
        super().__init__()
        try:
            from transformer_engine.pytorch.graph import make_graphed_callables
        except ImportError as error:
            raise PartialGraphError("TransformerEngineBackend needs transformer_engine for PyTorch") from error
        if "clone_param_grads_on_return" not in inspect.signature(make_graphed_callables).parameters:
            raise PartialGraphError("this Transformer Engine returns static gradients of parameters, which a second "
                                    "microbatch would overwrite; one with clone_param_grads_on_return is needed (2.20)")
        self._make = make_graphed_callables
        self.recipe, self.cache_quantized_params = recipe, cache_quantized_params
        self.first_microbatch: bool | None = None

    def canonicalize(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Take `is_first_microbatch` out of the guards' sight; replays pass it on."""
        if not isinstance(kwargs.get("is_first_microbatch"), bool):
            if self.cache_quantized_params:
                raise PartialGraphError("cache_quantized_params needs is_first_microbatch=True or False in every call")
            return args, kwargs
        self.first_microbatch = kwargs["is_first_microbatch"]
        return args, {**kwargs, "is_first_microbatch": True}

    def add_checks(self, build: GuardBuilder, signature: Signature) -> None:
        """A leaf would keep the static gradient of its slot as .grad, where the next replay overwrites it."""
        for name, path, wants in zip(build.tensors, signature.call.paths, signature.requires_grad):
            if wants:
                build.check("leaf input", path, f"not {name}.is_leaf")

    def slot(self, name: str, signature: Signature, target: nn.Module, statics: list[torch.Tensor]) -> TESlot:
        """Capture one replica.

        Raises:
            Unsupported: for a call without gradients.
        """
        return TESlot(self, name, signature, target, statics)


class _Adapter(nn.Module):
    """The target's call with tensors only. Transformer Engine finds the parameters through the submodule."""

    def __init__(self, signature: Signature, target: nn.Module):
        super().__init__()
        self.target = target
        self._rebuild = signature.call.rebuild
        self.plan: OutputPlan | None = None

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self._rebuild(tensors)
        result = self.target(*args, **kwargs)
        plan = OutputPlan([])
        plan.finish(result)
        self.plan = plan
        outputs, plan.outputs = plan.outputs, []
        return tuple(outputs)


class TESlot:
    """One graphed callable of Transformer Engine, with the same interface as `replay.Slot`."""

    def __init__(self, backend: TransformerEngineBackend, name: str, signature: Signature, target: nn.Module,
                 statics: list[torch.Tensor]):
        self.name = name
        self.inputs, self.borrowed, self.outputs, self.grad_inputs, self.grad_outputs = statics, {}, [], [], []
        self._backend = backend
        self._pending: weakref.ref | None = None
        self._watched: list[tuple[Any, int]] | None = None  # (storage, references of Transformer Engine)
        adapter = _Adapter(signature, target)
        adapter.train(target.training)
        ambient = signature.ambient
        if not ambient.grad or ambient.inference:
            raise Unsupported("Transformer Engine captures forward and backward together; this call has no gradients")
        with torch.autocast(signature.call.device_type, dtype=ambient.autocast_dtype, enabled=ambient.autocast,
                            cache_enabled=False):
            graphed = backend._make((adapter,), (tuple(statics),), enabled=backend.recipe is not None,
                                    recipe=backend.recipe, cache_quantized_params=backend.cache_quantized_params,
                                    allow_unused_input=True)
        self._graphed = graphed[0] if isinstance(graphed, tuple) else graphed
        if not callable(getattr(self._graphed, "reset", None)):
            raise PartialGraphError("this Transformer Engine cannot free its graphs: reset() needs 2.10 or newer")
        self._rebuild = adapter.plan.rebuild

    def finish(self) -> None:
        """Nothing to build: the graphed callable is complete."""

    def settle(self, returned: set[int]) -> None:
        """Reference counts are taken at the first replay, when the static outputs first come to light."""

    def idle(self) -> bool:
        if self._pending is not None and self._pending() is not None:
            return False
        return all(use_count(storage._cdata) <= own for storage, own in self._watched or ())

    def free(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        return self.idle()

    def launch(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Replay; returns the result of the module."""
        flags = {"is_first_microbatch": self._backend.first_microbatch} if self._backend.cache_quantized_params else {}
        outputs = self._graphed(*tensors, **flags)
        outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        if self._watched is None:
            self._watched = self._count(outputs)
        node = next((output.grad_fn for output in outputs if output.grad_fn is not None), None)
        if node is not None:
            self._pending = weakref.ref(node)
            node.register_hook(self._spent)
        return self._rebuild(outputs, tensors)

    def _spent(self, *_: Any) -> None:
        if not keeps_graph():
            self._pending = None

    @staticmethod
    def _count(outputs: list[torch.Tensor]) -> list[tuple[Any, int]]:
        storages = {storage._cdata: storage for storage in (o.untyped_storage() for o in output_tensors(outputs))}
        handed_out = [output.untyped_storage()._cdata for output in outputs]
        return [(storage, use_count(handle) - handed_out.count(handle)) for handle, storage in storages.items()]

    def reset(self) -> None:
        """Free the graphs. Safe to call again."""
        graphed, self._graphed = self._graphed, None
        if graphed is not None:
            graphed.reset()
            for attribute in ("forward", "backward_dw", "reset"):  # closures that keep the buffers alive
                vars(graphed).pop(attribute, None)
        self.inputs = []
