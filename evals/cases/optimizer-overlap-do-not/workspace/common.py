# SPDX-License-Identifier: Apache-2.0
"""What all our pre-training recipes have in common."""

from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    GPTDatasetConfig,
    LoggerConfig,
    OptimizerConfig,
    RerunStateMachineConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
)


def pretrain_base(seq_length=4096):
    model = GPTModelProvider(
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        num_query_groups=8,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        add_bias_linear=False,
        seq_length=seq_length,
        vocab_size=128256,
    )
    return ConfigContainer(
        model=model,
        train=TrainingConfig(train_iters=2000, global_batch_size=64, micro_batch_size=1),
        optimizer=OptimizerConfig(lr=3e-4, min_lr=3e-5, use_distributed_optimizer=True, bf16=True),
        scheduler=SchedulerConfig(lr_decay_style="cosine", lr_warmup_iters=200),
        ddp=DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
        ),
        dataset=GPTDatasetConfig(
            random_seed=1234,
            seq_length=seq_length,
            blend=None,
            split="99,1,0",
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            dataloader_type="single",
        ),
        logger=LoggerConfig(log_interval=10),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=128256),
        checkpoint=CheckpointConfig(),
        rng=RNGConfig(seed=1234),
        rerun_state_machine=RerunStateMachineConfig(),
        mixed_precision="bf16_mixed",
    )
