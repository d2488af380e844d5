# SPDX-License-Identifier: Apache-2.0
"""FullCudaGraphWrapper: its graphs live on the class, one a stage (megatron/core/full_cuda_graph.py, 0.19.2)."""

import torch


class FullCudaGraphWrapper:
    curr_iteration = {"training": 0, "validation": 0}
    cuda_graph = {"training": None, "validation": None}
    result = {"training": None, "validation": None}

    def __init__(self, forward_backward_func, cuda_graph_warmup_steps=1, **options):
        self.forward_backward_func = forward_backward_func
        self.cuda_graph_warmup_steps = cuda_graph_warmup_steps

    def __call__(self, *, forward_only=False, **arguments):
        stage = "validation" if forward_only else "training"
        cls = FullCudaGraphWrapper
        if cls.curr_iteration[stage] == self.cuda_graph_warmup_steps:
            cls.cuda_graph[stage] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(cls.cuda_graph[stage]):
                cls.result[stage] = self.forward_backward_func(forward_only=forward_only, **arguments)
        if cls.cuda_graph[stage] is None:
            cls.result[stage] = self.forward_backward_func(forward_only=forward_only, **arguments)
        else:
            cls.cuda_graph[stage].replay()
        cls.curr_iteration[stage] += 1
        return cls.result[stage]
