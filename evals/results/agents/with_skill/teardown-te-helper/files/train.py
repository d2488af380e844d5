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
    model = build_model(layers=2)
    helper = TECudaGraphHelper(model=model, config=None, seq_length=4096, micro_batch_size=1, optimizers=[])
    try:
        train(model, helper, args.steps, args.warmup)
    finally:
        # A live graph holds its NCCL communicator, for which destroy_process_group would wait for ever. Deleting needs
        # the process group (it logs by rank), and asserts where nothing was captured.
        if helper.graphs_created():
            helper.delete_cuda_graphs()
    # Not after an exception: it also waits for collectives that other ranks may never join. run.sh aborts those.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
