# SPDX-License-Identifier: Apache-2.0
"""The model of our own training loop."""

from megatron.core.transformer.transformer_config import TransformerConfig


def model_config():
    return TransformerConfig(
        num_layers=16,
        hidden_size=2048,
        num_attention_heads=16,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        external_cuda_graph=True,
        cuda_graph_scope="attn",
    )
