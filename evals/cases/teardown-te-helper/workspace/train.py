# SPDX-License-Identifier: Apache-2.0
"""A small Megatron-Core training loop with layer graphs."""

import argparse

import torch
import torch.distributed as dist
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

from model import build_model


def train(model, helper, steps, warmup):
    for step in range(steps):
        if step == warmup:
            helper.create_cudagraphs()
        loss = model[0](torch.randint(0, 1000, (1, 4096)))
        loss.backward()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("nccl")
    try:
        model = build_model(layers=2)
        helper = TECudaGraphHelper(model=model, config=None, seq_length=4096, micro_batch_size=1, optimizers=[])
        train(model, helper, args.steps, args.warmup)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
