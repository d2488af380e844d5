# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the classes that hold CUDA graphs, named and shaped as in each released version.

MEGATRON lists the names that the cleanup relies on, by megatron-core minor; tests/oracle/test_delete_graphs_names.py
holds that list against the released wheels.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

GRAPHS = "megatron.core.transformer.cuda_graphs"
FULL = "megatron.core.full_cuda_graph"
OPTIMIZER = "megatron.core.optimizer.optimizer_cuda_graph"

_LOCAL = {
    "CudaGraphManager": ("cudagraph_runners",),
    "_CudaGraphRunner": (
        "fwd_graph",
        "bwd_graph",
        "fwd_graph_recorded",
        "bwd_graph_recorded",
        "cudagraph_created",
        "fwd_graph_input_surface",
        "fwd_graph_outputs",
        "fwd_graph_output_surface",
        "static_grad_outputs",
        "static_grad_inputs",
    ),
    "_CudagraphGlobalRecord": ("cudagraph_created", "cudagraph_record"),
}
_HELPER = {"TECudaGraphHelper": ("callables_per_chunk",)}
_HELPER_16 = {"TECudaGraphHelper": ("callables_per_chunk", "_graphs_created", "graphs_created", "delete_cuda_graphs")}
_FULL = {"FullCudaGraphWrapper": ("cuda_graph", "result", "curr_iteration")}
_OPTIMIZER = {"OptimizerCudaGraphWrapper": ("cuda_graph", "result", "curr_iteration")}
_VISION = {"VisionTECudaGraphHelper": ()}

# minor -> module -> class or function -> attributes that its source assigns or defines
MEGATRON: dict[int, dict[str, dict[str, tuple[str, ...]]]] = {
    13: {GRAPHS: _LOCAL},
    14: {GRAPHS: _LOCAL | _HELPER, FULL: _FULL},
    15: {GRAPHS: _LOCAL | _HELPER | {"delete_cuda_graphs": ()}, FULL: _FULL},
    16: {GRAPHS: _LOCAL | _HELPER_16 | {"delete_cuda_graphs": ()}, FULL: _FULL},
    17: {GRAPHS: _LOCAL | _HELPER_16 | _VISION | {"delete_cuda_graphs": ()}, FULL: _FULL, OPTIMIZER: _OPTIMIZER},
    18: {GRAPHS: _LOCAL | _HELPER_16 | _VISION | {"delete_cuda_graphs": ()}, FULL: _FULL, OPTIMIZER: _OPTIMIZER},
    19: {GRAPHS: _LOCAL | _HELPER_16 | _VISION | {"delete_cuda_graphs": ()}, FULL: _FULL, OPTIMIZER: _OPTIMIZER},
}
ABSENT: dict[int, tuple[tuple[str, str | None], ...]] = {
    13: ((GRAPHS, "TECudaGraphHelper"), (GRAPHS, "delete_cuda_graphs"), (FULL, None), (OPTIMIZER, None)),
    14: ((GRAPHS, "delete_cuda_graphs"), (OPTIMIZER, None)),
    16: ((GRAPHS, "VisionTECudaGraphHelper"), (OPTIMIZER, None)),
}


