"""The GEMM family in Triton's interpreter and cross-compiled, on small and odd shapes.

The interpreter must be chosen before triton is imported, and the fake driver must be the only one, so the cases run in
two processes of their own (this file as a script) that print one JSON row a case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

Make = Callable[[], tuple[Any, ...]]


class Call(torch.nn.Module):
    """A function of the inputs and of named parameters."""

    def __init__(self, function: Callable[..., Any], **parameters: Any):
        super().__init__()
        self.function = function
        for name, shape in parameters.items():
            value = torch.randn(shape) if isinstance(shape, tuple) else shape
            self.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


@dataclass
class Case:
    """A computation, its inputs and the schedules to try; each is a dict of changes to the first of a small schedule."""

    module: Callable[[], torch.nn.Module]
    inputs: Make
    schedules: list[dict[str, Any]]
    limit: float = 0.0
    expect: dict[str, Any] = field(default_factory=dict)


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


SPLIT = [
    {"precision": "fp16x3", "descriptors": d, "cat": c, "promote": p}
    for d in (True, False)
    for c, p in ((True, 2), (False, 0), (False, 1), (True, 0))
]
PLAIN = [{"precision": "ieee"}]
BOTH = [*PLAIN, {"precision": "fp16x3", "descriptors": True, "cat": True, "promote": 2}]
mm = lambda s, x, y: x @ y  # noqa: E731

CASES: dict[str, Case] = {
    "odd": Case(lambda: Call(mm), shapes((70, 200), (200, 90)), [*PLAIN, *SPLIT, {"precision": "tf32x3", "promote": 2}]),
    "mixed magnitudes": Case(lambda: Call(lambda s, x, y: x @ y.T), shapes((70, 200), (90, 200), spread=True), [*PLAIN, *SPLIT]),
    "persistent": Case(lambda: Call(mm), shapes((70, 200), (200, 90)), [dict(s, persistent=True) for s in BOTH]),
    "one plane": Case(lambda: Call(mm), shapes((70, 200), (200, 90)), [{"precision": "fp16"}, {"precision": "fp16", "descriptors": True, "promote": 2}], 4e-3),
    "tf32": Case(lambda: Call(mm), shapes((70, 200), (200, 90)), [{"precision": "tf32"}, {"precision": "tf32", "packed": "ab"}, {"precision": "tf32", "packed": "b", "descriptors": True}], 4e-3),
    "three planes": Case(lambda: Call(mm), shapes((70, 200), (200, 90)), [{"precision": "bf16x6", "descriptors": True}, {"precision": "bf16x6", "cat": True, "promote": 2}]),
    "two bf16 planes": Case(lambda: Call(mm), shapes((70, 200), (200, 90)), [{"precision": "bf16x3", "descriptors": True}, {"precision": "bf16x3", "cat": True}], 1e-4),
    "left transposed": Case(lambda: Call(lambda s, x, y: x.T @ y), shapes((200, 70), (200, 90)), BOTH),
    "right transposed": Case(lambda: Call(lambda s, x, y: x @ y.T), shapes((70, 200), (90, 200)), BOTH),
    "both transposed": Case(lambda: Call(lambda s, x, y: x.T @ y.T), shapes((200, 70), (90, 200)), BOTH),
    "deep column": Case(lambda: Call(mm), shapes((16, 600), (600, 32)), BOTH),
    "batch": Case(lambda: Call(lambda s, x, y: torch.bmm(x, y)), shapes((3, 40, 50), (3, 50, 36)), [*BOTH, *SPLIT]),
    "batch of transposed": Case(lambda: Call(lambda s, x, y: torch.matmul(x.transpose(1, 2), y.transpose(1, 2))), shapes((3, 50, 40), (3, 36, 50)), BOTH),
    "batch broadcast": Case(lambda: Call(mm), shapes((3, 20, 50), (50, 36)), BOTH, expect={"batch": 1, "m": 60}),
    "four dimensions": Case(lambda: Call(lambda s, x, y: torch.einsum("bijl,lk->bijk", x, y)), shapes((2, 3, 10, 50), (50, 36)), BOTH, expect={"m": 60}),
    "heads": Case(lambda: Call(lambda s, x, y: x.view(2, 20, 3, 16).transpose(1, 2) @ y.view(2, 20, 3, 16).permute(0, 2, 3, 1)), shapes((2, 20, 48), (2, 20, 48)), BOTH, expect={"batch": 6}),
    "split depth": Case(lambda: Call(lambda s, x, y: functional.relu(x @ y)), shapes((40, 500), (500, 36)), [dict(s, splits=n) for s in BOTH for n in (2, 3)]),
    "split depth, batch": Case(lambda: Call(mm), shapes((2, 40, 300), (2, 300, 36)), [dict(s, splits=3) for s in BOTH]),
    "linear gelu residual": Case(lambda: Call(lambda s, x, r: functional.gelu(functional.linear(x, s.w, s.b)) + r, w=(90, 200), b=(90,)), shapes((70, 200), (70, 90)), [*BOTH, *(dict(s, packed="b") for s in BOTH), {"precision": "fp16x3", "packed": "b", "splits": 2}]),
    "linear on three dimensions": Case(lambda: Call(lambda s, x: torch.sigmoid(functional.linear(x, s.w, s.b)) * 2, w=(36, 50), b=(36,)), shapes((3, 20, 50)), BOTH),
    "input again": Case(lambda: Call(lambda s, x: functional.linear(x, s.w) + x, w=(50, 50)), shapes((40, 50)), BOTH),
    "with itself": Case(lambda: Call(lambda s, x: x @ x.T), shapes((40, 50)), BOTH),
    "prologue": Case(lambda: Call(lambda s, x, y: functional.relu(x * 2 + 1) @ torch.sigmoid(y)), shapes((70, 100), (100, 40)), [*BOTH, {"precision": "ieee", "packed": "ab"}]),
    "scalar": Case(lambda: Call(lambda s, x, y, c: (x @ y) * c), lambda: (torch.randn(40, 50), torch.randn(50, 36), 1.5), [*BOTH, {"precision": "ieee", "splits": 2}]),
    "transposed output": Case(lambda: Call(lambda s, x, y: (x @ y).T.contiguous() * 2), shapes((40, 50), (50, 36)), BOTH),
    "output twice": Case(lambda: Call(lambda s, x, y: (lambda p: (p, torch.tanh(p)))(x @ y)), shapes((40, 50), (50, 36)), BOTH, 4e-6),
    "lower triangle": Case(lambda: Call(lambda s, x, y: torch.tril(x @ y)), shapes((90, 50), (50, 90)), BOTH, expect={"triangle": "lower"}),
    "upper triangle": Case(lambda: Call(lambda s, x, y: torch.triu(x @ y, 5)), shapes((90, 50), (50, 70)), BOTH, expect={"triangle": "upper"}),
    "row sum": Case(lambda: Call(lambda s, x: functional.linear(x, s.w, s.b).sum(1, keepdim=True) * 0.5, w=(90, 50), b=(90,)), shapes((70, 50)), [*BOTH, {"precision": "ieee", "splits": 2}], 3e-5),
    "row maximum and product": Case(lambda: Call(lambda s, x, y: (lambda p: (p, p.amax(1)))(x @ y)), shapes((70, 50), (50, 90)), BOTH),
    "logsumexp": Case(lambda: Call(lambda s, x, y: functional.gelu(torch.logsumexp(x @ y, 1, keepdim=True))), shapes((70, 50), (50, 90)), BOTH),
    "column statistics": Case(lambda: Call(lambda s, x, y: (lambda p: (p, *torch.var_mean(p, 0)))(x @ y)), shapes((70, 50), (50, 90)), BOTH),
    "batch row minimum": Case(lambda: Call(lambda s, x, y: torch.bmm(x, y).amin(2)), shapes((3, 40, 50), (3, 50, 36)), BOTH),
    "mean of all": Case(lambda: Call(lambda s, x, y: (x @ y).mean()), shapes((70, 50), (50, 90)), BOTH, 1e-4),
    "half": Case(lambda: Call(lambda s, x: functional.relu(functional.linear(x, s.w, s.b)), w=torch.randn(96, 200).half(), b=torch.randn(96).half()), shapes((70, 200), dtype=torch.float16), [{}, {"descriptors": True}, {"packed": "b", "descriptors": True}, {"splits": 2}], 2e-3),
    "bfloat16": Case(lambda: Call(mm), shapes((72, 200), (200, 88), dtype=torch.bfloat16), [{}, {"descriptors": True}, {"packed": "ab"}], 1.6e-2),
    "bfloat16 batch": Case(lambda: Call(mm), shapes((3, 40, 48), (3, 48, 56), dtype=torch.bfloat16), [{}, {"descriptors": True}], 1.6e-2),
    "half transposed": Case(lambda: Call(lambda s, x, y: x.T @ y.T), shapes((200, 72), (88, 200), dtype=torch.float16), [{}, {"descriptors": True}], 2e-3),
    "half prologue": Case(lambda: Call(lambda s, x, y: functional.relu(x) @ y), shapes((70, 50), (50, 36), dtype=torch.float16), [{}, {"packed": "a", "descriptors": True}], 2e-3),
}  # fmt: skip

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
    """(graph, region, nest, loads, plan) of a module."""
    from qimeng.coder.template.gemm_plan import plan_gemm
    from qimeng.coder.template.sources import nest_of
    from qimeng.graph.capture import capture
    from qimeng.graph.region import make_region

    graph = capture(case, inputs)
    region = make_region(graph, [n.name for n in graph.ops()])
    nest, loads = nest_of(region)
    return graph, region, nest, loads, plan_gemm(region, nest, loads)


def arguments(graph: Any, region: Any, module: torch.nn.Module, inputs: tuple[Any, ...]) -> list[Any]:
    """The region's inputs as tensors."""
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    nodes = [graph.nodes[v.node] for v in region.inputs]
    return [held[n.target] if n.kind in ("parameter", "buffer") else inputs[int(n.target)] for n in nodes]


