"""Rows that are kept apart are told from rows that may mix, and code that asks for their number shows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qimeng.envs.errors.independent_rows import RowsMix, watched


def noted(run: Callable[..., object], *inputs: torch.Tensor, module: nn.Module | None = None) -> list[object]:
    held = [] if module is None else [*module.parameters(), *module.buffers()]
    with torch.no_grad():
        return watched(lambda: run(*inputs), inputs, held, inputs[0].shape[0])[1]


IMAGES, ROWS = (6, 4, 8, 8), (6, 5, 8)
APART: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "convolution": (nn.Conv2d(4, 3, 3), IMAGES),
    "transposed": (nn.ConvTranspose2d(4, 3, 3), IMAGES),
    "pools": (nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()), IMAGES),
    "linear": (nn.Sequential(nn.Linear(8, 7), nn.GELU(), nn.LayerNorm(7), nn.Softmax(-1)), ROWS),
    "groups": (nn.Sequential(nn.GroupNorm(2, 4), nn.ReLU(inplace=False), nn.PReLU(4)), IMAGES),
    "evaluated": (nn.BatchNorm2d(4).eval(), IMAGES),
    "in place": (nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Hardtanh(inplace=True)), ROWS),
}


@pytest.mark.parametrize("name", APART)
def test_some_rows_give_what_they_give_among_all_and_do_the_same(name: str) -> None:
    module, shape = APART[name]
    x = torch.randn(shape)
    assert noted(module, x, module=module) == noted(module, x[2:5].clone(), module=module)
    with torch.no_grad():
        assert torch.allclose(module(x)[2:5], module(x[2:5]), atol=1e-5)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x - x.mean(0),
        lambda x: x / x.norm(),
        lambda x: x.softmax(0),
        lambda x: x.cumsum(0),
        lambda x: x.flip(0),
        lambda x: x.transpose(0, 1),
        lambda x: x.sum(),
        lambda x: x + x[:1],
        lambda x: x.reshape(5, -1),
        lambda x: x @ x.mean((0, 1)),
        lambda x: x.reshape(6, -1) @ torch.ones(40, 40)[: x.reshape(6, -1).shape[1]].mul(float(x.max())),
        lambda x: torch.cat([x, x]),
        lambda x: torch.stack([x, x]),
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: x.roll(1),
        lambda x: x.add_(1),
        lambda x: x.tril() if x.dim() == 2 else x.reshape(6, -1).tril(),
        lambda x: x.reshape(6, -1).T.matmul(x.reshape(6, -1)),
        lambda x: x.argmax(),
        lambda x: torch.ones(6, 1, 1),
    ],
)
def test_what_may_mix_rows_is_refused(run: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(RowsMix):
        noted(run, torch.randn(ROWS))


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x / x.shape[0],
        lambda x: x * torch.tensor(float(x.shape[0])),
        lambda x: x * torch.from_numpy(torch.tensor(x.shape[0]).numpy()),
        lambda x: x * torch.arange(x.shape[0]).sum(),
        lambda x: x + 1 if x.shape[0] > 4 else x - 1,
        lambda x: x.reshape(6, -1),
    ],
)
def test_code_that_asks_for_the_number_of_rows_shows(run: Callable[[torch.Tensor], torch.Tensor]) -> None:
    whole = noted(run, torch.randn(ROWS))
    with contextlib.suppress(RowsMix):
        assert noted(run, torch.randn(3, *ROWS[1:])) != whole


def test_rows_of_two_inputs_go_together_and_a_product_has_those_of_its_left_operand() -> None:
    a, b = torch.randn(6, 8), torch.randn(6, 8)
    assert noted(torch.add, a, b) == noted(torch.add, a[:2], b[:2])
    with pytest.raises(RowsMix):
        watched(lambda: a + b, [a], [b], 6)
    square = torch.randn(6, 6)
    assert watched(lambda: square @ b, [square], [b], 6)[0][0].shape == (6, 8)
    with pytest.raises(RowsMix):
        watched(lambda: square @ b, [b], [square], 6)


def test_several_rows_may_stand_for_each_row_of_the_inputs() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return (x.reshape(-1, x.shape[-1]) * 2).reshape(x.shape[0], -1).sum(-1)

    assert noted(run, torch.randn(ROWS)) == noted(run, torch.randn(2, *ROWS[1:]))
