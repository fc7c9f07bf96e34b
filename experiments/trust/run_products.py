"""Generated products of fp32 operands on inputs that vary within a row, and the time of what guards them.

`errors` runs every class of `experiments.trust.hard_products` through every form, precision and variant of the
template's kernels: one row each, with the error by the judge's measure, its budget, and the largest error as a share
of the product of the absolute values. `times` compares each product on benign and on hard inputs with the same kernels
without the guard, with plain fp32 kernels and with PyTorch's eager mode, in turns.
"""

from __future__ import annotations

import functools
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from experiments.trust.hard_products import BENIGN, FORMS, HARD, Product, Shape
from experiments.trust.journal import Journal
from qimeng.bench.environment import environment
from qimeng.coder.template.families.gemm.exact import exact_schedules
from qimeng.coder.template.families.gemm.host import print_gemm
from qimeng.coder.template.families.gemm.plan import GemmPlan, plan_gemm
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.families.gemm.sweeps import default_schedule, schedule_for_precision
from qimeng.device import device_named, target_device
from qimeng.envs.errors import accuracy, error_budget
from qimeng.graph.capture import capture
from qimeng.graph.region import make_region
from qimeng.program.program import load_source

HEADER = "import torch\nimport triton\nimport triton.language as tl\n\n"
MODES = {"default": "fp16x3", "high": "fp16"}
SCALE = {"weight": 1.0, "prologue": 2.0, "epilogue": 0.5}
EXACT = {"default": "bf16x6", "high": "tf32"}
WHAT = {"errors": "product", "times": "product times"}
LIMIT = {"default": 4e-6, "high": 2e-3}
"""Error as a share of |A| |B| above which a row is printed."""
TIMED = {  # M, K, N, whether B is a weight
    "4096^3": (4096, 4096, 4096, False),
    "4096^3, weight": (4096, 4096, 4096, True),
    "1024 x 8192 x 8192, weight": (1024, 8192, 8192, True),
    "2048^3, weight": (2048, 2048, 2048, True),
    "16384 x 512 x 1024, weight": (16384, 512, 1024, True),
    "256 x 131072 x 256": (256, 131072, 256, False),
}


class Generated:
    """A product as the template coder prints it under some schedule."""

    def __init__(self, module: Product, inputs: tuple[torch.Tensor, ...]):
        self.module, self.given = module, inputs
        self.graph = capture(lambda: module, lambda: inputs)
        self.region = make_region(self.graph, [n.name for n in self.graph.ops()])
        self.plan = plan_gemm(self.region)

    def arguments(self, inputs: tuple[torch.Tensor, ...]) -> list[Any]:
        """The region's inputs."""
        held = dict(self.module.named_parameters())
        nodes = [self.graph.nodes[v.node] for v in self.region.inputs]
        return [held[n.target] if n.kind == "parameter" else inputs[int(n.target)] for n in nodes]

    def load(self, schedule: GemmSchedule, change: Callable[[str], str] = str) -> Callable[..., Callable[[], Any]]:
        """A function of inputs that prepares a call of the kernels, after `change` to their text."""
        impl = print_gemm(self.plan, schedule, "g")
        loaded = load_source(HEADER + change(impl.source), f"hard_{abs(hash((str(schedule), impl.source)))}")

        def ready(*inputs: torch.Tensor) -> Callable[[], Any]:
            given = self.arguments(inputs)
            prepared = getattr(loaded, impl.prepare)(*[given[i] for i in impl.prepare_inputs]) if impl.prepare else ()
            return lambda: getattr(loaded, impl.entry)(*given, *prepared)

        return ready


