"""How a nest with a matrix product is a GEMM: which axes are rows, columns, depth and batch, and what surrounds it.

Deals in axes and expressions: the prologue of each operand, the epilogue, reductions of the result. Knows nothing
about schedules or kernel text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from qimeng.coder.template.nest.expr import Expr, Staging, Sum, positions, reach, sum_of
from qimeng.coder.template.nest.ir import VECTOR_BYTES, Nest, coalesce
from qimeng.coder.template.nest.loads import Loads
from qimeng.coder.template.rules.regions import region_nest
from qimeng.family import NotConcerned, Unsupported
from qimeng.graph.opgraph import itemsize
from qimeng.graph.ops import is_product, precision_of
from qimeng.graph.region import Region
from qimeng.graph.state import is_state

Atoms = tuple[int, ...]

OVERLAPPING = 1.5
"""`Side.repeats` from which an operand is never copied: the copy would move more than the tensor itself."""

REDUCTIONS = ("sum", "max", "min", "welford", "sumexp")
"""Kinds of reduction that the epilogue can do tile by tile."""


@dataclass(frozen=True, eq=False)
class Side:
    """One operand of the product.

    Attributes:
        name: ``"a"`` or ``"b"``.
        expr: its value; anything pointwise of tensors over (batch, rows, depth).
        rows: the axes it does not share with the other operand: rows of A, columns of B.
        loads: the tensors below `expr`.
        plain: the tensor where the operand is one as it is; None where there is a prologue.
        held: made of parameters and buffers alone, so that it can be packed once.
        k_major: memory runs along the depth (else along the rows, or neither).
        aligned: every row of memory begins at a multiple of 16 bytes, so that threads and the copy engine can take
            whole vectors; where that fails (a row stride of 2949 bf16), each element is an access of its own.
        repeats: elements of the operand for each element in memory: more than 1 where windows overlap, so that a copy
            of the operand would be as much larger than the tensor.
        rounded: its elements have TF32's significand already.
        split: its tensor holds the planes of the product's scheme, one after the other.
        short: axes with more positions than the operand has elements, and how many it has: beyond, it is 0.
        reader: a class of `Operand` where another family reads it in its own way.
    """

    name: str
    expr: Expr
    rows: Atoms
    loads: tuple[Expr, ...]
    plain: Expr | None
    held: bool
    k_major: bool
    aligned: bool
    repeats: float = 1.0
    rounded: bool = False
    split: bool = False
    short: tuple[tuple[int, int], ...] = ()
    reader: Callable[..., Any] | None = None

    @property
    def computed(self) -> bool:
        """Whether any of its tensors is read at computed positions."""
        return any(e.access and e.access.steps for e in self.loads)


@dataclass(frozen=True)
class Triangle:
    """The output is zero where (column - row >= offset) is false (``"upper"``) or where <= is (``"lower"``)."""

    kind: str
    offset: int


@dataclass(frozen=True)
class Skips:
    """Tiles of the result whose depth need not be walked; their product counts as 0.

    Attributes:
        given: parameters of the entry function after the inputs.
        made: lines of the entry function before the product.
        read: variables of the entry function that the product's kernel reads, each by its pointer.
        test: text of that kernel which is true for a tile at `row0`, `col0` that is left out.
    """

    given: tuple[str, ...]
    made: tuple[str, ...]
    read: tuple[str, ...]
    test: str


@dataclass(frozen=True, eq=False)
class Shift:
    """Where a block of a convolution's copy begins, as a matrix of positions and channels.

    Attributes:
        rows: rows between the tile's own first row and the block's.
        columns: its first channel.
        shape: rows and columns of the matrix.
        exists: where the window has an element at all; None for everywhere.
    """

    rows: Sum
    columns: Sum
    shape: tuple[int, int]
    exists: Expr | None


@dataclass(frozen=True, eq=False)
class GemmPlan:
    """A region as prologue, product, epilogue.

    Attributes:
        region: the region.
        nest: its loop nest.
        loads: how its inputs reach the kernels.
        dot: the product.
        batch: axes that both operands and the result have.
        m: rows of the result, outermost first.
        n: columns of the result.
        k: the depth.
        a: the left operand.
        b: the right operand.
        tiles: numbers of the outputs that are stored tile by tile.
        reductions: reductions of the epilogue, all over the same axes.
        over: which sides they reduce: ``"n"`` (rows), ``"m"`` (columns), ``"mn"``; empty without reductions.
        finals: numbers of the outputs that need the reductions' results.
        triangle: where nothing but zeros is stored outside a triangle.
        skips: makes `Skips` for tiles of a schedule, where another family knows of tiles that nobody needs.
        staging: the copy of a convolution's input that the left operand may be read from.
        shift: where the left operand is read, if its rows are those of that copy.
        lying: the left operand where it lies, if a copy is read instead and does not hold all values.
    """

    region: Region
    nest: Nest
    loads: Loads
    dot: Expr
    batch: Atoms
    m: Atoms
    n: Atoms
    k: Atoms
    a: Side
    b: Side
    tiles: tuple[int, ...]
    reductions: tuple[Expr, ...]
    over: str
    finals: tuple[int, ...]
    triangle: Triangle | None
    skips: Callable[..., Skips] | None = None
    staging: Staging | None = None
    shift: Shift | None = None
    lying: Side | None = None

    def extent(self, atoms: Atoms) -> int:
        """Number of positions along `atoms`."""
        return prod(self.nest.axes.sizes(atoms))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch, M, N and K."""
        return self.extent(self.batch), self.extent(self.m), self.extent(self.n), self.extent(self.k)

    @property
    def dtype(self) -> str:
        """The dtype of the operands."""
        return self.a.expr.dtype

    @property
    def interleaved(self) -> bool:
        """Whether neighbours in memory are results of different batch elements, as of a transposed convolution."""

        def step(atoms: Atoms, steps: dict[int, int]) -> float:
            some = (steps[a] for a in atoms if steps.get(a) and self.extent((a,)) > 1)
            return min(some, default=math.inf)

        tables = [self.nest.output_strides(i) for i in self.tiles]
        return any(step(self.batch, t) < min(step(self.m, t), step(self.n, t)) for t in tables)

    @property
    def original(self) -> GemmPlan:
        """The plan that reads the left operand where it lies."""
        return self if self.lying is None else replace(self, a=self.lying, shift=None, lying=None)

    def mode(self, mode: str) -> str:
        """The precision mode that the product is computed in where the spec's is `mode` (see `precision_of`)."""
        graph = self.region.graph
        return precision_of([n.packet for n in self.region.ops if is_product(graph, n)], mode)

    @property
    def packable(self) -> str:
        """Operands that are worth a packed copy, of ``""``, ``"a"``, ``"b"``, ``"ab"``.

        Parameters, once, and those whose rows do not begin at multiples of 16 bytes, at every call; but no operand
        of overlapping windows, whose copy would be `Side.repeats` times as large as its tensor.
        """
        return "".join(s.name for s in self.sides if s.held or (not s.aligned and s.repeats < OVERLAPPING))

    @property
    def half(self) -> bool:
        """True where the operands are fp16 or bf16, which tensor cores take as they are."""
        return self.dtype in ("float16", "bfloat16")

    @property
    def sides(self) -> tuple[Side, Side]:
        """Both operands."""
        return self.a, self.b

    def used(self, side: Side) -> frozenset[int] | None:
        """Axes whose positions an operand needs one by one (see `used_axes`)."""
        used = used_axes(self.nest, [side.expr])
        return used if used is None else used | {a for a, _ in side.short}

    @property
    def kept(self) -> Atoms:
        """The axes that the reductions' results change along, outermost first."""
        return self.batch + (self.m if "m" not in self.over else ()) + (self.n if "n" not in self.over else ())

    def epilogue(self) -> list[Expr]:
        """The expressions of the epilogue, the product itself included."""
        return reach([o[0] for o in self.nest.outputs], lambda e: e is self.dot)

    def epilogue_used(self) -> frozenset[int] | None:
        """Axes whose positions the epilogue needs one by one (see `used_axes`)."""
        used = used_axes(self.nest, [o[0] for o in self.nest.outputs], lambda e: e is self.dot)
        return used if used is None else used | {a for d, _ in self.nest.limits for a in d}

    def epilogue_tables(self) -> list[dict[int, int]]:
        """Strides of every tensor that the epilogue reads or writes."""
        loads = [e for e in self.epilogue() if e.op == "load" and not self.nest.sources[e.param].scalar]
        outputs = [self.nest.output_strides(i) for i in range(len(self.nest.outputs))]
        return [self.nest.load_strides(e) for e in loads] + outputs


