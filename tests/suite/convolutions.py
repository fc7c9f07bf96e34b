"""Convolutions: dense ones as matrix products over windows, with what surrounds them."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from tests.suite.problem import BF16, Table, normal

problem = Table()


@problem("convolution", normal((2, 5, 9, 8)))
class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(5, 20, 3, padding=1)
        self.b = nn.Conv2d(5, 18, (3, 2), stride=(2, 1), dilation=(1, 2), bias=False)
        self.c = nn.Conv2d(5, 17, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.a(x), self.b(x), self.c(x)


@problem("convolution in a block", normal((2, 12, 7, 6)))
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(12, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12)
        self.b = nn.Conv2d(12, 12, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.b(functional.silu(self.norm(self.a(x)))) + x)


@problem("convolution of half numbers", normal((2, 6, 8, 8), dtype=BF16))
class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(6, 16, 3, stride=2, padding=1, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        return functional.hardswish(self.a(x))