def variants(plan: GemmPlan, mode: str, small: bool) -> dict[str, GemmSchedule]:
    """The schedules to try: the coder's first ones, a split depth, and operands that the main loop splits."""
    device = device_named("h100")
    start = default_schedule(plan, device, mode)
    first, *others = schedule_for_precision(plan, start, MODES[mode], device)
    if small:
        first = first.but(block_m=32, block_n=32, block_k=32, warps=4, stages=2, promote=64, splits=1)
        others = []
    split = first.but(splits=2, cat=True)
    found = {"first": first, "split depth": split, "pointers": first.but(descriptors=False, cat=False)}
    found |= {f"other {i}": s for i, s in enumerate(others[1:3])}
    inline = "".join(s.name for s in plan.sides if s.name not in first.packed)
    if inline and not plan.reductions:
        found["in the loop"] = first.but(
            inline=inline, packed="".join(set("ab") & set(first.packed)), block_m=min(first.block_m, 64),
            block_n=min(first.block_n, 64), block_k=32, warps=4, stages=2, cat=False,
        )  # fmt: skip
    return found


def errors(device: str, small: bool, modes: list[str]) -> Iterator[dict[str, Any]]:
    """One row for each class, form, mode and variant."""
    shape = Shape(64, 256, 64, device) if small else Shape(512, 1024, 512, device)
    for mode in modes:
        torch.backends.cuda.matmul.allow_tf32 = mode == "high"
        for form in FORMS:
            torch.manual_seed(1)
            operands = shape.normal()
            module = Product(form, operands).to(device)
            made = Generated(module, module.inputs(operands))
            for variant, schedule in variants(made.plan, mode, small).items():
                ready = made.load(schedule)
                for name, make in {**BENIGN, **HARD}.items():
                    torch.manual_seed(2)
                    row = {"class": name, "mode": mode, "form": form, "variant": variant, "schedule": str(schedule)}
                    yield row | _errors(module, make(shape), ready)


def _errors(module: Product, operands: Any, ready: Callable[..., Any]) -> dict[str, Any]:
    inputs = module.inputs(operands)
    if module.weight is not None:
        module.weight.copy_(operands[1].T)
    got, eager = ready(*inputs)()[0], _first(module(*inputs))
    exact = _first(module.double()(*[x.double() for x in inputs]))
    moved = [x.double() * (1 + torch.finfo(torch.float32).eps * (torch.randint_like(x, 2) * 2 - 1)) for x in inputs]
    shifted = _first(module(*moved))
    module.float()
    reference = exact.float()
    own = accuracy.measure(eager, reference, eager)
    floor = error_budget.floor(
        torch.float32, math.sqrt(inputs[0].shape[-1]), accuracy.measure(shifted.float(), reference, eager)
    )
    budget = error_budget.Expected(reference, own, floor).budget
    error = accuracy.measure(got, reference, eager)
    size = _first(module.double()(*[x.double().abs() for x in inputs])) if module.weight is None else None
    if size is None:
        size = inputs[0].double().abs() @ operands[1].double().abs() * SCALE[module.form]
    module.float()
    odd = ~eager.isfinite()
    wrong = int((odd & ~((got == eager) | (got.isnan() & eager.isnan()))).sum() + (~odd & ~got.isfinite()).sum())
    return {
        "eager": own.max, "error": error.max, "budget": budget.max, "rms": error.rms, "rms_budget": budget.rms,
        "within": error.within(budget), "not_finite_wrong": wrong,
        "componentwise": _componentwise(got, exact, size), "componentwise_eager": _componentwise(eager, exact, size),
    }  # fmt: skip


def _componentwise(y: torch.Tensor, exact: torch.Tensor, size: torch.Tensor) -> float:
    """Largest |y - exact| / (|A| |B|), where all three are finite and fp32 holds the denominator."""
    error = (y.double() - exact).abs() / size
    held = error.isfinite() & (size > 1e-30) & (size < 1e38)
    return float(torch.where(held, error, 0.0).max())


def _first(x: Any) -> torch.Tensor:
    first: torch.Tensor = x[0] if isinstance(x, tuple) else x
    return first


def without_guard(text: str) -> str:
    """The same kernels, launched without the exact form and without a look at what planes lose."""
    text = re.sub(r"^    \w+_exact\[.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^    high = tl.where\(level > 0, .*, (.*)\)\n", r"    high = \1\n", text, flags=re.MULTILINE)
    return re.sub(LOOK, "", text, flags=re.MULTILINE)


