"""The GEMM family in Triton's interpreter and cross-compiled, on small and odd shapes.

The interpreter must be chosen before triton is imported, and the fake driver must be the only one, so the cases run in
two processes of their own (this file as a script) that print one JSON row a case.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.interpreted import rows_of

Make = Callable[[], tuple[Any, ...]]


class Call(torch.nn.Module):
    """A function of the inputs and of named parameters."""

    def __init__(self, function: Callable[..., Any], **parameters: Any):
        super().__init__()
        self.function = function
        for name, shape in parameters.items():
            if isinstance(shape, tuple):
                sizes = [s for s in shape if isinstance(s, int)]
                value = torch.randn(sizes).to(next((s for s in shape if isinstance(s, torch.dtype)), torch.float32))
            else:
                value = shape
            self.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


@dataclass
class Case:
    """A computation, its inputs and the schedules to try: changes to a small schedule."""

    module: Callable[[], torch.nn.Module]
    inputs: Make
    schedules: list[dict[str, Any]]
    limit: float = 0.0
    expect: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def planned(self) -> Any:
        """What `planned` gives, for all its schedules."""
        return planned(self.module, self.inputs)


def shapes(*sizes: tuple[int, ...], dtype: torch.dtype = torch.float32, spread: bool = False) -> Make:
    """Normal inputs; `spread` gives every row a magnitude of its own."""

    def make() -> tuple[torch.Tensor, ...]:
        found = []
        for size in sizes:
            x = torch.randn(size)
            if spread:
                x = x * 10 ** torch.empty(*size[:-1], 1).uniform_(-6, 6)
            found.append(x.to(dtype))
        return tuple(found)

    return make


SPLIT: list[dict[str, Any]] = [
    {"precision": "fp16x3", "descriptors": d, "cat": c, "promote": p}
    for d in (True, False)
    for c, p in ((True, 64), (False, 0), (False, 32), (True, 0))
]
PLAIN: list[dict[str, Any]] = [{"precision": "ieee"}]
BOTH: list[dict[str, Any]] = [*PLAIN, {"precision": "fp16x3", "descriptors": True, "cat": True, "promote": 64}]
HALF: list[dict[str, Any]] = [{}, {"descriptors": True}]
FLAT: dict[str, Any] = {"descriptors": True, "persistent": True, "flat": True, "stores": True}
FP16, BF16 = torch.float16, torch.bfloat16


def mm(s: Call, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y


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


def case(
    name: str,
    function: Callable[..., Any],
    inputs: Make,
    schedules: list[dict[str, Any]],
    limit: float = 0.0,
    expect: dict[str, Any] | None = None,
    **parameters: Any,
) -> None:
    CASES[name] = Case(lambda: Call(function, **parameters), inputs, schedules, limit, expect or {})


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


def planned(case: Any, inputs: Make) -> Any:
    """(graph, region, plan) of a module."""
    from qimeng.coder.template.families.gemm.plan import plan_gemm
    from qimeng.graph.capture import capture
    from qimeng.graph.region import make_region

    graph = capture(case, inputs)
    region = make_region(graph, [n.name for n in graph.ops()])
    return graph, region, plan_gemm(region)


def arguments(graph: Any, region: Any, module: torch.nn.Module, inputs: tuple[Any, ...]) -> list[Any]:
    """The region's inputs as tensors."""
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    nodes = [graph.nodes[v.node] for v in region.inputs]
    return [held[n.target] if n.kind in ("parameter", "buffer") else inputs[int(n.target)] for n in nodes]


HEADER = "import torch\nimport triton\nimport triton.language as tl\n\n"


def interpret(names: list[str]) -> None:
    """Run cases in the interpreter and print their errors; first or last schedule only of those that are not quick."""
    from qimeng.envs.estimate.interpreter import mend

    mend()
    for place, name in enumerate(names or CASES):
        one = (len(CASES[name].schedules) - 1) * (place % 2)
        for number, changes in enumerate(CASES[name].schedules):
            if name not in QUICK and number != one:
                continue
            row: dict[str, Any] = {"case": name, "schedule": changes}
            try:
                row |= _measure(CASES[name], number, changes)
            except Exception as error:  # noqa: BLE001 - one case's failure, whatever it is, must not hide the others
                row["failure"] = f"{type(error).__name__}: {error}"
                row["trace"] = traceback.format_exc()
            print(json.dumps(row), flush=True)


def _printed(case: Case, number: int, changes: dict[str, Any]) -> Any:
    from qimeng.coder.template.families.gemm.host import print_gemm
    from qimeng.coder.template.families.gemm.schedule import GemmSchedule

    base = GemmSchedule(block_m=32, block_n=32, block_k=32, group_m=2, warps=4, stages=2)
    graph, region, plan = case.planned
    return graph, region, plan, print_gemm(plan, base.but(**changes), f"g{number}")


