"""Sums and means before the linear maps that they sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from qimeng.coder.template.coder import TemplateCoder
from qimeng.graph.region import merge
from tests.graph.rewriting import Rewritten


class Then(nn.Module):
    """A map, and a function of what it yields."""

    def __init__(self, map_: nn.Module, function: Any):
        super().__init__()
        self.map, self.function = map_, function
        self.shift, self.column = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(5, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, self.map(x))


def linear() -> nn.Module:
    return nn.Linear(6, 8)


CASES: dict[str, tuple[Any, Any, tuple[int, ...], list[str]]] = {
    "features": (linear, lambda m, y: y.sum(1), (5, 6), ["sum_features"]),
    "mean, kept": (linear, lambda m, y: y.mean(-1, keepdim=True) * 2, (5, 6), ["sum_features"]),
    "three dimensions": (linear, lambda m, y: y.sum(2), (2, 5, 6), ["sum_features"]),
    "all": (linear, lambda m, y: y.mean((0, 1)), (5, 6), ["sum_features"]),
    "all, without naming them": (linear, lambda m, y: (y * 2).mean(), (5, 6), ["sum_scale", "sum_features"]),
    "scaled": (linear, lambda m, y: (y / 2 * 3).sum(1, keepdim=True), (5, 6), ["sum_scale"] * 2 + ["sum_features"]),
    "shifted": (linear, lambda m, y: (-(y - m.shift) + 3).sum(1), (5, 6), ["sum_scale"] * 3 + ["sum_features"]),
    "shifted mean": (linear, lambda m, y: (y + m.shift + 3).mean(1), (5, 6), ["sum_scale"] * 2 + ["sum_features"]),
    "by rows": (linear, lambda m, y: (m.column * y).mean(1), (5, 6), ["sum_scale", "sum_features"]),
    "convolution": (lambda: nn.Conv2d(3, 8, 3, 2, 1), lambda m, y: y.sum(1), (2, 3, 7, 7), ["sum_features"]),
    "groups": (lambda: nn.Conv2d(4, 8, 3, groups=2), lambda m, y: y.mean(1, True), (2, 4, 7, 7), ["sum_features"]),
    "transposed": (
        lambda: nn.ConvTranspose3d(3, 8, 3, 2, 1, bias=False),
        lambda m, y: y.mean(1, True),
        (1, 3, 3, 3, 3),
        ["sum_features"],
    ),
    "transposed groups": (
        lambda: nn.ConvTranspose2d(4, 8, 3, groups=2), lambda m, y: y.mean((1, 2)), (2, 4, 5, 5), ["sum_features"],
    ),
    "places": (
        lambda: nn.ConvTranspose2d(3, 8, 3, stride=2, output_padding=1, dilation=2),
        lambda m, y: y.mean((2, 3), True),
        (2, 3, 5, 5),
        ["sum_places"],
    ),
    "places of one": (lambda: nn.Conv2d(3, 8, 1), lambda m, y: y.sum((0, 2, 3)), (2, 3, 5, 5), ["sum_places"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_sum_moves_before_the_map(name: str) -> None:
    map_, function, shape, rules = CASES[name]
    found = Rewritten(lambda: Then(map_(), function), lambda: (torch.empty(shape),), "early")
    assert found.rules == rules, found.reasons
    assert max(found.errors()) < 1e-5


@pytest.mark.parametrize("name", ["features", "convolution", "places"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(name: str, bad: float) -> None:
    map_, function, shape, _ = CASES[name]
    found = Rewritten(lambda: Then(map_(), function), lambda: (torch.empty(shape),), "early")
    x = torch.randn(shape)
    x[(0,) * len(shape)] = bad
    a, b = found.on(x)
    assert torch.equal(a.isnan(), b.isnan()) and a.isnan().any() and not a.isnan().all()


def test_the_sum_over_places_of_single_weights_keeps_an_infinity() -> None:
    found = Rewritten(
        lambda: Then(nn.Conv2d(3, 8, 1), lambda m, y: y.mean((2, 3))), lambda: (torch.empty(2, 3, 5, 5),), "early"
    )
    x = torch.randn(2, 3, 5, 5)
    x[0, 1, 2, 3] = float("inf")
    a, b = found.on(x)
    assert found.rules == ["sum_places"] and a[0].isinf().all()
    torch.testing.assert_close(a, b)


def test_less_is_computed() -> None:
    map_, function, shape, _ = CASES["features"]
    found = Rewritten(lambda: Then(map_(), function), lambda: (torch.empty(shape),), "early")
    assert sorted(found.labels) == ["add", "add", "mv", "mv"]
    (one,) = merge(found.program.called, (r.id for r in found.program.called))
    assert TemplateCoder().can_implement(one) is None  # a kernel that reads the input once


REFUSED: dict[str, tuple[Any, Any, tuple[int, ...], str]] = {
    "padding": (
        lambda: nn.ConvTranspose2d(3, 8, 3, padding=1), lambda m, y: y.mean((2, 3)), (2, 3, 5, 5), "has the padding",
    ),
    "windows": (lambda: nn.Conv2d(3, 8, 3), lambda m, y: y.mean((2, 3)), (2, 3, 5, 5), "reads windows"),
    "few": (lambda: nn.Linear(6, 3), lambda m, y: y.sum(1), (5, 6), "has 3 features, fewer than 4"),
    "by features": (linear, lambda m, y: (y * m.shift).sum(1), (5, 6), "a factor that changes along dimension 1"),
    "by zero": (linear, lambda m, y: (y / 0.0).sum(1), (5, 6), "divides by 0"),
    "infinite": (linear, lambda m, y: (y + float("inf")).sum(1), (5, 6), "not finite"),
    "another reader": (linear, lambda m, y: y.sum(1, True) * y, (5, 6), "is read by 1 other"),
    "nonlinear": (linear, lambda m, y: torch.relu(y).sum(1), (5, 6), ""),
    "no map": (nn.Identity, lambda m, y: (y * 2).sum(1), (5, 6), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_stays_says_why(name: str) -> None:
    map_, function, shape, reason = REFUSED[name]
    found = Rewritten(lambda: Then(map_(), function), lambda: (torch.empty(shape),), "early")
    assert found.rules == [] and reason in "; ".join(found.reasons)
