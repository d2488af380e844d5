# SPDX-License-Identifier: Apache-2.0
"""What CUDA graphs exist in this process, kind by kind, found without importing anything.

Instances are found by one walk over the garbage collector's objects, matched by module and class name, so that no
import is needed and nothing has to be registered beforehand. Class-level state is found through sys.modules.
Names read in the released wheels of megatron-core 0.13.1, 0.14.0, 0.15.3, 0.16.1, 0.17.1, 0.18.2, 0.19.2,
Transformer Engine 2.2.0 to 2.20.2, torch 2.11 and 2.13, NeMo AutoModel 0.7.0:

    kind             where it lives                                                              since
    partial_manager  any class PartialCudaGraphManager with close()                              ours, AutoModel 0.6
    te_helper        megatron.core.transformer.cuda_graphs.TECudaGraphHelper and subclasses      0.14
                     (VisionTECudaGraphHelper 0.17); graphs_created(), delete_cuda_graphs() 0.16
    te_layer         `cuda_graphs` of a TransformerLayer, MambaLayer, GraphableMegatronModule    0.13
    local_runner     `cudagraph_runners` of a CudaGraphManager; module function                  0.13
                     delete_cuda_graphs() 0.15, which from 0.16 resets recorded runners only
    optimizer        megatron.core.optimizer.optimizer_cuda_graph.OptimizerCudaGraphWrapper      0.17
    full_iteration   megatron.core.full_cuda_graph.FullCudaGraphWrapper                          0.14
    te_callable      `reset` that transformer_engine.pytorch.make_graphed_callables attaches     TE 2.10
    torch_callable   what torch.cuda.make_graphed_callables returns
    cuda_graph       every other torch.cuda.CUDAGraph
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

MCORE_GRAPHS = "megatron.core.transformer.cuda_graphs"
FULL_ITERATION = ("megatron.core.full_cuda_graph", "FullCudaGraphWrapper")
OPTIMIZER = ("megatron.core.optimizer.optimizer_cuda_graph", "OptimizerCudaGraphWrapper")
TE_GRAPH = "transformer_engine.pytorch.graph"
TORCH_GRAPHS = "torch.cuda.graphs"
TE_RESET_SINCE = (2, 10)
STAGES = ("training", "validation")

# The order of deletion: owners before what they own, so that an owner never meets a graph that is gone already.
KINDS = (
    "partial_manager",
    "te_helper",
    "te_layer",
    "local_runner",
    "optimizer",
    "full_iteration",
    "te_callable",
    "torch_callable",
    "cuda_graph",
)

# Static inputs and outputs of a runner, which live in the graphs' pool.
_RUNNER_TENSORS = (
    "fwd_graph_input_args",
    "fwd_graph_input_kwargs",
    "fwd_graph_input_surface",
    "fwd_graph_outputs",
    "fwd_graph_output_surface",
    "static_grad_outputs",
    "static_grad_inputs",
)
_LAYER_CLASSES = {"TransformerLayer", "MambaLayer", "GraphableMegatronModule"}
_REACH_LIMIT = 200_000  # objects looked at from one given object: about 5,000 submodules, half a second


@dataclass(frozen=True)
class Target:
    """One thing to delete: `delete()` may raise, and leaves nothing behind when called twice."""

    kind: str
    name: str
    delete: Callable[[], None]


@dataclass
class Heap:
    """Objects of interest, sorted by class. Holds strong references: keep it for one deletion only."""

    partial_managers: list[Any] = field(default_factory=list)
    te_helpers: list[Any] = field(default_factory=list)
    graphed_layers: list[Any] = field(default_factory=list)
    local_managers: list[Any] = field(default_factory=list)
    te_resets: list[Any] = field(default_factory=list)
    te_functions: list[Any] = field(default_factory=list)
    torch_functions: list[Any] = field(default_factory=list)
    cuda_graphs: list[Any] = field(default_factory=list)
    _buckets: dict[type, list[Any] | None] = field(default_factory=dict, repr=False)

    def add(self, obj: Any) -> bool:
        """Keep obj if it is of interest. True when it was kept and its own contents need no look."""
        kind = type(obj)
        if kind is FunctionType:
            self._add_function(obj)
            return False
        try:
            bucket = self._buckets[kind]
        except KeyError:
            bucket = self._buckets[kind] = self._bucket(kind)
        if bucket is None:
            return False
        bucket.append(obj)
        return bucket is not self.graphed_layers

    def _bucket(self, kind: type) -> list[Any] | None:
        for base in kind.__mro__:
            name, module = base.__name__, str(getattr(base, "__module__", ""))
            if name == "PartialCudaGraphManager":
                return self.partial_managers
            if module == MCORE_GRAPHS and name == "TECudaGraphHelper":
                return self.te_helpers
            if module == MCORE_GRAPHS and name == "CudaGraphManager":
                return self.local_managers
            if name in _LAYER_CLASSES and module.startswith("megatron.core."):
                return self.graphed_layers
            if module == TORCH_GRAPHS and name == "CUDAGraph":
                return self.cuda_graphs
        return None

    def _add_function(self, function: FunctionType) -> None:
        if function.__module__ == TE_GRAPH:
            if function.__name__ == "reset":
                self.te_resets.append(function)
            elif function.__name__ == "functionalized":
                self.te_functions.append(function)
        elif function.__module__ == TORCH_GRAPHS and function.__name__ == "functionalized":
            self.torch_functions.append(function)


def loaded(module: str) -> ModuleType | None:
    """The module if it is imported already, else None."""
    return sys.modules.get(module)


def walk_heap() -> Heap:
    """Everything of interest in this process.

    Objects frozen by gc.freeze() are invisible to gc.get_objects(), and megatron-core 0.13 to 0.19 freezes for the time
    of a local capture without a finally: after a failed capture everything is frozen. So they are unfrozen first.
    """
    if gc.get_freeze_count():
        gc.unfreeze()
    heap = Heap()
    for obj in gc.get_objects():
        heap.add(obj)
    return heap


def reach(root: Any) -> Heap:
    """Everything of interest behind one object: a module, a graphed callable, a closure, a container, a trainer.

    A bounded walk through closures, attributes, containers and classes made inside functions (the autograd functions of
    torch and Transformer Engine keep their graphs there). Never enters Python modules, tensors or frames.
    """
    heap, seen, todo = Heap(), set(), [root]
    while todo and len(seen) < _REACH_LIMIT:
        obj = todo.pop()
        if id(obj) not in seen:
            seen.add(id(obj))
            if not heap.add(obj):
                todo.extend(_children(obj))
    return heap


def is_live(graph: Any) -> bool:
    """Whether a torch.cuda.CUDAGraph owns a captured graph: pool() raises before a capture and after reset()."""
    try:
        graph.pool()
    except Exception:
        return False
    return True


def _children(obj: Any) -> Iterable[Any]:
    if isinstance(obj, (str, bytes, int, float, complex, type(None), ModuleType, FrameType, BuiltinFunctionType)):
        return ()
    if isinstance(obj, FunctionType):
        cells = [_cell(c) for c in obj.__closure__ or ()]
        return [*cells, *vars(obj).values()]
    if isinstance(obj, MethodType):
        return (obj.__func__, obj.__self__)
    if isinstance(obj, (staticmethod, classmethod)):
        return (obj.__func__,)
    if isinstance(obj, dict):
        return list(obj.values())
    if isinstance(obj, (list, tuple, set, frozenset)):
        return list(obj)
    if isinstance(obj, type):
        return list(vars(obj).values()) if "<locals>" in obj.__qualname__ else ()
    if any(c.__name__ == "Tensor" and c.__module__.startswith("torch") for c in type(obj).__mro__):
        return ()
    return list(getattr(obj, "__dict__", {}).values())


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def targets(heap: Heap, whole_process: bool = True) -> Iterator[tuple[str, Iterator[Target]]]:
    """What to delete, kind by kind in the order of KINDS; read a kind only once the ones before it are gone.

    With whole_process False only what the heap holds: no class-level state, no module-level record.
    """
    yield "partial_manager", _partial_managers(heap)
    yield "te_helper", _te_helpers(heap)
    yield "te_layer", _te_layers(heap)
    yield "local_runner", _local_runners(heap, whole_process)
    if whole_process:
        yield "optimizer", _optimizer_wrapper()
        yield "full_iteration", _full_iteration_wrapper()
    yield "te_callable", _te_callables(heap)
    yield "torch_callable", _torch_callables(heap)
    yield "cuda_graph", _bare_graphs(heap)


def check_given(obj: Any) -> None:
    """Raise TypeError for a plain value, which cannot hold a graph."""
    if isinstance(obj, (str, bytes, int, float, complex, type(None))):
        raise TypeError(
            f"cannot delete CUDA graphs of {obj!r}: give a CUDAGraph, a graphed callable, a module, a graph helper, "
            "a manager with close(), or nothing"
        )


def _partial_managers(heap: Heap) -> Iterator[Target]:
    for manager in heap.partial_managers:
        # close() is idempotent on both managers; a closed one is not counted again.
        if callable(getattr(manager, "close", None)) and not _is_closed(manager):
            yield Target("partial_manager", _name(manager), manager.close)


def _is_closed(manager: Any) -> bool:
    return bool(getattr(manager, "closed", getattr(manager, "_closed", False)))


def _te_helpers(heap: Heap) -> Iterator[Target]:
    for helper in heap.te_helpers:
        created = getattr(helper, "graphs_created", None)
        if created is not None and created():
            yield Target("te_helper", _name(helper), lambda helper=helper: _delete_helper(helper))


def _delete_helper(helper: Any) -> None:
    """Upstream's own method, which asserts when nothing was created and asks torch.distributed for the rank.

    Without a process group it would raise half way, after the resets; the layers are then reset as te_layer and only
    the flag is left to do.
    """
    distributed = loaded("torch.distributed")
    try:
        if distributed is not None and distributed.is_initialized():
            helper.delete_cuda_graphs()
    finally:
        helper._graphs_created = False


def _te_layers(heap: Heap) -> Iterator[Target]:
    of_helpers = [layer for h in heap.te_helpers for chunk in getattr(h, "callables_per_chunk", ()) for layer in chunk]
    for layer in [*heap.graphed_layers, *of_helpers]:  # a given helper brings its layers, which reach() did not enter
        if isinstance(getattr(layer, "cuda_graphs", None), list) and layer.cuda_graphs:
            yield Target("te_layer", _name(layer), lambda layer=layer: _clear_layer(layer))


def _clear_layer(layer: Any) -> None:
    graphs, layer.cuda_graphs = layer.cuda_graphs, []
    layer.cuda_graph_manual_hooks = []
    _call_all([graph.reset for graph in graphs if hasattr(graph, "reset")])


def _local_runners(heap: Heap, with_record: bool) -> Iterator[Target]:
    """Runners of every CudaGraphManager, then the module's own record.

    Upstream's delete_cuda_graphs() walks its record, which creation empties: the runners of training graphs are only
    reachable from their managers.
    """
    for manager in heap.local_managers:
        for runner in list(getattr(manager, "cudagraph_runners", ())):
            if getattr(runner, "fwd_graph", None) is not None or getattr(runner, "bwd_graph", None) is not None:
                yield Target("local_runner", _name(runner), lambda runner=runner: _reset_runner(runner))
    module = loaded(MCORE_GRAPHS)
    record = getattr(module, "_CudagraphGlobalRecord", None)
    if with_record and record is not None and (record.cudagraph_created or record.cudagraph_record):
        yield Target("local_runner", f"{MCORE_GRAPHS}.{record.__name__}", lambda: _reset_record(module, record))


def _reset_runner(runner: Any) -> None:
    """The runner stays with its manager, marked as recorded: its layer then runs eagerly.

    A second recording in the same process is not upstream's plan. In 0.19 it ends in a bare AssertionError, because
    cached inputs (rotary embeddings) still carry the buffers of the first capture (_resolve_input_buffer).
    """
    graphs = [g for g in (runner.fwd_graph, runner.bwd_graph) if g is not None]
    runner.fwd_graph = runner.bwd_graph = None
    runner.cudagraph_created = False
    for name in _RUNNER_TENSORS:
        if hasattr(runner, name):
            setattr(runner, name, None)
    _call_all([graph.reset for graph in graphs])


def _reset_record(module: ModuleType, record: Any) -> None:
    manager_class = getattr(module, "CudaGraphManager", None)
    pools = {
        n: getattr(manager_class, n)
        for n in ("global_mempool", "fwd_mempools", "bwd_mempool")
        if hasattr(manager_class, n)
    }
    if hasattr(module, "delete_cuda_graphs"):
        module.delete_cuda_graphs()
    record.cudagraph_created = False
    record.cudagraph_record = []
    if hasattr(record, "cudagraph_inference_record"):
        record.cudagraph_inference_record = []
    # Upstream drops the pool handles, which only a manager's constructor makes: a capture by a manager that lives on
    # would fail on None. A handle whose graphs are gone cannot be captured into either (torch asserts that a pool in
    # use is live, CUDACachingAllocator.cpp), so the class gets fresh ones.
    new_handle = module.torch.cuda.graph_pool_handle
    for name, value in pools.items():
        if isinstance(value, dict):  # fwd_mempools, 0.13 to 0.15: makes its handles on demand
            value.clear()
        setattr(manager_class, name, value if value is None or isinstance(value, dict) else new_handle())


def _optimizer_wrapper() -> Iterator[Target]:
    wrapper = getattr(loaded(OPTIMIZER[0]), OPTIMIZER[1], None)
    if wrapper is not None and getattr(wrapper, "cuda_graph", None) is not None:
        yield Target("optimizer", OPTIMIZER[1], lambda: _reset_optimizer(wrapper))


def _reset_optimizer(wrapper: Any) -> None:
    graph, wrapper.cuda_graph, wrapper.result, wrapper.curr_iteration = wrapper.cuda_graph, None, None, 0
    graph.reset()
    _renew_shared_pool()


def _full_iteration_wrapper() -> Iterator[Target]:
    wrapper = getattr(loaded(FULL_ITERATION[0]), FULL_ITERATION[1], None)
    for stage in STAGES if wrapper is not None else ():
        # Bridge 0.4 to 0.6 deletes the "training" key; the next run in this process needs it, so it counts as there.
        if wrapper.cuda_graph.get(stage) is not None or stage not in wrapper.cuda_graph:
            yield Target(
                "full_iteration", f"{FULL_ITERATION[1]} {stage}", lambda stage=stage: _reset_stage(wrapper, stage)
            )


def _reset_stage(wrapper: Any, stage: str) -> None:
    graph, wrapper.cuda_graph[stage] = wrapper.cuda_graph.get(stage), None
    wrapper.result[stage] = None
    wrapper.curr_iteration[stage] = 0
    if graph is not None:
        graph.reset()
        _renew_shared_pool()


def _renew_shared_pool() -> None:
    """Let the next capture take a fresh pool.

    full_cuda_graph keeps one pool handle for full-iteration and optimizer graphs (0.18, use_single_mempool). Once its
    graphs are gone, but not yet all of its memory, torch refuses another capture into it: a validation that captures
    after the cleanup fails with "use_count > 0 INTERNAL ASSERT FAILED" (seen with megatron-core 0.19.2 and torch 2.11).
    """
    module = loaded(FULL_ITERATION[0])
    if hasattr(module, "_shared_graph_pool"):
        module._shared_graph_pool = None


def _te_callables(heap: Heap) -> Iterator[Target]:
    for reset in heap.te_resets:
        if any(is_live(graph) for graph in _graphs_of_reset(reset)):
            yield Target("te_callable", "Transformer Engine graphed callable", reset)


def _graphs_of_reset(reset: FunctionType) -> list[Any]:
    """The graphs in the closure of TE's reset(): lists and an index in 2.10, the graphs themselves later."""
    cells = {name: _cell(cell) for name, cell in zip(reset.__code__.co_freevars, reset.__closure__ or ())}
    index = cells.get("graph_idx")
    graphs = [
        value[index] if isinstance(value, list) and index is not None else value
        for name, value in cells.items()
        if "graph" in name and name != "graph_idx"
    ]
    return [graph for graph in graphs if graph is not None]


