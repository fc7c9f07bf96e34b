"""What a mask selects and writes back is a choice between two tensors where each element is computed alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

X = torch.linspace(-2, 2, 24).reshape(4, 6)
N = torch.arange(24).reshape(4, 6)


def divided(x: Tensor, n: Tensor) -> Tensor:
    """PyTorch raises an error for a zero that the mask does not select."""
    y = n.clone()
    y[n > 0] = 60 // n[n > 0]
    return y


def by_another_mask(x: Tensor, n: Tensor) -> Tensor:
    y = x.clone()
    y[x > 0] = x.flip(1)[x < 0]
    return y


def by_their_number(x: Tensor, n: Tensor) -> Tensor:
    y = x.clone()
    y[x > 0] = x[x > 0] - x[x > 0].cumsum(0)
    return y


def drawn_twice(x: Tensor, n: Tensor) -> Tensor:
    y = x.clone()
    y[torch.rand(4) > 2] = x[torch.rand(4) > 2]
    return y


def labels(x: Tensor, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.arange(4)
    y, z, w = x.softmax(-1), torch.zeros(4, 6), n.clone()
    y[rows, n[:, 1] % 6 - 6] -= 1.0
    z[rows, n[:, 0] % 6] = 1.0
    w[rows, n[:, 2] % 6] = n[:, 5]
    return y, z, w


def put(thing: Callable[..., object]) -> tuple[list[str], Program]:
    graph = capture_spec(KernelSpec.from_function(thing, (X, N)))
    return [n.target for n in graph.ops() if "index_put" in n.target], Program.start(graph)


@pytest.mark.parametrize("thing", [divided, by_another_mask, by_their_number, drawn_twice])
def test_other_writes_stay(thing: Callable[..., Tensor]) -> None:
    found, program = put(thing)
    assert found
    assert torch.equal(program.load().Model()(X, N), thing(X, N))


def test_one_element_of_each_row_is_a_choice() -> None:
    found, program = put(labels)
    assert not found
    for mine, wanted in zip(program.load().Model()(X, N), labels(X, N), strict=True):
        torch.testing.assert_close(mine, wanted)
