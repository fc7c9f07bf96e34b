"""The schedule of the recurrent family.

Deals in block sizes. Knows nothing about which are good.
"""

from __future__ import annotations

from dataclasses import dataclass

from qimeng.program.schedule import Schedule, count, family_field, power_of_two

HELD = 32
"""Values of weights that a thread holds from step to step, of 255 registers. By compiler counts (Triton 3.6, sm_90,
256 units, both directions): at 48 and 64 of them 232 B (GRU) and 672 B (LSTM) are spilled in each step, at 32 none or
24 B."""

HELD_BY_RESULT, WARPS = 128, 8
"""The same where `RecurrentSchedule.by_result`, with so many warps at most: LSTM's 128 take 255 registers and spill
none, GRU's 96 take 238 (the same compiler, one direction)."""

LEAST, MOST_PRODUCTS = 16, 4
"""Sequences that a program has at least where products are on tensor cores, and products at most."""


@dataclass(frozen=True)
class RecurrentSchedule(Schedule):
    """How the sequences of a batch and the units of a state are shared among programs.

    Attributes:
        family: ``"recurrent"``.
        block_p: sequences a program.
        block_r: units a program; where that is not all of them, programs exchange their states after each step.
        block_k: units of the state that a product takes at once.
        warps: warps a program.
        by_result: lanes of a warp have different results, and each adds up its own; otherwise they share the terms of a
            result, which takes shuffles, and all of them compute what follows.
        dot: products on tensor cores, whose programs have at least `LEAST` sequences.
        precision: how these take fp32: ``"fp16x3"`` (three products of halves, about fp32's accuracy) or ``"tf32"``;
            half types are taken as they are.
        by_value: programs wait for the states themselves, each of which is at first a NaN that no program stores, and
            not for a count of the programs that have stored theirs.
        stages: depth of software pipelining, for loops whose programs do not wait for each other.
        fast: special functions in few instructions, by the GPU's approximate units where those are accurate enough.
    """

    family: str = family_field("recurrent")
    block_p: int = power_of_two(1)
    block_r: int = power_of_two(16)
    block_k: int = power_of_two(256)
    warps: int = power_of_two(8)
    by_result: bool = False
    dot: bool = False
    precision: str = "fp16x3"
    by_value: bool = False
    stages: int = count(1)
    fast: bool = False

    def holds(self, products: int, depth: int) -> bool:
        """Whether a thread holds the weights of so many products of `depth` terms from step to step."""
        if self.dot:  # in shared memory, where they do not fit
            return True
        rows, most = (self.block_p, HELD_BY_RESULT) if self.by_result and self.warps <= WARPS else (1, HELD)
        a_thread = rows * self.block_r * self.block_k * products / (32 * self.warps)
        return self.block_k >= depth and a_thread <= most

    @property
    def form(self) -> str:
        """A program walks the steps."""
        return "loop"

    @property
    def splits(self) -> int:
        """No step is shared but by its units."""
        return 1


__all__ = ["LEAST", "MOST_PRODUCTS", "RecurrentSchedule"]
