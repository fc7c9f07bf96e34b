"""Experts that all compute the same rows as a batch of products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.graph.experts.samples import Dense
from tests.graph.rewriting import Rewritten


def rows() -> tuple[torch.Tensor]:
    return (torch.randn(12, 16),)


@pytest.mark.parametrize(("form", "bias"), [("stack 1", False), ("stack 0", True), ("add", False)])
def test_they_become_one_batch(form: str, bias: bool) -> None:
    made = Rewritten(lambda: Dense(form, bias=bias), rows, "experts")
    assert made.rules == ["experts"]
    found = " ".join(made.labels)
    assert found.count("bmm") == 3 and found.count("linear") == 1
    assert max(made.errors()) < 1e-5


class Shared(nn.Module):
    """Weighted sums that are no layer of experts."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> Any:
        first, second = self.layers
        if self.form == "activations":
            return w[:, :1] * torch.relu(first(x)) + w[:, 1:2] * torch.tanh(second(x))
        if self.form == "same":
            return w[:, :1] * first(x) + w[:, :1] * second(x)
        return w[:, :1] * x + w[:, 1:2] * x


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("activations", "are computed in different ways"),
        ("same", "adds up 2 results with weights of other than 2 columns"),
        ("values", "adds up the same values"),
    ],
)
def test_others_stay(form: str, reason: str) -> None:
    made = Rewritten(lambda: Shared(form), lambda: (torch.randn(6, 8), torch.rand(6, 2)), "experts")
    assert made.rules == [] and any(reason in r for r in made.reasons)