def walked(nest: Nest, load: Expr) -> dict[int, int]:
    """Axis to the elements by which a step along it moves in memory, as far as positions are sums of multiples."""
    place = Sum(nest.load_strides(load))
    for position, step in positions(load):
        place = place.plus(sum_of(nest.axes, position).times(step))
    return {a: abs(c) for a, c in place.steps.items()} if load.access else place.steps


def used_axes(nest: Nest, roots: list[Expr], stop: Callable[[Expr], bool] = lambda e: False) -> frozenset[int] | None:
    """Axes whose positions are needed one by one below `roots` (see `coalesce`); None where all of the nest's count.

    Where an operand is of windows the axes of its positions are those of every other tensor too, which need not walk
    them apart.
    """
    if not any(e.access and e.access.steps for e in nest.exprs):
        return None
    return frozenset(a for e in reach(roots, stop) if e.op == "index" for a in e.reduced)


def plan_gemm(region: Region, one_row: bool = False) -> GemmPlan:
    """The plan for `region`.

    Args:
        region: the region.
        one_row: products with one row are covered as well, but for reductions of their results. They are computed as
            tiles of rows, of which one is stored.

    Raises:
        Unsupported: no template covers it, or it is not a product with a pointwise prologue and a tile-wise epilogue.
    """
    region, nest, loads = region_nest(region, one_row)
    if nest.dot is not None and nest.ordered:
        raise Unsupported("a scan beside a matrix product")
    dots = [e for e in nest.exprs if e.op == "dot"]
    if not dots:
        raise NotConcerned("no matrix product")
    if len(dots) > 1:
        raise NotConcerned(f"{len(dots)} matrix products in one region")
    dot = dots[0]
    a, b = dot.args
    k = _depth(nest, dot)
    order = [x for d in dot.dims for x in d]
    in_a, in_b = a.depends, b.depends
    lost = [x for x in order if x not in in_a and x not in in_b]
    if lost:
        raise Unsupported("a matrix product of a broadcast with a broadcast")
    batch = tuple(x for x in order if x in in_a and x in in_b)
    m = tuple(x for x in order if x in in_a and x not in in_b)
    n = tuple(x for x in order if x in in_b and x not in in_a)
    if not n or not k or not (m or one_row):
        raise Unsupported("a matrix product with one row or one column")
    if a.dtype != b.dtype or a.dtype not in ("float32", "float16", "bfloat16"):
        raise Unsupported(f"a matrix product of {a.dtype} and {b.dtype}")
    left = _side(region, nest, loads, "a", a, m, k, batch)
    right = _side(region, nest, loads, "b", b, n, k, batch)
    if not m and nest.reductions():
        raise Unsupported("a reduction of a matrix product with one row")
    reductions, over, finals = _reductions(nest, dot, m, n)
    tiles = tuple(i for i in range(len(nest.outputs)) if i not in finals)
    triangle = _triangle(nest, tiles, finals, m, n)
    plan = GemmPlan(
        region, nest, loads, dot, batch, m, n, k, left, right, tiles, reductions, over, finals, triangle,
        staging=dot.staging,
    )  # fmt: skip
    _check_epilogue(plan)
    return plan


