# SPDX-License-Identifier: Apache-2.0
"""A decoder of Transformer Engine TransformerLayers, captured with TE's make_graphed_callables, in BF16 or FP8.

Source: transformer_engine/pytorch/graph.py, make_graphed_callables, and transformer.py, TransformerLayer (TE 2.20).
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import transformer_engine.pytorch as te
from torch import nn
from transformer_engine.common import recipe as recipes

from cudagraphs.capture.stacks import plain

RECIPES = {
    "delayed": recipes.DelayedScaling,
    "tensorwise": recipes.Float8CurrentScaling,
    "blockwise": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
}


class Decoder(nn.Module):
    """Tokens int64 [batch, sequence] in, logits [sequence, batch, vocabulary] out; layers see [sequence, batch,
    hidden]."""

    def __init__(self, shape: dict, dropout: float, autocast):
        super().__init__()
        self.autocast = autocast
        self.embedding = nn.Embedding(shape["vocabulary"], shape["hidden"])
        self.position_embedding = nn.Embedding(shape["sequence"], shape["hidden"])
        self.layers = nn.ModuleList(
            te.TransformerLayer(
                shape["hidden"],
                shape["ffn"],
                shape["heads"],
                num_gqa_groups=shape["kv_heads"],
                layer_number=index + 1,
                hidden_dropout=dropout,
                attention_dropout=dropout,
                self_attn_mask_type="causal",
                params_dtype=torch.bfloat16,
                fuse_qkv_params=True,
            )
            for index in range(shape["layers"])
        )
        self.final_norm = nn.RMSNorm(shape["hidden"])
        self.head = nn.Linear(shape["hidden"], shape["vocabulary"], bias=False)

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = (self.embedding(tokens) + self.position_embedding(position_ids)).transpose(0, 1).contiguous()
        with self.autocast():
            for layer in self.layers:
                x = layer(x)
        return self.head(self.final_norm(x)).transpose(0, 1)


class Trainer(plain.Trainer):
    """As the plain trainer, with TE layers. TE clones parameter gradients on return (`clone_param_grads_on_return`)."""

    def _build(self) -> nn.Module:
        precision = self.job["precision"]
        self.recipe = RECIPES[precision.removeprefix("fp8-")]() if precision.startswith("fp8-") else None

        def autocast():
            return te.autocast(enabled=True, recipe=self.recipe) if self.recipe else nullcontext()

        return Decoder(self.shape, self.job["dropout"], autocast).to(torch.bfloat16)

    def _capture_callables(self) -> None:
        self._zero()
        s = self.shape
        size = (s["sequence"], s["microbatch"], s["hidden"])
        layers = tuple(self.model.layers)
        samples = tuple(
            (torch.randn(size, dtype=torch.bfloat16, device=self.device, requires_grad=True),) for _ in layers
        )
        te.make_graphed_callables(
            layers, samples, num_warmup_iters=plain.WARMUP, enabled=self.recipe is not None, recipe=self.recipe
        )

    def block(self) -> nn.Module:
        return self.model.layers[-1].self_attention
