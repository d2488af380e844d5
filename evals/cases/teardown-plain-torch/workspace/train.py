# SPDX-License-Identifier: Apache-2.0
"""Two graphed blocks, and an optimizer step in a graph."""

import torch
import torch.distributed as dist


class Block:
    def __call__(self, hidden):
        return hidden


def main():
    dist.init_process_group("nccl")
    try:
        blocks = torch.cuda.make_graphed_callables((Block(), Block()), ((torch.zeros(1),), (torch.zeros(1),)))
        optimizer_graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(optimizer_graph):
            pass
        for _ in range(4):
            hidden = torch.zeros(1)
            for block in blocks:
                hidden = block(hidden)
            hidden.backward()
            optimizer_graph.replay()
        torch.save({}, "checkpoint.pt")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
