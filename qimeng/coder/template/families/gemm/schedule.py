"""The schedule of the gemm family.

Deals in blocks, precisions and forms. Knows nothing about which are good.
"""

from __future__ import annotations

from dataclasses import dataclass

from qimeng.program.schedule import Schedule, count, device_flag, family_field, power_of_two


@dataclass(frozen=True)
class GemmSchedule(Schedule):
    """How a matrix product is cut into tiles, and how its operands reach the tensor cores.

    Attributes:
        family: ``"gemm"``.
        splits: programs that share the depth of a tile (split-K).
        block_m: rows of the output tile.
        block_n: columns of the output tile.
        block_k: depth of one step.
        group_m: rows of tiles visited together, for reuse in L2; 1 is plain row order.
        warps: warps a program.
        stages: depth of software pipelining.
        precision: how a dot is computed: ``"ieee"``, ``"tf32"``, ``"tf32x3"``, ``"bf16x3"``, ``"bf16x6"``,
            ``"fp16x3"`` (two scaled half planes, three products), ``"fp16"`` (one scaled half plane: TF32's
            significand).
        cat: the products of planes run end to end along K with one dot a step, rather than several dots a step
            (schemes of two or more planes).
        promote: depth after which a fresh accumulator is started and the old one added in fp32, since tensor cores
            truncate theirs; 0 is never.
        packed: operands written in the form the main loop wants before the product (parameters once, others at every
            call): of ``""``, ``"a"``, ``"b"``, ``"ab"``.
        inline: operands whose planes the main loop makes of what it reads, rather than a kernel before it (schemes of
            planes): of ``""``, ``"a"``, ``"b"``, ``"ab"``.
        persistent: one program an SM that loops over tiles.
        descriptors: operands read through tensor descriptors (TMA).
        flat: the loop of a persistent program over its tiles and the one over the depth run as one, so that the next
            tile's first blocks are fetched while this one is finished.
        stores: results leave through tensor descriptors (TMA) where their strides allow it.
        staged: a convolution reads a copy of its input that a kernel makes before: channels last, with its padding, and
            as planes where the scheme has any and `inline` does not ask for others.
        shifted: the rows of the product are the positions of that copy, so that each element of the window is a block
            of it some rows further down, which the copy engine moves.
        dependent: kernels that follow another one of the region are launched while that one ends, and wait for it
            themselves (programmatic dependent launch).
        fast: special functions in few instructions, by the GPU's approximate units where those are accurate enough.
    """

    family: str = family_field("gemm")
    splits: int = count(1)
    block_m: int = power_of_two(128)
    block_n: int = power_of_two(128)
    block_k: int = power_of_two(64)
    group_m: int = count(8)
    warps: int = power_of_two(4)
    stages: int = count(3)
    precision: str = "ieee"
    cat: bool = False
    promote: int = 0
    packed: str = ""
    inline: str = ""
    persistent: bool = False
    descriptors: bool = False
    flat: bool = False
    stores: bool = False
    staged: bool = False
    shifted: bool = False
    dependent: bool = device_flag()
    fast: bool = False

    @property
    def numerics(self) -> str:
        """The planes that are multiplied and how long an accumulator truncates."""
        return f"{self.precision}, {self.promote}, {self.fast}"

    @property
    def pieces(self) -> int:
        """Pieces in which a tile goes through the epilogue: two where a thread holds 128 or more of its elements."""
        held = self.block_m * self.block_n // (32 * self.warps)
        return 2 if held >= 128 and self.block_n >= 64 else 1


__all__ = ["GemmSchedule"]
