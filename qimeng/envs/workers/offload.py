"""Work that a process has done elsewhere, where there are cores to spare.

Deals in errands and in whoever takes them: in a process of a cluster's GPU, its keeper does
(`qimeng.cluster.cpu_tasks`). Where nobody takes an errand, or it comes to nothing, whoever has it does the work as if
this module was not there. Knows nothing about what an errand is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import cloudpickle

R = TypeVar("R")


@dataclass(frozen=True)
class Errand:
    """One piece of work.

    Attributes:
        key: names it by content: equal keys have equal results, so one result serves all, and doing it twice is
            harmless.
        work: a function without arguments, pickled by cloudpickle. A result whose attribute `lasting` is False is an
            accident, such as a crash: only who asked gets it.
        seconds: that it may take.
    """

    key: str
    work: bytes
    seconds: float


Taker = Callable[[Sequence[Errand]], Sequence[bytes | None]]
"""Does errands: the pickled result of each, None where it came to nothing."""

_taker: list[Taker] = []


class NotHere(Exception):
    """Raised by an errand where the machine that it is done on cannot do it; another one may."""


def offer(taker: Taker | None) -> None:
    """From now on `taker` does the errands of this process; with None, nobody does."""
    _taker[:] = [] if taker is None else [taker]


def offered() -> bool:
    """Whether somebody does the errands of this process."""
    return bool(_taker)


def done_elsewhere(works: Sequence[tuple[str, Callable[[], R]]], seconds: float) -> list[R | None]:
    """The results of functions, each with its key (`Errand`), in order; None for each that is left to the caller.

    Args:
        works: what is to be done.
        seconds: that each may take.
    """
    if not _taker or not works:
        return [None] * len(works)
    found = _taker[0]([Errand(key, cloudpickle.dumps(work), seconds) for key, work in works])
    results: list[Any] = [None if data is None else cloudpickle.loads(data) for data in found]
    return cast("list[R | None]", results)


__all__ = ["Errand", "NotHere", "Taker", "done_elsewhere", "offer", "offered"]
