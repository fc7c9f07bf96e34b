"""Schedules: the numbers from which a template prints a kernel.

Deals in block sizes, forms and precisions. Knows nothing about a region's operators or about Triton.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class Schedule:
    """How a region's loop nest is cut and mapped to the GPU; each family reads the fields it needs.

    Attributes:
        family: ``"tile"`` (pointwise, reductions, normalizations) or ``"gemm"``.
        form: tile family: ``"resident"`` (a row stays in registers), ``"loop"`` (a program loops over its row),
            ``"split"`` (several programs a row, one launch a pass), ``"wave"`` (the same in one launch, where a pass
            waits for the one before while the data is still in L2).
        block_p: elements of the kept axes a program (tile family).
        block_r: elements of the reduced axes a step (tile family).
        splits: programs that share one reduction (split-K in the gemm family).
        lag: rows that the first pass of the wave form runs ahead.
        per_sm: programs that run on a multiprocessor at the same time (cooperative form; wave form, where more than 1).
        block_m: rows of the output tile (gemm family).
        block_n: columns of the output tile (gemm family).
        block_k: depth of one step (gemm family).
        group_m: rows of tiles visited together, for reuse in L2; 1 is plain row order (gemm family).
        warps: warps a program.
        stages: depth of software pipelining; 2 loads the next row ahead (cooperative form).
        precision: how a dot is computed: ``"ieee"``, ``"tf32"``, ``"tf32x3"``, ``"bf16x3"``, ``"bf16x6"``,
            ``"fp16x3"`` (two scaled half planes, three products), ``"fp16"`` (one scaled half plane: TF32's
            significand).
        cat: the products of planes run end to end along K with one dot a step, rather than several dots a step
            (gemm family; schemes of two or more planes).
        promote: depth after which a fresh accumulator is started and the old one added in fp32, since tensor cores
            truncate theirs; 0 is never (gemm family).
        packed: operands written in the form the main loop wants before the product (parameters once, others at every
            call): of ``""``, ``"a"``, ``"b"``, ``"ab"``.
        inline: operands whose planes the main loop makes of what it reads, rather than a kernel before it (gemm family;
            schemes of planes): of ``""``, ``"a"``, ``"b"``, ``"ab"``.
        persistent: one program an SM that loops over tiles.
        descriptors: operands read through tensor descriptors (TMA).
        fast: special functions in few instructions, by the GPU's approximate units where those are accurate enough.
    """

    family: str = "tile"
    form: str = "resident"
    block_p: int = 1
    block_r: int = 1024
    splits: int = 1
    lag: int = 1
    per_sm: int = 1
    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    group_m: int = 8
    warps: int = 4
    stages: int = 3
    precision: str = "ieee"
    cat: bool = False
    promote: int = 0
    packed: str = ""
    inline: str = ""
    persistent: bool = False
    descriptors: bool = False
    fast: bool = False

    def but(self, **changes: Any) -> Schedule:
        """This schedule with some fields changed."""
        return replace(self, **changes)

    def __str__(self) -> str:
        default = Schedule()
        shown = [
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(default, f.name)
        ]
        return f"{self.family}({', '.join(s for s in shown if not s.startswith('family'))})"


__all__ = ["Schedule"]
