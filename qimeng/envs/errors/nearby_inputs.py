"""A second look at a result just outside its budget: how large is eager's error on inputs nearby?

Eager's error on one trial is partly luck. In a small output a few roundings decide it, so an honest program that rounds
elsewhere is sometimes out of bounds. The budget is therefore the worst over similar trials: the same distribution, and
inputs, parameters and buffers nearby (`qimeng.envs.errors.float64`) with new roundings and their own float64 result.
Eager's error there is measured relative to the result in question, whose terms may cancel more than those of its
neighbours. Other distributions are not used: eager's errors there may be larger by orders of magnitude, and a wrong
program could hide behind them. Nor are fresh draws of the same distribution, since some are badly conditioned. A cheat
gains at most the variation of eager's own error on these inputs. That is little for a large output, which averages many
roundings.

Deals in errors and in when to stop. Knows nothing about how trials are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from qimeng.envs.errors.accuracy import Error
from qimeng.envs.errors.error_budget import Expected

NEARBY_TRIALS = 64
"""Trials that are looked at before a result is refused. An honest Linear with BatchNorm1d over two or three rows is out
of bounds in one trial of some 200, and a few of these need more than 16."""
NEARBY_ELEMENTS, FEWEST = 1 << 22, 4
"""Maximum number of input and output elements of all nearby trials, and the minimum number of trials. Large outputs
leave little to luck, unless a few elements whose terms nearly cancel decide everything."""
FAR = (256.0, 64.0, 16.0)
"""Multiples of the budget above which an error gets no further look: at first, after one more look, and from then on.
If a single rounding decides everything, as with two nearly equal logits, eager may be lucky once, but hardly twice.
The error beside columns is not asked in the first `FEWEST` looks: what a ReLU leaves of a channel near zero may be
nothing but rounding, in eager's result as in a candidate's, and beside a column of zeros it has no bound."""


def most_nearby(elements: int) -> int:
    """Trials nearby that may be made of a specification with so many elements of inputs and outputs."""
    return max(FEWEST, min(NEARBY_TRIALS, NEARBY_ELEMENTS // max(elements, 1)))


def second_look(error: Error, expected: Callable[[], Expected], look: Callable[[], bool]) -> Expected | None:
    """The expected value with its budget widened just enough for `error`; None if it stays out of bounds.

    Args:
        error: of a candidate, out of bounds.
        expected: tells what is expected by now.
        look: makes one more trial nearby and widens what is expected; False where no more are to be made.
    """
    looks = 0
    while not error.within(expected().budget):
        most = expected().budget * FAR[min(looks, len(FAR) - 1)]
        if not error.within(replace(most, across=math.inf) if looks < FEWEST else most) or not look():
            return None
        looks += 1
    return expected()


__all__ = ["FAR", "NEARBY_TRIALS", "most_nearby", "second_look"]
