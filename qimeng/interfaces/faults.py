"""Whose fault a failed evaluation is, and so whether an engine asks again.

Deals in the classes of failure, which are words. Knows nothing about evaluations or about who judges.
"""

from __future__ import annotations

from enum import Enum

LASTING = frozenset(
    "illegal coder forbidden compile resources unsupported meta error wrong illegal-access too-fast tampered "
    "not-a-kernel sanitizer".split()
)
"""Classes of failure that are the program's fault for certain. All others may come from a busy machine."""


class Fault(str, Enum):
    """Whose fault a failure is.

    Only the fault of a measurement or of a machine is asked again by an engine (`ASKED_AGAIN`). What a program does may
    be harm: it meets no second device, unless a search comes back to it.
    """

    KERNEL = "kernel"
    """The program's: a verdict, or how the process ended that ran it."""
    MEASUREMENT = "measurement"
    """The program is right, and its time could not be told."""
    MACHINE = "machine"
    """A process of the judge, a driver, a device or a node failed, or did not answer in time."""
    JUDGE = "judge"
    """The judge's own code raised, or could not read the request: it would again."""


ASKED_AGAIN = (Fault.MEASUREMENT, Fault.MACHINE)
"""Faults after which an engine with processes of its own judges a program again."""

MACHINE_FAILED, JUDGE_FAILED, LATE = "machine", "judge", "late"
"""Classes of failure: see `FAULTS`. The last is that of a machine that was given a limit of time, which is used up."""

LEFT_ASIDE = "left-aside"
"""Class of failure: a library had not compiled the program in the seconds that the request gives it. No verdict."""

FAULTS = {
    **dict.fromkeys(LASTING, Fault.KERNEL),
    **dict.fromkeys(("crash", "exit", "protocol", "timeout", "memory", "clock"), Fault.KERNEL),
    "not-timed": Fault.MEASUREMENT,
    **dict.fromkeys((MACHINE_FAILED, LATE, "setup"), Fault.MACHINE),
    JUDGE_FAILED: Fault.JUDGE,
}
"""Class of a failure to whose fault it is; other classes are nobody's (not stored, interrupted, a language model's).

How a worker ended counts as the program's doing, for it ran there. So does ``"clock"``, a time that the judge's own
clock refuted several times: asking again would be one more draw for a program that cheats.
"""

__all__ = ["ASKED_AGAIN", "FAULTS", "JUDGE_FAILED", "LASTING", "LATE", "LEFT_ASIDE", "MACHINE_FAILED", "Fault"]
