"""Which schedules a product of codes starts from, and its tunings.

Reasoned from what is moved, not swept: few rows wait for the weight, so that enough programs must read it at once; many
rows want the largest tiles, since an SM's tensor cores take codes of 8 bits twice as fast as halves. Deals in block
sizes. Knows nothing about kernel text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qimeng.coder.template.families.gemm.moves import Pipeline, Reordering, Split, Tiling
from qimeng.coder.template.families.gemm.plan import GemmPlan
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.nest.sizes import power_of_two
from qimeng.device import Device
from qimeng.family import MAX_ALTERNATIVES, Move, family_field
from qimeng.graph.opgraph import itemsize
from qimeng.vocabulary.quantized.coded import Coded


@dataclass(frozen=True)
class CodedSchedule(GemmSchedule):
    """How a product of codes is cut into tiles; see `GemmSchedule` for the other fields.

    `promote` counts where codes are fp8: Hopper's tensor cores keep 14 bits of such sums (DeepSeek-V3 Technical Report,
    arXiv 2412.19437, 3.3.2).

    Attributes:
        turned: the transposed product is computed, so that a few rows are the short side of what tensor cores take.
    """

    family: str = family_field("quantized")
    turned: bool = False


@dataclass(frozen=True, eq=False)
class CodedPlan:
    """A product of codes.

    Attributes:
        gemm: the product, both operands read by `qimeng.vocabulary.quantized.reading`.
        coded: the codes.
        inputs: the entry function's parameters, in the order of the region's inputs.
        hidden: names of the product's inputs that the codes stand for.
    """

    gemm: GemmPlan
    coded: Coded
    inputs: tuple[str, ...]
    hidden: tuple[str, str]


@dataclass(frozen=True)
class Blocks:
    """Blocks of a schedule, and programs for each multiprocessor that share the depth (0: no split).

    Attributes:
        flat: one program a multiprocessor, whose loops run as one, and results that leave through descriptors.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    per_sm: int = 0
    promote: int = 0
    turned: bool = False
    described: bool = True
    flat: bool = False


FEW, SOME = 16, 128
"""Rows up to which a product waits for its weight alone, and up to which it takes few tiles of rows."""

EACH = 128
"""Depth after which a sum in fp32 takes over what was summed, where that is asked for."""

SUMMED = 128 * 128
"""Results of a tile whose steps are summed apart and scaled: with 8 warps, registers hold both sums of no more (128 by
256 spill 104 registers; Triton 3.6, sm_90)."""

FEW_SWEEP: tuple[Blocks, ...] = (
    Blocks(16, 64, 256, 4, 4, 2, turned=True),
    Blocks(16, 64, 256, 4, 4, 4, turned=True, described=False),
    Blocks(16, 128, 128, 4, 5, 2, turned=True),
    Blocks(16, 64, 128, 4, 6, 3, EACH, turned=True),
    Blocks(16, 32, 256, 4, 4, described=False),
    Blocks(16, 64, 256, 4, 3, 4, described=False),
    Blocks(16, 64, 512, 4, 3, 2, turned=True),
    Blocks(16, 16, 512, 4, 4, described=False),
)
SOME_SWEEP: tuple[Blocks, ...] = (
    Blocks(64, 128, 128, 4, 4, 1),
    Blocks(64, 64, 128, 4, 5, 1),
    Blocks(64, 64, 256, 4, 3, 1),
    Blocks(64, 128, 128, 4, 4, 1, turned=True),
    Blocks(64, 64, 128, 4, 5, 2, EACH),
    Blocks(32, 64, 256, 4, 4, 1, turned=True),
    Blocks(64, 256, 128, 8, 4, 1),
    Blocks(128, 128, 128, 8, 4, 1),
)
MANY_SWEEP: tuple[Blocks, ...] = (
    Blocks(128, 256, 128, 8, 4, flat=True),
    Blocks(128, 256, 128, 8, 4, 1),
    Blocks(128, 128, 128, 8, 4, promote=EACH, flat=True),
    Blocks(128, 256, 128, 8, 3, promote=EACH),
    Blocks(128, 128, 128, 8, 4, promote=EACH),
    Blocks(256, 128, 128, 8, 3),
    Blocks(64, 128, 128, 4, 4),
    Blocks(64, 256, 128, 8, 4),
)


