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


@problem("convolutions of other dimensions", normal((2, 6, 19), (2, 4, 5, 4, 6)))
class OtherDimensions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv1d(6, 16, 5, stride=2, padding=4, dilation=2, groups=2)
        self.b = nn.Conv3d(4, 18, (1, 3, 3), padding=(0, 1, 1))
        self.c = nn.Conv1d(6, 1, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return self.a(x).tanh(), functional.leaky_relu(self.b(y), 0.1), self.c(x), self.a(x[0])


@problem("convolutions with padding modes", normal((2, 4, 7, 8)), stays=("arange", "empty"))
class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(4, 16, 3, padding="same", dilation=2)
        self.b = nn.Conv2d(4, 16, 3, padding=1, padding_mode="reflect")
        self.c = nn.Conv2d(4, 16, 3, padding=2, padding_mode="circular")
        self.d = nn.Conv2d(4, 16, 3, padding=1, padding_mode="replicate")
        self.e = nn.Conv2d(4, 16, (2, 4), padding="same")

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.a(x), self.b(x), self.c(x), self.d(x), self.e(x)


@problem("transposed convolutions", normal((2, 6, 5, 4)))
class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ConvTranspose2d(6, 16, 3, stride=2, padding=1)
        self.b = nn.ConvTranspose2d(6, 16, 4, stride=2, padding=1, bias=False)
        self.c = nn.ConvTranspose2d(6, 16, 3, stride=(2, 3), output_padding=(1, 2), groups=2)
        self.d = nn.ConvTranspose2d(6, 6, 3, stride=2, groups=6)
        self.e = nn.ConvTranspose2d(6, 1, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = functional.gelu(self.a(x.exp()))
        return y, self.b(x) * 2, self.c(x), self.d(x), self.e(x), y.mean((2, 3)), y[:, :, 1:].relu()


@problem("padded convolutions of one place", normal((3, 8, 1, 1), (3, 8, 1, 5)))
class OnePlace(nn.Module):
    """Windows reach past a dimension of one element, and windows of one element meet strides."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(8, 16, 3, padding=1)
        self.b = nn.ConvTranspose2d(8, 16, 3, stride=2, padding=1, output_padding=1)
        self.c = nn.ConvTranspose2d(8, 16, 1, stride=2, output_padding=1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return self.a(x), self.a(y).relu(), self.b(x), self.b(y * 2), self.c(x), self.c(y)
