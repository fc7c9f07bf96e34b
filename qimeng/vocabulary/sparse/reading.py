"""How the main loop walks what is kept of a weight: blocks on the tensor cores, single elements one by one.

The loops over single elements on a transposed left operand are in `qimeng.vocabulary.sparse.elements`.

Deals in loads, loops and masks of one tile. Knows nothing about schedules or launches.
"""

from __future__ import annotations

from functools import cached_property

from qimeng.coder.template.families.gemm.loop import indent
from qimeng.coder.template.families.gemm.operand import Operand
from qimeng.coder.template.families.gemm.operands import operand
from qimeng.coder.template.families.gemm.plan import GemmPlan
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.families.gemm.scheme import scheme_of
from qimeng.family import Unsupported
from qimeng.vocabulary.sparse.by_depth import SORTED_AT, SORTED_TO, SORTED_VALUES, by_depth
from qimeng.vocabulary.sparse.elements import AT, FIRST, SUMS, VALUES, Shares, by_columns
from qimeng.vocabulary.sparse.kept import Kept
from qimeng.vocabulary.sparse.padded import PADDED_AT, PADDED_VALUES, STEPS, by_steps
from qimeng.vocabulary.sparse.turned import WIDE, Turned


class KeptOperand(Operand):
    """The kept blocks of a weight. A tile's columns lie in one row of blocks."""

    kept: Kept
    """Set by the subclass that `reader_of` makes."""

    def _arrange(self) -> None:
        self.given = (FIRST, AT, VALUES)
        if self.ell:
            self.parameters = [f"{PADDED_AT}_ptr", f"{PADDED_VALUES}_ptr", STEPS]
            self.arguments = [PADDED_AT, PADDED_VALUES, f"{PADDED_AT}.shape[0]"]
            return
        if self.sorts:
            names = [FIRST, SORTED_AT, SORTED_TO, SORTED_VALUES]
            self.parameters, self.arguments = [f"{name}_ptr" for name in names], names
            return
        names = [FIRST, SUMS] if self.shares else list(self.given)
        self.parameters, self.arguments = [f"{name}_ptr" for name in names], names
        self.host = self.shares.launch() if self.shares else []

    @property
    def ell(self) -> bool:
        """Whether columns are padded to one length."""
        return bool(getattr(self.schedule, "padded", False))

    @property
    def sorts(self) -> bool:
        """Whether elements lie by their depth."""
        return bool(getattr(self.schedule, "by_depth", False))

    @cached_property
    def shares(self) -> Shares | None:
        """The kernel that gives each program the same number of elements, where the schedule has one."""
        share = getattr(self.schedule, "share", 0)
        if not share:
            return None
        left = operand(self.plan, self.schedule, self.plan.a, self.prefix, self.names)
        if not isinstance(left, Turned):
            raise Unsupported("shares of single elements on a left operand that is not transposed")
        return Shares(self.kept, left, share, self.prefix)

    def fetch(self, target: str, k: str, plane: str = "0") -> list[str]:
        """Nothing: the loop is the operand's own."""
        raise AssertionError("a product of kept blocks has a loop of its own")

    def loop(self, left: Operand) -> list[str]:
        """Walk the kept blocks of the tile's row of blocks, or the single elements of its columns."""
        if self.shares:
            return self.shares.add(self.schedule.block_n)
        if isinstance(left, Turned) and self.sorts:
            dot = scheme_of(self.plan, self.schedule).dot
            precision = f', input_precision="{dot}"' if dot else ""
            return by_depth(left, self.plan.shape[2], self.schedule.block_n, precision)
        if isinstance(left, Turned) and self.ell:
            return by_steps(left, self.plan.shape[2], self.schedule.block_n)
        if isinstance(left, Turned):
            return by_columns(left, self.plan.shape[2], self.schedule.block_n)
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


def kernel_before(plan: GemmPlan, schedule: GemmSchedule, prefix: str) -> str:
    """The text of the kernel that leaves sums for the product; empty where there is none."""
    made = operand(plan, schedule, plan.b, prefix, plan.loads.names)
    assert isinstance(made, KeptOperand)
    return made.shares.kernel() if made.shares else ""


__all__ = ["AT", "FIRST", "VALUES", "KeptOperand", "kernel_before", "reader_of"]