HEADER = "import torch\nimport triton\nimport triton.language as tl\n\n"


def interpret(names: list[str]) -> None:
    """Run every case in the interpreter and print its errors."""
    _mend_bf16_dot()
    for name in names or CASES:
        for number, changes in enumerate(CASES[name].schedules):
            row: dict[str, Any] = {"case": name, "schedule": changes}
            try:
                row |= _measure(CASES[name], number, changes)
            except Exception as error:  # one case's failure, whatever it is, must not hide the others
                row["failure"] = f"{type(error).__name__}: {error}"
                row["trace"] = traceback.format_exc()
            print(json.dumps(row), flush=True)


def _printed(case: Case, number: int, changes: dict[str, Any]) -> Any:
    from qimeng.coder.template.gemm import print_gemm
    from qimeng.program.schedule import Schedule

    base = Schedule("gemm", block_m=32, block_n=32, block_k=32, group_m=2, warps=4, stages=2)
    graph, region, nest, loads, plan = planned(case.module, case.inputs)
    return graph, region, plan, print_gemm(region, nest, loads, plan, base.but(**changes), f"g{number}")


def _measure(case: Case, number: int, changes: dict[str, Any]) -> dict[str, Any]:
    from qimeng.program.program import load_source

    graph, region, plan, impl = _printed(case, number, changes)
    torch.manual_seed(1)
    module, inputs = case.module(), case.inputs()
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
        errors.append(((y.double() - r).abs() / (r.abs() + rms)).max().item())
    batch, m, n, k = plan.shape
    facts = {"batch": batch, "m": m, "n": n, "k": k, "triangle": plan.triangle.kind if plan.triangle else None}
    return {"error": max(errors), "limit": case.limit or 1.9e-6 + 6e-8 * k**0.5, "facts": facts}


