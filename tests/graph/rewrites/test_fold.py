"""Scales, shifts and batch norms of evaluation mode in the weights before them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.graph.rewriting import Rewritten


class Chain(nn.Sequential):
    """A module in evaluation mode."""

    def __init__(self, *parts: nn.Module):
        super().__init__(*parts)
        self.eval()


class Act(nn.Module):
    """A function of one tensor as a module."""

    def __init__(self, function: Any):
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Gate(nn.Module):
    """A map times a number that the input decides."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) * x.mean()


CASES = {
    "conv2d": (lambda: Chain(nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()), (2, 4, 5, 5)),
    "no bias, groups": (lambda: Chain(nn.Conv1d(4, 8, 3, groups=2, bias=False), nn.BatchNorm1d(8)), (2, 4, 9)),
    "transposed": (lambda: Chain(nn.ConvTranspose2d(4, 6, 3, stride=2), nn.BatchNorm2d(6)), (2, 4, 5, 5)),
    "linear": (lambda: Chain(nn.Linear(8, 6), nn.BatchNorm1d(6)), (5, 8)),
    "not affine": (lambda: Chain(nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3, affine=False)), (1, 2, 4, 4, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_norm_becomes_weights_that_follow_the_parameters(name: str) -> None:
    make, shape = CASES[name]
    found = Rewritten(make, lambda: (torch.empty(shape),), "fold")
    assert found.rules == ["norm"] and not any("norm" in label for label in found.labels)
    assert max(found.errors()) < 1e-5


def test_scales_shifts_and_norms_in_a_row_leave_one_map() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
            self.shift = nn.Parameter(torch.zeros(4, 1, 1))
            self.eval()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(1 - self.norm(-(self.conv(x) + self.shift) / 3)) * 2

    found = Rewritten(Model, lambda: (torch.empty(2, 3, 6, 6),), "fold")
    assert found.labels[0] == "convolution" and len(found.rules) >= 4
    assert max(found.errors()) < 1e-5


def test_a_half_type_is_folded_in_fp32() -> None:
    found = Rewritten(
        lambda: Chain(nn.Linear(8, 6, dtype=torch.bfloat16), nn.BatchNorm1d(6, dtype=torch.bfloat16)),
        lambda: (torch.empty(5, 8, dtype=torch.bfloat16),),
        "fold",
    )
    assert found.rules == ["norm"]
    assert any(n.packet == "aten._to_copy" for n in found.program.graph.ops()) and max(found.errors()) < 2e-2


def test_infinite_inputs_stay_infinite() -> None:
    make, shape = CASES["conv2d"]
    found = Rewritten(make, lambda: (torch.empty(shape),), "fold")
    x = torch.randn(shape)
    x[0, 1, 2, 2], x[1, 0, 0, 0] = float("inf"), float("nan")
    a, b = found.on(x)
    assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf())


REFUSED = {
    "eps is 0": (lambda: Chain(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, eps=0.0)), "eps is 0"),
    "training": (lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), ""),
    "another reader": (lambda: Chain(nn.Conv2d(3, 4, 1), Act(lambda y: y * 2 + torch.tanh(y))), "read by 1 other"),
    "infinite": (lambda: Chain(nn.Conv2d(3, 4, 1), Act(lambda y: y * float("inf"))), "not finite"),
    "by zero": (lambda: Chain(nn.Conv2d(3, 4, 1), Act(lambda y: y / 0.0)), "divides by 0"),
    "depends on the input": (lambda: Gate(), "depends on the inputs"),
    "along the width": (lambda: Chain(nn.Conv2d(3, 4, 1), nn.LayerNorm(5, bias=False)), ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_folded_says_why(name: str) -> None:
    make, reason = REFUSED[name]
    found = Rewritten(make, lambda: (torch.empty(2, 3, 5, 5),), "fold")
    assert found.rules == [] and reason in "; ".join(found.reasons)
