"""The time that the first call of an implementation may take: a library may compile the region then.

Deals in seconds. Knows nothing about what is compiled.
"""

from __future__ import annotations

from collections.abc import Iterable

from qimeng.library import COMPILE_S, compiles
from qimeng.program.program import Implementation, Program


def first_call_s(implementations: Iterable[Implementation], usual_s: float, most_s: float = COMPILE_S) -> float:
    """Seconds for a first call: `usual_s`, or `most_s` if that is more and one of `implementations` compiles then."""
    return max(usual_s, most_s) if any(map(compiles, implementations)) else usual_s


def warms_up(program: Program) -> bool:
    """Whether the first call of `program` compiles something."""
    return not program.fallback and any(compiles(program.implementation(r)) for r in program.called)


__all__ = ["first_call_s", "warms_up"]