def _mend_bf16_dot() -> None:
    """Triton's interpreter multiplies bf16 as integers; give it floats."""
    import numpy as np
    from triton.runtime import interpreter

    original = interpreter.InterpreterBuilder.create_dot

    def widen(x: Any) -> Any:
        if x.dtype.scalar.is_bf16():
            data = (x.data.astype(np.uint32) << 16).view(np.float32)
            return interpreter.TensorHandle(data, interpreter.tl.float32)
        return x

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return original(self, widen(a), widen(b), d, *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def compile_all(names: list[str]) -> None:
    """Cross-compile every case's kernels for sm_90, and those without descriptors for sm_80, and print what they take."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from qimeng.program.program import load_source

    class Fake:
        """A driver of a GPU that is not there."""

        target = GPUTarget("cuda", 90, 32)

        def get_current_target(self) -> GPUTarget:
            return self.target

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:
            return 0

    built: list[Any] = []
    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        built.append(original(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = run
    driver.set_active(Fake())
    for name in names or CASES:
        for number, changes in enumerate(CASES[name].schedules):
            for arch in (90, 80):
                if arch == 80 and changes.get("descriptors"):
                    continue
                Fake.target = GPUTarget("cuda", arch, 32)
                row: dict[str, Any] = {"case": name, "schedule": changes, "arch": arch}
                built.clear()
                try:
                    graph, region, plan, impl = _printed(CASES[name], number, changes)
                    module, inputs = CASES[name].module(), CASES[name].inputs()
                    loaded = load_source(HEADER + impl.source, f"case_{number}_{arch}")
                    given = arguments(graph, region, module, inputs)
                    buffers = (
                        getattr(loaded, impl.prepare)(*[given[i] for i in impl.prepare_inputs]) if impl.prepare else ()
                    )
                    getattr(loaded, impl.entry)(*given, *buffers)
                    row["shared"] = {k.metadata.name: k.metadata.shared for k in built}
                except Exception as error:  # one case's failure, whatever it is, must not hide the others
                    row["failure"] = f"{type(error).__name__}: {error}"
                    row["trace"] = traceback.format_exc()
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    (compile_all if sys.argv[1] == "compile" else interpret)(sys.argv[2:])