def _measure(case: Case, number: int, changes: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    from qimeng.program.program import load_source

    graph, region, plan, impl = _printed(case, number, changes)
    torch.manual_seed(1)
    module = case.module().to(device)
    inputs = tuple(x.to(device) if isinstance(x, torch.Tensor) else x for x in case.inputs())
    loaded = load_source(HEADER + impl.source, f"case_{number}")
    given = arguments(graph, region, module, inputs)
    buffers = getattr(loaded, impl.prepare)(*[given[i] for i in impl.prepare_inputs]) if impl.prepare else ()
    got = getattr(loaded, impl.entry)(*given, *buffers)
    reference = module.double()(*[x.double() if isinstance(x, torch.Tensor) else x for x in inputs])
    reference = reference if isinstance(reference, tuple) else (reference,)
    errors = []
    for y, v in zip(got, region.outputs, strict=True):
        r = reference[graph.outputs.index(v)]
        meta = graph.meta(v)
        assert (tuple(y.shape), y.stride(), str(y.dtype)) == (meta.shape, meta.stride, f"torch.{meta.dtype}")
        assert not y.isnan().any(), "NaN"
        rms = r.pow(2).mean(-1, keepdim=True).sqrt() if r.dim() else r.abs()
        errors.append(((y.double() - r).abs() / (r.abs() + rms).clamp_min(1e-30)).max().item())
    batch, m, n, k = plan.shape
    facts = {"batch": batch, "m": m, "n": n, "k": k, "triangle": plan.triangle.kind if plan.triangle else None}
    return {"error": max(errors), "limit": case.limit or 1.9e-6 + 6e-8 * k**0.5, "facts": facts}


def _fake_driver(built: list[Any]) -> Any:
    """A driver of a GPU that is not there, whose launches only compile; gives the class, to choose the target."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Fake:
        target = GPUTarget("cuda", 90, 32)

        def get_current_target(self) -> GPUTarget:
            return self.target

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:
            return 0

    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        built.append(original(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = run
    driver.set_active(Fake())
    return Fake


def _compile(module: torch.nn.Module, inputs: tuple[Any, ...], graph: Any, region: Any, impl: Any) -> None:
    from qimeng.program.program import load_source

    loaded = load_source(HEADER + impl.source, "compiled")
    given = arguments(graph, region, module, inputs)
    buffers = getattr(loaded, impl.prepare)(*[given[i] for i in impl.prepare_inputs]) if impl.prepare else ()
    getattr(loaded, impl.entry)(*given, *buffers)


def compile_all(names: list[str]) -> None:
    """Cross-compile cases: the last schedule for sm_90; of every other, the first without descriptors for sm_80."""
    built: list[Any] = []
    fake = _fake_driver(built)
    for place, name in enumerate(names or CASES):
        case = CASES[name]
        older = next((i for i, changes in enumerate(case.schedules) if not changes.get("descriptors")), -1)
        for number, changes in enumerate(case.schedules):
            for arch in (90, 80):
                if number != (len(case.schedules) - 1 if arch == 90 else older if place % 2 == 0 else -1):
                    continue
                fake.target = type(fake.target)("cuda", arch, 32)
                row: dict[str, Any] = {"case": name, "schedule": changes, "arch": arch}
                try:
                    graph, region, plan, impl = _printed(case, number, changes)
                    _compile(case.module(), case.inputs(), graph, region, impl)
                except Exception as error:  # noqa: BLE001 - one case's failure, whatever it is, must not hide the others
                    row["failure"] = f"{type(error).__name__}: {error}"
                    row["trace"] = traceback.format_exc()
                print(json.dumps(row), flush=True)


def compare_shared(names: list[str]) -> None:
    """Print the shared memory of the product kernel beside the formula's, with the first schedule of each sweep."""
    from qimeng.coder.template.families.gemm.host import print_gemm
    from qimeng.coder.template.families.gemm.sweeps import default_schedule, schedule_for_precision, shared_bytes
    from qimeng.device import device_named

    built: list[Any] = []
    _fake_driver(built)
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
            _compile(make(), inputs(), graph, region, print_gemm(plan, schedule, "g"))
            shared = next(k.metadata.shared for k in built if k.metadata.name == "g_product")
            print(
                json.dumps({"schedule": str(schedule), "shared": shared, "formula": shared_bytes(plan, schedule)}),
                flush=True,
            )


def rows(how: str, *names: str) -> list[dict[str, Any]]:
    """What this file prints when it runs as a script in a process of its own."""
    return rows_of(__file__, how, *names, timeout=900, interpret=how == "interpret")


def check(found: list[dict[str, Any]]) -> None:
    """Every row is within its limit and recognised what the case expects."""
    assert found
    for row in found:
        assert "failure" not in row, f"{row['case']} {row['schedule']}: {row['failure']}\n{row['trace']}"
        if "error" in row:
            assert row["error"] <= row["limit"], row
            facts = CASES[row["case"]].expect
            assert {k: row["facts"][k] for k in facts} == facts, row


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
    check(rows("interpret", *QUICK))


@pytest.mark.slow
def test_other_cases_in_the_interpreter() -> None:
    """Every third one, for time's sake; others are compiled below, and a GPU runs all of them."""
    check(rows("interpret", *[name for name in CASES if name not in QUICK][::3]))


def test_quick_cases_cross_compile() -> None:
    check(rows("compile", *QUICK_TO_COMPILE))


@pytest.mark.slow
def test_other_cases_cross_compile() -> None:
    check(rows("compile", *OTHERS_TO_COMPILE))


@pytest.mark.slow
def test_shared_memory_is_what_triton_takes() -> None:
    for row in rows("shared"):
        assert row["formula"] == pytest.approx(row["shared"], rel=0.1), row


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_case_on_the_gpu(name: str) -> None:
    for number, changes in enumerate(CASES[name].schedules):
        measured = _measure(CASES[name], number, changes, "cuda")
        assert measured["error"] <= measured["limit"], (changes, measured)


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name: str) -> None:
    from qimeng.family import Unsupported

    function, inputs, reason = REFUSED[name]
    with pytest.raises(Unsupported, match=reason):
        planned(lambda: Call(function), inputs)


if __name__ == "__main__":
    {"compile": compile_all, "interpret": interpret, "shared": compare_shared}[sys.argv[1]](sys.argv[2:])
