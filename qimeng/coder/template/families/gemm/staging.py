"""The plan of a product whose windows are read from a copy: channels last, padded, so that no guards are left.

A step then reads neighbouring channels in whole vectors, and the prologue is computed once for each element rather than
once for each window. Where tensor cores take planes of the operand, the copy holds these, so that an element is split
once rather than in every window. A few channels are filled up with zeros to whole vectors. The copy is read, written
and read again. Deals in plans. Knows nothing about which schedules are good; the kernel that copies is `stager`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

from qimeng.coder.template.families.gemm.plan import GemmPlan, Shift, Side, walked
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.families.gemm.scheme import scheme_of
from qimeng.coder.template.nest.axes import Dim
from qimeng.coder.template.nest.expr import Expr, Staging, Sum, guard, positions, reach, sum_of, walk
from qimeng.coder.template.nest.ir import VECTOR_BYTES, Source
from qimeng.coder.template.nest.sizes import round_up
from qimeng.graph.opgraph import itemsize

WASTE = 1.25
"""Times as many rows as positions of the result that may be computed."""

FEW = 8
"""Channels up to which cuDNN was seen to compute in fp32 although it may take TF32 (H200, PyTorch 2.11)."""

RUN = 4
"""Channels of the copy are a multiple of this: 16 bytes of fp32, 8 of a 16-bit plane."""

NAME = "staged"
"""The copy's variable in the entry function."""


def stageable(plan: GemmPlan) -> str | None:
    """None where a copy of the left operand's tensor may be read instead, else why not."""
    staging = plan.staging
    if staging is None or staging.read.depends != plan.a.expr.depends:
        return "the left operand is not of a convolution's windows"
    if not plan.a.computed:
        return "windows of one element need no copy"
    run = plan.extent(_near(plan))
    if run % RUN and not _fillable(plan):
        return f"{run} neighbouring elements are no multiple of {RUN}, and cannot be filled up"
    return None


@lru_cache(256)
def _fillable(plan: GemmPlan) -> bool:
    """Whether there may be more channels: they are one axis of the copy and one of the weights, and inside no other.

    One channel, and those of a group, are no such axis.
    """
    staging, near = plan.staging, _near(plan)
    assert staging is not None
    channels = staging.order[-1]
    if not len(near) == len(channels) == 1 or plan.extent(near) != plan.extent(channels):
        return False
    return _inner(reach([staging.fill, plan.b.expr])).isdisjoint(near + channels)


def few_channels(plan: GemmPlan) -> bool:
    """Whether results are sums over at most `FEW` channels."""
    if plan.staging is None or not plan.a.computed:
        return False
    assert plan.staging.read.access is not None
    channels, _ = plan.staging.read.access.direct[1]
    return plan.extent(tuple(a for a in channels if a in plan.k)) <= FEW


def _near(plan: GemmPlan) -> tuple[int, ...]:
    """The axes of the depth along which the copy's elements are neighbours."""
    steps = walked(plan.nest, plan.staging.read)  # type: ignore[union-attr]
    return tuple(a for a in plan.k if steps.get(a) == 1)


def under(plan: GemmPlan, schedule: GemmSchedule) -> GemmPlan:
    """The plan as `schedule` has it computed."""
    if not schedule.staged or stageable(plan) is not None:
        return plan
    scheme = scheme_of(plan, schedule)
    staged = _staged(plan, scheme.rounds, scheme.dtype if holds_planes(plan, schedule) else "", bool(scheme.exact))
    return _shifted(staged) if schedule.shifted and shiftable(plan, schedule) is None else staged


def holds_planes(plan: GemmPlan, schedule: GemmSchedule) -> bool:
    """Whether the copy of `schedule` holds planes. Where these are scaled, each image has a scale of its own."""
    scheme, staging = scheme_of(plan, schedule), plan.staging
    if staging is None or not (schedule.staged and scheme.splits and "a" not in schedule.inline):
        return False
    *outer, channels = (plan.extent(d) for d in staging.order)
    images = tuple(images_of(plan))
    by_image = plan.m[: len(images)] == images
    return scheme.planes * prod(outer) * round_up(channels, RUN) < 1 << 31 and (by_image or not scheme.scaled)


def images_of(plan: GemmPlan) -> tuple[int, ...]:
    """The axes of the rows that count images."""
    assert plan.staging is not None and plan.staging.read.access is not None
    return plan.staging.read.access.direct[0][0]


def shiftable(plan: GemmPlan, schedule: GemmSchedule) -> str | None:
    """None where the rows of the product may be the copy's own positions (`GemmSchedule.shifted`), else why not."""
    if (reason := stageable(plan)) is not None:
        return reason
    scheme, most = scheme_of(plan, schedule), 1 << 31
    if not (plan.half or scheme.rounds or holds_planes(plan, schedule)):
        return "blocks that the copy engine moves go to the tensor cores as they are"
    if plan.reductions or plan.triangle is not None or plan.skips is not None:
        return "the result is reduced, or parts of it are left out"
    found = _along(plan)
    if found is None:
        return "a step of the window is no step to the next position"
    copied = plan.extent(plan.staging.order[0]) * prod(found.values())  # type: ignore[union-attr]
    if copied > WASTE * plan.shape[1]:
        return f"the copy has {copied / plan.shape[1]:.2f} times as many positions as the result"
    run = plan.extent(_near(plan))
    if run % schedule.block_k:
        return f"a block of {schedule.block_k} channels of {run} holds more than one element of the window"
    columns = plan.extent(plan.staging.order[-1])  # type: ignore[union-attr]
    if columns * itemsize(scheme.dtype) % VECTOR_BYTES or copied * columns * scheme.planes >= most:
        return "the copy engine does not take rows of that length, or so many of them"
    return None


