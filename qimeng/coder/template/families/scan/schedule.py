"""The schedule of the scan family.

Deals in form and block sizes. Knows nothing about which are good.
"""

from __future__ import annotations

from dataclasses import dataclass

from qimeng.program.schedule import Schedule, count, family_field, power_of_two


@dataclass(frozen=True)
class ScanSchedule(Schedule):
    """How rows and their ordered columns are cut and shared among programs.

    Attributes:
        family: ``"scan"``.
        form: ``"resident"`` (a row stays in registers), ``"loop"`` (a program walks its row in steps and carries the
            last value along), ``"split"`` (several programs a row: one launch for the totals of their shares, one for
            the scan).
        block_p: rows a program.
        block_r: elements of the ordered axis a step.
        splits: programs that share a row.
        warps: warps a program.
        stages: depth of software pipelining.
        backwards: where all scans begin at the end of the axis: read and write it from there. Otherwise a tile is
            turned in registers, which takes ten times the shuffles, but whole vectors are read.
        fast: special functions in few instructions, by the GPU's approximate units where those are accurate enough.
    """

    family: str = family_field("scan")
    form: str = "resident"
    block_p: int = power_of_two(1)
    block_r: int = power_of_two(1024)
    splits: int = count(1)
    warps: int = power_of_two(4)
    stages: int = count(1)
    backwards: bool = False
    fast: bool = False


__all__ = ["ScanSchedule"]
