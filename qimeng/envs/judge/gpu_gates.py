"""The lists of gates of the judge for a device in this machine.

Deals in their order alone. `docs/judging.md` says what each check catches.
"""

from __future__ import annotations

from qimeng.envs.judge.gates.gpu_run import GpuRun
from qimeng.envs.judge.gates.library_code import LIBRARY_CODE
from qimeng.envs.judge.gates.own_kernels import OWN_KERNELS
from qimeng.envs.judge.gates.pipeline import Pipeline
from qimeng.envs.judge.gates.program import GUARDS_AND_REPEATS, RIGHT_OUTPUTS
from qimeng.envs.judge.gates.region import RegionContest
from qimeng.envs.judge.gates.screening import ALLOWED_TEXT, LAUNCHES_KERNELS, Compiles, FitsDevice
from qimeng.envs.judge.gates.timing import CREDIBLE_TIME, RIGHT_WHEN_TIMED

SCREENING = (ALLOWED_TEXT, Compiles(first_launch=True), LAUNCHES_KERNELS, FitsDevice(few_spills=False), LIBRARY_CODE)
TIMED = (CREDIBLE_TIME, RIGHT_WHEN_TIMED, OWN_KERNELS)

CHECK_GATES: Pipeline[GpuRun] = Pipeline(SCREENING, RegionContest(), (RIGHT_OUTPUTS,))
"""What a program passes that is checked and not timed."""
SEARCH_GATES: Pipeline[GpuRun] = Pipeline(SCREENING, RegionContest(), (RIGHT_OUTPUTS, *TIMED))
"""What a program passes during a search."""
FINAL_GATES: Pipeline[GpuRun] = Pipeline(SCREENING, RegionContest(), (RIGHT_OUTPUTS, GUARDS_AND_REPEATS, *TIMED))
"""What it passes in a final verification."""

__all__ = ["CHECK_GATES", "FINAL_GATES", "SCREENING", "SEARCH_GATES"]
