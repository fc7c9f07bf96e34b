"""What planners read the regions of the built-in families are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from qimeng.family import word_of
from qimeng.graph.capture import capture
from qimeng.program.program import Program

IMAGE, WEIGHT, ROWS = (2, 8, 16, 16), (8, 8, 3, 3), (64, 32)


@pytest.mark.parametrize(
    ("word", "function", "shapes"),
    [
        ("gemm", torch.mm, (ROWS, (32, 16))),
        ("convolution", F.conv2d, (IMAGE, WEIGHT)),
        ("convolution", lambda x, w: F.conv2d(x, w, groups=8), (IMAGE, (8, 1, 3, 3))),
        ("attention", F.scaled_dot_product_attention, ((2, 4, 64, 32),) * 3),
        ("scan", lambda x: torch.cumsum(x, -1), (ROWS,)),
        ("reduction", lambda x: torch.softmax(x, -1), (ROWS,)),
        ("pointwise", torch.relu, (ROWS,)),
        ("sort", lambda x: torch.sort(x)[0], (ROWS,)),
        ("other", lambda x: torch.kthvalue(x, 2)[0], (ROWS,)),
    ],
)
def test_a_region_has_the_word_of_its_family(
    word: str, function: Callable[..., torch.Tensor], shapes: tuple[tuple[int, ...], ...]
) -> None:
    class Module(torch.nn.Module):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return function(*inputs)

    program = Program.start(capture(Module, lambda: tuple(torch.empty(s) for s in shapes)))
    assert word in [word_of(region) for region in program.regions]
