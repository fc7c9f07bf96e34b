"""Main loops over the kept blocks of a weight: blocks on the tensor cores, single elements one by one.

Deals in loads, loops and masks of one tile. Knows nothing about schedules or launches.
"""

from __future__ import annotations

from qimeng.coder.template.families.gemm.loop import indent
from qimeng.coder.template.families.gemm.operand import Operand
from qimeng.coder.template.families.gemm.scheme import scheme_of
from qimeng.vocabulary.sparse.kept import Kept

FIRST, AT, VALUES = "b_first", "b_at", "b_values"
"""Variables of the entry function."""

WIDE = 1 << 31
"""Elements from which on offsets take 64 bits."""


class KeptOperand(Operand):
    """The kept blocks of a weight. A tile's columns lie in one row of blocks."""

    kept: Kept
    """Set by the subclass that `reader_of` makes."""

    def _arrange(self) -> None:
        self.given = (FIRST, AT, VALUES)
        self.parameters, self.arguments = [f"{name}_ptr" for name in self.given], list(self.given)

    def fetch(self, target: str, k: str, plane: str = "0") -> list[str]:
        """Nothing: the loop is the operand's own."""
        raise AssertionError("a product of kept blocks has a loop of its own")

    def loop(self, left: Operand) -> list[str]:
        """Walk the kept blocks of the tile's row of blocks."""
        row = "col0" if self.kept.block == 1 else f"col0 // {self.kept.block}"
        head = [
            f"row_of_blocks = {row}",
            f"low = tl.load({FIRST}_ptr + row_of_blocks)",
            f"high = tl.load({FIRST}_ptr + row_of_blocks + 1)",
        ]
        return head + (self._elements(left) if self.kept.block == 1 else self._blocks(left))

    def _blocks(self, left: Operand) -> list[str]:
        """One product of the tensor cores a block."""
        block, dot = self.kept.block, scheme_of(self.plan, self.schedule).dot
        number = "i.to(tl.int64)" if self.kept.count * block**2 >= WIDE else "i"
        precision = f', input_precision="{dot}"' if dot else ""
        inside = "tl.arange(0, BN)[None, :]"
        if self.schedule.block_n < block:
            inside = f"(col0 % {block} + {inside})"
        step = [
            f"k = tl.load({AT}_ptr + i) * BK",
            *left.fetch("a0", "k"),
            f"b_place = {inside} * {block} + tl.arange(0, BK)[:, None]",
            f"b0 = tl.load({VALUES}_ptr + {number} * {block * block} + b_place)",
            f"acc = tl.dot(a0, b0, acc{precision})",
        ]
        return ["acc = tl.zeros([BM, BN], tl.float32)", "for i in range(low, high):", *indent(step)]

    def _elements(self, left: Operand) -> list[str]:
        """BK elements of one row a step, and as many columns of the left operand."""
        left.gathered = True
        number = "i.to(tl.int64)" if self.kept.count >= WIDE else "i"
        step = [
            "b_i = i + tl.arange(0, BK)[None, :]",
            f"b_k = tl.load({AT}_ptr + b_i, mask=b_i < high, other=0)",
            *left.fetch("a0", "b_k"),
            f"b0 = tl.load({VALUES}_ptr + b_i, mask=b_i < high, other=0.0)",
            "sums += a0.to(tl.float32) * b0.to(tl.float32)",
        ]
        step = [line.replace("b_i = i", f"b_i = {number}") for line in step]
        return [
            "sums = tl.zeros([BM, BK], tl.float32)",
            "for i in range(low, high, BK):",
            *indent(step),
            "acc = tl.sum(sums, axis=1, keep_dims=True)",
        ]


def reader_of(kept: Kept) -> type[KeptOperand]:
    """The operand's class for one weight."""
    return type("KeptBlocks", (KeptOperand,), {"kept": kept})


__all__ = ["AT", "FIRST", "VALUES", "KeptOperand", "reader_of"]
