# SPDX-License-Identifier: Apache-2.0
"""The smallest training loops that make each kind of graph, with places where a fault can be put.

A workload has: eager_steps (training steps before the capture), capture(), step(), evaluate(), delete() (the cleanup
that the framework itself offers) and recapture(). Every step reads a number back, as training does with its loss.

Kinds: transformer_engine, local, full_iteration, optimizer (megatron-core with Transformer Engine layers, one
tensor-parallel group of all ranks, so that collectives are captured), partial (our manager) and torch_callable
(torch.cuda.make_graphed_callables), both with an all-reduce inside, bare (one torch.cuda.CUDAGraph with an all-reduce),
eager (the loop of torch_callable without any graph: what a fault does anyway) and stand_in: no GPU, a graph object that
only knows whether it is alive.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

MEGATRON_KINDS = ("transformer_engine", "local", "full_iteration", "optimizer")
TORCH_KINDS = ("partial", "torch_callable", "bare", "eager")
STAND_IN = "stand_in"
WIDTH, TOKENS = 64, 32


class Points:
    """Where the program is, and the places it passes. `fire(place)` acts if this is the row's place."""

    def __init__(self, fire: Callable[[str], None], capturing: Callable[[], bool]) -> None:
        self.fire, self.capturing = fire, capturing
        self.phase = "warmup"

    def layer_forward(self) -> None:
        if self.capturing():
            self.fire("capture_forward")
        elif self.phase == "warmup":
            self.fire("warmup")

    def layer_backward(self) -> None:
        if self.capturing():
            self.fire("capture_backward")

    def output_forward(self) -> None:
        if not self.capturing() and self.phase in ("replay_forward", "evaluation"):
            self.fire(self.phase)

    def output_backward(self) -> None:
        if not self.capturing() and self.phase == "replay_backward":
            self.fire(self.phase)

    def optimizer(self, captured: bool = False) -> None:
        if captured and self.capturing():
            self.fire("capture_forward")
        elif not self.capturing() and self.phase == "optimizer_step":
            self.fire(self.phase)

    def after_launch(self) -> None:
        """After the launch of a graph that holds forward and backward, while the device may still be running it."""
        if self.phase in ("replay_forward", "replay_backward", "evaluation"):
            self.fire(self.phase)


class _Place(torch.autograd.Function):
    """The identity, which tells when its forward and its backward run."""

    @staticmethod
    def forward(ctx, tensor, on_forward, on_backward):
        ctx.on_backward = on_backward
        on_forward()
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.on_backward()
        return gradient, None, None


class _AllReduce(torch.autograd.Function):
    """A sum over all ranks; the gradient passes. It puts a collective into the captured region."""

    @staticmethod
    def forward(ctx, tensor):
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Block(nn.Module):
    def __init__(self, points: Points) -> None:
        super().__init__()
        self.up, self.down, self.points = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), points

    def forward(self, x):
        y = _AllReduce.apply(self.down(torch.relu(self.up(x))))
        return x + _Place.apply(y, self.points.layer_forward, self.points.layer_backward)


class Blocks(nn.Module):
    def __init__(self, points: Points) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(points) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class TorchWorkload:
    """Two blocks, plain SGD. Subclasses say how the blocks are captured."""

    eager_steps = 2

    def __init__(self, points: Points, device: torch.device) -> None:
        self.points, self.device = points, device
        self.model = Blocks(points).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.optimizer.register_step_pre_hook(lambda *_: points.optimizer())

    def _output(self) -> torch.Tensor:
        x = torch.randn(TOKENS, WIDTH, device=self.device, requires_grad=True)
        return _Place.apply(self.model(x), self.points.output_forward, self.points.output_backward)

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self._output().square().mean()
        loss.backward()
        self.optimizer.step()
        loss.item()

    @torch.no_grad()
    def evaluate(self) -> None:
        self.model.eval()
        self._output()
        self.model.train()

    def state(self) -> dict:
        return self.model.state_dict()


