"""Attentions of deep heads taken apart into products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.graph.rewriting import Rewritten


class Attention(torch.nn.Module):
    def __init__(self, **options: Any):
        super().__init__()
        self.options = options

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, **self.options)


def rewritten(depth: int, **options: Any) -> Rewritten:
    shapes = (2, 3, 7, depth), (2, 3, 9, depth), (2, 3, 9, 24)
    return Rewritten(lambda: Attention(**options), lambda: tuple(torch.empty(s) for s in shapes), "apart")


@pytest.mark.parametrize("options", [{}, {"scale": 0.5}], ids=str)
def test_products_take_the_place_of_a_deep_attention(options: dict[str, Any]) -> None:
    found = rewritten(300, **options)
    assert found.rules == ["attention"] and found.labels == ["matmul", "mul", "_softmax", "matmul"]
    assert max(found.errors()) < 1e-5


@pytest.mark.parametrize("depth, options, words", [(256, {}, "up to 256"), (300, {"is_causal": True}, "has a mask")])
def test_others_stay_whole(depth: int, options: dict[str, Any], words: str) -> None:
    found = rewritten(depth, **options)
    assert not found.rules and words in found.reasons[0]
