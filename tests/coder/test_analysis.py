"""Which loop nests regions have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from qimeng.coder.template.analysis import analyse
from qimeng.coder.template.axes import Unsupported
from qimeng.coder.template.tile_edges import edges_of
from qimeng.coder.template.tile_plan import TilePlan
from qimeng.graph.capture import capture
from qimeng.graph.region import Region, make_region


class Function(torch.nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]):
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)


def region_of(function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> Region:
    graph = capture(lambda: Function(function), lambda: tuple(torch.empty(s) for s in shapes))
    return make_region(graph, [n.name for n in graph.ops()])


def test_reductions_of_equal_extent_share_their_axes() -> None:
    facts = analyse(region_of(lambda x, y: x.sum() / y.abs().amax(), (40, 50), (2000,))).facts
    assert (facts.rows, facts.columns, facts.passes) == (1, 2000, 1)


@pytest.mark.parametrize(
    ("function", "shapes", "reason"),
    [
        (lambda x, y: x.sum() / y.sum(), ((40, 50), (30,)), "different axes"),
        (lambda x, y: x.sum(0) / y.sum(), ((40, 50), (50,)), "different axes"),
        (lambda x, y: x + y.sum(1), ((64, 64), (64, 64)), "computed 64 times over"),
    ],
)
def test_other_reductions_stay_apart(
    function: Callable[..., torch.Tensor], shapes: tuple[tuple[int, ...], ...], reason: str
) -> None:
    with pytest.raises(Unsupported, match=reason):
        analyse(region_of(function, *shapes))


@pytest.mark.parametrize(
    ("function", "divides"),
    [
        (lambda x, y: x / x.sum(1, keepdim=True), False),
        (lambda x, y: x / y[:, :1] + x / 3, False),
        (lambda x, y: x / y, True),
        (lambda x, y: torch.floor(x / x.amax(1, keepdim=True)), True),
        (lambda x, y: torch.where(x / 3 >= 1, x, y), True),
        (lambda x, y: torch.relu(x / 3) + torch.where(x / 3 > 0, x, y), False),
    ],
)
def test_a_shared_divisor_is_inverted_once(function: Callable[..., torch.Tensor], divides: bool) -> None:
    nest = analyse(region_of(function, (64, 64), (64, 64))).nest
    assert any(e.op == "div" for e in nest.exprs) == divides


@pytest.mark.parametrize(
    ("function", "shapes", "steps"),
    [
        (lambda x: torch.softmax(x, 1), ((9, 131),), [3]),
        (lambda x, y: torch.softmax(x + y, 2), ((5, 9, 130), (5, 9, 130)), [2]),
        (lambda x: torch.softmax(x, 1), ((9, 132),), None),
        (lambda x: torch.softmax(x[:, 1:], 1), ((9, 132),), None),
        (lambda x, y: torch.softmax(x + y[:, :131], 1), ((9, 131), (9, 133)), None),
        (lambda x, w: torch.softmax(x * w, 1), ((9, 131), (131,)), None),
        (lambda x: torch.softmax(x, 0), ((131, 9),), None),
    ],
)
def test_rows_that_vectors_can_be_shifted_to(
    function: Callable[..., torch.Tensor], shapes: tuple[tuple[int, ...], ...], steps: list[int] | None
) -> None:
    found = analyse(region_of(function, *shapes))
    assert isinstance(found.plan, TilePlan)
    edges = edges_of(found.nest, found.plan)
    assert (None if edges is None else list(edges.steps.values())) == steps
