# SPDX-License-Identifier: Apache-2.0
"""The base that `recipe.py` builds on: a pre-training configuration for a small dense model."""

from megatron.bridge import AutoBridge
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    GPTDatasetConfig,
    LoggerConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
)


def pretrain_base(model_id: str, seq_length: int = 4096) -> ConfigContainer:
    """A pre-training configuration on mock data; the caller sets what is special to its model."""
    return ConfigContainer(
        model=AutoBridge.from_hf_pretrained(model_id).to_megatron_provider(load_weights=False),
        train=TrainingConfig(train_iters=1000, global_batch_size=64, micro_batch_size=1),
        optimizer=OptimizerConfig(lr=3e-4, use_distributed_optimizer=True, bf16=True),
        scheduler=SchedulerConfig(lr_decay_style="cosine", lr_warmup_iters=100),
        ddp=DistributedDataParallelConfig(check_for_nan_in_grad=True, overlap_grad_reduce=True, overlap_param_gather=True),
        dataset=GPTDatasetConfig(random_seed=1234, seq_length=seq_length, blend=None, split="99,1,0"),
        logger=LoggerConfig(log_interval=10),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=128256),
        checkpoint=CheckpointConfig(save=None, load=None),
        rng=RNGConfig(seed=1234),
        mixed_precision="bf16_mixed",
    )
