"""One line of what `qimeng doctor` says.

Deals in names and outcomes. Knows nothing about what is checked.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: what was checked.
        works: True or False; None where it does not apply to this machine.
        details: version, device, or the reason.
    """

    name: str
    works: bool | None
    details: str


__all__ = ["Check"]
