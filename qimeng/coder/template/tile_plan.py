"""How the tile family cuts a nest: which axes are rows, which are columns, and the default schedule.

Deals in axes, extents and capacities. Knows nothing about kernel text.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from qimeng.coder.template.axes import Unsupported
from qimeng.coder.template.ir import Nest, by_stride, coalesce
from qimeng.device import Device
from qimeng.program.schedule import Schedule

Group = tuple[tuple[int, ...], int]
"""Coalesced axes, outermost first, and their extent."""


@dataclass(frozen=True)
class TilePlan:
    """Rows and columns of the tiles.

    Attributes:
        rows: groups of kept axes, outermost first.
        columns: groups of reduced axes, or, without reductions, the innermost kept ones.
        passes: passes over the columns before outputs that change along them can be written.
        full: number of outputs that change along the columns.
        tensors: number of tensors of the full size read or written.
        contiguous: ``"r"`` or ``"p"``: the side along which the largest tensor is contiguous.
        itemsize: bytes of an element of the largest tensor.
    """

    rows: tuple[Group, ...]
    columns: tuple[Group, ...]
    passes: int
    full: int
    tensors: int
    contiguous: str
    itemsize: int

    @property
    def row_count(self) -> int:
        """Number of rows."""
        return prod(e for _, e in self.rows)

    @property
    def column_count(self) -> int:
        """Elements of one row."""
        return prod(e for _, e in self.columns)


MOST_REPEATS = 4
"""A reduction may be computed so many times over where its result is broadcast along axes that it does not have."""


def plan_tile(nest: Nest) -> TilePlan:
    """The plan for `nest`.

    Raises:
        Unsupported: a matrix product, reductions over different axes, or one whose result is broadcast so that it would
            be computed many times over.
    """
    if nest.dot is not None:
        raise Unsupported("a matrix product is not in the tile family")
    for e in nest.reductions():
        if frozenset(e.reduced) != nest.reduced:
            raise Unsupported("reductions over different axes in one region")
        repeats = nest.axes.extent(nest.kept - e.depends)
        if repeats > MOST_REPEATS:
            raise Unsupported(f"a reduction would be computed {repeats} times over, as its result is broadcast")
    rows = _groups(nest, nest.kept)
    columns = _groups(nest, nest.reduced)
    accesses = sorted(nest.accesses(), key=lambda a: -a[1])
    if not columns:
        rows, columns = rows[:-1], rows[-1:]
        while rows and prod(e for _, e in columns) < 64:
            rows, columns = rows[:-1], [rows[-1], *columns]
    inside = {a for g, _ in columns for a in g}
    full = sum(bool({a for d in e.dims for a in d} & inside) for e, *_ in nest.outputs)
    contiguous, itemsize = "r", 4
    if accesses:
        steps, size = accesses[0]
        itemsize = size // nest.axes.extent(steps)
        nearest = min(steps, key=lambda a: steps[a], default=None)
        contiguous = "r" if nearest in inside or not rows else "p"
    tensors = sum(1 for s, _ in accesses if inside & set(s)) or 1
    passes = nest.passes if nest.reduced else 0
    return TilePlan(tuple(rows), tuple(columns), passes, full, tensors, contiguous, itemsize)


def _groups(nest: Nest, atoms: frozenset[int]) -> list[Group]:
    return [(tuple(g), nest.axes.extent(g)) for g in coalesce(nest, by_stride(nest, atoms))]


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n` (1 for 0)."""
    return 1 << max(n - 1, 0).bit_length()


RESIDENT_ELEMENTS = 32768
"""Most elements of a row that a program keeps in registers (16 or 32 warps; measured best up to here on H200)."""


def default_schedule(plan: TilePlan, device: Device) -> Schedule:
    """A plain schedule that is right for the shape, without tuning.

    The forms follow measurements on an H200: resident rows up to 32K elements, one program a row beyond that, several
    programs a row where rows are too few to fill the GPU.
    """
    rows, columns = plan.row_count, plan.column_count
    if plan.passes == 0:
        elements = 1024 if plan.itemsize > 2 else 2048  # two 16-byte accesses a thread or more
        width = min(power_of_two(columns), elements)
        height = max(1, min(elements // width, power_of_two(rows)))
        return Schedule("tile", "split", block_p=height, block_r=width, warps=4, stages=1)
    if plan.contiguous == "p":
        height = min(power_of_two(plan.rows[-1][1]), 128)
        if plan.full and power_of_two(columns) * height <= RESIDENT_ELEMENTS // 2:
            return Schedule("tile", "resident", block_p=height, block_r=power_of_two(columns), warps=8, stages=1)
        deep = min(32, power_of_two(columns))
        programs = -(-rows // height)
        splits = _splits(programs, -(-columns // deep), device)
        return Schedule(
            "tile", "split" if splits > 1 else "loop", block_p=height, block_r=deep, splits=splits, warps=8, stages=1
        )
    if power_of_two(columns) <= RESIDENT_ELEMENTS:
        width = power_of_two(columns)
        return Schedule(
            "tile",
            "resident",
            block_p=max(1, min(2048 // width, power_of_two(rows))),
            block_r=width,
            warps=_warps(width),
            stages=1,
        )
    width = 4096
    splits = _splits(rows, -(-columns // width), device)
    return Schedule(
        "tile", "split" if splits > 1 else "loop", block_p=1, block_r=width, splits=splits, warps=8, stages=1
    )


def _warps(elements: int) -> int:
    """Warps for a row of `elements` in registers."""
    return max(4, min(16, elements // 1024))


def _splits(programs: int, steps: int, device: Device) -> int:
    """Programs that share a row so that every SM has about eight; 1 where rows alone give it two."""
    if programs >= 2 * device.sms:
        return 1
    return max(1, min(steps, -(-8 * device.sms // programs), 1024))
