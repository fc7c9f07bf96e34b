"""A computation in KernelBench's form, which `qimeng optimize` reads.

qimeng optimize examples/softmax_problem.py --out runs/demo
"""

import torch
from torch import nn


class Model(nn.Module):
    """A gated softmax: pointwise operators around a reduction, which PyTorch runs as four kernels."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(width))
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x * torch.sigmoid(self.gate) * self.scale, dim=-1)


ROWS = 2048
WIDTH = 1024


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(ROWS, WIDTH)]


def get_init_inputs() -> list[float]:
    return [WIDTH, 0.5]
