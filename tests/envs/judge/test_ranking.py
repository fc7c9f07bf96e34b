"""Which of two judged programs is the better one."""

from __future__ import annotations

import pytest

from qimeng.envs.judge.ranking import beats, gain, margin, preferred, refusal
from qimeng.interfaces import Evaluation, Gate, Timing


def judged(ms: float, share: float = 1.0, spread: float = 0.0, calls: int = 25, eager: float = 10.0) -> Evaluation:
    timing = Timing(ms, spread, calls=calls)
    return Evaluation(Gate.PASSED, timing=timing, eager=Timing(eager, calls=calls), generated_share=share)


@pytest.mark.parametrize(
    ("new", "old", "better"),
    [
        (judged(9.0), judged(10.0), True),
        (judged(10.0), judged(10.0), False),
        (judged(10.05, share=1.0), judged(10.0, share=0.0), True),  # a tie goes to the generated kernel
        (judged(10.2, share=1.0), judged(10.0, share=0.0), False),
        (judged(9.95, share=0.0), judged(10.0, share=1.0), False),  # and stays there
        (judged(9.8, share=0.0), judged(10.0, share=1.0), True),
    ],
)
def test_faster_or_as_fast_and_generated(new: Evaluation, old: Evaluation, better: bool) -> None:
    assert preferred(new, old) is better


def test_anything_timed_is_better_than_nothing() -> None:
    assert preferred(judged(10.0), None)
    assert not preferred(Evaluation(Gate.PASSED), judged(10.0))


def test_uncertainty_shrinks_with_the_number_of_calls() -> None:
    assert Timing(1.0, 0.1, calls=0).uncertainty == 0.1
    assert Timing(1.0, 0.1, calls=100).uncertainty == pytest.approx(0.00929)


def test_a_gain_must_be_twice_the_uncertainty() -> None:
    noisy, parent = judged(9.7, spread=0.1, calls=25), judged(10.0)
    assert margin(noisy, parent) == pytest.approx(2 * 0.929 * 0.1 / 5)
    assert not beats(noisy, parent)
    assert beats(judged(9.5, spread=0.1, calls=25), parent)
    assert not beats(judged(9.96), parent)  # less than the smallest gain


def test_times_count_as_shares_of_eagers() -> None:
    slow_memory = judged(10.5, eager=11.2)  # everything takes 12 % longer
    assert preferred(slow_memory, judged(10.0, eager=10.0))
    assert beats(slow_memory, judged(10.0, eager=10.0))
    assert not preferred(judged(9.9, eager=9.0), judged(10.0, eager=10.0))


def test_a_gain_is_of_shares() -> None:
    assert gain(judged(5.0), judged(10.0)) == pytest.approx(2.0)
    assert gain(judged(10.0, eager=11.0), judged(10.0, eager=10.0)) == pytest.approx(1.1)
    assert gain(None, judged(1.0)) is None and gain(judged(1.0), Evaluation(Gate.PASSED)) is None


def test_the_final_verification_may_refuse() -> None:
    assert refusal(judged(9.0), judged(10.0)) is None
    assert refusal(judged(9.99), judged(10.0)) is None  # no worse than before, and right
    assert "is slower than 10 ms (1.000 x eager)" in (refusal(judged(10.1), judged(10.0)) or "")
    assert refusal(judged(10.05), judged(10.0, share=0.0)) is None
    assert "0.889 x PyTorch eager" in (refusal(judged(9.0, eager=8.0), judged(11.0, eager=8.0)) or "")
    assert "gate program: 3 of 4 wrong" in (refusal(Evaluation(Gate.PROGRAM, "3 of 4 wrong"), None) or "")
    assert refusal(judged(20.0), None) is None  # the start program is what is left
    assert refusal(judged(0.39, eager=2.7), judged(0.51, eager=4.4)) is None  # eager alone is faster than it was
    assert refusal(judged(13.0, eager=13.0), judged(10.0)) is None  # the whole GPU is slower than it was


def test_views_take_no_time() -> None:
    nothing, something = judged(0.0, eager=0.0), judged(1.0, eager=0.0)
    assert nothing.speedup is None
    assert preferred(nothing, something) and beats(nothing, something)
    assert not preferred(something, nothing) and not beats(something, nothing)
    assert gain(something, nothing) == 0.0 and gain(nothing, something) is None and gain(nothing, nothing) is None
    assert not beats(nothing, nothing) and refusal(nothing, None) is None
