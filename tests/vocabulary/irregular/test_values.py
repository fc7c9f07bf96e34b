"""Reductions by segment in Triton's interpreter, held against the same module in float64.

The cases run in a process of its own (this file as a script), where Triton interprets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from qimeng import KernelSpec
from qimeng.actions import legal_actions
from qimeng.interfaces import Action, Request
from qimeng.program.program import Program
from tests.vocabulary.irregular.samples import CONTEXT, Attention, Bags, Layer, Segments, graph, reducing, start_of
from tests.vocabulary.values import BF16, F16, F32, FACTOR, FLOORS, check

Made = Callable[[torch.dtype], tuple[nn.Module, tuple[Any, ...]]]


@dataclass
class Case:
    """A module with its inputs, and the dtypes that it runs in.

    Attributes:
        made: makes both.
        dtypes: of floating tensors.
        tiles: numbers of the configurations that the first action begins with.
    """

    made: Made
    dtypes: tuple[torch.dtype, ...] = (F32,)
    tiles: tuple[int, ...] = (0, 1, 2)


def layer(reduce: str, nodes: int = 25, edges: int = 70, width: int = 20, buffer: bool = False) -> Made:
    """A layer with an index that is an input, or a buffer."""

    def made(dtype: torch.dtype) -> tuple[nn.Module, tuple[Any, ...]]:
        torch.manual_seed(0)
        pairs = graph(nodes, edges)
        module = Layer(reduce, pairs if buffer else None).to(dtype)
        inputs = torch.randn(nodes, width).to(dtype), torch.rand(edges).to(dtype)
        return module, (*inputs, *(() if buffer else (pairs,)))

    return made


def bags(mode: str, last: bool = False, even: bool = False, weighted: bool = False, long: int = 1) -> Made:
    """Bags by offsets, the third empty; or of one size."""

    def made(dtype: torch.dtype) -> tuple[nn.Module, tuple[Any, ...]]:
        torch.manual_seed(0)
        module = Bags(mode, last=last).to(dtype)
        if even:
            return module, (torch.randint(0, 40, (7, 9)), *((None, torch.rand(7, 9).to(dtype)) if weighted else ()))
        offsets = torch.tensor([0, 3, 8, 8, 20, *([45] if last else [])]) * long
        weights = (torch.rand(45 * long).to(dtype),) if weighted else ()
        return module, (torch.randint(0, 40, (45 * long,)), offsets, *weights)

    return made


def segments(reduce: str, by: str, initial: float | None = None, long: int = 1) -> Made:
    """Neighbouring rows; the second segment is empty."""

    def made(dtype: torch.dtype) -> tuple[nn.Module, tuple[Any, ...]]:
        torch.manual_seed(0)
        lengths = torch.tensor([4, 0, 9, 3, 17]) * long
        place = lengths if by == "lengths" else torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        return Segments(reduce, by, initial), (torch.randn(33 * long, 12).to(dtype), place)

    return made


def attention(dtype: torch.dtype) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    return Attention(), (torch.randn(20, 4, 6).to(dtype), torch.randn(20, 4).to(dtype), graph(20, 70))


ALL = (F32, F16, BF16)

CASES = {
    "index_add": Case(layer("index_add"), ALL),
    "index_add, buffer": Case(layer("index_add", buffer=True), ALL),
    "advanced index": Case(layer("index")),
    "onto values": Case(layer("onto x"), (F32, BF16)),
    "scatter_add": Case(layer("scatter_add")),
    "scatter_reduce mean": Case(layer("mean apart"), (F32, BF16)),
    "scatter_reduce mean, joined": Case(layer("mean joined")),
    "scatter_reduce amax": Case(layer("amax apart", buffer=True), (F32, BF16), (0, 1)),
    "scatter_reduce amin, joined": Case(layer("amin joined")),
    "index_reduce mean": Case(layer("index_reduce mean")),
    "index_reduce amax": Case(layer("index_reduce amax")),
    "wide rows": Case(layer("index_add", 9, 40, 300)),
    "one column": Case(layer("index_add", 40, 90, 1)),
    "long segments": Case(layer("index_add", 3, 400, 33, buffer=True), (BF16,)),
    "bags of sums": Case(bags("sum"), (F32, F16)),
    "bags of means, last offset": Case(bags("mean", last=True)),
    "bags of extremes": Case(bags("max"), (F32, BF16)),
    "bags with weights": Case(bags("sum", weighted=True), (F32, F16)),
    "bags of one size": Case(bags("mean", even=True)),
    "bags of one size with weights": Case(bags("sum", even=True, weighted=True)),
    "sums by lengths": Case(segments("sum", "lengths")),
    "means by offsets": Case(segments("mean", "offsets")),
    "extremes by lengths": Case(segments("max", "lengths")),
    "least by offsets, from a number": Case(segments("min", "offsets", 0.5)),
    "sums by lengths, from a number": Case(segments("sum", "lengths", 3.0)),
    "hubs, buffer": Case(layer("index_add", 7, 1100, 9, buffer=True), (F32, BF16), (0, 1)),
    "hubs": Case(layer("mean joined", 7, 1100, 9), tiles=(0, 1)),
    "hubs, extremes": Case(layer("amax apart", 7, 1100, 40), tiles=(1,)),
    "long bags": Case(bags("mean", long=30), tiles=(1,)),
    "long segments by lengths": Case(segments("max", "lengths", long=40), tiles=(1,)),
    "attention over edges": Case(attention, tiles=(0,)),
    "one segment": Case(layer("mean apart", 1, 50, 8)),
}


def programs(case: Case, dtype: torch.dtype) -> Iterator[tuple[str, Program]]:
    """The program in which rows are computed where they are reduced: first configurations, then each form."""
    module, inputs = case.made(dtype)
    start = start_of(KernelSpec.from_module(module, inputs))
    offered = {a.kind: a for a in legal_actions(start, CONTEXT) if a.regions == (reducing(start).id,)}
    action = offered.get("aggregate", offered.get("lowering"))
    assert action is not None
    patch = CONTEXT.coder.write(Request(start, action, CONTEXT.device))
    for tile in case.tiles:
        yield f"tile {tile}", patch.apply(start, min(tile, len(patch.alternatives) - 1))
    program = patch.apply(start, 0)
    assert program.implementation(reducing(program)).generated
    for form in (a for a in legal_actions(program, CONTEXT) if a.kind in ("irregular", "split")):
        yield str(form), CONTEXT.coder.write(Request(program, form, CONTEXT.device)).apply(program, 0)

    while (last := action_named(program, "aggregate")) is not None:
        program = CONTEXT.coder.write(Request(program, last, CONTEXT.device)).apply(program, 0)
        yield "another", program


def action_named(program: Program, kind: str) -> Action | None:
    return next((a for a in legal_actions(program, CONTEXT) if a.kind == kind), None)


def rows(name: str) -> Iterator[dict[str, Any]]:
    """Errors of each program of a case, against float64, relative to |result| + rms."""
    case = CASES[name]
    for dtype in case.dtypes:
        module, inputs = case.made(dtype)
        eager = module(*inputs)
        exact = module.double()(*[x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in inputs])
        usual = exact.where(exact.isfinite(), 0.0)
        scale = (usual.abs() + usual.square().mean().sqrt()).clamp_min(1e-30)
        state = case.made(dtype)[0].state_dict()

        def error(y: torch.Tensor, exact: torch.Tensor = exact, scale: torch.Tensor = scale) -> float:
            same = (y == exact) | (y.isnan() & exact.isnan())  # a mean of nothing is NaN, an extreme infinite
            return float(torch.where(same, 0.0, (y.double() - exact).abs() / scale).max())

        limit = max(FACTOR * error(eager), FLOORS[dtype])
        for form, program in programs(case, dtype):
            made = program.load().Model()
            made.load_state_dict(state)
            y = made(*inputs)
            assert y.dtype == eager.dtype and y.shape == eager.shape and y.stride() == eager.stride()
            yield {"case": name, "form": form, "dtype": str(dtype), "error": error(y), "limit": limit}


QUICK = ["index_add, buffer", "scatter_reduce amax", "bags of sums", "hubs"]


def test_quick_cases() -> None:
    check("tests.vocabulary.irregular.test_values", QUICK)


@pytest.mark.slow
def test_other_cases() -> None:
    check("tests.vocabulary.irregular.test_values", [name for name in CASES if name not in QUICK])


if __name__ == "__main__":
    import sys

    from qimeng.envs.estimate.interpreter import mend

    mend()
    for one in sys.argv[1:]:
        for row in rows(one):
            print(json.dumps(row), flush=True)
