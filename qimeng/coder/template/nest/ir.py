"""A region as a list of expressions over loop axes.

Deals in what each value is (a load, arithmetic, a reduction, a matrix product) and over which axes. Composite
operators are taken apart by PyTorch's own decompositions and the few rules of `qimeng.coder.template.rules.builder`.
Knows nothing about schedules or kernel text.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace

from qimeng.coder.template.nest.axes import Axes, Dim, strides_of
from qimeng.coder.template.nest.expr import Expr, affine, positions
from qimeng.family import Unsupported

VECTOR_BYTES = 16
"""Bytes of the widest access of a thread, and the alignment that tensor descriptors ask for."""


@dataclass(eq=False)
class Source:
    """An input tensor as memory: strides by dimension."""

    number: int
    stride: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    scalar: bool = False


@dataclass(eq=False)
class Nest:
    """A region's loop nest.

    Attributes:
        axes: the axes.
        exprs: every expression, operands first.
        outputs: what is stored, with the shape, strides and dtype of each output tensor.
        sources: the region's inputs.
        reduced: axes that any reduction sums over.
        kept: the other axes of the nest.
        ordered: those of the kept axes that a scan goes along.
        dots: the matrix products, those that others are computed from first.
        deciding: numbers of the outputs by which something is decided later on.
        limits: dimensions whose axes have more positions than elements, with their numbers of elements: what lies
            beyond is computed but never stored.
    """

    axes: Axes
    exprs: list[Expr] = field(default_factory=list)
    outputs: list[tuple[Expr, tuple[int, ...], tuple[int, ...], str]] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    reduced: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()
    ordered: frozenset[int] = frozenset()
    dots: tuple[Expr, ...] = ()
    deciding: frozenset[int] = frozenset()
    limits: list[tuple[Dim, int]] = field(default_factory=list)

    def add(self, expr: Expr) -> Expr:
        """Record an expression."""
        self.exprs.append(expr)
        return expr

    def join_reductions(self) -> None:
        """Let reductions over different axes walk the same ones, as ``a.sum() / b.sum()`` may; call it before `finish`.

        Raises:
            Unsupported: they have different numbers of elements.
        """
        found = [e for e in self.exprs if e.op == "reduce"]
        for e in found[1:]:
            self.axes.unify(found[0].reduced, e.reduced)

    def finish(self) -> None:
        """Drop what no output needs and fill in which axes each expression depends on, and in which pass it is known.

        Raises:
            Unsupported: two dimensions of one tensor were unified (`x + x.T`): strides cannot say that.
        """
        self._drop_unneeded()
        for e in self.scans():
            self._drop_positions(e)
        self._drop_unneeded()
        every: set[int] = set()
        reduced: set[int] = set()
        ordered: set[int] = set()
        for e in self.exprs:
            e.dims = tuple(self.axes.resolve(d) for d in e.dims)
            e.reduced = self.axes.resolve(e.reduced)
            e.access = e.access.resolved(self.axes) if e.access else None
            held = [a for d in e.dims for a in d]
            if len(set(held)) < len(held) or (e.op == "dot" and set(held) & set(e.reduced)):
                raise Unsupported("two dimensions of one tensor would have to be one axis")
            below: set[int] = set()
            for a in e.operands():
                below |= a.depends
            if e.op == "load":
                below |= set(self.load_strides(e))
            elif e.op == "index":
                below |= set(e.reduced)
            elif e.op == "scan":
                below |= set(e.reduced)
                ordered |= set(e.reduced)
            elif e.op in ("reduce", "dot"):
                below -= set(e.reduced)
                every |= set(e.reduced)
                if e.op == "reduce":
                    reduced |= set(e.reduced)
            e.depends = frozenset(below)
            every |= below
            walks = e.op == "reduce" or (e.op == "dot" and not reduced.isdisjoint(e.reduced))
            e.level = max((a.level for a in e.operands()), default=0) + (1 if walks else 0)
        self.limits = [(self.axes.resolve(d), n) for d, n in self.limits]
        for e, *_ in self.outputs:
            every |= {a for d in e.dims for a in d}
        self.reduced, self.ordered = frozenset(reduced), frozenset(ordered)
        self.dots = tuple(e for e in self.exprs if e.op == "dot")
        for staging in (e.staging for e in self.dots if e.staging is not None):
            staging.order = tuple(self.axes.resolve(d) for d in staging.order)
            done: set[int] = set()
            self._finish_copy(staging.fill, done)
            self._finish_copy(staging.read, done)
        contracted = {a for e in self.dots for a in e.reduced}
        self.kept = frozenset(every - reduced - contracted)

    def _finish_copy(self, e: Expr, done: set[int]) -> None:
        """The same for what a copy holds or how it is read (`Staging`), which no output needs."""
        if id(e) in done:
            return
        done.add(id(e))
        below: set[int] = set()
        for a in e.operands():
            self._finish_copy(a, done)
            below |= a.depends
        e.dims, e.reduced = tuple(self.axes.resolve(d) for d in e.dims), self.axes.resolve(e.reduced)
        e.access = e.access.resolved(self.axes) if e.access else None
        below |= set(self.load_strides(e)) if e.op == "load" else set(e.reduced) if e.op == "index" else set()
        e.depends = frozenset(below)

    @property
    def dot(self) -> Expr | None:
        """The matrix product, where there is one; the last of several."""
        return self.dots[-1] if self.dots else None

    def _drop_unneeded(self) -> None:
        """Keep what an output needs."""
        needed: set[int] = set()
        stack = [e for e, *_ in self.outputs]
        while stack:
            e = stack.pop()
            if id(e) not in needed:
                needed.add(id(e))
                stack.extend(e.operands())
        self.exprs = [e for e in self.exprs if id(e) in needed]

    def _drop_positions(self, scan: Expr) -> None:
        """Make a scan for the best and their positions one for the best, where no position is used."""
        parts = [e for e in self.exprs if e.op == "part" and e.args[0] is scan]
        if scan.param.kind in ("argmax", "argmin") and all(e.param == "best" for e in parts):
            scan.param, scan.args = replace(scan.param, kind=scan.param.kind[3:]), scan.args[:1]
            for e in parts:
                e.param = "value"

    def load_strides(self, load: Expr) -> dict[int, int]:
        """Axis to stride (in elements) of a load, what its computed positions add left out."""
        if load.access:
            dims, steps = [d for d, _ in load.access.direct], [s for _, s in load.access.direct]
            return strides_of(self.axes, dims, steps)
        source = self.sources[load.param]
        return strides_of(self.axes, load.dims, source.stride)

    def walked_strides(self, load: Expr) -> dict[int, int]:
        """Axis to the elements by which a step along it moves in memory; computed positions count where affine."""
        table = self.load_strides(load)
        for position, step in positions(load):
            for atom, coefficient in (affine(self.axes, position) or {}).items():
                table[atom] = table.get(atom, 0) + coefficient * step
        return {atom: abs(step) for atom, step in table.items() if step}

    def output_strides(self, number: int) -> dict[int, int]:
        """Axis to stride (in elements) of output `number`."""
        expr, _, stride, _ = self.outputs[number]
        return strides_of(self.axes, expr.dims, stride)

    def accesses(self) -> list[tuple[dict[int, int], int]]:
        """Strides by axis, and bytes, of every tensor read or written."""
        from qimeng.graph.opgraph import itemsize

        found = [
            (self.walked_strides(e), e.dtype) for e in self.exprs if e.op == "load" and not self.sources[e.param].scalar
        ]
        found += [(self.output_strides(i), o[3]) for i, o in enumerate(self.outputs)]
        return [(s, self.axes.extent(s) * itemsize(d)) for s, d in found]

    def reductions(self, level: int | None = None) -> list[Expr]:
        """The reductions, all or those of one pass."""
        return [e for e in self.exprs if e.op == "reduce" and (level is None or e.level == level)]

    def scans(self) -> list[Expr]:
        """The scans, those that others are computed from first."""
        return [e for e in self.exprs if e.op == "scan"]

    @property
    def finest(self) -> str:
        """The finest floating numbers that are read or written: ``"float32"`` (or finer, or none), else a half type."""
        dtypes = {s.dtype for s in self.sources} | {dtype for *_, dtype in self.outputs}
        halves = [d for d in ("float16", "bfloat16") if d in dtypes]
        return halves[0] if halves and not dtypes & {"float32", "float64"} else "float32"

    @property
    def passes(self) -> int:
        """Number of passes over the reduced axes before the outputs can be written."""
        return max((e.level for e in self.exprs), default=0)


def coalesce(
    nest: Nest,
    atoms: Sequence[int],
    tables: Sequence[dict[int, int]] | None = None,
    used: Set[int] | None = None,
) -> list[list[int]]:
    """`atoms` (outermost first) in groups that every tensor can walk with one stride.

    Two neighbouring axes belong together when each access steps over the outer one by the extent of the inner one, or
    ignores both. `tables` are the strides of the accesses that count, by default all of the nest's. `used` are axes
    whose positions are needed one by one, by default those of every position that the nest computes.
    """
    groups: list[list[int]] = []
    tables = [s for s, _ in nest.accesses()] if tables is None else tables
    used = {a for e in nest.exprs if e.op == "index" for a in e.reduced} if used is None else used
    for atom in atoms:
        if groups:
            outer, size = groups[-1][-1], nest.axes.size(atom)
            if not {outer, atom} & used and all(t.get(outer, 0) == t.get(atom, 0) * size for t in tables):
                groups[-1].append(atom)
                continue
        groups.append([atom])
    return groups


def is_wide(nest: Nest, tables: Sequence[dict[int, int]]) -> bool:
    """True where offsets pass 31 bits; a strided view may lie far apart although it is small."""
    far = (1 << 31) - (1 << 25)
    if any(sum((nest.axes.size(a) - 1) * abs(s) for a, s in t.items()) >= far for t in tables):
        return True
    sources = [nest.sources[e.param] for e in nest.exprs if e.access]  # an index may point to any element
    return any(sum((n - 1) * abs(s) for n, s in zip(x.shape, x.stride, strict=True)) >= far for x in sources)


def by_stride(nest: Nest, atoms: frozenset[int]) -> list[int]:
    """`atoms` ordered outermost first by their stride in the largest tensors."""
    accesses = sorted(nest.accesses(), key=lambda a: -a[1])

    def rank(atom: int) -> tuple[int, ...]:
        for table, _ in accesses:
            if atom in table:
                return (0, -table[atom], atom)
        return (-1, 0, atom)

    order = sorted(atoms, key=rank)
    if accesses:
        main = accesses[0][0]
        order = [a for a in order if a not in main] + [a for a in order if a in main]
    return order


__all__ = ["VECTOR_BYTES", "Nest", "Source", "by_stride", "coalesce", "is_wide"]
