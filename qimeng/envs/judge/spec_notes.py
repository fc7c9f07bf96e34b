"""Remarks about a specification that belong to every result.

Deals in what a look at the reference found, in sentences. Knows nothing about candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

from qimeng.spec import KernelSpec


def remarks_on(
    spec: KernelSpec, degenerate: str, random: Sequence[str], in_double: bool, mode_matters: bool
) -> tuple[str, ...]:
    """The sentences.

    Args:
        spec: the specification.
        degenerate: why the result can be guessed; empty where it cannot.
        random: operators that draw random numbers.
        in_double: whether the reference is a float64 result.
        mode_matters: whether evaluation mode computes something else than training mode.
    """
    found = []
    if degenerate:
        found.append(f"degenerate: {degenerate}; a speedup on it says little")
    if random:
        how = "float64 with eager's draws" if in_double else "eager with the same seed"
        found.append(f"random operators ({', '.join(random)}): checked against {how}")
    if mode_matters:
        mine, other = ("training", "evaluation") if spec.training else ("evaluation", "training")
        found.append(f"made for {mine} mode, as the spec says: in {other} mode the module computes something else")
    for number in spec.never_changed:
        found.append(
            f"input {number} kept its given values in every trial: the module accepted no others that were tried"
        )
    return tuple(found)


__all__ = ["remarks_on"]
