"""A region as a grouped product, its schedules and their tunings.

Schedules are reasoned from what is moved, not swept: few rows meet each matrix, so that reading the matrices is most of
the work. Deals in block sizes. Knows nothing about kernel text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qimeng.coder.template.families.gemm.moves import resized
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.device import Device
from qimeng.family import MAX_ALTERNATIVES, Move, NotConcerned, Unsupported, family_field
from qimeng.graph.opgraph import Meta, Value, itemsize
from qimeng.graph.region import Region
from qimeng.vocabulary.irregular.grouped import PRODUCT, Grouped, grouped_product
from qimeng.vocabulary.irregular.plan import before, beside

LEAST, MOST = 16, 256
"""The least and the most that a tile has along rows, columns and depth."""


@dataclass(frozen=True)
class GroupedSchedule(GemmSchedule):
    """How a grouped product is cut into tiles; see `GemmSchedule` for the fields."""

    family: str = family_field("grouped")


@dataclass(frozen=True, eq=False)
class GroupedPlan:
    """A grouped product and how its operands reach it.

    Attributes:
        grouped: the product.
        out: shape, strides and dtype of the result.
        parameters: the entry function's parameters, in the order of the region's inputs.
        before: lines of the entry function before its kernels.
        rows: variable of the rows.
        weight: variable of the matrices.
        by: variable of the index.
    """

    grouped: Grouped
    out: Meta
    parameters: tuple[str, ...]
    before: tuple[str, ...]
    rows: str
    weight: str
    by: str

    @property
    def half(self) -> bool:
        """Whether operands are of a half type."""
        return itemsize(self.out.dtype) == 2


def plan_grouped(region: Region) -> GroupedPlan:
    """The plan of `region`.

    Raises:
        NotConcerned: it has no batch of products with chosen matrices, or they are chosen elsewhere.
        Unsupported: it does more than that.
    """
    graph = region.graph
    products = [n for n in region.ops if n.packet == PRODUCT]
    if len(products) != 1:
        raise NotConcerned(f"{len(products)} batches of products")
    found = grouped_product(graph, products[0])
    if not set(found.copies) <= set(region.nodes):
        raise NotConcerned("the matrices are chosen elsewhere")
    if region.outputs != (Value(products[0].name),):
        raise Unsupported("besides the products, the region returns other values, or views of them")
    texts = {v: f"x{i}" for i, v in enumerate(region.inputs)}
    lines: list[str] = []
    rows, weight, by = (beside(region, v, texts, lines) for v in (found.rows, found.weight, found.by))
    needed = {n for v in (found.rows, found.weight, found.by) for n in before(region, v)}
    if other := set(region.nodes) - needed - set(found.copies) - {products[0].name}:
        raise Unsupported(f"{', '.join(sorted(other))}: the region does more than multiply")
    out = graph.meta(Value(products[0].name))
    return GroupedPlan(
        found, out, tuple(texts[v] for v in region.inputs), tuple(dict.fromkeys(lines)), rows, weight, by
    )


def schedules(plan: GroupedPlan) -> tuple[GroupedSchedule, ...]:
    """At most eight schedules, the best guess first, each once."""
    found = plan.grouped
    each = -(-found.slots // found.groups)
    high = min(max(power_of_two(each), LEAST), 128)
    deep, wide = power_of_two(found.depth, LEAST), power_of_two(found.columns, LEAST)
    most = 128 if plan.half else 64
    shapes = [
        (high, 64, most, 4, 3),
        (high, 128, most // 2, 4, 4),
        (high, 32, most, 4, 4),
        (max(LEAST, high // 2), 64, most, 4, 3),
        (min(128, high * 2), 128, 64, 8, 3),
        (high, 128, 64, 8, 3),
    ]
    precisions = ("ieee",) if plan.half else ("ieee", "tf32x3")
    made = [
        GroupedSchedule(block_m=m, block_n=min(n, wide), block_k=min(k, deep), warps=w, stages=s, precision=p)
        for m, n, k, w, s in shapes
        for p in precisions
    ]
    return tuple(dict.fromkeys(made))[:MAX_ALTERNATIVES]


def shared_bytes(plan: GroupedPlan, schedule: GroupedSchedule) -> int:
    """Bytes of shared memory of a block, at most: every stage holds a tile of both operands."""
    s = schedule
    return (s.block_m + s.block_n) * s.block_k * itemsize(plan.out.dtype) * max(s.stages, 1)


def tiles(plan: GroupedPlan, schedule: GroupedSchedule) -> int:
    """Tiles of slots, at most: each matrix that is chosen may have one that is not full."""
    found = plan.grouped
    return found.slots // schedule.block_m + min(found.slots, found.groups)


class Tiling(Move[Any, Any]):
    """Tiles of other shapes."""

    def schedules(self, plan: object, schedule: GemmSchedule, param: str, device: Device) -> Sequence:
        """Twice or half along one side."""
        found = resized(schedule, param)
        return tuple(c for c in found if all(LEAST <= b <= MOST for b in (c.block_m, c.block_n, c.block_k)))


class Pipeline(Move[Any, Any]):
    """Other depths of the pipeline, other numbers of warps."""

    def schedules(self, plan: object, schedule: GemmSchedule, param: str, device: Device) -> Sequence:
        """Depths of 2 to 5, 2 to 8 warps."""
        s = schedule
        found = [s.but(warps=w) for w in (2, 4, 8)] if param == "warps" else [s.but(stages=n) for n in (2, 3, 4, 5)]
        return tuple(c for c in found if c != s)


__all__ = [
    "LEAST", "MOST", "GroupedPlan", "GroupedSchedule", "Pipeline", "Tiling", "plan_grouped", "schedules",
    "shared_bytes", "tiles",
]  # fmt: skip