def read_weight_by(plan: GemmPlan, reader: type) -> GemmPlan:
    """The plan of a linear layer, its weight read by a family's own `reader`.

    Args:
        plan: of the product.
        reader: a subclass of `qimeng.coder.template.families.gemm.operand.Operand`.

    Raises:
        Unsupported: it is no linear layer.
    """
    weight = plan.b.plain
    if weight is None or plan.batch or len(plan.n) != 1 or weight.param is None:
        raise Unsupported("a product whose right operand is not the weight of a linear layer")
    return replace(plan, b=replace(plan.b, plain=None, loads=(), held=False, reader=reader))


def _depth(nest: Nest, dot: Expr) -> Atoms:
    """The axes of the depth; those along which memory runs innermost, where an operand is of windows.

    So a step of the loop reads neighbours: channels in channels-last memory, positions inside a window elsewhere.
    """
    k = tuple(dot.reduced)
    loads = [e for e in reach(list(dot.args)) if e.op == "load" and e.access and e.access.steps]
    if not loads:
        return k
    main = walked(nest, max(loads, key=lambda e: nest.axes.extent(e.depends)))
    moved = used_axes(nest, loads) or ()
    near = [a for a in k if main.get(a) == 1 and a not in moved]
    return (*(a for a in k if a not in near), *near)


