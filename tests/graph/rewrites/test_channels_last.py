"""Networks of convolutions in channels-last memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from qimeng.graph.opgraph import Meta, Value, row_major
from qimeng.graph.rewrites.channels_last import is_channels_last
from tests.graph.rewriting import Rewritten


class Network(nn.Module):
    """Two convolutions or more, a depthwise one and one of single elements among them."""

    def __init__(self, several: bool = True) -> None:
        super().__init__()
        self.first, self.pool = nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2)
        self.others = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 4, 1)) if several else None
        self.squeeze = nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.pool(torch.relu(self.first(x)))
        if self.others is None:
            return y
        y = y * torch.sigmoid(self.squeeze(y.mean((2, 3), keepdim=True)))
        z = self.others(y) + 1
        return z, z.flatten(2).transpose(1, 2), z.mean((2, 3))


class Volumes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv3d(2, 4, 3), nn.GELU(), nn.Conv3d(4, 2, 2, stride=2))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


def found(make: Any, shape: tuple[int, ...]) -> Rewritten:
    return Rewritten(make, lambda: (torch.empty(shape),), "channels-last")


@pytest.mark.parametrize(("make", "shape"), [(Network, (2, 3, 8, 6)), (Volumes, (2, 2, 7, 6, 8))])
def test_between_convolutions_everything_is_channels_last(make: Any, shape: tuple[int, ...]) -> None:
    rewritten = found(make, shape)
    assert rewritten.rules and set(rewritten.rules) == {"channels_last"}
    graph = rewritten.program.graph
    for node in graph.ops():
        if node.packet in ("aten.convolution", "aten.max_pool2d_with_indices", "aten.gelu"):
            assert is_channels_last(graph.meta(Value(node.name))), node
    assert max(rewritten.errors()) < 1e-5


def test_results_lie_in_memory_as_before_and_inputs_are_copied_once() -> None:
    rewritten = found(Network, (2, 3, 8, 6))
    graph = rewritten.program.graph
    strides = [graph.meta(v).stride for v in graph.results()]
    assert strides == [row_major((2, 4, 4, 3)), (48, 1, 12), row_major((2, 4))]
    copies = [n for n in graph.ops() if n.packet == "aten.clone" and n.operands()[0].node == "x"]
    assert len(copies) == 1


def test_one_convolution_is_left_alone() -> None:
    assert not found(lambda: Network(several=False), (2, 3, 8, 6)).rewrites


def test_a_network_that_is_channels_last_is_left_alone() -> None:
    class Already(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1))

        def forward(self, x: torch.Tensor) -> Any:
            return self.layers(x.contiguous(memory_format=torch.channels_last))

    assert not found(Already, (2, 3, 8, 6)).rewrites


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((2, 3, 4, 5), (60, 1, 15, 3), True),
        ((2, 3, 4, 5), (60, 20, 5, 1), False),
        ((2, 1, 4, 5), (20, 20, 5, 1), True),
        ((2, 3, 1, 1), (3, 1, 1, 1), True),
        ((2, 3, 4, 5), (120, 2, 30, 6), False),
    ],
)
def test_is_channels_last(shape: tuple[int, ...], stride: tuple[int, ...], expected: bool) -> None:
    assert is_channels_last(Meta(shape, stride, "float32")) is expected
