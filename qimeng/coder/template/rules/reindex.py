"""Values at other positions: `x[i]` becomes `x[f(i)]` for an expression, all the way down to the tensors it loads.

So slices, padding, concatenation, windows and gathers cost no memory: what is computed in between is computed at the
position where it is wanted. Deals in substituting positions for axes. Knows nothing about operators or kernel text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qimeng.coder.template.nest.axes import Dim
from qimeng.coder.template.nest.expr import Access, Expr, linear, walk
from qimeng.coder.template.nest.scans import Scan, neutral
from qimeng.coder.template.rules.builder import Builder
from qimeng.family import Unsupported

MOST_COPIES = 2048
"""Expressions that one substitution may copy: chains of concatenations of concatenations grow without end."""


def index(b: Builder, dim: Dim) -> Expr:
    """The position along `dim` (int32), for arithmetic with other positions: it has no dimensions that could meet."""
    if not dim:
        return b.const(0, "int32")
    return b.nest.add(Expr("index", (), (), "int32", reduced=dim))


def integer(b: Builder, op: str, *args: Expr | int, dtype: str = "int32") -> Expr:
    """Arithmetic on positions; adding 0 and multiplying by 1 are left out."""
    first, second = args[0], args[1] if len(args) > 1 else None
    if isinstance(first, Expr) and ((op in ("add", "sub") and second == 0) or (op == "mul" and second == 1)):
        return first
    return b.nest.add(Expr(op, args, (), dtype))


def within(b: Builder, position: Expr, low: int, high: int) -> Expr:
    """Where `low <= position < high`."""
    above = integer(b, "ge", position, low, dtype="bool")
    return integer(b, "and", above, integer(b, "lt", position, high, dtype="bool"), dtype="bool")


def at(b: Builder, x: Expr, dim: int, into: Sequence[Dim], position: Expr, guard: Expr | None = None) -> Expr:
    """`x` with its dimension `dim` replaced by the dimensions `into`, read at `position` along the old one.

    Args:
        b: the builder.
        x: the value.
        dim: number of the dimension.
        into: the dimensions that stand in its place; none drops it.
        position: the position along the old dimension (an integer) as it depends on other axes.
        guard: where the result is used; elsewhere nothing is read, and the value is meaningless.

    Raises:
        Unsupported: the dimension's axes mean something else in `x` as well.
    """
    old = b.axes.resolve(b.whole(x.dims[dim]))
    dims = (*x.dims[:dim], *into, *x.dims[dim + 1 :])
    if not old:
        return b.redim(x, dims)
    if any(set(old) & set(b.axes.resolve(d)) for i, d in enumerate(x.dims) if i != dim):
        raise Unsupported("two dimensions of one tensor that are the same axis")
    moved = _Substitution(b, old, tuple(a for d in into for a in d), position, guard).of(x)
    return b.redim(moved, dims)


class _Substitution:
    """A position in place of a group of axes."""

    def __init__(
        self, b: Builder, old: Dim, into: Dim, position: Expr, guard: Expr | None, straight: bool = False
    ) -> None:
        self._straight = straight
        self._b, self._old, self._into, self._position, self._guard = b, old, into, position, guard
        self._made: dict[int, Expr] = {}
        self._held: dict[int, bool] = {}
        self._parts: dict[int, Expr] = {}

    def of(self, e: Expr) -> Expr:
        """`e` at the new positions; what does not change along the old axes stays as it is."""
        if id(e) not in self._made:
            if len(self._made) >= MOST_COPIES:
                raise Unsupported("views of views of too many values")
            self._made[id(e)] = self._copy(e) if self._holds(e) else e
        return self._made[id(e)]

    def _holds(self, e: Expr) -> bool:
        """Whether any of the old axes occurs in `e` or below it."""
        if id(e) not in self._held:
            dims = [*e.dims, e.reduced, *(d for d, _ in (e.access.direct if e.access else ()))]
            own = any(set(self._old) & set(self._b.axes.resolve(d)) for d in dims)
            self._held[id(e)] = own or any([self._holds(a) for a in e.operands()])
        return self._held[id(e)]

    def _copy(self, e: Expr) -> Expr:
        axes = self._b.axes
        if e.op == "load":
            return self._load(e)
        if e.op == "index":
            return self._index(axes.resolve(e.reduced))
        if e.op == "scan":
            return self._scan(e)
        if e.op in ("reduce", "dot"):
            bound = set(axes.resolve(e.reduced)) & set(self._old)
            if bound and any(set(self._old) & set(axes.resolve(d)) for d in e.dims):
                raise Unsupported("a view of a reduction along the axis that it sums over")
            if bound:
                return e
        args = tuple(self.of(a) if isinstance(a, Expr) else a for a in e.args)
        copy = replace(e, args=args, dims=self._dims(e.dims), depends=frozenset(), level=0)
        return self._b.nest.add(copy)

    def _scan(self, e: Expr) -> Expr:
        """A scan, of elements that are read at the new positions; it may change its direction.

        What lies outside the old axis is neutral, so that a shift by one makes an exclusive scan.
        """
        b, ordered = self._b, self._b.axes.resolve(e.reduced)
        found = linear(b.axes, self._position)
        if not set(ordered) & set(self._old):
            if found is None or set(found[0]) & set(ordered):
                raise Unsupported("a scan read at positions that change along it")
            args = tuple(self.of(a) for a in e.operands())
            return b.nest.add(replace(e, args=args, dims=self._dims(e.dims)))
        into, size, count = b.axes.resolve(self._into), b.axes.extent(ordered), b.axes.extent(self._into)
        steps = walk(b.axes, into)
        signs = [s for s in (1, -1) if found is not None and found[0] == {a: s * c for a, c in steps.items()}]
        if found is None or ordered != self._old or not signs:
            raise Unsupported("a scan read at other positions than one after the other")
        sign, first = signs[0], found[1]
        start = size - 1 if e.param.reverse else 0
        if not 0 <= sign * (start - first) < count:
            raise Unsupported("a part of a scan without its beginning")
        ends = (first, first + sign * (count - 1))
        outside = min(ends) < 0 or max(ends) >= size
        guard = within(b, self._position, 0, size) if outside else None
        below = _Substitution(b, self._old, into, self._position, guard, straight=True)
        args = tuple(below.of(a) for a in e.operands())
        if guard is not None:
            neutrals = [neutral(e.param.kind, part, a.dtype) for part, a in zip(e.param.parts, args, strict=True)]
            args = tuple(b.pw("where", guard, a, n, dtype=a.dtype) for a, n in zip(args, neutrals, strict=True))
        turned = Scan(e.param.kind, e.param.reverse != (sign < 0))
        return b.nest.add(replace(e, args=args, dims=self._dims(e.dims), param=turned, reduced=into))

    def _dims(self, dims: Sequence[Dim]) -> tuple[Dim, ...]:
        """`dims` with the new axes where the first of the old ones were."""
        out, placed = [], False
        for dim in dims:
            atoms = self._b.axes.resolve(dim)
            left = tuple(a for a in atoms if a not in self._old)
            if len(left) < len(atoms) and not placed:
                left, placed = left + self._into, True
            out.append(left)
        return tuple(out)

    def _load(self, e: Expr) -> Expr:
        b, source = self._b, self._b.nest.sources[e.param]
        direct = e.access.direct if e.access else tuple(zip(e.dims, source.stride, strict=True))
        plain, args, steps = [], [], []
        for dim, stride in direct:
            for part, step in self._cut(b.axes.resolve(dim), stride):
                if isinstance(part, Expr):
                    args.append(part)
                    steps.append(step)
                else:
                    plain.append((part, step))
        guards = [] if self._guard is None or not args else [self._guard]
        if e.access:
            old = [self.of(a) for a in e.operands()]
            if e.access.guarded:
                guards.append(old.pop())
            if any(n is not o for n, o in zip(old, e.args, strict=False)) and self._guard is not None and not args:
                guards.append(self._guard)
            args, steps = [*old, *args], [*e.access.steps, *steps]
        if len(guards) == 2:
            guards = [integer(b, "and", *guards, dtype="bool")]
        if self._straight:
            args, steps = self._straightened(args, steps, plain)
        access = Access(tuple(plain), tuple(steps), bool(guards))
        return b.nest.add(replace(e, args=(*args, *guards), dims=self._dims(e.dims), access=access))

    def _straightened(
        self, args: Sequence[Expr], steps: Sequence[int], plain: list[tuple[Dim, int]]
    ) -> tuple[list[Expr], list[int]]:
        """Positions without detours: n - 1 - (n - 1 - i) is an axis as it is, which is added to `plain`."""
        b, left = self._b, []
        into = b.axes.resolve(self._into)
        for arg, step in zip(args, steps, strict=True):
            found = linear(b.axes, arg)
            if found is None or found[0] != walk(b.axes, into):
                left.append((arg, step))
            elif found[1]:
                left.append((integer(b, "add", index(b, into), found[1]), step))
            else:
                plain.append((into, step))
        return [a for a, _ in left], [s for _, s in left]

    def _cut(self, dim: Dim, stride: int) -> list[tuple[Dim | Expr, int]]:
        """The parts of a dimension with their strides: runs of other axes, and positions in place of the old ones."""
        parts: list[tuple[Dim | Expr, int]] = []
        atoms, step = list(dim), stride
        while atoms:
            if atoms[-len(self._old) :] == list(self._old):
                parts.append((self._position, step))
                step *= self._b.axes.extent(self._old)
                del atoms[-len(self._old) :]
                continue
            atom = atoms.pop()
            parts.append((self._part(atom) if atom in self._old else (atom,), step))
            step *= self._b.axes.size(atom)
        return parts[::-1]

    def _part(self, atom: int) -> Expr:
        """The position along one of the old axes, by division of the whole."""
        if atom not in self._parts:
            b, at_ = self._b, self._old.index(atom)
            inner, size = b.axes.extent(self._old[at_ + 1 :]), b.axes.size(atom)
            found = self._position if inner == 1 else integer(b, "idiv", self._position, inner)
            self._parts[atom] = found if at_ == 0 else integer(b, "imod", found, size)
        return self._parts[atom]

    def _index(self, dim: Dim) -> Expr:
        """The position along `dim`, an axis of which is replaced."""
        b, total = self._b, None
        for part, step in self._cut(dim, 1):
            term = integer(b, "mul", part if isinstance(part, Expr) else index(b, part), step)
            total = term if total is None else integer(b, "add", total, term)
        return total if total is not None else b.const(0, "int32")


__all__ = ["at", "index", "integer", "within"]
