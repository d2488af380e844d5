# SPDX-License-Identifier: Apache-2.0
"""Merged neighbours with further outputs: an auxiliary loss of an earlier member keeps its gradients."""

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from fake_graphs import FakeBackend, every_way  # noqa: E402, F401
from partial_graphs import PartialCudaGraphManager  # noqa: E402


class WithAuxiliary(nn.Module):
    def __init__(self):
        super().__init__()
        self.main, self.auxiliary = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x, other):
        return self.main(x), (self.auxiliary(x) * other).sum()


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.main(x))


class Model(nn.Module):
    """`other` is reached through the auxiliary loss alone."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([WithAuxiliary(), Plain()])

    def forward(self, x, other):
        hidden, auxiliary = self.layers[0](x, other)
        return self.layers[1](hidden), auxiliary


def gradients(accumulate, graphs, use_auxiliary, backend=FakeBackend, device="cpu"):
    torch.manual_seed(7)
    model, found = Model().to(device), []
    manager = PartialCudaGraphManager.from_modules(
        model, "layers.*", backend=backend(), merge=True, accumulate_in_graph=accumulate
    ) if graphs else None  # fmt: skip
    for step in range(3):
        model.zero_grad()
        inputs = [torch.randn(4, width, device=device, requires_grad=True) for width in (8, 1)]
        for _ in range(2):
            output, auxiliary = model(*(tensor * 1 for tensor in inputs))
            (output.sum() + auxiliary if use_auxiliary(step) else output.sum()).backward()
            del output, auxiliary
        found.append([None if t.grad is None else t.grad.clone() for t in (*model.parameters(), *inputs)])
        if manager and step == 0:
            model.zero_grad()
            manager.capture()
    if manager:
        assert manager.stats()["replayed"] > 0
        manager.close()
    return found


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("use_auxiliary", [lambda step: True, lambda step: step != 1, lambda step: step == 2])
def test_gradients_through_an_earlier_members_second_output(accumulate, use_auxiliary):
    eager, ours = (gradients(accumulate, graphs, use_auxiliary) for graphs in (False, True))
    for expected, actual in zip(eager, ours):
        for one, other in zip(expected, actual):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)