def schedules(plan: CodedPlan, device: Device) -> tuple[CodedSchedule, ...]:
    """At most eight schedules, the best guess first, each once."""
    rows = plan.gemm.shape[1]
    sweep: tuple[Blocks, ...] = FEW_SWEEP if rows <= FEW else SOME_SWEEP if rows <= SOME else MANY_SWEEP
    if plan.coded.group:
        sweep = tuple(b for b in sweep if b.m * b.n <= SUMMED)
    return tuple(dict.fromkeys(_fit(plan, device, blocks) for blocks in sweep))[:MAX_ALTERNATIVES]


def _fit(plan: CodedPlan, device: Device, blocks: Blocks) -> CodedSchedule:
    """A schedule with blocks no larger than the problem, its depth shared where that was asked for."""
    _, m, n, k = plan.gemm.shape
    bm, bn, bk = (
        min(size, power_of_two(most, least))
        for size, most, least in ((blocks.m, m, 16), (blocks.n, n, 16), (blocks.k, plan.coded.group or k, 32))
    )
    tiles, steps = -(-m // bm) * -(-n // bn), -(-k // bk)
    return CodedSchedule(
        block_m=bm,
        block_n=bn,
        block_k=bk,
        warps=blocks.warps,
        stages=blocks.stages,
        splits=max(1, min(blocks.per_sm * device.sms // tiles, steps // 2)),
        promote=blocks.promote if plan.coded.floating and not plan.coded.group else 0,
        descriptors=blocks.described and device.has("descriptors"),
        persistent=blocks.flat,
        flat=blocks.flat,
        stores=blocks.flat and device.has("descriptors"),
        turned=blocks.turned,
    )


WARPGROUP = 64
"""Rows from which Hopper's tensor cores read both operands from shared memory."""


def shared_bytes(plan: CodedPlan, schedule: CodedSchedule) -> int:
    """Bytes of shared memory of a block, as Triton 3.6 allocates them for sm_90 (within 1 %).

    All stages of both operands; one less where registers hold what is used. A persistent program keeps the tile that
    leaves apart.
    """
    s = schedule
    whole = (s.block_n if s.turned else s.block_m) >= WARPGROUP and s.warps >= 4
    total = (s.block_m + s.block_n) * s.block_k * (s.stages if whole else max(s.stages - 1, 1))
    tile = s.block_m * s.block_n
    if s.stores and s.persistent:
        return total + tile * itemsize(plan.gemm.dtype) // s.pieces
    return total + (tile if s.flat else 0)


class Tuning(Move[CodedPlan, CodedSchedule]):
    """A tuning of the products with whole operands, on such a plan."""

    def __init__(self, move: Move[GemmPlan, GemmSchedule]):
        self.move = move

    def schedules(self, plan: CodedPlan, schedule: CodedSchedule, param: str, device: Device) -> Sequence:
        """Those of the move; a step reads no more codes of a row than share a scale."""
        found = self.move.schedules(plan.gemm, schedule, param, device)
        return [s for s in found if s.block_k <= (plan.coded.group or s.block_k)]


def moves() -> dict[str, Tuning]:
    """Kind of action to the move that carries it out."""
    tuned = {"tiling": Tiling(), "reordering": Reordering(), "pipeline": Pipeline(), "split": Split()}
    return {name: Tuning(move) for name, move in tuned.items()}


__all__ = [
    "EACH", "FEW", "SOME", "Blocks", "CodedPlan", "CodedSchedule", "Tuning", "moves", "schedules", "shared_bytes",
]  # fmt: skip
