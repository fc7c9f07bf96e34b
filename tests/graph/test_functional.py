"""Operators that write in place become operators that give a new tensor, where nothing else sees the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from qimeng.graph import decompose
from qimeng.graph.functional import without_writes
from qimeng.spec.origin import FunctionModule


def residual(x: Tensor) -> Tensor:
    y = functional.relu(torch.exp(x), inplace=True)
    y += x
    return functional.hardtanh(y.mul_(2), inplace=True).view(-1)


def seen_by_a_view(x: Tensor) -> Tensor:
    y = x.exp()
    rows = y.view(-1)
    y.add_(1)
    return rows * 2


def a_view_that_is_done_with(x: Tensor) -> Tensor:
    y = x.exp()
    total = y.view(-1).sum()
    return y.add_(total)


def of_another_dtype(x: Tensor) -> Tensor:
    y = x.exp()
    return y.eq_(x)


def of_integers(x: Tensor) -> Tensor:
    y = x.argmax(1)
    y += 1
    return y


def of_what_is_given(x: Tensor) -> Tensor:
    y = functional.dropout(x * 2, 0.5, training=False)
    z = y + 1
    y += 1
    return y * z


def of_a_part(x: Tensor) -> Tensor:
    y = x.exp()
    y[:, 0] += 1
    return y * 2


def of_the_input(x: Tensor) -> Tensor:
    return x.add_(1) * 2


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.exp()
    before = y * 3
    y.add_(1)
    z = y.sigmoid_()
    return z * before, y


def writes(program: Any) -> int:
    found = [n.target for n in program.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    return sum(target._schema.is_mutable for target in found)


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (residual, 0),
        (seen_by_a_view, 1),
        (a_view_that_is_done_with, 0),
        (of_another_dtype, 1),
        (of_integers, 0),
        (of_what_is_given, 1),
        (of_a_part, 2),
        (of_the_input, 1),
        (twice, 0),
    ],
)
def test_results_stay_the_same(function: Callable[[Tensor], Any], left: int) -> None:
    x = torch.randn(3, 4)
    program = torch.export.export(FunctionModule(function), (x.clone(),))
    expected = function(x.clone())
    without_writes(program)
    program.graph.lint()
    assert writes(program) == left
    program.graph_module.recompile()
    torch.testing.assert_close(program.module()(x.clone()), expected)
    names = {n.name for n in program.graph.output_node().all_input_nodes}
    assert {spec.arg.name for spec in program.graph_signature.output_specs} <= names | {"x"}


def test_a_network_that_writes_in_place_is_not_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.first(x))
            y += x
            return self.relu(y)

    def whole(exported: Any) -> Any:
        raise AssertionError("the program is traced again")

    monkeypatch.setattr(decompose, "_whole", whole)
    program = decompose.decomposed(torch.export.export(Block().eval(), (torch.randn(2, 8, 6, 6),)))
    assert writes(program) == 0
