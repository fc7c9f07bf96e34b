"""The gates before anything runs: what a text may contain, whether it compiles, launches kernels and fits the device.

Deals in candidates and their compiled kernels. Every judge begins with these. Knows nothing about inputs or times.
"""

from __future__ import annotations

from collections.abc import Sequence

from qimeng.envs.judge.gates.pipeline import Candidate, GateCheck, Refusal, Run
from qimeng.envs.screening.resources import largest, refusal, too_many_spills
from qimeng.envs.screening.static_pass import judged_text
from qimeng.envs.workers.compile import launches_nothing
from qimeng.envs.workers.kernel_launches import own_kernels
from qimeng.interfaces import Gate


class AllowedText(GateCheck[Run]):
    """Untrusted texts use only allowed constructs, and are not run at all where the sandbox lacks landlock."""

    name, gate = "allowed text", Gate.COMPILE

    def check(self, run: Run, candidate: Candidate) -> Refusal | None:
        """Refuse a text that is not even compiled; see `judged_text`."""
        refused = judged_text(candidate.program, run.sandbox, run.any_text)
        return None if refused is None else Refusal(Gate.COMPILE, *refused)


class Compiles(GateCheck[Run]):
    """What is generated compiles.

    Args:
        first_launch: whether programs run later: if only the code around the kernels failed, because it needs real
            tensors, the first launch decides. Else such a program is ``"unsupported"``.
    """

    name, gate = "compiles", Gate.COMPILE

    def __init__(self, first_launch: bool):
        self.first_launch = first_launch

    def prepare(self, run: Run, candidates: Sequence[Candidate]) -> None:
        """Compile the kernels of all candidates in parallel, and note what they need."""
        tables = run.compilers.programs([c.program for c in candidates])
        for candidate, table in zip(candidates, tables, strict=True):
            candidate.compiled = table
            if table:
                program, kernels = candidate.program, candidate.kernels
                candidate.resources = largest(kernels)
                candidate.overlapping = sorted({k.name for k in kernels if k.overlaps})
                parts = [(program.implementation(r), table.get(r.signature)) for r in program.regions]
                candidate.own = own_kernels((m, c) for m, c in parts if m.generated)

    def check(self, run: Run, candidate: Candidate) -> Refusal | None:
        """Refuse what failed to compile."""
        failed = [c for c in candidate.compiled.values() if c.error and not (self.first_launch and c.host)]
        if not failed:
            return None
        failure = failed[0].failure or "compile"
        if failure == "meta" and not self.first_launch:
            failure = "unsupported"
        return Refusal(Gate.COMPILE, failure, failed[0].error or "")


class LaunchesKernels(GateCheck[Run]):
    """Each region that is said to be generated launches a kernel of its own."""

    name, gate = "launches kernels", Gate.COMPILE

    def check(self, run: Run, candidate: Candidate) -> Refusal | None:
        """Refuse regions that launch nothing at each call."""
        idle = launches_nothing(candidate.program, candidate.compiled)
        return None if idle is None else Refusal(Gate.COMPILE, "not-a-kernel", idle)


class FitsDevice(GateCheck[Run]):
    """The kernels fit the device.

    Args:
        few_spills: whether kernels with many spilled registers are refused too, because no model can make a time of
            them.
    """

    name, gate = "fits the device", Gate.RESOURCES

    def __init__(self, few_spills: bool):
        self.few_spills = few_spills

    def check(self, run: Run, candidate: Candidate) -> Refusal | None:
        """Refuse kernels that need more than the device has."""
        kernels = candidate.kernels
        too_much = refusal(kernels, run.device) or (too_many_spills(kernels) if self.few_spills else None)
        return None if too_much is None else Refusal(Gate.RESOURCES, "resources", too_much)


ALLOWED_TEXT, LAUNCHES_KERNELS = AllowedText(), LaunchesKernels()

__all__ = ["ALLOWED_TEXT", "LAUNCHES_KERNELS", "AllowedText", "Compiles", "FitsDevice", "LaunchesKernels"]