def _side(region: Region, nest: Nest, loads: Loads, name: str, expr: Expr, rows: Atoms, k: Atoms, batch: Atoms) -> Side:
    below = reach([expr])
    if any(e.op in ("reduce", "part", "dot") for e in below):
        raise Unsupported("a reduction or a product inside an operand of a matrix product")
    found = tuple(dict.fromkeys(e for e in below if e.op == "load" and not nest.sources[e.param].scalar))
    if not found:
        raise Unsupported("an operand of a matrix product without a tensor")
    scalars = any(e.op == "load" and nest.sources[e.param].scalar for e in below)
    held = not scalars and all(_is_held(region, loads, e.param) for e in found)
    plain = expr
    while plain.op == "identity":
        plain = plain.args[0]
    largest = max(found, key=lambda e: nest.axes.extent(e.depends))
    main = walked(nest, largest)
    runs = [atoms for atoms in (rows, k) if any(main.get(x) == 1 for x in atoms)]
    k_major = rows not in runs or (runs == [rows, k] and not any(e.access for e in found))
    allowed = set(rows) | set(k) | set(batch)
    if not expr.depends <= allowed:
        raise Unsupported("an operand of a matrix product changes along other axes")
    is_load = plain.op == "load" and not nest.sources[plain.param].scalar
    aligned = all(_is_aligned(nest, e, (batch, rows, k)) for e in found if e.depends & set(rows) and e.depends & set(k))
    elements = nest.axes.extent(largest.depends)
    whole = {e.param for e in found if nest.axes.extent(e.depends) == elements}  # several, where tensors are joined
    repeats = elements / min(elements, sum(prod(nest.sources[param].shape) for param in whole))
    return Side(name, expr, rows, found, plain if is_load else None, held, k_major, aligned, repeats)


def _is_aligned(nest: Nest, load: Expr, roles: tuple[Atoms, ...]) -> bool:
    """True where `load` has a contiguous axis and steps of whole vectors of 16 bytes along the others."""
    strides = walked(nest, load)
    used = used_axes(nest, [load])
    groups = [g for atoms in roles for g in coalesce(nest, atoms, [strides], used) if prod(nest.axes.sizes(g)) > 1]
    steps = [strides.get(g[-1], 0) for g in groups]
    size = itemsize(nest.sources[load.param].dtype)
    return 1 in steps and all(step == 1 or step * size % VECTOR_BYTES == 0 for step in steps)