class Stack:
    """Fake modules in sys.modules, and the log of what was reset, in order."""

    def __init__(self, monkeypatch) -> None:
        self.monkeypatch = monkeypatch
        self.log: list[str] = []
        self.keep: list[Any] = []  # what a training script would keep alive
        log = self.log

        class CUDAGraph:
            def __init__(self, name: str, live: bool = True, error: Exception | None = None) -> None:
                self.name, self.live, self.error = name, live, error

            def pool(self):
                if not self.live:
                    raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
                return (0, 1)

            def reset(self):
                if self.error is not None:
                    raise self.error
                log.append(self.name)
                self.live = False

        CUDAGraph.__module__ = "torch.cuda.graphs"
        self.CUDAGraph = CUDAGraph
        self.initialized = False
        self.torch = self.module("torch", __version__="2.11.0")
        self.reserved = 100
        self.torch.cuda = self.module(
            "torch.cuda",
            is_initialized=lambda: True,
            device_count=lambda: 1,
            memory_reserved=lambda device: self.reserved,
            empty_cache=self._empty_cache,
            graph_pool_handle=object,
        )
        self.module("torch.distributed", is_initialized=lambda: self.initialized, get_world_size=lambda: 2)

    def _empty_cache(self) -> None:
        self.log.append("empty_cache")
        self.reserved = 40

    def module(self, name: str, **contents: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(contents)
        self.monkeypatch.setitem(__import__("sys").modules, name, module)
        return module

    def graph(self, name: str, **more: Any) -> Any:
        return self.CUDAGraph(name, **more)

    def kept(self, obj: Any) -> Any:
        self.keep.append(obj)
        return obj

    def named(self, name: str, module: str, bases: tuple[type, ...] = (), **contents: Any) -> type:
        return type(name, bases, {"__module__": module, **contents})

    def te_callable(self, name: str, with_reset: bool = True) -> Any:
        """A function as TE's make_graphed_callables returns it; from 2.10 with reset()."""
        fwd_graph = self.graph(name)
        name_space = {"__name__": "transformer_engine.pytorch.graph", "fwd_graph": fwd_graph}
        source = (
            "def make(fwd_graph):\n"
            "    def functionalized(*args):\n"
            "        return fwd_graph\n"
            "    def reset():\n"
            "        fwd_graph.reset()\n"
            "    return functionalized, reset\n"
        )
        exec(source, name_space)
        functionalized, reset = name_space["make"](fwd_graph)
        if with_reset:
            functionalized.reset = reset
        return functionalized

    def megatron(self, minor: int) -> None:
        """The classes of megatron-core 0.`minor`, with a local runner, a TE layer, both stages and the optimizer."""
        names = MEGATRON[minor]
        record = self.named("_CudagraphGlobalRecord", GRAPHS, cudagraph_created=True, cudagraph_record=[])
        manager_class = self.named("CudaGraphManager", GRAPHS, global_mempool="old pool")
        runner_class = self.named("_CudaGraphRunner", GRAPHS)
        layer_class = self.named("TransformerLayer", "megatron.core.transformer.transformer_layer")
        contents = {
            "torch": self.torch,
            "_CudagraphGlobalRecord": record,
            "CudaGraphManager": manager_class,
            "_CudaGraphRunner": runner_class,
        }

        def delete_cuda_graphs():
            self.log.append("upstream module delete")
            manager_class.global_mempool = None

        if "delete_cuda_graphs" in names[GRAPHS]:
            contents["delete_cuda_graphs"] = delete_cuda_graphs
        if "TECudaGraphHelper" in names[GRAPHS]:
            contents["TECudaGraphHelper"] = self._helper_class(minor)
        self.graphs = self.module(GRAPHS, **contents)
        runner = runner_class()
        runner.fwd_graph, runner.bwd_graph = self.graph("local forward"), self.graph("local backward")
        runner.fwd_graph_recorded = runner.bwd_graph_recorded = runner.cudagraph_created = True
        runner.static_grad_inputs = ("a tensor of the pool",)
        self.manager = self.kept(manager_class())
        self.manager.cudagraph_runners = [runner]
        self.layer = self.kept(layer_class())
        self.layer.cuda_graphs = [self.te_callable("te layer")]
        self.layer.cuda_graph_manual_hooks = ["hook"]
        if "TECudaGraphHelper" in contents:
            self.helper = self.kept(contents["TECudaGraphHelper"]())
            self.helper.callables_per_chunk = [[self.layer]]
            self.helper._graphs_created = True
        if FULL in names:
            stages = {stage: self.graph(f"full {stage}") for stage in ("training", "validation")}
            self.full = self.named(
                "FullCudaGraphWrapper",
                FULL,
                cuda_graph=stages,
                result={s: "loss" for s in stages},
                curr_iteration={s: 7 for s in stages},
            )
            self.full_module = self.module(FULL, FullCudaGraphWrapper=self.full, _shared_graph_pool="old pool")
        if OPTIMIZER in names:
            self.optimizer = self.named(
                "OptimizerCudaGraphWrapper",
                OPTIMIZER,
                cuda_graph=self.graph("optimizer"),
                result=True,
                curr_iteration=7,
            )
            self.module(OPTIMIZER, OptimizerCudaGraphWrapper=self.optimizer)

    def _helper_class(self, minor: int) -> type:
        stack = self

        def graphs_created(helper):
            return helper._graphs_created

        def delete(helper):
            assert helper._graphs_created, "No CUDA Graphs were created to delete."
            stack.log.append("upstream helper delete")
            for layers in helper.callables_per_chunk:
                for layer in layers:
                    for graph in layer.cuda_graphs:
                        graph.reset()
                    layer.cuda_graphs = []
            helper._graphs_created = False

        methods = {"graphs_created": graphs_created, "delete_cuda_graphs": delete} if minor >= 16 else {}
        return self.named("TECudaGraphHelper", GRAPHS, **methods)
