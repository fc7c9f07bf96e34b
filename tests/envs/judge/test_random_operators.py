"""Draws of one run given to another."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from qimeng.envs.judge.random_operators import can_repeat, draws_of, random_operators, repeating

X = torch.randn(16, 16)


def noisy(x: torch.Tensor) -> torch.Tensor:
    mask = torch.bernoulli(torch.full_like(x, 0.3))
    y = functional.dropout(x * mask, 0.2) + torch.randn_like(x) + torch.empty_like(x).uniform_()
    return y[torch.randperm(16)]


def test_the_same_draws_in_another_dtype():
    torch.manual_seed(3)
    draws = draws_of(lambda: noisy(X))
    torch.manual_seed(3)
    eager = noisy(X)
    exact = repeating(draws, lambda: noisy(X.double()))
    assert exact.dtype is torch.float64
    torch.testing.assert_close(eager.double(), exact, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(noisy(X).double(), exact, atol=0.1)


def test_the_mask_of_dropout_is_drawn_and_its_values_are_computed():
    draws = draws_of(lambda: torch.native_dropout(X, 0.25, True))
    assert draws[0][1].dtype is torch.bool
    y, mask = repeating(draws, lambda: torch.native_dropout(X.double() + 1, 0.25, True))
    torch.testing.assert_close(y, (X.double() + 1) * mask / 0.75)
    assert torch.equal(mask, draws[0][1])
    draws = draws_of(lambda: torch.native_dropout(X, 0.25, False))
    assert torch.equal(repeating(draws, lambda: torch.native_dropout(X.double(), 0.25, False))[0], X.double())


@pytest.mark.parametrize(
    "other",
    [lambda: torch.rand(4), lambda: torch.randn(5), lambda: torch.randn(4) + torch.randn(4), lambda: torch.ones(4)],
    ids=["operator", "shape", "more", "fewer"],
)
def test_a_run_that_draws_something_else_is_refused(other):
    draws = draws_of(lambda: torch.randn(4))
    with pytest.raises(ValueError, match="aten"):
        repeating(draws, other)


def test_only_operators_that_return_what_they_draw_can_be_repeated():
    names = {
        "dropout": random_operators(lambda: functional.dropout(X, 0.5))[1],
        "alpha": random_operators(lambda: functional.alpha_dropout(X, 0.5, True))[1],
        "rrelu": random_operators(lambda: functional.rrelu(X, training=True))[1],
    }
    assert can_repeat(names["dropout"]) and can_repeat(names["alpha"])
    assert not can_repeat(names["rrelu"]) and not can_repeat(())