@lru_cache(256)
def _along(plan: GemmPlan) -> dict[int, int] | None:
    """The axis of the rows along each dimension of the copy, and the copy's length there; None where a row is no step.

    What else is read or written must have those axes in dimensions of their own, whose lengths stay as they are.
    """
    staging, nest = plan.staging, plan.nest
    assert staging is not None and staging.read.access is not None
    found: dict[int, int] = {}
    for (position, _), order in zip(positions(staging.read), staging.order[1:-1], strict=True):
        steps = {a: c for a, c in sum_of(nest.axes, position).steps.items() if a in plan.m}
        if list(steps.values()) != [1] or set(steps) & found.keys():
            return None
        found[next(iter(steps))] = plan.extent(order)
    if plan.m != (*staging.read.access.direct[0][0], *found):
        return None
    inner = _inner(plan.epilogue()) | {a for e, *_ in nest.outputs for d in e.dims for a in d[1:]}
    return None if inner & found.keys() else found


def _inner(exprs: Sequence[Expr]) -> set[int]:
    """Axes inside a dimension that is read or counted along: were one longer, those outside it would step further."""
    dims = [d for e in exprs if e.op == "load" for d in _dims(e)] + [e.reduced for e in exprs if e.op == "index"]
    return {a for d in dims for a in d[1:]}


def _dims(load: Expr) -> Sequence[Dim]:
    return [d for d, _ in load.access.direct] if load.access else load.dims


@lru_cache(256)
def _shifted(plan: GemmPlan) -> GemmPlan:
    """A staged plan whose rows are the positions of the copy."""
    nest, staging, along = plan.nest, plan.staging, _along(plan)
    assert staging is not None and staging.read.access is not None and along is not None
    columns = plan.extent(staging.order[-1])
    rows = Sum()
    for (position, step), atom in zip(positions(staging.read), along, strict=True):
        place = sum_of(nest.axes, position).plus(Sum({atom: -1}))
        rows = rows.plus(place.times(step // columns))
    channels = Sum(walk(nest.axes, staging.read.access.direct[1][0]))
    limited = {a for d, _ in nest.limits for a in d}
    fewer = tuple((a, nest.axes.size(a)) for a, n in along.items() if n > nest.axes.size(a))
    short = [((a,), size) for a, size in fewer if a not in limited]
    wider = replace(nest, axes=nest.axes.widened(along), limits=[*nest.limits, *short])
    lying = None if plan.lying is None else replace(plan.lying, short=(*plan.lying.short, *fewer))
    shape = plan.extent(staging.order[0]) * prod(along.values()), columns
    return replace(plan, nest=wider, lying=lying, shift=Shift(rows, channels, shape, guard(staging.read)))


@lru_cache(256)
def _staged(plan: GemmPlan, rounds: bool, planes: str, loses: bool) -> GemmPlan:
    """The plan that reads the copy.

    Args:
        plan: the plan that reads windows where they lie.
        rounds: whether the copy is rounded to TF32.
        planes: dtype of the planes that the copy holds; empty where it holds the elements as they are.
        loses: whether these planes do not hold all values.
    """
    plan = _filled(plan)
    staging: Staging = plan.staging  # type: ignore[assignment]
    shape = tuple(plan.extent(d) for d in staging.order)
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    source = Source(len(plan.nest.sources), stride, shape, planes or plan.dtype)
    read = replace(staging.read, param=source.number)
    nest = replace(plan.nest, sources=[*plan.nest.sources, source], exprs=[*plan.nest.exprs, read])
    loads = replace(plan.loads, names={**plan.loads.names, source.number: NAME})
    near = _near(plan)
    k = tuple(a for a in plan.k if a not in near) + near
    repeats = max(1.0, nest.axes.extent(read.depends) / prod(shape))
    whole = Side("a", read, plan.m, (read,), plain=read, held=False, k_major=True, aligned=True)
    side = replace(whole, repeats=repeats, rounded=rounds, split=bool(planes))
    return replace(plan, nest=nest, loads=loads, k=k, a=side, lying=plan.a if planes and loses else None)


def _filled(plan: GemmPlan) -> GemmPlan:
    """`plan` with its channels filled up to a multiple of `RUN`, the weights of the further ones being zero."""
    staging, near = plan.staging, _near(plan)
    assert staging is not None and staging.read.access is not None
    run = plan.extent(near)
    if run % RUN == 0:
        return plan
    (own,), (channel,), wide = staging.order[-1], near, round_up(run, RUN)
    access = staging.read.access
    read = replace(
        staging.read,
        access=replace(
            access,
            direct=tuple((d, step if step == 1 else step // run * wide) for d, step in access.direct),
            steps=tuple(step // run * wide for step in access.steps),
        ),
    )
    nest = replace(plan.nest, axes=plan.nest.axes.widened({own: wide, channel: wide}))
    a, b = (replace(side, short=((channel, run),)) for side in plan.sides)
    return replace(plan, nest=nest, staging=replace(staging, read=read), a=a, b=b)


__all__ = ["NAME", "few_channels", "holds_planes", "images_of", "shiftable", "stageable", "under"]
