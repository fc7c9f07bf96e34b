"""Which schedule a region of the tile family starts from."""

from __future__ import annotations

import pytest
import torch

from qimeng.device import device_named
from qimeng.family import covering
from qimeng.graph.capture import capture
from qimeng.graph.region import make_region

H200 = device_named("h200")


@pytest.mark.parametrize(("stride", "width"), [(1, 1), (2, 1), (8, 32)])
def test_a_thread_walks_a_window_whose_neighbours_begin_near(stride: int, width: int) -> None:
    graph = capture(lambda: torch.nn.AvgPool3d(3, stride, 1), lambda: (torch.empty(4, 8, 96, 96, 96),))
    family, plan = covering(make_region(graph, [n.name for n in graph.ops()]))
    assert family.default(plan, H200, "default").block_r == width
