"""The GEMM family in Triton's interpreter and cross-compiled, on small and odd shapes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.coder.product_cases import (
    BF16,
    FLAT,
    FP16,
    Call,
    Case,
    Make,
    add,
    check,
    compile_all,
    compiled,
    fake_driver,
    interpret,
    measured,
    mm,
    planned,
    rows,
    shapes,
)

SPLIT: list[dict[str, Any]] = [
    {"precision": "fp16x3", "descriptors": d, "cat": c, "promote": p}
    for d in (True, False)
    for c, p in ((True, 64), (False, 0), (False, 32), (True, 0))
]
PLAIN: list[dict[str, Any]] = [{"precision": "ieee"}]
BOTH: list[dict[str, Any]] = [*PLAIN, {"precision": "fp16x3", "descriptors": True, "cat": True, "promote": 64}]
HALF: list[dict[str, Any]] = [{}, {"descriptors": True}]


def heads(s: Call, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.view(2, 20, 3, 16).transpose(1, 2) @ y.view(2, 20, 3, 16).permute(0, 2, 3, 1)


def masked_and_counted(s: Call, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of which whole tiles are -inf, and sums of integers that fp32 does not hold."""
    p = torch.round(x) @ torch.round(y)
    return torch.logsumexp(p + s.mask, 1), (p.to(torch.int64) * 1000003).sum(1).remainder(1009).float()


