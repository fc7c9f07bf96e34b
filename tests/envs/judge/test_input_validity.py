"""Whether a graph shows that no operator looks at the values of inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from qimeng.envs.judge.input_validity import has_norms_alone, takes_any_values
from qimeng.graph.capture import capture
from qimeng.spec.origin import FunctionModule


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)).eval()
        self.register_buffer("mask", torch.ones(4, 1, 1))

    def forward(self, x: Tensor) -> Any:
        return self.layers(x) * self.mask


def image() -> tuple[Tensor, ...]:
    return (torch.randn(2, 3, 8, 8),)


def rows() -> tuple[Tensor, ...]:
    return (torch.rand(4, 6), torch.rand(4, 6))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, y: functional.softmax(x @ y.T, -1).cumsum(0), True),
        (functional.binary_cross_entropy, False),
        (lambda x, y: x[(y[:, 0] * 4).long()], False),
        (lambda x, y: torch.linalg.cholesky(x @ y.T), False),
        (lambda x, y: x[torch.arange(4).flip(0)] + functional.embedding(torch.arange(4), y), True),
        (lambda x, y: x + functional.embedding(torch.arange(4) + x[:, 0].argmax(), y), False),
    ],
    ids=["arithmetic", "a checked range", "indices", "a factorization", "fixed indices", "indices of numbers"],
)
def test_arithmetic_takes_any_values_and_nothing_else_does(function: Callable[..., Any], expected: bool) -> None:
    assert takes_any_values(capture(lambda: FunctionModule(function), rows)) is expected


def test_buffers_of_batch_norms_are_told_from_others() -> None:
    plain = capture(lambda: Buffered().layers, image)
    assert takes_any_values(plain) and has_norms_alone(plain)
    assert not has_norms_alone(capture(Buffered, image))
    assert not takes_any_values(None)