class TorchCallables(TorchWorkload):
    def capture(self) -> None:
        sample = torch.randn(TOKENS, WIDTH, device=self.device, requires_grad=True)
        torch.cuda.make_graphed_callables(
            tuple(self.model.blocks), ((sample,), (sample.clone().detach().requires_grad_(),))
        )

    def delete(self) -> None:
        for block in self.model.blocks:  # torch offers no more than dropping the callables
            vars(block).pop("forward", None)

    def recapture(self) -> None:
        self.delete()
        self.capture()


class Eager(TorchWorkload):
    def capture(self) -> None:
        """Nothing is."""


class Bare:
    """One CUDA graph that holds one all-reduce: the smallest thing that keeps a communicator."""

    eager_steps = 1  # makes the communicator, which a capture cannot

    def __init__(self, points: Points, device: torch.device) -> None:
        self.points = points
        self.source = torch.ones(TOKENS, WIDTH, device=device)
        self.graph, self.result = None, None

    def _work(self) -> torch.Tensor:
        result = self.source * 2
        dist.all_reduce(result)
        self.points.layer_forward()
        return result

    def capture(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = self._work()

    def step(self) -> None:
        if self.graph is None:
            self.result = self._work()
        else:
            self.graph.replay()
            self.points.after_launch()
        self.result.sum().item()

    evaluate = step

    def delete(self) -> None:
        self.graph = self.result = None

    recapture = capture

    def state(self) -> dict:
        return {"source": self.source}


class Partial(TorchWorkload):
    eager_steps = 1  # the recorded step

    def __init__(self, points: Points, device: torch.device) -> None:
        super().__init__(points, device)
        self._record()

    def _record(self) -> None:
        from partial_graphs import PartialCudaGraphManager

        self.manager = PartialCudaGraphManager.from_modules(self.model, select="blocks.*")

    def capture(self) -> None:
        self.manager.capture()

    def delete(self) -> None:
        self.manager.close()

    def recapture(self) -> None:
        self._record()
        self.step()
        self.capture()


class StandInGraph(torch.cuda.CUDAGraph):
    """Has a CUDAGraph's life without a GPU. A torch built without CUDA gives it an empty base class."""

    def __new__(cls):
        return object.__new__(cls)

    def __init__(self) -> None:
        self.alive = True

    def pool(self):
        if not self.alive:
            raise RuntimeError("no captured graph")
        return (0, 1)

    def reset(self) -> None:
        self.alive = False


class StandIn(TorchWorkload):
    """The same loop on the CPU; a capture is an eager pass in which Points.capturing() holds."""

    in_capture = False

    def __init__(self, points: Points, device: torch.device) -> None:
        super().__init__(points, device)
        self.graphs: list[StandInGraph] = []

    @contextmanager
    def _capturing(self):
        StandIn.in_capture = True
        try:
            yield
        finally:
            StandIn.in_capture = False

    def capture(self) -> None:
        with self._capturing():
            self._output().square().mean().backward()
        self.graphs.append(StandInGraph())

    def delete(self) -> None:
        self.graphs.clear()

    recapture = capture


class Megatron:
    """A GPT of two layers on megatron-core, captured by megatron-core's own implementations."""

    def __init__(self, kind: str, points: Points, rank: int, ranks: int, seed: int, device: torch.device) -> None:
        from cudagraphs.capture import plan, variants
        from cudagraphs.capture.stacks.batches import Batches
        from cudagraphs.capture.stacks.megatron import Trainer

        self.kind, self.points = kind, points
        impl = "none" if kind == "optimizer" else kind
        shape = plan.Shape(
            layers=2, hidden=256, heads=4, kv_heads=4, ffn=512, sequence=128, microbatches=1, vocabulary=512
        )
        parallel = {"tensor": ranks, "pipeline": 1, "virtual": 1, "expert": 1}
        job = {
            "shape": plan.as_dict(shape),
            "impl": impl,
            "parallel": parallel,
            "data_parallel": dict.fromkeys(
                ("overlap_grad_reduce", "distributed_optimizer", "overlap_param_gather"), False
            ),
            "rank": rank,
            "local_rank": device.index,
            "seed": seed,
            "config": plan.config_fields("dense", shape, "bf16", 0.0, parallel),
            "drill": None,
            "graph": variants.fields(variants.Variant(impl), _megatron_minor()),
        }
        self.trainer = trainer = Trainer(job)
        self.batches, self.index = Batches(job["shape"], seed, 0, trainer.device), 0
        # Local and full-iteration graphs are captured inside a training step.
        self.eager_steps = 1 if kind == "optimizer" else trainer.warmup_steps
        block = trainer.block()
        block.forward = self._in_layer(block.forward)
        trainer.model.forward = self._at_output(trainer.model.forward)
        self._prepare_optimizer()
        if kind == "full_iteration":
            self.wrapper = trainer._schedule
            trainer._schedule = self._launched(self.wrapper)

    def _in_layer(self, forward):
        def call(*args, **kwargs):
            output, *rest = forward(*args, **kwargs)
            return _Place.apply(output, self.points.layer_forward, self.points.layer_backward), *rest

        return call

    def _at_output(self, forward):
        def call(*args, **kwargs):
            return _Place.apply(forward(*args, **kwargs), self.points.output_forward, self.points.output_backward)

        return call

    def _launched(self, schedule):
        def call(**kwargs):
            losses = schedule(**kwargs)
            self.points.after_launch()
            return losses

        return call

    def _prepare_optimizer(self) -> None:
        """The optimizer graph holds a plain SGD step: Megatron's own reads values back on the host by default.

        Its one collective is Megatron's too: the gradient norm over the model-parallel group.
        """
        optimizer, points = self.trainer.optimizer, self.points
        if self.kind != "optimizer":
            step = optimizer.step

            def watched():
                points.optimizer()
                return step()

            optimizer.step = watched
            return
        from megatron.core import parallel_state
        from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper

        group = parallel_state.get_model_parallel_group()
        parameters = [p for p in self.trainer.model.parameters() if p.requires_grad]

        @torch.no_grad()
        def sgd():
            norm = torch.stack([parameter.main_grad.square().sum() for parameter in parameters]).sum()
            dist.all_reduce(norm, group=group)
            points.optimizer(captured=True)
            for parameter in parameters:
                parameter.add_((parameter.main_grad / (1 + norm.sqrt())).to(parameter.dtype), alpha=-1e-4)

        graphed = OptimizerCudaGraphWrapper(sgd, cuda_graph_warmup_steps=1)

        def step():
            points.optimizer()
            return graphed()

        optimizer.step = step

    def step(self) -> None:
        for loss in self.trainer.step(self.batches.at("train", self.index)):
            loss.item()
        self.index += 1

    def evaluate(self) -> None:
        self.trainer.evaluate(self.batches.at("evaluation", 0))

    def capture(self) -> None:
        if self.kind == "transformer_engine":
            self.trainer.capture()
        else:
            self.step()

    def delete(self) -> None:
        """The framework's own cleanup, as Megatron Bridge calls it at the end of training."""
        if self.kind == "full_iteration":
            self.wrapper.reset_cuda_graph()
        elif self.kind == "optimizer":
            from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper as Wrapper

            Wrapper.cuda_graph, Wrapper.result, Wrapper.curr_iteration = None, None, 0
        elif self.kind == "local":
            from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

            delete_cuda_graphs()
        else:
            self.trainer._helper.delete_cuda_graphs()

    def recapture(self) -> None:
        if self.kind == "full_iteration":
            for _ in range(self.trainer.warmup_steps + 1):
                self.evaluate()
        elif self.kind == "optimizer":
            self.step()
            self.step()
        else:
            self.capture()

    def state(self) -> dict:
        return self.trainer.model.state_dict()


def _megatron_minor() -> int:
    from megatron.core import __version__

    return int(__version__.split(".")[1])


def build(kind: str, points: Points, rank: int, ranks: int, seed: int, device: torch.device):
    if kind in MEGATRON_KINDS:
        return Megatron(kind, points, rank, ranks, seed, device)
    kinds = {"partial": Partial, "torch_callable": TorchCallables, "bare": Bare, "eager": Eager, STAND_IN: StandIn}
    return kinds[kind](points, device)
