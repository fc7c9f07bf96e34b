"""What counts as a product, its arithmetic, and where PyTorch computes it in TF32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from qimeng.graph.capture import capture
from qimeng.graph.opgraph import OpGraph
from qimeng.graph.ops import flops, is_product, longest_reduction, precision_of


def graph_of(function: Any, *inputs: torch.Tensor) -> OpGraph:
    class Model(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return function(*args)

    return capture(Model, lambda: inputs)


@pytest.mark.parametrize(
    ("function", "weight", "work", "longest", "product"),
    [
        (lambda x, w: functional.conv2d(x, w, padding=1), (6, 4, 3, 3), 2 * 2 * 6 * 7 * 8 * 36, 36, True),
        (lambda x, w: functional.conv2d(x, w, groups=2), (6, 2, 1, 1), 2 * 2 * 6 * 7 * 8 * 2, 2, True),
        (lambda x, w: functional.conv2d(x, w, padding=1, groups=4), (4, 1, 3, 3), 2 * 2 * 4 * 7 * 8 * 9, 9, False),
        (lambda x, w: functional.conv_transpose2d(x, w, stride=2), (4, 6, 3, 3), 2 * 2 * 4 * 7 * 8 * 54, 36, True),
    ],
    ids=["dense", "groups", "depthwise", "transposed"],
)
def test_a_convolution_is_a_product_of_its_windows(
    function: Any, weight: tuple[int, ...], work: int, longest: int, product: bool
) -> None:
    graph = graph_of(function, torch.empty(2, 4, 7, 8), torch.empty(weight))
    (node,) = (n for n in graph.ops() if n.packet == "aten.convolution")
    assert (flops(graph, node), longest_reduction(graph), is_product(graph, node)) == (work, longest, product)


def test_convolutions_are_in_tf32_by_default_and_matrix_products_are_not() -> None:
    modes = ("default", "highest", "high")
    assert [precision_of(["aten.convolution"], m) for m in modes] == ["high", "highest", "high"]
    assert [precision_of(["aten.convolution", "aten.mm"], m) for m in modes] == ["default", "highest", "high"]
    assert [precision_of([], m) for m in modes] == list(modes)
