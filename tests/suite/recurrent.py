"""Recurrences: Python loops over steps, which a capture unrolls, and recurrent layers.

Loops are one region each. Layers stay whole until the action `algebra layers` takes them apart.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.suite.problem import BF16, Table, normal

problem = Table()


@problem("a loop of pointwise steps", normal((26, 3, 2, 7), (3, 1, 7), (3, 2, 7)))
def pointwise_steps(x: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    found = []
    for t in range(26):
        state = torch.where(x[t] > 2, x[t], torch.sigmoid(decay) * state + x[t])
        found.append(state)
    return torch.stack(found), state


@problem("a loop of pointwise steps in bf16", normal((28, 6, 33), (6, 33), dtype=BF16))
def pointwise_steps_in_bf16(x: Tensor, state: Tensor) -> Tensor:
    found = []
    for t in range(28):
        state = (state * 0.5 + x[t]).tanh() - x[27 - t]
        found.append(state)
    return torch.stack(found, 1)


@problem("a loop with a weight", normal((5, 28, 20), (5, 20), (20, 20)))
def steps_with_a_weight(x: Tensor, state: Tensor, weight: Tensor) -> Tensor:
    found, weight = [], weight / 4
    for t in range(28):
        state = torch.tanh(functional.linear(state, weight) + x[:, t])
        found.append(state * 2)
    return torch.stack(found, 1)


@problem("recurrent layers", normal((6, 5, 8)), stays=("full", "lstm", "gru"))
class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(8, 12, batch_first=True), nn.GRU(12, 4, 2, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        y, (h, _) = self.lstm(x)
        z: Tensor = self.gru(y)[0] + h.sum()
        return z
