"""Linear layers on the same values as one product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.graph.rewriting import Rewritten


class Attention(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16, bias=bias), nn.Linear(16, 8, bias=bias), nn.Linear(16, 8, bias=bias)
        self.o = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.view(2, 5, -1, 4).transpose(1, 2)

        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        y = functional.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
        return self.o(y.transpose(1, 2).reshape(2, 5, 16))


class Gated(nn.Module):
    def __init__(self, function: Callable[..., Any], biases: tuple[bool, bool] = (True, True)) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(16, 12, bias=bias) for bias in biases)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.a(x), self.b(x))


@pytest.mark.parametrize("bias", [False, True])
def test_queries_keys_and_values_are_one_product(bias: bool) -> None:
    found = Rewritten(lambda: Attention(bias), lambda: (torch.empty(2, 5, 16),), "together")
    assert found.rules == ["together"] and found.labels.count("linear") == 2
    assert max(found.errors()) < 1e-5


def test_a_gate_is_one_product_and_its_readers_see_the_strides() -> None:
    found = Rewritten(lambda: Gated(lambda a, b: functional.silu(a) * b), lambda: (torch.empty(5, 16),), "together")
    assert found.rules == ["together"] and found.labels == ["linear", "silu", "mul"]
    assert max(found.errors()) < 1e-5


REFUSED = {
    "a result": (lambda: Gated(lambda a, b: (a, b * 2)), "has Meta"),
    "a view that needs other strides": (lambda: Gated(lambda a, b: a.view(-1) * b.view(-1)), "does not fit"),
    "one bias": (lambda: Gated(lambda a, b: a * b, (True, False)), "some of the 2 layers on x have a bias"),
    "one layer": (lambda: nn.Linear(16, 8), ""),
    "in a row": (lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8)), ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_stays_apart_says_why(name: str) -> None:
    make, reason = REFUSED[name]
    found = Rewritten(make, lambda: (torch.empty(5, 16),), "together")
    assert found.rules == [] and reason in "; ".join(found.reasons)


def test_results_of_one_row_keep_memory_of_their_own() -> None:
    found = Rewritten(lambda: Gated(lambda a, b: (a, b)), lambda: (torch.empty(16),), "together")
    assert found.rules == [] and "memory of its own" in "; ".join(found.reasons)
