"""Diagonal matrices, reductions of one element, and what is computed twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.graph.rewriting import Rewritten


class Of(nn.Module):
    """A function as a module with a linear layer."""

    def __init__(self, function: Callable[..., torch.Tensor]):
        super().__init__()
        self.function, self.linear = function, nn.Linear(6, 4)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(self, *inputs)


def rewritten(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Rewritten:
    return Rewritten(lambda: Of(function), lambda: tuple(torch.empty(s) for s in shapes), "structure")


@pytest.mark.parametrize("left", [True, False])
def test_a_diagonal_matrix_is_a_scale(left: bool) -> None:
    found = rewritten(lambda m, a, b: torch.diag(a) @ b if left else b @ torch.diag(a), (6,), (6, 6))
    assert found.rules == ["diagonal"] and not any("mm" in label for label in found.labels)
    assert max(found.errors()) < 1e-6
    a, b = torch.randn(6), torch.randn(6, 6)
    b[2, 3] = float("nan")
    want, got = found.on(a, b)
    assert torch.equal(want.isnan(), got.isnan()) and int(got.isnan().sum()) == 6


@pytest.mark.parametrize(
    "function",
    [
        lambda m, a, b: torch.diag(a, 1)[:6, :6] @ b,
        lambda m, a, b: torch.tril(a * torch.ones(6, 6)) @ b,
        lambda m, a, b: torch.where(torch.eye(6) > 0, a, 1.0) @ b,
    ],
)
def test_another_matrix_is_none(function: Callable[..., Any]) -> None:
    assert "diagonal" not in rewritten(function, (6,), (6, 6)).rules


def test_reductions_of_one_element_are_views() -> None:
    def function(m: Of, x: torch.Tensor) -> torch.Tensor:
        y = m.linear(x).sum(1, keepdim=True)
        return torch.logsumexp(y.mean(1, keepdim=True).amax(1, keepdim=True), 1, keepdim=True) * 2

    found = rewritten(function, (5, 6))
    assert found.rules == ["single"] * 3 and found.labels == ["linear", "sum", "mul"]
    assert max(found.errors()) < 1e-5
    x = torch.randn(5, 6)
    x[0], x[1] = float("inf"), float("nan")
    want, got = found.on(x)
    assert torch.equal(want.isnan(), got.isnan())


def test_what_is_computed_twice_is_computed_once() -> None:
    found = rewritten(lambda m, x: torch.relu(m.linear(x)) + torch.tanh(m.linear(x)), (5, 6))
    assert found.rules == ["repeat"] and found.labels.count("linear") == 1
    assert max(found.errors()) < 1e-6


def test_random_numbers_and_results_stay() -> None:
    found = rewritten(lambda m, x: torch.dropout(x, 0.5, True) + torch.dropout(x, 0.5, True), (5, 6))
    assert found.rules == []
    found = rewritten(lambda m, x: (torch.relu(x), torch.relu(x)), (5, 6))
    assert found.rules == [] and "memory of its own" in "; ".join(found.reasons)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: (torch.relu(x), torch.relu(x).view(-1)),
        lambda m, x: (torch.relu(x).view(-1), torch.relu(x).view(5, 1, 1)),
        lambda m, x: x.sum(1, keepdim=True).view(-1),
        lambda m, x: (torch.relu(x), torch.relu(x).amax(1, keepdim=True).view(-1)),
    ],
)
def test_views_of_results_keep_memory_of_their_own(function: Callable[..., Any]) -> None:
    found = rewritten(function, (5, 1))
    assert "memory of its own" in "; ".join(found.reasons)
    x = torch.randn(5, 1)
    with torch.no_grad():
        got = found.program.load().Model()(x)
    held = [t.untyped_storage().data_ptr() for t in (x, *(got if isinstance(got, tuple) else (got,)))]
    assert len(set(held)) == len(held)
