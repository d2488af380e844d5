# SPDX-License-Identifier: Apache-2.0
"""One captured training step."""

import torch


def schedule(step, peak=3e-4, warmup=100):
    return peak * min(1.0, (step + 1) / warmup)


def build(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return optimizer


def capture(model, optimizer, static_input, static_target):
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = torch.nn.functional.mse_loss(model(static_input), static_target)
        loss.backward()
        optimizer.step()
    return graph, loss


def run(model, batches, static_input, static_target):
    optimizer = build(model)
    graph, loss = capture(model, optimizer, static_input, static_target)
    for step, (source, target) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = schedule(step)
        static_input.copy_(source)
        static_target.copy_(target)
        graph.replay()
    return loss
