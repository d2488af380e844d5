# SPDX-License-Identifier: Apache-2.0
"""TECudaGraphHelper: graphs live on the layers (megatron/core/transformer/cuda_graphs.py, 0.19.2)."""

import torch


class TransformerLayer:
    """Stands for megatron.core.transformer.TransformerLayer: holds its graphs, and replays them once they are there."""

    def __init__(self):
        self.cuda_graphs = []
        self.cuda_graph_manual_hooks = []

    def __call__(self, hidden):
        for graph in self.cuda_graphs:
            graph.replay()
        return hidden


class TECudaGraphHelper:
    def __init__(self, model, config=None, seq_length=None, micro_batch_size=None, optimizers=None, **options):
        self.callables_per_chunk = [[layer for chunk in model for layer in chunk.layers]]
        self._graphs_created = False

    def graphs_created(self):
        return self._graphs_created

    def cuda_graph_set_manual_hooks(self):
        pass

    def create_cudagraphs(self):
        for layer in self.callables_per_chunk[0]:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                pass
            layer.cuda_graphs.append(graph)
        self._graphs_created = True

    def delete_cuda_graphs(self):
        assert self._graphs_created, "CUDA Graphs have not been created."
        for layer in self.callables_per_chunk[0]:
            for graph in layer.cuda_graphs:
                graph.reset()
            layer.cuda_graphs = []
        self._graphs_created = False
