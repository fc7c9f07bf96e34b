"""The sign of a zero counts where IEEE 754 settles it, and only there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from qimeng.envs.errors import accuracy, error_budget
from qimeng.graph.capture import capture
from qimeng.graph.zeros import zeros_are_signed
from qimeng.spec.origin import FunctionModule


@pytest.mark.parametrize(
    ("function", "signed"),
    [
        (lambda x: -x, True),
        (lambda x: torch.where(x < 0, -x.round(), x * 2).t(), True),
        (lambda x: torch.relu(x), False),
        (lambda x: x - x, False),
        (lambda x: x @ x, False),
    ],
)
def test_only_what_has_one_sign_counts(function: Callable[[torch.Tensor], torch.Tensor], signed: bool) -> None:
    graph = capture(lambda: FunctionModule(function), lambda: (torch.empty(4, 4),))
    assert zeros_are_signed(graph) == signed


def test_zeros_of_the_other_sign_are_refused() -> None:
    value = torch.tensor([[0.0, -0.0, 1.0]])
    for signed, right in ((True, False), (False, True)):
        expected = error_budget.Expected(value, floor=accuracy.Error(1.0, 1.0, 1.0, 1.0), signed=signed)
        assert error_budget.check(value.clone(), expected)[1] is None
        assert (error_budget.check(value.abs(), expected)[1] is None) == right
