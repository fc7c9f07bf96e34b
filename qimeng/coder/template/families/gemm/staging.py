"""The plan of a product whose windows are read from a copy: channels last, padded, so that no guards are left.

A step then reads neighbouring channels in whole vectors, and the prologue is computed once for each element rather than
once for each window. The copy is read, written and read again. Deals in plans. Knows
nothing about which schedules are good; the kernel that copies is `stager`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod

from qimeng.coder.template.families.gemm.plan import GemmPlan, Side, walked
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.families.gemm.scheme import scheme_of
from qimeng.coder.template.nest.expr import Staging
from qimeng.coder.template.nest.ir import VECTOR_BYTES, Source
from qimeng.graph.opgraph import itemsize

NAME = "staged"
"""The copy's variable in the entry function."""


def stageable(plan: GemmPlan) -> str | None:
    """None where a copy of the left operand's tensor may be read instead, else why not."""
    staging = plan.dot.staging
    if staging is None or staging.read.depends != plan.a.expr.depends:
        return "the left operand is not of a convolution's windows"
    if not plan.a.computed:
        return "windows of one element need no copy"
    near = [a for a, step in walked(plan.nest, staging.read).items() if step == 1 and a in plan.k]
    run = plan.extent(tuple(near)) * itemsize(plan.dtype)
    if run % VECTOR_BYTES:
        return f"neighbouring channels are {run} B, no multiple of {VECTOR_BYTES}"
    return None


def under(plan: GemmPlan, schedule: GemmSchedule) -> GemmPlan:
    """The plan as `schedule` has it computed."""
    if not schedule.staged or stageable(plan) is not None:
        return plan
    return _staged(plan, scheme_of(plan, schedule).rounds)


@lru_cache(256)
def _staged(plan: GemmPlan, rounds: bool) -> GemmPlan:
    staging: Staging = plan.dot.staging  # type: ignore[assignment]
    shape = tuple(plan.extent(d) for d in staging.order)
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    source = Source(len(plan.nest.sources), stride, shape, plan.dtype)
    read = replace(staging.read, param=source.number)
    nest = replace(plan.nest, sources=[*plan.nest.sources, source], exprs=[*plan.nest.exprs, read])
    loads = replace(plan.loads, names={**plan.loads.names, source.number: NAME})
    steps = walked(nest, read)
    near = tuple(a for a in plan.k if steps.get(a) == 1)
    k = tuple(a for a in plan.k if a not in near) + near
    repeats = max(1.0, nest.axes.extent(read.depends) / prod(shape))
    side = Side("a", read, plan.m, (read,), read, False, True, True, repeats, rounds)
    return replace(plan, nest=nest, loads=loads, k=k, a=side)


__all__ = ["NAME", "stageable", "under"]
