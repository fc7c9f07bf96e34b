"""A convolution's input as a matrix whose blocks the copy engine moves: a window's elements are some rows further down.

The rows of the product are the positions of the padded copy, image by image. What an element of the window reads lies
the same number of rows away for all of them, so that a block is one rectangle of memory, and no address is computed for
each row. Rows beyond the output's positions are computed and not stored. Deals in lines of kernel text. Knows nothing
about when the copy pays.
"""

from __future__ import annotations

from qimeng.coder.template.families.gemm.operand import Operand
from qimeng.coder.template.families.gemm.positions import summed, terms_of
from qimeng.coder.template.families.gemm.scheme import scheme_of
from qimeng.coder.template.families.gemm.staging import NAME
from qimeng.coder.template.nest.expr import Sum
from qimeng.coder.template.triton.emitter import Emitter, Walk
from qimeng.coder.template.triton.walks import spread


class Shifted(Operand):
    """The left operand, read by a descriptor of the copy. A block holds channels of one element of the window."""

    def _arrange(self) -> None:
        plan, s, shift = self.plan, self.schedule, self.plan.shift
        assert shift is not None
        tables = [shift.rows.steps, shift.columns.steps]
        used = plan.used(self.side)
        zs, batch = spread(plan.nest, plan.batch, tables, "z", stem="a_z", used=used)
        deep, depth = spread(plan.nest, plan.k, tables, "a_k", used=used)
        self._em = Emitter(plan.nest, [*batch, *depth], letter="a_u")
        self.setup, self._deep = zs, deep
        self._row = summed(["row0", *self._terms(shift.rows, batch, depth)])
        self._column = summed(self._terms(shift.columns, batch, depth))
        rows, columns = shift.shape
        self.stride = rows
        self._exists = None if shift.exists is None else self._em.value(shift.exists)
        self._all = rows * (scheme_of(plan, s).planes if self.side.split else 1)
        self._describe(NAME, f"[{self._all}, {columns}], [{columns}, 1], [{s.block_m}, {s.block_k}]")
        if self.side.split:
            self._scale_images()

    def _terms(self, place: Sum, batch: list[Walk], depth: list[Walk]) -> list[str]:
        found = [*terms_of(batch, place.steps), *terms_of(depth, place.steps)]
        for e, factor in place.others:
            found.append(self._em.value(e) if factor == 1 else f"{self._em.value(e)} * {factor}")
        return [*found, *([str(place.constant)] if place.constant else [])]

    def fetch(self, target: str, k: str, plane: str = "0") -> list[str]:
        """Lines that leave one block in `target`."""
        row = self._row if plane == "0" else f"{self._row} + {plane}"
        if self._exists is not None:  # no such row is in memory, and the copy engine fills it with zeros
            row = f"tl.where({self._exists}, {row}, {self._all})"
        return [f"a_k = {k}", *self._deep, *self._em.lines, f"{target} = a.load([{row}, {self._column}])"]


__all__ = ["Shifted"]
