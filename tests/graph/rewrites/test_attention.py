"""Attentions of deep heads taken apart into products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from qimeng.graph.capture import capture
from qimeng.graph.device_strides import heads_inside, with_strides
from qimeng.graph.rewrites import find_rewrites
from qimeng.program.program import Program
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


def test_the_result_lies_in_memory_as_a_gpus_kernel_leaves_it() -> None:
    inputs = tuple(torch.randn(2, 3, n, 300) for n in (7, 9, 9))
    graph = with_strides(capture(Attention, lambda: inputs), heads_inside)
    found, reasons = find_rewrites(graph, "apart")
    assert len(found) == 1 and reasons == ()
    program = Program.start(graph).with_rewrites(found)
    result = program.load().Model()(*inputs)
    assert result.stride() == (6300, 300, 900, 1)
    assert torch.allclose(result, Attention()(*inputs), atol=1e-5)
