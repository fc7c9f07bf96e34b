"""Rows whose elements are products, with the multiply-adds that a compiler makes of them, against PyTorch.

The largest exponent of a softmax is 0 only where the product is rounded before the maximum is subtracted: at numbers of
10^12 the rounding is 2^15. The interpreter must be chosen before triton is imported, so that the cases run in one
process of their own (this file as a script), which prints a JSON row a case.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.nn import functional

from qimeng.coder.template.coder import TemplateCoder
from qimeng.coder.template.families.scan.defaults import default_schedule as scans_by_default
from qimeng.coder.template.families.scan.plan import plan_scan
from qimeng.coder.template.families.tile.defaults import default_schedule as rows_by_default
from qimeng.coder.template.families.tile.plan import plan_tile
from qimeng.coder.template.nest.contracted import beside_extreme, is_product
from qimeng.coder.template.nest.expr import Expr
from qimeng.coder.template.triton.row_edges import edges_of
from qimeng.device import device_named
from qimeng.family import Unsupported
from qimeng.graph.capture import capture
from qimeng.graph.region import make_region
from qimeng.program.program import load_source
from tests.coder.test_tile import _Module
from tests.contracted import contract
from tests.interpreted import rows_of

LIMIT = 2e-6
"""Relative to each value, or to 1 where that is larger."""
FACTOR = 0.3
"""No power of two: its products are rounded."""

ROWS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "softmax": (lambda x: (x * FACTOR).softmax(-1), ((5, 128),)),
    "softmax of an odd row": (lambda x: (x * FACTOR).softmax(-1), ((5, 131),)),
    "softmax along columns": (lambda x: (x * FACTOR).softmax(0), ((32, 19),)),
    "softmax of a quotient": (lambda x: (x / 7).softmax(-1), ((5, 128),)),
    "softmax of what a mask leaves": (
        lambda x: (x * FACTOR).masked_fill(torch.ones(5, 128, dtype=torch.bool).tril(), float("-inf")).softmax(-1),
        ((5, 128),),
    ),
    "softmax of a sum of products": (lambda x, a, b: (x * FACTOR + a * b).softmax(-1), ((5, 128), (5, 1), (128,))),
    "softmin": (lambda x: functional.softmin(x * FACTOR, -1), ((5, 128),)),
    "written out": (
        lambda x: (lambda e: e / e.sum(-1, keepdim=True))((x * FACTOR - (x * FACTOR).amax(-1, keepdim=True)).exp()),
        ((5, 128),),
    ),
    "below the smallest": (lambda x: ((x * FACTOR).amin(-1, keepdim=True) - x * FACTOR).exp(), ((5, 128),)),
    "log_softmax": (lambda x: (x * FACTOR).log_softmax(-1), ((5, 128),)),
    "logsumexp": (lambda x: torch.logsumexp(x * FACTOR, 1), ((5, 128),)),
    "cross entropy": (
        lambda x: functional.cross_entropy(x * FACTOR, torch.arange(5) * 7, reduction="none"),
        ((5, 128),),
    ),
    "twice the largest": (lambda x: torch.cat((x, x), 1).mul(FACTOR).softmax(-1), ((5, 64),)),
}
GEMM = (lambda s, x, y: torch.logsumexp((x @ y) * FACTOR, 1), [{}, {"splits": 3}, {"flat": True}])
SCAN = lambda x: torch.logcumsumexp(x * FACTOR, 1)  # noqa: E731
SIZES = (1.0, 1e12)
"""Of the numbers in rows that take turns, or in columns where the columns are reduced (`COLUMNS`)."""
COLUMNS = "softmax along columns"
H200 = device_named("h200")
HEADER = "import torch\nimport triton\nimport triton.language as tl\n"


def _region_of(function: Any, shapes: tuple[tuple[int, ...], ...]) -> Any:
    graph = capture(lambda: _Module(function), lambda: tuple(torch.empty(s) for s in shapes))
    return make_region(graph, [n.name for n in graph.ops()])


def _row_schedules(plan: Any) -> Iterator[Any]:
    base = rows_by_default(plan, H200)
    width = 1 << (plan.column_count - 1).bit_length()
    yield base
    yield base.but(form="loop", block_p=4, block_r=32)
    yield base.but(form="loop", block_p=4, block_r=1)
    yield base.but(form="split", block_p=4, block_r=16, splits=3)
    yield base.but(form="resident", block_p=2, block_r=width)
    if plan.passes == 1 and plan.full:
        yield base.but(form="wave", block_p=2, block_r=32, lag=3)
        yield base.but(form="cooperative", block_p=2, block_r=width)
        if edges_of(plan):
            yield base.but(form="wave", block_p=1, block_r=32, lag=3)
            yield base.but(form="cooperative", block_p=1, block_r=width)


def _printed() -> Iterator[tuple[str, Any, tuple[Any, ...], str, str, Any]]:
    """Case, function, shapes of its inputs, source, entry and schedule."""
    coder = TemplateCoder()
    for name, (function, shapes) in ROWS.items():
        region = _region_of(function, shapes)
        for schedule in _row_schedules(plan_tile(region)):
            with suppress(Unsupported):  # a form that this computation has not
                made = coder.print(region, schedule)
                yield name, function, shapes, made.source, made.entry, schedule
    region, shapes = _region_of(SCAN, ((5, 128),)), ((5, 128),)
    base = scans_by_default(plan_scan(region), H200)
    for schedule in (base, base.but(form="loop", block_p=2, block_r=32)):
        made = coder.print(region, schedule)
        yield "scan", SCAN, shapes, made.source, made.entry, schedule


def _products() -> Iterator[tuple[str, Any, tuple[Any, ...], str, str, Any]]:
    """The same of a matrix product."""
    from tests.coder.product_cases import Call, Case, printed

    function, schedules = GEMM
    shapes = ((64, 50), (50, 96))
    case = Case(lambda: Call(function), lambda: tuple(torch.empty(s) for s in shapes), schedules, 0.0, {})
    for number, changes in enumerate(schedules):
        made = printed(case, number, changes)[-1]
        yield "product", lambda x, y: function(None, x, y), shapes, made.source, made.entry, changes


def main() -> None:
    """Print a row a kernel and size of numbers: the largest error."""
    from qimeng.envs.estimate.interpreter import mend

    mend()
    contract()
    torch.set_num_threads(1)
    for number, (name, function, shapes, source, entry, schedule) in enumerate([*_printed(), *_products()]):
        loaded, axis = load_source(HEADER + source, f"contracted_{number}"), int(name == COLUMNS)
        torch.manual_seed(0)
        inputs = [torch.randn(s) for s in shapes]
        scaled = inputs[0].movedim(axis, 0)
        for turn, size in enumerate(SIZES):
            scaled[turn :: len(SIZES)] *= size
        (found,), r = getattr(loaded, entry)(*inputs), function(*inputs)
        errors = ((found.double() - r.double()).abs() / r.double().abs().clamp(min=1.0)).movedim(axis, 0)
        for turn, size in enumerate(SIZES):
            error = errors[turn :: len(SIZES)].amax()
            row = {"case": name, "schedule": str(schedule), "size": size, "error": str(error.item())}
            print(json.dumps(row), flush=True)


@pytest.fixture(scope="module")
def rows(once: Callable[..., Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = once("contracted_rows", lambda: rows_of(__file__))
    return found


@pytest.mark.parametrize("name", [*ROWS, "scan", "product"])
def test_kernels_give_what_pytorch_gives(rows: list[dict[str, Any]], name: str) -> None:
    mine = [r for r in rows if r["case"] == name]
    assert len(mine) >= 2 * len(SIZES)
    assert not [r for r in mine if not float(r["error"]) < LIMIT]


X = Expr("load", (), (), "float32", 0)
TOP = Expr("reduce", (X,), (), "float32", "max")


def test_which_values_are_products() -> None:
    def of(op: str, *args: Any, dtype: str = "float32") -> Expr:
        return Expr(op, args, (), dtype)

    product = of("mul", X, 0.3)
    products = [product, of("neg", product), of("identity", product), of("where", X, product, 0.0)]
    products += [of("cast", of("mul", X, 0.3, dtype="bfloat16")), of("add", product, product), of("div", X, 7.0)]
    rounded = [X, TOP, of("add", product, X), of("round", product), of("cast", product, dtype="float64")]
    rounded += [of("relu", product), of("where", X, X, 0.0), of("mul", X, 2, dtype="int32"), 0.3]
    assert all(map(is_product, products)) and not any(map(is_product, rounded))
    assert beside_extreme(of("sub", product, TOP)) == (0, TOP)
    assert beside_extreme(of("sub", of("where", X, 0.0, TOP), product))[0] == 1
    assert beside_extreme(of("sub", X, TOP)) is None and beside_extreme(of("sub", product, X)) is None


@pytest.mark.parametrize("form", [{}, {"form": "loop", "block_p": 1, "block_r": 1024}], ids=str)
@pytest.mark.parametrize("columns", [128, 513])
def test_a_gpus_compiler_makes_no_multiply_add_of_the_factor(columns: int, form: dict[str, Any]) -> None:
    """It is 0x3E99999A in PTX; rows of 513 leave some lanes empty whatever the thread."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    region = _region_of(lambda x: (x * FACTOR).softmax(-1), ((8, columns),))
    plan = plan_tile(region)
    schedule = rows_by_default(plan, H200).but(**form)
    made = TemplateCoder().print(region, schedule)
    loaded = load_source(HEADER + made.source, f"compiled_{columns}_{len(form)}")
    kernel = next(f for name, f in vars(loaded).items() if name.endswith("_rows"))
    signature = {"x0_ptr": "*fp32", "y0_ptr": "*fp32", "PB": "constexpr", "RB": "constexpr"}
    source = ASTSource(kernel, signature, {"PB": schedule.block_p, "RB": schedule.block_r})
    ptx = compile(source, GPUTarget("cuda", 90, 32), {"num_warps": schedule.warps}).asm["ptx"]
    found = {line.split()[0].split(".")[0] for line in ptx.splitlines() if "0f3E99999A" in line}
    assert found - {"mov"} == {"mul"} and "fma.rn.f32" in ptx


if __name__ == "__main__":
    main()
