"""Axes of a loop nest, found by following shapes through a region.

Every dimension of every tensor is a product of *atoms*: loop axes that are never cut further. A reshape splits atoms,
a pointwise operator says that two dimensions are the same axis. What is left at the end is the smallest set of axes
from which every tensor of the region can be indexed by strides alone (the idea of einops' axis lists).

Deals in sizes and equalities. Knows nothing about operators or kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from qimeng.family import Unsupported

Dim = tuple[int, ...]
"""A dimension as atoms, outermost first; empty for size 1."""


class Axes:
    """Atoms with their sizes, merged and split as shapes are unified.

    >>> axes = Axes()
    >>> a, b, c = axes.new(12), axes.new(3), axes.new(4)
    >>> axes.unify(a, b + c)
    >>> axes.sizes(axes.resolve(a))
    [3, 4]
    """

    def __init__(self) -> None:
        self._size: list[int] = []
        self._same: dict[int, int] = {}
        self._parts: dict[int, Dim] = {}

    def new(self, size: int) -> Dim:
        """A dimension of `size` with an axis of its own (none for size 1)."""
        if size == 1:
            return ()
        self._size.append(size)
        return (len(self._size) - 1,)

    def size(self, atom: int) -> int:
        """Number of elements along a resolved atom."""
        return self._size[atom]

    def sizes(self, atoms: Iterable[int]) -> list[int]:
        """Sizes of resolved atoms."""
        return [self._size[a] for a in atoms]

    def extent(self, atoms: Iterable[int]) -> int:
        """Product of the sizes."""
        n = 1
        for a in atoms:
            n *= self._size[a]
        return n

    def widened(self, sizes: Mapping[int, int]) -> Axes:
        """A copy in which these resolved atoms have other sizes."""
        found = Axes()
        found._size = [sizes.get(atom, size) for atom, size in enumerate(self._size)]
        found._same, found._parts = dict(self._same), dict(self._parts)
        return found

    def resolve(self, dim: Dim) -> Dim:
        """`dim` in atoms as they now stand."""
        out: list[int] = []
        for atom in dim:
            root = self._root(atom)
            out.extend(self.resolve(self._parts[root]) if root in self._parts else (root,))
        return tuple(out)

    def unify(self, left: Dim, right: Dim) -> None:
        """Say that two dimensions of equal size are the same axes.

        Raises:
            Unsupported: their factors do not line up.
        """
        a, b = list(self.resolve(left)), list(self.resolve(right))
        while a and b:
            x, y = a.pop(0), b.pop(0)
            if x == y:
                continue
            if self._size[x] == self._size[y]:
                self._same[y] = x
            elif self._size[x] > self._size[y]:
                a[:0] = self._cut(x, self._size[y])[1:]
                self._same[y] = self._parts[x][0]
            else:
                b[:0] = self._cut(y, self._size[x])[1:]
                self._same[self._parts[y][0]] = x
            a, b = list(self.resolve(tuple(a))), list(self.resolve(tuple(b)))
        if a or b:
            raise Unsupported("two shapes with different numbers of elements meet")

    def regroup(self, dims: Sequence[Dim], shape: Sequence[int]) -> tuple[Dim, ...]:
        """The dimensions of a row-major reshape of `dims` to `shape`.

        Raises:
            Unsupported: the factors do not line up.
        """
        flat = [a for d in dims for a in self.resolve(d)]
        out = []
        for size in shape:
            group: list[int] = []
            while size > 1:
                if not flat:
                    raise Unsupported("a reshape changes the number of elements")
                atom = flat.pop(0)
                if self._size[atom] > size:
                    head, *rest = self._cut(atom, size)
                    flat[:0] = rest
                    flat = [r for a in flat for r in self.resolve((a,))]
                    atom = head
                if size % self._size[atom]:
                    raise Unsupported(f"a reshape cuts an axis of {self._size[atom]} at {size}")
                size //= self._size[atom]
                group.append(atom)
            out.append(tuple(group))
        return tuple(out)

    def _root(self, atom: int) -> int:
        while atom in self._same:
            atom = self._same[atom]
        return atom

    def _cut(self, atom: int, outer: int) -> list[int]:
        """Split an atom into `outer` times the rest."""
        size = self._size[atom]
        if size % outer:
            raise Unsupported(f"an axis of {size} and one of {outer} do not line up")
        parts = self.new(outer) + self.new(size // outer)
        self._parts[atom] = parts
        return list(parts)


def strides_of(axes: Axes, dims: Sequence[Dim], stride: Sequence[int]) -> dict[int, int]:
    """Atom to its stride, for a tensor whose dimension `i` has stride `stride[i]` (zero strides are left out)."""
    table: dict[int, int] = {}
    for dim, step in zip(dims, stride, strict=True):
        for atom in reversed(axes.resolve(dim)):
            if step:
                table[atom] = table.get(atom, 0) + step
            step *= axes.size(atom)
    return table


__all__ = ["Axes", "Dim", "strides_of"]