def statistics(s: Call, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    p = x @ y
    return p, torch.logsumexp(p, 1), *torch.var_mean(p, 1)


CASES: dict[str, Case] = {}

case = partial(add, CASES)

ODD = shapes((40, 100), (100, 45))
SMALL = shapes((40, 50), (50, 36))
MEDIUM = shapes((70, 50), (50, 90))
PLANES = [{"precision": "fp16"}, {"precision": "fp16", "descriptors": True, "promote": 64}]
TF32 = [{"precision": "tf32", **more} for more in ({}, {"packed": "ab"}, {"packed": "b", "descriptors": True})]
case("odd", mm, ODD, [*PLAIN, *SPLIT, {"precision": "tf32x3", "promote": 64}])
case("dependent launches", mm, ODD, [dict(SPLIT[0], dependent=True), {"splits": 3, "dependent": True}])
case("mixed magnitudes", lambda s, x, y: x @ y.T, shapes((70, 200), (90, 200), spread=True), [*PLAIN, *SPLIT], 5e-6)
case("persistent", mm, ODD, [dict(s, persistent=True) for s in BOTH])
INLINE: list[dict[str, Any]] = [{"precision": "fp16x3", "inline": s} for s in ("ab", "a", "b")]
case("in the loop", mm, ODD, [*INLINE, dict(INLINE[0], splits=3, promote=64, cat=True)])
case(
    "in the loop, mixed magnitudes",
    lambda s, x, y: x @ y.T,
    shapes((70, 200), (90, 200), spread=True),
    [INLINE[0], {"precision": "bf16x6", "inline": "ab"}],
    8e-6,
)
case("in the loop, batch", lambda s, x, y: torch.bmm(x, y.mT), shapes((3, 40, 50), (3, 36, 50)), INLINE[:1])
case(
    "in the loop, prologue",
    lambda s, x: functional.linear(functional.relu(x * 2 + 1), s.w),
    shapes((70, 100)),
    [dict(INLINE[1], packed="b"), dict(INLINE[0], packed="b", precision="fp16")],
    4e-3,
    w=(36, 100),
)
TMA: list[dict[str, Any]] = [{"precision": p, "inline": "ab", "descriptors": True} for p in ("fp16x3", "bf16x6")]
case("in the loop, descriptors", mm, shapes((72, 200), (200, 88)), TMA)
DEEP = {
    "precision": "bf16x3",
    "inline": "ab",
    "block_m": 16,
    "block_n": 16,
    "block_k": 256,
    "promote": 1024,
    "splits": 4,
}
case("in the loop, deep", mm, shapes((16, 70000), (70000, 16)), [DEEP], 3e-5)
case("one plane", mm, ODD, PLANES, 4e-3)
case("tf32", mm, ODD, TF32, 4e-3)
case("tf32 by descriptors", mm, shapes((72, 200), (200, 88)), [{"precision": "tf32", "descriptors": True}], 4e-3)
for scheme, limit in (("bf16x6", 4e-6), ("bf16x3", 1e-4)):
    case(
        scheme,
        mm,
        ODD,
        [{"precision": scheme, "descriptors": True}, {"precision": scheme, "cat": True, "promote": 64}],
        limit,
    )
case("left transposed", lambda s, x, y: x.T @ y, shapes((200, 70), (200, 90)), BOTH)
case("right transposed", lambda s, x, y: x @ y.T, shapes((70, 200), (90, 200)), BOTH)
case("both transposed", lambda s, x, y: x.T @ y.T, shapes((200, 70), (90, 200)), BOTH)
case("deep column", mm, shapes((16, 1200), (1200, 36)), BOTH)
case("batch", lambda s, x, y: torch.bmm(x, y), shapes((3, 40, 50), (3, 50, 36)), [*BOTH, *SPLIT])
case("batch of transposed", lambda s, x, y: x.mT @ y.mT, shapes((3, 50, 40), (3, 36, 50)), BOTH)
case("batch broadcast", mm, shapes((3, 20, 50), (50, 36)), BOTH, expect={"batch": 1, "m": 60})
case(
    "four dimensions",
    lambda s, x, y: torch.einsum("bijl,lk->bijk", x, y),
    shapes((2, 3, 10, 50), (50, 36)),
    BOTH,
    expect={"m": 60},
)
case("heads", heads, shapes((2, 20, 48), (2, 20, 48)), BOTH, expect={"batch": 6})
case(
    "split depth",
    lambda s, x, y: functional.relu(x @ y),
    shapes((40, 500), (500, 36)),
    [dict(s, splits=n) for s in BOTH for n in (2, 3)],
)
case(
    "many parts of the depth",
    mm,
    shapes((40, 1400), (1400, 36)),
    [{"precision": "ieee", "splits": 41}, {"precision": "ieee", "splits": 7}],
)
case("split depth, batch", mm, shapes((2, 40, 300), (2, 300, 36)), [dict(s, splits=3) for s in BOTH])
case(
    "linear gelu residual",
    lambda s, x, r: functional.gelu(functional.linear(x, s.w, s.b)) + r,
    shapes((70, 200), (70, 90)),
    [*BOTH, *(dict(s, packed="b") for s in BOTH), {"precision": "fp16x3", "packed": "b", "splits": 2}],
    w=(90, 200),
    b=(90,),
)
case(
    "linear on three dimensions",
    lambda s, x: torch.sigmoid(functional.linear(x, s.w, s.b)) * 2,
    shapes((3, 20, 50)),
    BOTH,
    w=(36, 50),
    b=(36,),
)
case("input again", lambda s, x: functional.linear(x, s.w) + x, shapes((40, 50)), BOTH, w=(50, 50))
PIECES = [dict(s, block_m=64, block_n=64, warps=1) for s in BOTH]
case("a piece beyond the last column", lambda s, x, y: functional.relu(x @ y), shapes((70, 50), (50, 32)), PIECES)
case("sum beside a piece beyond", lambda s, x, y: (x @ y).sum(1), shapes((70, 50), (50, 96)), PIECES, 3e-5)
case("with itself", lambda s, x: x @ x.T, shapes((40, 50)), BOTH)
case(
    "prologue",
    lambda s, x, y: functional.relu(x * 2 + 1) @ torch.sigmoid(y),
    shapes((70, 100), (100, 40)),
    [*BOTH, {"precision": "ieee", "packed": "ab"}],
)
case(
    "scalar",
    lambda s, x, y, c: (x @ y) * c,
    lambda: (torch.randn(40, 50), torch.randn(50, 36), 1.5),
    [*BOTH, {"precision": "ieee", "splits": 2}],
)
case("transposed output", lambda s, x, y: (x @ y).T.contiguous() * 2, SMALL, BOTH)
case("output twice", lambda s, x, y: (lambda p: (p, torch.tanh(p)))(x @ y), SMALL, BOTH, 4e-6)
case(
    "lower triangle", lambda s, x, y: torch.tril(x @ y), shapes((90, 50), (50, 90)), BOTH, expect={"triangle": "lower"}
)
case("upper triangle", lambda s, x, y: torch.triu(x @ y, 5), MEDIUM, BOTH, expect={"triangle": "upper"})
case(
    "row sum",
    lambda s, x: functional.linear(x, s.w, s.b).sum(1, keepdim=True) * 0.5,
    shapes((70, 50)),
    [*BOTH, {"precision": "ieee", "splits": 2}],
    3e-5,
    w=(90, 50),
    b=(90,),
)
case("row maximum and product", lambda s, x, y: (lambda p: (p, p.amax(1)))(x @ y), MEDIUM, BOTH)
case("logsumexp", lambda s, x, y: functional.gelu(torch.logsumexp(x @ y, 1, keepdim=True)), MEDIUM, BOTH)
case(
    "masked tiles, integers",
    masked_and_counted,
    shapes((70, 50), (50, 90)),
    PLAIN,
    4e-6,
    mask=torch.full((70, 90), float("-inf")).triu(1),
)
case("wide tiles, odd columns", statistics, shapes((20, 40), (40, 300)), [{"block_m": 16, "block_n": 256}], 4e-6)
case("column statistics", lambda s, x, y: (lambda p: (p, *torch.var_mean(p, 0)))(x @ y), MEDIUM, BOTH)
case("batch row minimum", lambda s, x, y: torch.bmm(x, y).amin(2), shapes((3, 40, 50), (3, 50, 36)), BOTH)
case("mean of all", lambda s, x, y: (x @ y).mean(), MEDIUM, BOTH, 1e-4)
case(
    "half",
    lambda s, x: functional.relu(functional.linear(x, s.w, s.b)),
    shapes((70, 200), dtype=FP16),
    [*HALF, {"packed": "b", "descriptors": True}, {"splits": 2}],
    2e-3,
    w=(96, 200, FP16),
    b=(96, FP16),
)
case("bfloat16", mm, shapes((72, 200), (200, 88), dtype=BF16), [*HALF, {"packed": "ab"}], 1.6e-2)
case("bfloat16 batch", mm, shapes((3, 40, 48), (3, 48, 56), dtype=BF16), HALF, 1.6e-2)
UNALIGNED = [{"packed": "ab", "descriptors": True}, {"packed": "ab"}, {"packed": "b", "descriptors": True}]
case("half, unaligned", mm, shapes((70, 75), (75, 37), dtype=BF16), UNALIGNED, 1.6e-2)
case(
    "half, unaligned batch and weight",
    lambda s, x: functional.relu(functional.linear(x, s.w)),
    shapes((2, 30, 75), dtype=FP16),
    [UNALIGNED[0]],
    2e-3,
    w=(37, 75, FP16),
)
case("half transposed", lambda s, x, y: x.T @ y.T, shapes((200, 72), (88, 200), dtype=FP16), HALF, 2e-3)
case(
    "half prologue",
    lambda s, x, y: functional.relu(x) @ y,
    shapes((70, 50), (50, 36), dtype=FP16),
    [{}, {"packed": "a", "descriptors": True}],
    2e-3,
)

case("half on Hopper", mm, shapes((200, 96), (96, 72), dtype=BF16), [FLAT, dict(FLAT, flat=False)], 1.6e-2)
case(
    "half on Hopper, epilogue",
    lambda s, x, r: (lambda p: (p * r, p.sum(1)))(functional.gelu(functional.linear(x, s.w, s.b))),
    shapes((150, 96), (150, 1), dtype=FP16),
    [dict(FLAT, block_n=64, warps=1), dict(FLAT, splits=2)],
    2e-3,
    w=(72, 96, FP16),
    b=(72, FP16),
)
case(
    "half on Hopper, batch",
    lambda s, x, y: (x @ y.mT).relu(),
    shapes((3, 150, 64), (3, 40, 64), dtype=BF16),
    [FLAT],
    1.6e-2,
)
case("half on Hopper, odd", mm, shapes((70, 75), (75, 37), dtype=FP16), [dict(FLAT, packed="ab"), FLAT], 2e-3)
case("stored by descriptors", mm, shapes((40, 100), (100, 44)), [dict(FLAT, flat=False), FLAT])

REFUSED: dict[str, tuple[Callable[..., Any], Make, str]] = {
    "two products": (lambda s, x, y: (x @ y) @ y, shapes((20, 30), (30, 30)), "2 matrix products"),
    "softmax": (lambda s, x, y: torch.softmax(x @ y, 1), shapes((20, 30), (30, 40)), "needed again"),
    "reduced operand": (
        lambda s, x, y: (x - x.amax(1, keepdim=True)) @ y,
        shapes((20, 30), (30, 40)),
        "inside an operand",
    ),
    "part of the columns": (lambda s, x, y: (x @ y).view(20, 8, 5).sum(2), shapes((20, 30), (30, 40)), "not over all"),
    "argmax": (lambda s, x, y: (x @ y).argmax(1), shapes((20, 30), (30, 40)), "argmax"),
    "double": (lambda s, x, y: x @ y, shapes((20, 30), (30, 40), dtype=torch.float64), "float64"),
}


def compare_shared() -> None:
    """Print the shared memory of the product kernel beside the formula's, with the first schedule of each sweep."""
    from qimeng.coder.template.families.gemm.host import print_gemm
    from qimeng.coder.template.families.gemm.sweeps import default_schedule, schedule_for_precision, shared_bytes
    from qimeng.device import device_named

    built: list[Any] = []
    fake_driver(built)
    device = device_named("h200")
    for dtype, precisions in (
        (torch.float32, ("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6", "fp16x3", "fp16")),
        (torch.bfloat16, ("ieee",)),
    ):

        def make(dtype: torch.dtype = dtype) -> torch.nn.Module:
            with torch.device("meta"):
                return Call(
                    lambda module, x: functional.gelu(functional.linear(x, module.w, module.b)),
                    w=torch.empty(4096, 4096, dtype=dtype),
                    b=torch.empty(4096, dtype=dtype),
                )

        def inputs(dtype: torch.dtype = dtype) -> tuple[torch.Tensor]:
            return (torch.empty(4096, 4096, dtype=dtype, device="meta"),)

        graph, region, plan = planned(make, inputs)
        start = default_schedule(plan, device, "default")
        for schedule in [start, *(s for p in precisions for s in schedule_for_precision(plan, start, p, device)[:1])]:
            built.clear()
            compiled(make(), inputs(), graph, region, print_gemm(plan, schedule, "g"))
            shared = next(k.metadata.shared for k in built if k.metadata.name == "g_product")
            print(
                json.dumps({"schedule": str(schedule), "shared": shared, "formula": shared_bytes(plan, schedule)}),
                flush=True,
            )


QUICK = (
    "odd",
    "in the loop, deep",
    "half, unaligned",
    "heads",
    "split depth, batch",
    "linear gelu residual",
    "wide tiles, odd columns",
    "lower triangle",
    "bfloat16 batch",
    "half on Hopper, epilogue",
    "half on Hopper, batch",
)


QUICK_TO_COMPILE = ("batch of transposed", "split depth", "half")

OTHERS_TO_COMPILE = (
    "persistent",
    "dependent launches",
    "in the loop",
    "in the loop, descriptors",
    "one plane",
    "tf32",
    "bf16x3",
    "left transposed",
    "a piece beyond the last column",
    "upper triangle",
    "row sum",
    "column statistics",
    "bfloat16",
    "half prologue",
    "half on Hopper",
    "half on Hopper, odd",
)
"""Chosen so that they differ in their options, in how operands lie and in what follows the product. Every other one is
compiled for sm_80 too, which has no dependent launches."""


def test_quick_cases_in_the_interpreter() -> None:
    check(CASES, rows(__file__, "interpret", *QUICK))


@pytest.mark.slow
def test_other_cases_in_the_interpreter() -> None:
    """Every third one, for time's sake; others are compiled below, and a GPU runs all of them."""
    check(CASES, rows(__file__, "interpret", *[name for name in CASES if name not in QUICK][::3]))


def test_quick_cases_cross_compile() -> None:
    check(CASES, rows(__file__, "compile", *QUICK_TO_COMPILE))


@pytest.mark.slow
def test_other_cases_cross_compile() -> None:
    check(CASES, rows(__file__, "compile", *OTHERS_TO_COMPILE))


@pytest.mark.slow
def test_shared_memory_is_what_triton_takes() -> None:
    for row in rows(__file__, "shared"):
        assert row["formula"] == pytest.approx(row["shared"], rel=0.1), row


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_case_on_the_gpu(name: str) -> None:
    for number, changes in enumerate(CASES[name].schedules):
        found = measured(CASES[name], number, changes, "cuda")
        assert found["error"] <= found["limit"], (changes, found)


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name: str) -> None:
    from qimeng.family import Unsupported

    function, inputs, reason = REFUSED[name]
    with pytest.raises(Unsupported, match=reason):
        planned(lambda: Call(function), inputs)


if __name__ == "__main__":
    how, *names = sys.argv[1:]
    if how == "interpret":
        interpret(CASES, names, QUICK)
    elif how == "compile":
        compile_all(CASES, names)
    else:
        compare_shared()
