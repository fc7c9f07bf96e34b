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


@dataclass(frozen=True)
class RecurrentSchedule(Schedule):
    """How the sequences of a batch and the units of a state are shared among programs.

    Attributes:
        family: ``"recurrent"``.
        block_p: sequences a program.
        block_r: units a program; where that is not all of them, programs exchange their states after each step.
        block_k: units of the state that a product takes at once.
        warps: warps a program.
        stages: depth of software pipelining, for loops whose programs do not wait for each other.
        fast: special functions in few instructions, by the GPU's approximate units where those are accurate enough.
    """

    family: str = family_field("recurrent")
    block_p: int = power_of_two(1)
    block_r: int = power_of_two(16)
    block_k: int = power_of_two(256)
    warps: int = power_of_two(8)
    stages: int = count(1)
    fast: bool = False

    @property
    def form(self) -> str:
        """A program walks the steps."""
        return "loop"

    @property
    def splits(self) -> int:
        """No step is shared but by its units."""
        return 1


__all__ = ["HELD", "RecurrentSchedule"]
