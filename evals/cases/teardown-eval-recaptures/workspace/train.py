# SPDX-License-Identifier: Apache-2.0
"""Training, then a final evaluation with graphs of its own."""

import torch
import torch.distributed as dist
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper, TransformerLayer


class Chunk:
    def __init__(self):
        self.layers = [TransformerLayer(), TransformerLayer()]

    def __call__(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def main():
    dist.init_process_group("nccl")
    try:
        model = [Chunk()]
        helper = TECudaGraphHelper(model=model)
        for step in range(6):
            if step == 2:
                helper.create_cudagraphs()
            model[0](torch.zeros(1)).backward()
        helper.delete_cuda_graphs()
        # final evaluation
        helper.create_cudagraphs()
        for _ in range(3):
            model[0](torch.zeros(1))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
