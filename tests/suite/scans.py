"""Scans: cumulative sums, products, extremes, their reverse, exclusive and masked forms."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.suite.problem import BF16, FP16, FP64, INT8, INT32, UINT8, Table, normal

problem = Table()


@problem("cumulative sums", normal((5, 6, 7)))
def cumulative_sums(x: Tensor) -> tuple[Tensor, ...]:
    return x.cumsum(0), x.cumsum(1), x.cumsum(-1)


@problem("cumulative sums of long rows", normal((2, 4507), (3001, 3)))
def cumulative_sums_of_long_rows(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x.cumsum(1), y.cumsum(0), y.flip(0).cumsum(0).flip(0)


@problem("cumulative products", lambda: (torch.rand(5, 301) + 0.5, torch.randint(-2, 3, (4, 9))))
def cumulative_products(x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
    return x.cumprod(1), x.cumprod(0), n.cumprod(1)


@problem(
    "cumulative extremes", lambda: (torch.randn(6, 37).round(decimals=1), torch.randint(0, 9, (5, 70), dtype=INT8))
)
def cumulative_extremes(x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
    odd = torch.where(x > 1.5, float("nan"), x)
    return *x.cummax(1), *x.cummin(0), *n.cummax(1), *odd.cummin(1), *x.flip(1).cummax(1), odd.cummax(0)[0]


@problem("cumulative sums of exponentials", lambda: (torch.randn(6, 133) * 30, torch.randn(6, 9, dtype=FP64)))
def cumulative_sums_of_exponentials(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    odd = torch.where(x > 60, float("inf"), torch.where(x < 0, float("-inf"), x))
    return x.logcumsumexp(1), x.logcumsumexp(0), odd.logcumsumexp(1), y.logcumsumexp(1)


@problem("reverse and exclusive sums", normal((6, 45), (6, 45)), stays=("view",))
def reverse_and_exclusive_sums(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    before = torch.cumsum(x.narrow(1, 0, 44), 1)
    exclusive = torch.cat((torch.zeros_like(x.select(1, 0).unsqueeze(1)), before), 1)
    after = torch.nn.functional.pad(x.flip(1).cumsum(1).flip(1)[:, 1:], (0, 1))
    return exclusive, after, torch.cumsum(x * y, 1) - x * y, x.flip(1).cumsum(1), x.cumsum(1)[:, ::2]


@problem("masked sums", lambda: (torch.randn(6, 301), torch.rand(6, 301) > 0.5))
def masked_sums(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    return torch.cumsum(x * mask, 1), mask.cumsum(1), torch.where(mask, x, 0.0).cumsum(0)


@problem("sums of other numbers", lambda: (torch.randn(7, 130).to(FP16), torch.randint(0, 200, (5, 130), dtype=UINT8)))
def sums_of_other_numbers(x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
    return (
        x.cumsum(1), x.to(BF16).cumsum(1), x.cumsum(0, dtype=torch.float32), n.cumsum(1), n.cumsum(1, dtype=INT32),
        n.cumsum(0, dtype=UINT8), n.cumsum(1, dtype=FP64), (x.abs() / 8).to(BF16).cumprod(1),
    )  # fmt: skip


@problem("shares of a running sum", lambda: (torch.rand(6, 300), torch.rand(6, 300)))
def shares_of_a_running_sum(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    p = torch.softmax(x, 1)
    return p.cumsum(1), x / (x.cumsum(1) + 1e-6), x.cumsum(1) / x.sum(1, keepdim=True), x.cumsum(1).cumsum(1) + y


@problem("sums along cut and odd axes", lambda: (torch.randn(4, 6, 10), torch.randn(1, 9), torch.randn(6).sum()))
def sums_along_cut_and_odd_axes(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    flat = x.reshape(4, 60).cumsum(1).reshape(4, 6, 10) * x
    turned = x.transpose(1, 2).reshape(4, 60).cumsum(1)
    return flat, turned, x.permute(2, 0, 1).cumsum(1), y.cumsum(0), z.cumsum(0), x.cumsum(1).cumsum(2)
