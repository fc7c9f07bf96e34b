"""Asks a judge again where whoever else uses the machine may have decided."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from qimeng.envs.judge.judge_clock import NOT_TIMED
from qimeng.envs.judge.verdicts import Verdict
from qimeng.interfaces import Evaluation

TRIES = 6
Answer = TypeVar("Answer", Verdict, Evaluation)


def settled(ask: Callable[[], Answer], unsettled: tuple[str | None, ...] = (NOT_TIMED, "clock")) -> Answer:
    """The first answer of `ask` whose failure is none of `unsettled`; the last one where all are."""
    for _ in range(TRIES):
        answer = ask()
        if answer.failure not in unsettled:
            break
    return answer


__all__ = ["settled"]
