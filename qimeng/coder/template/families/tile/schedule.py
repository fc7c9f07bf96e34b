"""The schedule of the tile family.

Deals in form and block sizes. Knows nothing about which are good.
"""

from __future__ import annotations

from dataclasses import dataclass

from qimeng.program.schedule import Schedule, count, family_field, power_of_two


@dataclass(frozen=True)
class TileSchedule(Schedule):
    """How rows and their columns are cut and shared among programs.

    Attributes:
        family: ``"tile"``.
        form: ``"resident"`` (a row stays in registers), ``"loop"`` (a program loops over its row), ``"split"`` (several
            programs a row, one launch a pass), ``"wave"`` (the same in one launch, where a pass waits for the one
            before while the data is still in L2), ``"cooperative"`` (a group of programs keeps a row in registers).
        block_p: elements of the kept axes a program.
        block_r: elements of the reduced axes a step.
        splits: programs that share one reduction.
        lag: rows that the first pass of the wave form runs ahead.
        per_sm: programs that run on a multiprocessor at the same time (cooperative form; wave form, where more than 1).
        warps: warps a program.
        stages: depth of software pipelining; 2 loads the next row ahead (cooperative form).
        fast: special functions in few instructions, by the GPU's approximate units where those are accurate enough.
        language: ``"triton"`` or ``"cuda"`` (CUDA C++, which reads `form` (``resident``, ``loop``, ``split``),
            `block_p`, `splits` and `warps`).
    """

    family: str = family_field("tile")
    form: str = "resident"
    block_p: int = power_of_two(1)
    block_r: int = power_of_two(1024)
    splits: int = count(1)
    lag: int = count(1)
    per_sm: int = count(1)
    warps: int = power_of_two(4)
    stages: int = count(3)
    fast: bool = False
    language: str = "triton"


__all__ = ["TileSchedule"]
