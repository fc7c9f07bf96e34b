"""The schedule of the attention family.

Deals in blocks and precisions. Knows nothing about which are good.
"""

from __future__ import annotations

from dataclasses import dataclass

from qimeng.program.schedule import Schedule, count, family_field, power_of_two

LEAST = 16
"""The least side of an operand of a tensor core's product."""


@dataclass(frozen=True)
class AttentionSchedule(Schedule):
    """How queries are cut into tiles, and how many keys a step takes.

    Attributes:
        family: ``"attention"``.
        splits: programs that share the keys of a tile of queries.
        block_m: queries a program.
        block_n: keys a step.
        warps: warps a program.
        stages: depth of software pipelining.
        precision: how products of fp32 operands are computed: ``"ieee"``, ``"tf32"`` or ``"tf32x3"``
            (Triton's `input_precision`); half operands ignore it.
        fast: special functions in few instructions; the exponentials of a softmax as powers of two, with one
            multiply-add an element.
        descriptors: half operands are copied as tiles through tensor descriptors (TMA), where they lie in memory so
            that a descriptor can say where (`boxes`).
        specialize: warps of their own do these copies, and two groups of four warps share a tile of queries
            (`tl.range(…, warp_specialize=True)`, which Triton 3.6 does for one loop of a kernel of 4 warps).
    """

    family: str = family_field("attention")
    splits: int = count(1)
    block_m: int = power_of_two(128)
    block_n: int = power_of_two(64)
    warps: int = power_of_two(4)
    stages: int = count(2)
    precision: str = "ieee"
    fast: bool = False
    descriptors: bool = False
    specialize: bool = False

    def row_blocks(self, queries: int) -> int:
        """Tiles of queries of one batch element."""
        return -(-queries // self.block_m)


__all__ = ["LEAST", "AttentionSchedule"]
