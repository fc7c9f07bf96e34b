"""Attention masks that depend on no input."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from qimeng.graph.opgraph import Node
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

B, L, D = 2, 12, 16


class Attention(torch.nn.Module):
    """Attention of `x` to itself under the mask that `make` computes from it."""

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor], keys: int = L):
        super().__init__()
        self.make, self.keys = make, keys

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = x if self.keys == L else x[:, :, : self.keys]
        return functional.scaled_dot_product_attention(x, seen, seen, attn_mask=self.make(x), scale=0.5)


def places() -> torch.Tensor:
    return torch.arange(L) + 0


def attention(make: Callable[[torch.Tensor], torch.Tensor], keys: int = L) -> tuple[Node, int]:
    """The attention in the verified graph, and the number of operators."""
    spec = KernelSpec.from_module(Attention(make, keys), (torch.randn(B, 2, L, D),))
    graph = capture_spec(spec)
    (node,) = (n for n in graph.ops() if n.packet == "aten.scaled_dot_product_attention")
    return node, sum(1 for _ in graph.ops())


def test_a_mask_that_hides_nothing_is_dropped_with_all_that_makes_it() -> None:
    node, count = attention(lambda x: (places() >= 0)[None, None, :, None].expand(B, 1, L, L))
    assert len(node.operands()) == 3 and dict(node.kwargs) == {"scale": 0.5} and count == 1


def test_a_mask_of_the_keys_after_each_row_is_called_causal() -> None:
    node, count = attention(lambda x: (places()[None, :] <= places()[:, None]).expand(B, 1, L, L))
    assert len(node.operands()) == 3 and dict(node.kwargs) == {"scale": 0.5, "is_causal": True} and count == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x[..., :1, :1] * places() > -9,
        lambda x: (places()[None, :] - places()[:, None]).abs() < 4,
        lambda x: torch.ones(L, L, dtype=torch.bool).tril(-1) | (places() == 0),
        lambda x: torch.zeros(L, L),
    ],
    ids=["of the input", "window", "another triangle", "added"],
)
def test_other_masks_stay(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert len(attention(make)[0].operands()) == 4


def test_a_triangle_over_fewer_keys_than_rows_stays() -> None:
    node, _ = attention(lambda x: places()[None, : L - 4] <= places()[:, None], keys=L - 4)
    assert len(node.operands()) == 4


def test_random_masks_stay() -> None:
    spec = KernelSpec.from_module(Attention(lambda x: torch.rand(L, L) > -1), (torch.randn(B, 2, L, D),))
    graph = capture_spec(spec, verify=False)
    assert any(n.packet == "aten.rand" for n in graph.ops())