LOOK = r"^    (level = 0|if tl.max\(\(a_loss.*|    level = .*|tl.store\(levels_ptr.*|[ab]_loss = |[ab]_far = ).*\n"


def times() -> Iterator[dict[str, Any]]:
    """One row for each product, kind of input and schedule."""
    device = device_named("h100")
    for name, (m, k, n, weight) in TIMED.items():
        shape = Shape(m, k, n, "cuda")
        operands = shape.normal()
        module = Product("weight" if weight else "two inputs", operands)
        made = Generated(module, module.inputs(operands))
        for mode, precision in MODES.items():
            torch.backends.cuda.matmul.allow_tf32 = mode == "high"
            start = default_schedule(made.plan, device, mode)
            schedules = schedule_for_precision(made.plan, start, precision, device)[:3]
            for kind in ("normal", "uniform", "units 1e-6 to 1e6, weights inverse"):
                operands = {**BENIGN, **HARD}[kind](shape)
                inputs = module.inputs(operands)
                if weight:
                    assert module.weight is not None
                    module.weight.copy_(operands[1].T)
                calls: dict[str, Callable[[], Any]] = {"eager": functools.partial(module, *inputs)}
                calls["plain"] = made.load(start)(*inputs)
                packed = schedule_for_precision(made.plan, start, EXACT[mode], device)
                calls["exact, packed"] = made.load(packed[0])(*inputs)
                calls["exact, in the loop"] = made.load(exact_schedules(made.plan, schedules[0])[0])(*inputs)
                for i, s in enumerate(schedules):
                    calls[f"guarded {i}"] = made.load(s)(*inputs)
                    if kind == "normal":
                        calls[f"without {i}"] = made.load(s, without_guard)(*inputs)
                row = {"product": name, "mode": mode, "inputs": kind, "schedules": [str(s) for s in schedules]}
                yield row | {"ms": in_turns(calls)}


def in_turns(calls: dict[str, Callable[[], Any]], rounds: int = 15, budget_s: float = 1.5) -> dict[str, float]:
    """Median milliseconds of each call, the L2 cache overwritten before it."""
    flush = torch.empty(128 << 20, dtype=torch.int8, device="cuda")
    found: dict[str, list[float]] = {}
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    begun = time.monotonic()
    for _ in range(rounds):
        for name, call in calls.items():
            flush.zero_()
            torch.cuda._sleep(2_000_000)  # until all launches of a call are queued
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            found.setdefault(name, []).append(start.elapsed_time(end))
        if time.monotonic() - begun > budget_s and len(found[name]) >= 5:
            break
    return {name: round(sorted(v)[len(v) // 2], 5) for name, v in found.items()}


def products(part: str, out: Path, device: str = "cuda", mode: str = "", small: bool = False) -> None:
    """Add the rows of one part and print those that are beyond a limit.

    Args:
        part: ``"errors"`` or ``"times"``.
        out: file of rows.
        device: of `errors`: ``"cuda"``, or ``"cpu"`` for Triton's interpreter.
        mode: of `errors`: ``"default"`` or ``"high"``; both where it is empty.
        small: of `errors`: small tiles and operands.
    """
    if device == "cpu":
        from qimeng.envs.estimate.interpreter import mend

        mend()
    found = errors(device, small, [mode] if mode else list(MODES)) if part == "errors" else times()
    journal = Journal(out, environment(target_device()))
    with torch.no_grad():
        for row in found:
            names = [row[n] for n in ("product", "class", "mode", "form", "variant", "inputs") if n in row]
            journal.add(f"{part}: {': '.join(names)}", what=WHAT[part], **row)
            if part == "times" or not (
                row["within"] and not row["not_finite_wrong"] and row["componentwise"] < LIMIT[row["mode"]]
            ):
                print(json.dumps(row), file=sys.stderr, flush=True)


__all__ = ["errors", "products", "times"]
