"""Where an operand of windows is read: positions and guards as the main loop wants them.

A position is a sum of what the rows say and what the depth says. The part of the rows is computed once, before the
loop; the part of the depth once a step, as a vector; a guard compares their sum. What is not such a sum (a gather, a
position of a division) is left to the emitter. Deals in lines of kernel text. Knows nothing about the loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from qimeng.coder.template.families.gemm.plan import GemmPlan, Side
from qimeng.coder.template.nest.dtypes import compute_dtype, is_float
from qimeng.coder.template.nest.expr import Expr, Sum, guard, positions, reach, sum_of
from qimeng.coder.template.nest.ir import Nest
from qimeng.coder.template.triton.emitter import Emitter, Walk
from qimeng.coder.template.triton.ops import TRITON_DTYPE
from qimeng.coder.template.triton.walks import spread


@dataclass(frozen=True)
class Bound:
    """``low <= position < high``, the position a sum; None is no bound."""

    table: tuple[tuple[int, int], ...]
    first: int
    others: tuple[tuple[Expr, int], ...]
    low: int | None
    high: int | None

    @property
    def position(self) -> Sum:
        """The position."""
        return Sum(dict(self.table), self.first, self.others)

    def tightened(self, sizes: Mapping[int, int]) -> Bound:
        """Without the bounds that hold anyway."""
        if self.others:
            return self
        ends = [c * (sizes[a] - 1) for a, c in self.table]
        least = self.first + sum(e for e in ends if e < 0)
        most = self.first + sum(e for e in ends if e > 0)
        low = self.low if self.low is not None and least < self.low else None
        high = self.high if self.high is not None and most >= self.high else None
        return Bound(self.table, self.first, self.others, low, high)


class Positions:
    """The computed positions of one operand.

    Attributes:
        setup: lines before the loop.
        steps: lines of a step, after those of the depth's axes.
    """

    def __init__(
        self,
        nest: Nest,
        side: Side,
        fixed: Sequence[Walk],
        deep: Sequence[Walk],
        masks: Mapping[str, str] = MappingProxyType({}),
    ):
        self.setup: list[str] = []
        self.steps: list[str] = []
        self._nest, self._side, self._fixed, self._deep = nest, side, fixed, deep
        self._name = side.name
        self._emitters = tuple(
            Emitter(nest, list(w), letter=f"{side.name}_{c}", masks=dict(masks)) for w, c in ((fixed, "u"), (deep, "v"))
        )
        self._places: dict[int, str] = {}
        self._guards: dict[int, str] = {}
        self._tests: dict[Bound, str] = {}
        for test in _tests_of(side):
            self._take_guard(test)
        for e in side.loads:
            if e.access:
                self._take_load(e)

    def load(self, e: Expr | None, mask: str, plane: str = "0") -> str | None:
        """The text that reads `e`; None where the emitter is to print it.

        Args:
            e: a load; None where the operand is no tensor as it is.
            mask: of what overhangs on either side; empty where nothing does.
            plane: elements from the tensor's beginning to that of a plane.
        """
        exists = guard(e) if e is not None else None
        inside = "" if exists is None else self._guards.get(id(exists))
        if id(e) not in self._places or inside is None:
            return None
        whole = " & ".join(t for t in (mask, inside) if t)
        place = self._places[id(e)] + (f" + {plane}" if plane != "0" else "")
        return f"tl.load({place}{f', mask={whole}, other=0.0' if whole else ''})"

    def define(self, em: Emitter) -> None:
        """Print the reads and name them and the guards, so that `em` computes with them."""
        for e in self._side.loads:
            text = self.load(e, em.mask(em.side(e))) if e.access else None
            if text is not None:
                name, dtype = f"{self._side.name}_read{len(em.lines)}", compute_dtype(e.dtype)
                em.lines.append(f"{name} = {text}.to({TRITON_DTYPE[dtype]})")
                em.define(e, name)
        em.names |= {e: f"({text})" for e, text in self._guards.items() if text}

    def _take_guard(self, e: Expr) -> None:
        bounds = _bounds(self._nest, e)
        if bounds is None or any(self._parts(b.position) is None for b in bounds):
            return
        sizes = {a: self._nest.axes.size(a) for b in bounds for a, _ in b.table}
        tests = [self._test(b.tightened(sizes)) for b in bounds]
        self._guards[id(e)] = " & ".join(dict.fromkeys(t for t in tests if t))

    def _test(self, bound: Bound) -> str:
        """The name of a mask, printed once; empty where the bound always holds."""
        if bound.low is None and bound.high is None:
            return ""
        if bound not in self._tests:
            parts = self._parts(bound.position)
            assert parts is not None
            rows, deep = parts
            number = len(self._tests)
            at, self._tests[bound] = f"{self._name}_at{number}", f"{self._name}_in{number}"
            first = [str(bound.first)] if bound.first or not rows else []
            if rows or not deep:
                self.setup.append(f"{at} = {summed([*rows, *first])}")
            if deep:
                self.steps.append(f"{at}_k = {summed([*([at] if rows else first), *deep])}")
                at = f"{at}_k"
            tests = [f"({at} >= {bound.low})"] if bound.low is not None else []
            tests += [f"({at} < {bound.high})"] if bound.high is not None else []
            (self.steps if deep else self.setup).append(f"{self._tests[bound]} = {' & '.join(tests)}")
        return self._tests[bound]

    def _take_load(self, e: Expr) -> None:
        place = Sum(self._nest.load_strides(e))
        for position, step in positions(e):
            place = place.plus(sum_of(self._nest.axes, position).times(step))
        parts = self._parts(place)
        if parts is None:
            return
        rows, deep = parts
        sides = [{w.side for w in walks if w.side and set(w.atoms) & e.depends} for walks in (self._fixed, self._deep)]
        if bool(sides[0]) > bool(rows) or bool(sides[1]) > bool(deep):
            return  # a guard changes where the address does not: the emitter broadcasts it
        name = f"{self._name}_from{len(self._places)}" if self._places else f"{self._name}_from"
        first = [str(place.constant)] if place.constant else []
        self.setup.append(f"{name} = {summed([f'x{self._nest.sources[e.param].number}_ptr', *rows, *first])}")
        self.steps += [f"{name}_k = {summed(deep)}"] if deep else []
        self._places[id(e)] = f"{name} + {name}_k" if deep else name

    def _parts(self, place: Sum) -> tuple[list[str], list[str]] | None:
        """What the rows and what the depth add to a sum; None where a term of it depends on both."""
        rows, deep = terms_of(self._fixed, place.steps), terms_of(self._deep, place.steps)
        for e, factor in place.others:
            walks = [self._fixed, self._deep]
            inside = [e.depends <= {a for w in found for a in w.atoms} for found in walks]
            if not any(inside):
                return None
            late = not inside[0]
            em, (terms, lines) = self._emitters[late], ((rows, self.setup), (deep, self.steps))[late]
            before = len(em.lines)
            value = em.value(e)
            lines += em.lines[before:]
            terms.append(value if factor == 1 else f"{value} * {factor}")
        return rows, deep


def shortened(plan: GemmPlan) -> list[str]:
    """Lines that leave in `most` the steps after which an operand is zero for this element of the batch.

    So it is where the phases of a transposed convolution have windows of different sizes. Empty where all are as deep.
    """
    nest, batch, outer = plan.nest, set(plan.batch), plan.k[0]
    for side in plan.sides:
        for bound in (b for e in _tests_of(side) for b in _bounds(nest, e) or ()):
            by_phase = all(e.depends <= batch for e, _ in bound.others)
            ((atom, step),) = bound.table if len(bound.table) == 1 else ((None, 0),)
            if atom != outer or step < 0 or bound.high is None or not bound.others or not by_phase:
                continue
            tables = [nest.load_strides(e) for e in side.loads]
            lines, walks = spread(nest, plan.batch, tables, "z", stem="phase", used=plan.used(side))
            em = Emitter(nest, walks, letter="phase_u")
            first = [f"{em.value(e)} * {factor}" if factor != 1 else em.value(e) for e, factor in bound.others]
            inner = plan.extent(plan.k[1:])
            taps = f"({bound.high + step - 1 - bound.first} - ({summed(first)})) // {step}"
            return [*lines, *em.lines, f"most = ({taps} * {inner} + BK - 1) // BK"]
    return []


def columns_read(plan: GemmPlan) -> tuple[int, int]:
    """The first column that the right operand has, and the one after the last: beyond, the product is 0.

    Where a product is a part of a concatenation, the other parts are columns too, which the epilogue copies.
    """
    low, high, operand = 0, plan.shape[2], plan.b.plain
    exists = guard(operand) if operand is not None else None
    for bound in (_bounds(plan.nest, exists) or ()) if exists is not None else ():
        if len(plan.n) == 1 and bound.table == ((plan.n[0], 1),) and not bound.others:
            low = low if bound.low is None else max(low, bound.low - bound.first)
            high = high if bound.high is None else min(high, bound.high - bound.first)
    return low, high


def _tests_of(side: Side) -> list[Expr]:
    """Where the loads of an operand exist, and what its padding is decided by."""
    found = [e for e in reach([side.expr]) if e.op == "where" or e.access]
    return [a for e in found for a in e.operands() if a.dtype == "bool"]


def _bounds(nest: Nest, e: Expr) -> list[Bound] | None:
    """The bounds that `e` is the conjunction of; None where it is something else."""
    if e.op == "identity":
        return _bounds(nest, e.args[0])
    if e.op == "and":
        parts = [_bounds(nest, a) if isinstance(a, Expr) else None for a in e.args]
        known = [b for part in parts if part is not None for b in part]
        return None if None in parts else _joined(known)
    if e.op not in ("ge", "lt") or not isinstance(e.args[0], Expr) or not isinstance(e.args[1], int):
        return None
    if is_float(e.args[0].dtype):
        return None
    at = sum_of(nest.axes, e.args[0])
    low, high = (e.args[1], None) if e.op == "ge" else (None, e.args[1])
    return [Bound(tuple(sorted(at.steps.items())), at.constant, at.others, low, high)]


def _joined(bounds: Sequence[Bound]) -> list[Bound]:
    """Bounds of one position as one."""
    found: dict[tuple[object, ...], Bound] = {}
    for b in bounds:
        key = (b.table, b.first, b.others)
        other = found.get(key, b)
        low = max((x for x in (b.low, other.low) if x is not None), default=None)
        high = min((x for x in (b.high, other.high) if x is not None), default=None)
        found[key] = Bound(b.table, b.first, b.others, low, high)
    return list(found.values())


def terms_of(walks: Sequence[Walk], table: Mapping[int, int]) -> list[str]:
    """The multiples of walks that `table` says."""
    steps = [(w.name, table.get(w.atoms[-1], 0)) for w in walks if w.atoms]
    return [name if step == 1 else f"{name} * {step}" for name, step in steps if step]


def summed(terms: Sequence[str]) -> str:
    """Text of the sum of `terms`."""
    return " + ".join(terms).replace("+ -", "- ") or "0"


__all__ = ["Bound", "Positions", "columns_read", "shortened", "summed", "terms_of"]
