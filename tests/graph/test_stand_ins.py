"""Functions that torch.export refuses or mistakes are captured by others, which give the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from qimeng.graph.stand_ins import correlation, covariance, multi_margin_loss, write_picked
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

X = torch.randn(7, 11) + torch.arange(7.0)[:, None]


def both(x: torch.Tensor) -> Any:
    return torch.cov(x, correction=0), x.t().cov().fill_diagonal_(0).square().sum(), torch.corrcoef(x)


def diagonals(x: torch.Tensor) -> Any:
    same = (x @ x.t()).fill_diagonal_(-torch.inf)
    return same.softmax(1), x[None].exp().squeeze(0).fill_diagonal_(fill_value=2), (x + 1).t().fill_diagonal_(0.5)


def placed(x: torch.Tensor) -> Any:
    y, z, at = x * 2, x + 1, x.sum(1).argmax()
    y[at] = x[0].exp()
    z[2:, at - 8] = 0.5
    return y, z


@pytest.mark.parametrize("function", [both, diagonals, placed])
def test_what_is_captured_gives_the_same(function: Any) -> None:
    program = Program.start(capture_spec(KernelSpec.of(function, (X,))))
    torch.testing.assert_close(program.load().Model()(X), function(X))
    assert not any("as_strided" in region.label() for region in program.regions)


NUMBERS = [torch.tensor(n) for n in (0, 1, 2, -1)]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (NUMBERS[2], torch.randn(1, 4, 5)),
        ((slice(None), NUMBERS[3]), torch.randn(6, 5)),
        ((NUMBERS[3], ..., NUMBERS[2].short()), torch.randn(4)),
        ((2, NUMBERS[1]), 1.5),
        ((None, NUMBERS[1]), torch.randn(1, 4, 5)),
        ((slice(1, 5, 2), NUMBERS[0], 3), torch.tensor(2)),
        ((*NUMBERS[:3],), torch.randn(()).double()),
        ((..., NUMBERS[0]), True),
    ],
)
def test_a_write_where_tensors_of_one_number_say_is_that_of_pytorch(key: Any, value: Any) -> None:
    x = torch.randn(6, 4, 5)
    wanted, found = x.clone(), x.clone()
    wanted[key] = value
    write_picked(found, key, value)
    assert torch.equal(found, wanted) and not torch.equal(found, x)


@pytest.mark.parametrize(
    "x",
    [X, X[0], X[:1], X.double(), X.long(), torch.complex(X, X.flip(0) + 1), torch.full((3,), 2.0), torch.zeros(0, 3)],
    ids=["rows", "one row", "a matrix of one", "float64", "int64", "complex", "constant", "empty"],
)
def test_covariances_and_correlations_are_those_of_pytorch(x: torch.Tensor) -> None:
    torch.testing.assert_close(covariance(x), torch.cov(x), equal_nan=True)
    torch.testing.assert_close(correlation(x), torch.corrcoef(x), equal_nan=True)


@pytest.mark.filterwarnings("ignore:cov")
def test_too_few_observations_are_divided_by_0() -> None:
    torch.testing.assert_close(covariance(X, correction=11), torch.cov(X, correction=11), equal_nan=True)


LABELS, WEIGHT = torch.arange(7), torch.rand(11)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_margin_loss_is_that_of_pytorch_also_of_nan(reduction: str) -> None:
    x = torch.where(X > 6, torch.nan, X)

    def loss(x: torch.Tensor) -> Any:
        one = functional.multi_margin_loss(x, LABELS, reduction=reduction)
        return one, functional.multi_margin_loss(x * 2, LABELS, 2, 0.4, WEIGHT, reduction=reduction)

    torch.testing.assert_close(Program.start(capture_spec(KernelSpec.of(loss, (x,)))).load().Model()(x), loss(x))
    alone = multi_margin_loss(x[0], LABELS[0], p=2, weight=WEIGHT, reduction=reduction)
    torch.testing.assert_close(
        alone, functional.multi_margin_loss(x[0], LABELS[0], 2, weight=WEIGHT, reduction=reduction)
    )