def _torch_callables(heap: Heap) -> Iterator[Target]:
    for function in heap.torch_functions:
        live = [graph for graph in reach(function).cuda_graphs if is_live(graph)]
        if live:
            yield Target(
                "torch_callable",
                "torch.cuda graphed callable",
                lambda live=live: _call_all([graph.reset for graph in live]),
            )


def _bare_graphs(heap: Heap) -> Iterator[Target]:
    for graph in heap.cuda_graphs:
        if is_live(graph):
            yield Target("cuda_graph", _name(graph), graph.reset)


def old_te_warning(heap: Heap) -> str | None:
    """Transformer Engine before 2.10 has no reset: its graphs are freed here, its static buffers stay."""
    te = loaded("transformer_engine")
    if te is None or not heap.te_functions or heap.te_resets:
        return None
    version = str(getattr(te, "__version__", "of unknown version"))
    return (
        f"Transformer Engine {version} has no graph reset (added in 2.10): the graphs of {len(heap.te_functions)} "
        "graphed callables were reset directly, their static buffers stay until nothing refers to the callables"
    )


def _call_all(functions: Iterable[Callable[[], Any]]) -> None:
    """Call each, also after one has raised; raise the first error at the end."""
    first: Exception | None = None
    for function in functions:
        try:
            function()
        except Exception as error:
            first = first or error
    if first is not None:
        raise first


def _name(obj: Any) -> str:
    return f"{type(obj).__name__} at {id(obj):#x}"