def _is_held(region: Region, loads: Loads, number: int) -> bool:
    """True where source `number` depends on parameters and buffers alone, so that it can be packed beforehand."""
    value = next(v for v, s in loads.values.items() if s.number == number)
    return is_state(region.graph, value)


def _reductions(nest: Nest, dot: Expr, m: Atoms, n: Atoms) -> tuple[tuple[Expr, ...], str, tuple[int, ...]]:
    reductions = tuple(nest.reductions())
    if not reductions:
        return (), "", ()
    sets = {frozenset(e.reduced) for e in reductions}
    names = {frozenset(m): "m", frozenset(n): "n", frozenset(m + n): "mn"}
    if len(sets) > 1 or not sets <= set(names):
        raise Unsupported("a reduction that is not over all rows or all columns of the matrix product")
    for e in reductions:
        if e.level > 1:
            raise Unsupported("a second reduction of a reduced matrix product")
        if e.param not in REDUCTIONS:
            raise Unsupported(f"{e.param} of a matrix product")
    finals = tuple(i for i, o in enumerate(nest.outputs) if o[0].level > 0)
    reduced = next(iter(sets))
    for i in finals:
        expr = nest.outputs[i][0]
        late = [e for e in reach([expr], lambda e: e.op == "reduce") if e.op != "reduce"]
        if any(e.depends & reduced or e is dot for e in late) or {a for d in expr.dims for a in d} & reduced:
            raise Unsupported("the matrix product is needed again after its reduction")
    return reductions, names[reduced], finals


def _check_epilogue(plan: GemmPlan) -> None:
    outside = set(plan.batch + plan.m + plan.n)
    for expr, *_ in plan.nest.outputs:
        if not expr.depends <= outside or not {a for d in expr.dims for a in d} <= outside:
            raise Unsupported("an output has axes that the matrix product does not have")
    for e in plan.epilogue():
        if e is not plan.dot and not (e.depends | set(e.reduced)) <= outside:
            raise Unsupported("the epilogue needs axes that the matrix product does not have")


def _triangle(nest: Nest, tiles: tuple[int, ...], finals: tuple[int, ...], m: Atoms, n: Atoms) -> Triangle | None:
    """The triangle outside which the only output is zero."""
    if len(tiles) != 1 or finals or len(m) != 1 or len(n) != 1:
        return None
    e = nest.outputs[tiles[0]][0]
    while e.op in ("identity", "cast"):
        e = e.args[0]
    if e.op != "where" or _number(e.args[2]) != 0:
        return None
    test = e.args[0]
    if not isinstance(test, Expr) or test.op not in ("ge", "le"):
        return None
    difference, offset = test.args[0], _number(test.args[1])
    if not isinstance(difference, Expr) or difference.op != "sub" or offset is None:
        return None
    columns, rows = (_position(x) for x in difference.args)
    if columns != n or rows != m:
        return None
    return Triangle("upper" if test.op == "ge" else "lower", int(offset))


def _number(e: object) -> float | None:
    """The number that `e` is, where it is one."""
    if isinstance(e, Expr):
        return float(e.param) if e.op == "const" else None
    return float(e) if isinstance(e, (int, float)) else None


def _position(e: object) -> Atoms | None:
    """The axes that `e` counts positions along, where it is an index."""
    while isinstance(e, Expr) and e.op in ("identity", "cast"):
        e = e.args[0]
    return tuple(e.reduced) if isinstance(e, Expr) and e.op == "index" else None


__all__ = [
    "OVERLAPPING",
    "REDUCTIONS",
    "Atoms",
    "GemmPlan",
    "Shift",
    "Side",
    "Skips",
    "Triangle",
    "plan_gemm",
    "read_weight_by",
    "used_axes",
    "walked",
]
