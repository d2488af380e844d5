"""Two heads on one body."""

import torch


def step(body, head_a, head_b, optimizer, source, target_a, target_b):
    optimizer.zero_grad()
    hidden = body(source)
    loss_a = torch.nn.functional.mse_loss(head_a(hidden), target_a)
    loss_b = torch.nn.functional.mse_loss(head_b(hidden), target_b)
    loss_a.backward()
    loss_b.backward()
    optimizer.step()
    return loss_a.item() + loss_b.item()
