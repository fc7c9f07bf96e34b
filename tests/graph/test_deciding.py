"""Values by which something is decided further on, in the same region or in another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from qimeng.family import covering
from qimeng.graph.capture import capture
from qimeng.graph.deciding import deciding_values
from qimeng.graph.opgraph import OpGraph
from qimeng.graph.region import partition
from qimeng.spec.origin import FunctionModule


def graph_of(function: Callable[..., torch.Tensor]) -> OpGraph:
    return capture(lambda: FunctionModule(function), lambda: (torch.empty(8, 8), torch.empty(8, 1)))


@pytest.mark.parametrize(
    ("function", "deciding"),
    [
        (lambda x, y: torch.floor(x / y), {"div", "x", "y"}),
        (lambda x, y: (x / y + 1).to(torch.int32), {"add", "div", "x", "y"}),
        (lambda x, y: (x / y).amax(1).argmax(), {"amax", "div", "x", "y"}),
        (lambda x, y: (x / y).sum(1) >= 2, {"sum_1"}),
        (lambda x, y: (x / y).cummax(1)[1], {"div", "x", "y"}),
        (lambda x, y: torch.floor(x.cummin(0)[0]), {"cummin", "x"}),
        (lambda x, y: torch.floor(x.cumsum(0)), {"cumsum"}),
        (lambda x, y: torch.where(x / y > 0, x, y), set()),
        (lambda x, y: torch.relu(x / y), set()),
    ],
)
def test_what_decides(function: Callable[..., torch.Tensor], deciding: set[str]) -> None:
    graph = graph_of(function)
    found = {v.node for v in deciding_values(graph)}
    inputs = {n.name: n.target for n in graph.nodes.values() if n.kind == "input"}
    assert {{"0": "x", "1": "y"}[inputs[n]] if n in inputs else n for n in found} == deciding


def test_a_quotient_alone_in_its_region_is_exact_where_another_region_rounds_it_down() -> None:
    first = [partition(graph_of(f))[0] for f in (lambda x, y: torch.floor(x / y), lambda x, y: torch.relu(x / y))]
    assert [[e.op for e in covering(r)[1].nest.exprs if e.op in ("div", "div_rn", "mul")] for r in first] == [
        ["div_rn"],
        ["mul", "mul", "mul"],
    ]
    assert first[0].signature != first[1].signature
