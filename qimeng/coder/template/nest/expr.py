"""One value of a loop nest, and how a load finds its element.

Some dimensions of a loaded tensor are loop axes as they are. The position along the others may be an integer
expression: a window, a shift by padding, a gather through an index. A guard says where such a read exists at all;
elsewhere it gives 0 and touches no memory. Knows nothing about operators or kernel text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from qimeng.coder.template.nest.axes import Axes, Dim


@dataclass(frozen=True)
class Access:
    """How a load finds its element; see `Expr`.

    Attributes:
        direct: dimensions that are axes as they are, each with its stride in elements.
        steps: stride in elements of each computed position; the positions are the load's first operands.
        guarded: the load's last operand says where it exists.
    """

    direct: tuple[tuple[Dim, int], ...]
    steps: tuple[int, ...] = ()
    guarded: bool = False

    def resolved(self, axes: Axes) -> Access:
        """The same in atoms as they now stand."""
        return Access(tuple((axes.resolve(d), s) for d, s in self.direct), self.steps, self.guarded)


@dataclass(eq=False)
class Expr:
    """One value of the nest.

    Attributes:
        op: ``"load"``, ``"const"``, ``"index"`` (position along `reduced`, used as a dimension), ``"reduce"``,
            ``"scan"`` (along `reduced`, which stays a dimension), ``"dot"``, or the name of a pointwise operator
            (`qimeng.coder.template.triton.ops`).
        args: operands (`Expr`) and plain numbers.
        dims: the value's dimensions as atoms; a broadcast dimension keeps its axes although the value is the same.
        dtype: name of the PyTorch dtype.
        param: the kind of a reduction (``"sum"``, ``"max"`` …), the `Scan`, the input number of a load, the literal of
            a const.
        reduced: axes that a reduction or a product sums over, or a scan goes along, outermost first.
        depends: resolved axes that the value changes along; filled by `Nest.finish`.
        level: number of passes over the reduced axes that must end before it is known; filled by `Nest.finish`.
        stored: the result of an operator, which PyTorch rounds to its dtype.
        shown: that rounding shows in a finer result (`qimeng.graph.rounding`).
        staging: of a product, a copy that its left operand may be read from (`Staging`).
        access: how a load finds its element where its dimensions are not simply those of the tensor; its operands are
            then positions and, last, a guard.
    """

    op: str
    args: tuple[Any, ...]
    dims: tuple[Dim, ...]
    dtype: str
    param: Any = None
    reduced: Dim = ()
    depends: frozenset[int] = frozenset()
    level: int = 0
    stored: bool = False
    shown: bool = False
    access: Access | None = None
    staging: Staging | None = None

    def operands(self) -> Iterator[Expr]:
        """The expressions among the arguments."""
        return (a for a in self.args if isinstance(a, Expr))


@dataclass(eq=False)
class Staging:
    """A copy of a tensor that a product of windows may read instead: channels last, with its padding.

    Attributes:
        fill: what the copy holds, over axes of its own.
        order: dimensions of the copy, outermost first, as dimensions of `fill`.
        read: the operand as a load of the copy, without guards of padding; its `param` is no tensor's number yet.
    """

    fill: Expr
    order: tuple[Dim, ...]
    read: Expr


def constant(e: Expr) -> Expr | None:
    """The constant that `e` is, under whatever dimensions; None for anything that is computed or loaded."""
    while e.op == "identity":
        e = e.args[0]
    return e if e.op == "const" else None


def positions(load: Expr) -> list[tuple[Expr, int]]:
    """The computed positions of `load` with their strides."""
    return list(zip(load.args, load.access.steps, strict=False)) if load.access else []


def guard(load: Expr) -> Expr | None:
    """Where `load` exists; None where it always does."""
    return load.args[-1] if load.access and load.access.guarded else None


@dataclass(frozen=True)
class Sum:
    """An integer as a sum.

    Attributes:
        steps: atom to the multiple of the position along it.
        constant: what it is where all positions and other terms are 0.
        others: terms of another kind (quotients, loaded integers), each with its factor.
    """

    steps: dict[int, int] = field(default_factory=dict)
    constant: int = 0
    others: tuple[tuple[Expr, int], ...] = ()

    def times(self, factor: int) -> Sum:
        """The sum times a number."""
        steps = {a: c * factor for a, c in self.steps.items() if c * factor}
        return Sum(steps, self.constant * factor, tuple((e, c * factor) for e, c in self.others))

    def plus(self, more: Sum) -> Sum:
        """Both sums together."""
        total = dict(self.steps)
        for atom, coefficient in more.steps.items():
            total[atom] = total.get(atom, 0) + coefficient
        steps = {a: c for a, c in total.items() if c}
        return Sum(steps, self.constant + more.constant, (*self.others, *more.others))


def sum_of(axes: Axes, e: Expr) -> Sum:
    """The integer `e` as a sum."""

    def of(x: Any) -> Sum:
        return sum_of(axes, x) if isinstance(x, Expr) else Sum({}, int(x))

    if e.op == "const":
        return Sum({}, int(e.param))
    if e.op == "index":
        return Sum(walk(axes, axes.resolve(e.reduced)))
    if e.op == "identity" or (e.op == "cast" and not of(e.args[0]).others):
        return of(e.args[0])
    if e.op in ("add", "sub"):
        return of(e.args[0]).plus(of(e.args[1]).times(1 if e.op == "add" else -1))
    numbers = [a for a in e.args if isinstance(a, int)]
    if e.op == "mul" and numbers:
        return of(next(iter(e.operands()))).times(numbers[0])
    return Sum(others=((e, 1),))


def affine(axes: Axes, e: Expr) -> dict[int, int] | None:
    """Atom to coefficient, where the integer `e` is a sum of multiples of positions along axes and a constant.

    None for any other expression.
    """
    found = linear(axes, e)
    return None if found is None else found[0]


def linear(axes: Axes, e: Expr) -> tuple[dict[int, int], int] | None:
    """`affine` with the constant."""
    found = sum_of(axes, e)
    return None if found.others else (found.steps, found.constant)


def walk(axes: Axes, dim: Dim) -> dict[int, int]:
    """Atom to coefficient of the position along the resolved `dim`."""
    found, step = {}, 1
    for atom in reversed(dim):
        found[atom] = step
        step *= axes.size(atom)
    return found


def reach(roots: Iterable[Expr], stop: Callable[[Expr], bool] = lambda e: False) -> list[Expr]:
    """Every expression that `roots` are computed from, operands first, without what lies below one that stops."""
    seen: dict[int, Expr] = {}
    stack = list(roots)[::-1]
    while stack:
        e = stack[-1]
        waiting = [] if id(e) in seen or stop(e) else [a for a in e.operands() if id(a) not in seen]
        stack.extend(waiting[::-1])
        if not waiting:
            seen[id(e)] = stack.pop()
    return list(seen.values())


__all__ = [
    "Access",
    "Expr",
    "Staging",
    "Sum",
    "affine",
    "constant",
    "guard",
    "linear",
    "positions",
    "reach",
    "sum_of",
    "walk",
]
