"""Computations with a product, the schedules to try, and what their kernels give in a process of their own.

The interpreter must be chosen before triton is imported, and the fake driver must be the only one, so the cases run in
two processes of their own (a file of cases as a script) that print one JSON row a case.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from tests.interpreted import rows_of

FP16, BF16 = torch.float16, torch.bfloat16
FLAT: dict[str, Any] = {"descriptors": True, "persistent": True, "flat": True, "stores": True}
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


def mm(s: Call, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x @ y


def add(
    cases: dict[str, Case],
    name: str,
    function: Callable[..., Any],
    inputs: Make,
    schedules: list[dict[str, Any]],
    limit: float = 0.0,
    expect: dict[str, Any] | None = None,
    **parameters: Any,
) -> None:
    """Add a case of `function` to `cases`."""
    cases[name] = Case(lambda: Call(function, **parameters), inputs, schedules, limit, expect or {})


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


def interpret(cases: dict[str, Case], names: list[str], quick: Collection[str]) -> None:
    """Run cases in the interpreter and print their errors; first or last schedule only of those that are not quick."""
    from qimeng.envs.estimate.interpreter import mend

    mend()
    for place, name in enumerate(names or cases):
        one = (len(cases[name].schedules) - 1) * (place % 2)
        for number, changes in enumerate(cases[name].schedules):
            if name not in quick and number != one:
                continue
            row: dict[str, Any] = {"case": name, "schedule": changes}
            try:
                row |= measured(cases[name], number, changes)
            except Exception as error:  # noqa: BLE001 - one case's failure, whatever it is, must not hide the others
                row["failure"] = f"{type(error).__name__}: {error}"
                row["trace"] = traceback.format_exc()
            print(json.dumps(row), flush=True)


def printed(case: Case, number: int, changes: dict[str, Any]) -> Any:
    """(graph, region, plan, implementation) of a case with changes to a small schedule."""
    from qimeng.coder.template.families.gemm.host import print_gemm
    from qimeng.coder.template.families.gemm.schedule import GemmSchedule

    base = GemmSchedule(block_m=32, block_n=32, block_k=32, group_m=2, warps=4, stages=2)
    graph, region, plan = case.planned
    return graph, region, plan, print_gemm(plan, base.but(**changes), f"g{number}")


def measured(case: Case, number: int, changes: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """The largest error of a case, its limit, and what the plan says of it."""
    from qimeng.program.program import load_source

    graph, region, plan, impl = printed(case, number, changes)
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


def fake_driver(built: list[Any]) -> Any:
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


def compiled(module: torch.nn.Module, inputs: tuple[Any, ...], graph: Any, region: Any, impl: Any) -> None:
    """Launch a kernel once, which only compiles under `fake_driver`."""
    from qimeng.program.program import load_source

    loaded = load_source(HEADER + impl.source, "compiled")
    given = arguments(graph, region, module, inputs)
    buffers = getattr(loaded, impl.prepare)(*[given[i] for i in impl.prepare_inputs]) if impl.prepare else ()
    getattr(loaded, impl.entry)(*given, *buffers)


def compile_all(cases: dict[str, Case], names: list[str]) -> None:
    """Cross-compile cases: the last schedule for sm_90; of every other, the first without descriptors for sm_80."""
    built: list[Any] = []
    fake = fake_driver(built)
    for place, name in enumerate(names or cases):
        case = cases[name]
        older = next((i for i, changes in enumerate(case.schedules) if not changes.get("descriptors")), -1)
        for number, changes in enumerate(case.schedules):
            for arch in (90, 80):
                if number != (len(case.schedules) - 1 if arch == 90 else older if place % 2 == 0 else -1):
                    continue
                fake.target = type(fake.target)("cuda", arch, 32)
                row: dict[str, Any] = {"case": name, "schedule": changes, "arch": arch}
                try:
                    graph, region, _, impl = printed(case, number, changes)
                    compiled(case.module(), case.inputs(), graph, region, impl)
                except Exception as error:  # noqa: BLE001 - one case's failure, whatever it is, must not hide the others
                    row["failure"] = f"{type(error).__name__}: {error}"
                    row["trace"] = traceback.format_exc()
                print(json.dumps(row), flush=True)


def as_script(cases: dict[str, Case], infinite: Callable[[], None]) -> None:
    """What a file of cases does as a script: run or compile cases, those named or all; or `infinite`."""
    how, *names = sys.argv[1:]
    if how == "infinite":
        infinite()
    elif how == "interpret":
        interpret(cases, names, quick=cases)
    else:
        compile_all(cases, names)


def infinities(case: Case, number: int, changes: dict[str, Any], at: tuple[int, ...]) -> None:
    """Print whether results are finite where PyTorch's are, of an input that is infinite `at` a position."""
    from qimeng.program.program import load_source

    graph, region, _, impl = printed(case, number, changes)
    module, (x,) = case.module(), case.inputs()
    x[(slice(None), slice(None), *at)] = float("inf")
    y = module(x)
    loaded = load_source(HEADER + impl.source, f"infinite_{number}")
    given = arguments(graph, region, module, (x,))
    made = getattr(loaded, impl.prepare)(*[given[i] for i in impl.prepare_inputs]) if impl.prepare else ()
    (found,) = getattr(loaded, impl.entry)(*given, *made)
    same = torch.equal(found.isfinite(), y.isfinite())
    print(json.dumps({"same": same, "infinite": int((~y.isfinite()).sum())}), flush=True)


def rows(file: str, how: str, *names: str) -> list[dict[str, Any]]:
    """What a file of cases prints when it runs as a script in a process of its own."""
    return rows_of(file, how, *names, timeout=900, interpret=how == "interpret")


def check(cases: dict[str, Case], found: list[dict[str, Any]]) -> None:
    """Every row is within its limit and recognised what the case expects."""
    assert found
    for row in found:
        assert "failure" not in row, f"{row['case']} {row['schedule']}: {row['failure']}\n{row['trace']}"
        if "error" in row:
            assert row["error"] <= row["limit"], row
            facts = cases[row["case"]].expect
            assert {k: row["facts"][k] for k in facts} == facts, row
