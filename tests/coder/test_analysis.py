"""Which loop nests regions have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from qimeng.coder.template.families.tile.plan import TilePlan
from qimeng.coder.template.triton.row_edges import edges_of
from qimeng.family import Unsupported, covering
from qimeng.graph.capture import capture
from qimeng.graph.region import Region, make_region
from qimeng.spec.origin import FunctionModule


def region_of(
    function: Callable[..., torch.Tensor], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Region:
    graph = capture(lambda: FunctionModule(function), lambda: tuple(torch.empty(s, dtype=dtype) for s in shapes))
    return make_region(graph, [n.name for n in graph.ops()])


def planned(region: Region) -> Any:
    return covering(region)[1]


def test_reductions_of_equal_extent_share_their_axes() -> None:
    plan = planned(region_of(lambda x, y: x.sum() / y.abs().amax(), (40, 50), (2000,)))
    assert (plan.row_count, plan.column_count, plan.passes) == (1, 2000, 1)


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
        planned(region_of(function, *shapes))


@pytest.mark.parametrize(
    ("function", "divides"),
    [
        (lambda x, y: x / x.sum(1, keepdim=True), set()),
        (lambda x, y: x / y[:, :1] + x / 3, set()),
        (lambda x, y: x / y, {"div"}),
        (lambda x, y: torch.floor(x / x.amax(1, keepdim=True)), {"div_rn"}),
        (lambda x, y: torch.where(x / 3 >= 1, x, y), {"div_rn"}),
        (lambda x, y: torch.relu(x / 3) + torch.where(x / 3 > 0, x, y), set()),
        (lambda x, y: x / y + torch.floor(x / 7), {"div", "div_rn"}),
        (lambda x, y: (y * torch.reciprocal(x)).to(torch.int32), {"div_rn"}),
        (lambda x, y: (x / y).argmax(1), {"div_rn"}),
        (lambda x, y: (x / y[:, :1]) % 1.0, {"div_rn"}),
        (lambda x, y: torch.fmod(x / 3, 0.25), {"div_rn"}),
        (lambda x, y: torch.floor_divide(x / y[:, :1], 2.0), {"div_rn"}),
    ],
)
def test_divisions_are_exact_where_they_decide_and_shared_divisors_inverted_once(
    function: Callable[..., torch.Tensor], divides: set[str]
) -> None:
    nest = planned(region_of(function, (64, 64), (64, 64))).nest
    assert {e.op for e in nest.exprs if e.op in ("div", "div_rn")} == divides


@pytest.mark.parametrize(
    ("function", "lifted"),
    [
        (lambda x, y: x / x.abs().amax(1, keepdim=True), True),  # may be below 2^-128, whose inverse is infinite
        (lambda x, y: torch.softmax(x, 1), False),
        (lambda x, y: x / torch.sqrt((x * x).mean(1, keepdim=True) + 1e-6), False),
        (lambda x, y: x / x.norm(dim=1, keepdim=True).clamp_min(1e-12), False),
    ],
)
def test_only_divisors_that_may_be_tiny_are_lifted(function: Callable[..., torch.Tensor], lifted: bool) -> None:
    nest = planned(region_of(function, (64, 64), (64, 64))).nest
    assert (
        any(e.op == "mul" and 2.0**64 in [a.args[1] for a in e.operands() if a.op == "where"] for e in nest.exprs)
        == lifted
    )


def test_half_results_are_rounded_where_they_decide() -> None:
    def graph(function: Callable[..., torch.Tensor]) -> list[str]:
        return [e.op for e in planned(region_of(function, (64, 64), dtype=torch.bfloat16)).nest.exprs]

    assert "round" in graph(lambda x: torch.floor(x / 3))
    assert "round" not in graph(lambda x: torch.relu(x / 3) * x)


def test_a_view_without_elements_is_refused() -> None:
    with pytest.raises(Unsupported, match="empty"):
        planned(region_of(lambda x: x[17:20].sum(), (12, 5)))


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
    plan = planned(region_of(function, *shapes))
    assert isinstance(plan, TilePlan)
    edges = edges_of(plan)
    assert (None if edges is None else list(edges.steps.values())) == steps
