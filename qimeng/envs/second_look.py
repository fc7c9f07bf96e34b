"""A second look at a result that is just out of bounds: how far off is eager on inputs nearby?

Eager's error on one trial is partly luck: of a small output, a few roundings decide it, so that an honest program that
rounds elsewhere is now and then out of bounds. The design's "worst over the trials" is therefore taken over trials that
are alike: the same distribution and parameters, inputs nearby (`qimeng.envs.double.nearby`), whose roundings all fall
out anew, each with a float64 result of its own; how far eager is from that is told relative to the result in question,
whose terms may nearly cancel where those of its neighbours do less. Trials of another
distribution have no say: eager's errors there may be larger by orders of magnitude, and a program that is wrong on
inputs on which eager is good would hide behind them. Nor have fresh draws of the same distribution, among which one is
badly conditioned now and then. What a cheat gains is what eager's own error varies by on the inputs at hand: little for
a large output, whose figures are those of many roundings already.

Deals in errors and in when to go on looking. Knows nothing about how trials are made.
"""

from __future__ import annotations

from collections.abc import Callable

from qimeng.envs.accuracy import Error, Expected

NEARBY_TRIALS = 64
"""Trials that are looked at before a result is refused. An honest Linear with BatchNorm1d over two or three rows is out
of bounds in one trial of some 200, and a few of these need more than 16."""
NEARBY_ELEMENTS, FEWEST = 1 << 22, 4
"""Elements, inputs and outputs, that all of them may have together, but for so many trials: larger ones leave little to
luck, unless all hangs on the few elements whose terms nearly cancel."""
FAR = (256.0, 64.0, 16.0)
"""Times its budget from which an error is not looked at again: at first, after one more look, and from then on. Where a
single rounding decides all (two logits that are nearly the same), eager was lucky once, hardly twice."""


def most_nearby(elements: int) -> int:
    """Trials nearby that may be made of a specification with so many elements of inputs and outputs."""
    return max(FEWEST, min(NEARBY_TRIALS, NEARBY_ELEMENTS // max(elements, 1)))


def second_look(error: Error, expected: Callable[[], Expected], look: Callable[[], bool]) -> Expected | None:
    """What is expected, its budget widened just so far that `error` is within it; None where it stays out of bounds.

    Args:
        error: of a candidate, out of bounds.
        expected: tells what is expected by now.
        look: makes one more trial nearby and widens what is expected; False where no more are to be made.
    """
    looks = 0
    while not error.within(expected().budget):
        if not error.within(expected().budget * FAR[min(looks, len(FAR) - 1)]) or not look():
            return None
        looks += 1
    return expected()


__all__ = ["FAR", "NEARBY_TRIALS", "most_nearby", "second_look"]
