# SPDX-License-Identifier: Apache-2.0
"""A plain PyTorch decoder, so that a smoke run works where neither Megatron-Core nor Transformer Engine is installed.

On a CPU it runs dry: `_DryGraph` stands in for a CUDA graph and keeps the one property that breaks trainings, the
static buffers that each replay overwrites. That makes parity testable without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WARMUP = 3


class Attention(nn.Module):
    """Causal self-attention with residual. [batch, sequence, hidden] in and out."""

    def __init__(self, hidden: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, hidden)))


class Mlp(nn.Module):
    """Feed-forward block with residual. [batch, sequence, hidden] in and out."""

    def __init__(self, hidden: int, ffn: int, dropout: float):
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.fc1 = nn.Linear(hidden, ffn, bias=False)
        self.fc2 = nn.Linear(ffn, hidden, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.fc2(F.gelu(self.fc1(self.norm(x)))))


class Layer(nn.Module):
    def __init__(self, shape: dict, dropout: float):
        super().__init__()
        self.attn = Attention(shape["hidden"], shape["heads"], dropout)
        self.mlp = Mlp(shape["hidden"], shape["ffn"], dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attn(x))


class Decoder(nn.Module):
    """Tokens int64 [batch, sequence] in, logits [batch, sequence, vocabulary] out."""

    def __init__(self, shape: dict, dropout: float):
        super().__init__()
        self.embedding = nn.Embedding(shape["vocabulary"], shape["hidden"])
        self.position_embedding = nn.Embedding(shape["sequence"], shape["hidden"])
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape["layers"]))
        self.final_norm = nn.RMSNorm(shape["hidden"])
        self.head = nn.Linear(shape["hidden"], shape["vocabulary"], bias=False)

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position_embedding(position_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.final_norm(x))


class _DryGraph:
    """A graph's contract without a GPU: the function runs anew at each replay, on static inputs, into the same
    outputs."""

    def __init__(self, function: Callable[[], None]):
        self.replay = function


class Trainer:
    """See `stacks`. The optimizer is AdamW; gradients accumulate in `.grad`, which is kept allocated
    (`set_to_none=False`).

    make_graphed_callables of torch returns its static gradient buffers; where `.grad` is None the first microbatch's
    gradient becomes that buffer and the second replay overwrites it (pytorch/pytorch issue 181723). Keeping `.grad`
    makes each microbatch add to it instead. The drill `static-grads` takes that care away.
    """

    def __init__(self, job: dict):
        self.job, self.shape = job, job["shape"]
        self.device = torch.device(job["device"], job["local_rank"]) if job["device"] == "cuda" else torch.device("cpu")
        dtype = torch.float32 if job["precision"] == "fp32" else torch.bfloat16
        torch.manual_seed(job["seed"])
        self.model = self._build().to(self.device, dtype)
        self.impl, self.modules = job["impl"], set(job["modules"])
        self._whole = self.impl == "full_iteration"
        self._in_graph = self._whole and "optimizer" in self.modules
        on_gpu = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=torch.tensor(1e-4, device=self.device) if self._in_graph and on_gpu else 1e-4,
            capturable=self._in_graph and on_gpu,
        )
        self.warmup_steps = WARMUP
        self.captures_in_step = False
        self._drop_grads = job["drill"] == "static-grads" and self.impl != "none"
        self._graphs: list = []
        self._static: list[dict[str, torch.Tensor]] = []
        self._losses: list[torch.Tensor] = []
        self._stream = torch.cuda.Stream(self.device) if on_gpu else None

    def _build(self) -> nn.Module:
        return Decoder(self.shape, self.job["dropout"])

    def _forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = self.model(batch["tokens"], batch["position_ids"])
        return F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())

    def _accumulate(self, batches: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        losses = []
        for batch in batches:
            loss = self._forward(batch)
            (loss / len(batches)).backward()
            losses.append(loss.detach().clone())
        return losses

    def _zero(self) -> None:
        self.optimizer.zero_grad(set_to_none=self._drop_grads)

    def _reduce(self) -> None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    def step(self, batches, on_gradients=None, update=True) -> list[torch.Tensor]:
        if self._graphs and self._whole:
            for static, batch in zip(self._static, batches):
                for key, value in batch.items():
                    static[key].copy_(value)
            self._graphs[0].replay()
            losses = [loss.clone() for loss in self._losses]
        else:
            self._zero()
            # Warmup before a capture of the backward pass belongs on the capture stream, so that the gradient
            # accumulators are bound to it (torch.cuda.graph, "whole-network capture").
            with self._side() if self._whole else nullcontext():
                losses = self._accumulate(batches)
        if not (self._in_graph and self._graphs):
            self._reduce()
        if on_gradients:
            on_gradients()
        if update and not (self._in_graph and self._graphs):
            self.optimizer.step()
        return losses

    def _side(self):
        if self._stream is None:
            return nullcontext()
        return _JoinedStream(self._stream)

    @torch.no_grad()
    def evaluate(self, batches) -> list[torch.Tensor]:
        self.model.eval()
        losses = [self._forward(batch) for batch in batches]
        self.model.train()
        return losses

    def capture(self) -> None:
        if self.impl == "make_graphed_callables":
            self._capture_callables()
        elif self._whole:
            self._capture_iteration()

    def _targets(self) -> list[nn.Module]:
        layers = list(self.model.layers)
        if not self.modules:
            return layers
        return [getattr(layer, name) for layer in layers for name in ("attn", "mlp") if name in self.modules]

    def _capture_callables(self) -> None:
        self._zero()
        s = self.shape
        dtype = next(self.model.parameters()).dtype
        size = (s["microbatch"], s["sequence"], s["hidden"])
        targets = self._targets()
        if self.device.type != "cuda":
            # A dry run has no buffer that a replay could overwrite, unless the drill asks for that very fault.
            for target in targets:
                if self._drop_grads:
                    target.register_full_backward_hook(_overwrite_accumulated)
                self._graphs.append(_DryGraph(lambda: None))
            return
        samples = [(torch.randn(size, dtype=dtype, device=self.device, requires_grad=True),) for _ in targets]
        torch.cuda.make_graphed_callables(tuple(targets), tuple(samples))

    def _capture_iteration(self) -> None:
        self._static = [
            {key: torch.zeros_like(value) for key, value in batch.items()} for batch in self._sample_batches()
        ]
        self._zero()

        def iteration() -> None:
            self._zero()
            losses = self._accumulate(self._static)
            if self._in_graph:
                self._reduce()
                self.optimizer.step()
            if not self._losses:
                self._losses = losses
            elif self.device.type != "cuda":
                for static, loss in zip(self._losses, losses):
                    static.copy_(loss)

        if self.device.type != "cuda":
            self._graphs.append(_DryGraph(iteration))
            return
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=self._stream):
            iteration()
        self._graphs.append(graph)

    def _sample_batches(self) -> list[dict[str, torch.Tensor]]:
        s = self.shape
        zeros = torch.zeros((s["microbatch"], s["sequence"]), dtype=torch.int64, device=self.device)
        return [{"tokens": zeros, "labels": zeros, "position_ids": zeros} for _ in range(s["microbatches"])]

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None)

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, p.data) for name, p in self.model.named_parameters())

    def block(self) -> nn.Module:
        """The module that fault drills disturb: the attention of the last layer."""
        return self.model.layers[-1].attn

    def close(self) -> None:
        self.model = self.optimizer = None
        self._graphs, self._losses, self._static = [], [], []


class _JoinedStream:
    """A side stream that waits for the current one on entry and is waited for on exit."""

    def __init__(self, stream: torch.cuda.Stream):
        self._stream, self._context = stream, torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        self._context.__enter__()

    def __exit__(self, *error) -> None:
        self._context.__exit__(*error)
        torch.cuda.current_stream().wait_stream(self._stream)


def _overwrite_accumulated(module: nn.Module, _grad_input, _grad_output) -> None:
    """What a replay does to a gradient that aliases its static buffer: the earlier microbatch's share is lost."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
