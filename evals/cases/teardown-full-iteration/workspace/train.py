# SPDX-License-Identifier: Apache-2.0
"""Training with one graph an iteration, and evaluation in between."""

import torch
import torch.distributed as dist
from megatron.core.full_cuda_graph import FullCudaGraphWrapper

STEPS = 8


def forward_backward(forward_only, **arguments):
    loss = torch.zeros(1)
    if not forward_only:
        loss.backward()
    return loss


def main():
    dist.init_process_group("nccl")
    step = FullCudaGraphWrapper(forward_backward, cuda_graph_warmup_steps=2)
    try:
        for iteration in range(STEPS):
            step(forward_only=False)
            if iteration % 2:
                step(forward_only=True)
        del step
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
