"""What the judge's clock says of a told time: it agrees, it refutes it, or it cannot tell."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qimeng.envs.judge.clock_rule import Readings, decide

IDLE = (1.0, 1.01)


def ruling(told: float, candidate: float, eager: float = 0.1, in_batch: float = 4.2, kind: str = "cuda", idle=IDLE):
    """Of 32 queued calls; eager takes 0.1 ms by its events and by the clock."""
    found = Readings(32, idle, (in_batch,), (candidate,), queued=True)
    return decide(found, told, eager, kind).ok


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_a_time_that_the_clock_sees_as_well_is_believed(kind):
    assert ruling(0.05, 2.6, kind=kind) is True
    assert ruling(0.05, 2.1, kind=kind) is True, "in a batch parameters stay in the cache"


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("told", [0.001, 0.01, 0.02])
def test_a_gain_that_only_events_show_is_refuted_however_short_the_program(told, kind):
    assert ruling(told, 4.2, kind=kind) is False


def test_microseconds_can_be_told_on_a_gpu():
    assert ruling(0.004, 1.128, eager=0.012, in_batch=1.35) is True
    assert ruling(0.001, 1.35, eager=0.012, in_batch=1.35) is False


def test_events_that_leave_out_what_they_count_of_eager_are_refuted():
    """Eager takes 30 us from cold memory and 10 us in a batch; so does a candidate that says it takes 10."""
    assert ruling(0.03, 1.32, eager=0.03, in_batch=1.32) is True
    assert ruling(0.01, 1.32, eager=0.03, in_batch=1.32) is False


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_a_busy_machine_cannot_tell(kind):
    assert ruling(0.001, 40.0, in_batch=40.0, kind=kind) is None, "eager is as slow as that, by the clock"
    assert ruling(0.05, 2.6, idle=(1.0, 9.0), kind=kind) is None, "calls that do nothing take long"
    assert ruling(0.5, 1.1, kind=kind) is None, "less than told"
    assert ruling(0.5, 17.0, eager=1.0, in_batch=1.0, kind=kind) is None, "no time for eager"


def test_a_short_eager_that_begins_cold_does_not_hide_a_long_candidate():
    found = Readings(1, (0.8, 0.81), (1.1,), (20.0,))
    assert decide(found, 19.0, 0.06, "cpu").ok is True
    assert decide(found, 2.0, 0.06, "cpu").ok is False


def test_what_half_of_the_empty_batches_take_refutes_nothing():
    assert ruling(0.05, 4.2) is False
    assert ruling(0.05, 4.2, idle=(1.0, 1.01, 3.2, 3.4, 3.5)) is None


def test_one_slow_empty_batch_does_not_hide_a_long_candidate():
    """On an H200: a program that is 25 times slower than it says, and one batch of twelve that began late."""
    idle = (1.2, 12.9, *(1.2 + n / 1000 for n in range(10)))
    found = Readings(32, idle, (1.2 + 32 * 0.06,) * 6, (1.2 + 32 * 0.41,) * 6)
    assert decide(found, 0.0153, 0.0153, "cuda").ok is False
    assert decide(found, 0.39, 0.0153, "cuda").ok is True


def test_empty_batches_that_differ_hide_no_candidate_that_is_much_longer():
    """They confirm no time: what is left of the batch's may then be too short by as much."""
    assert ruling(0.01, 0.5 + 32 * 0.4, idle=(0.5, 1.1)) is False
    assert ruling(0.05, 0.5 + 32 * 0.06, idle=(0.5, 3.5), eager=0.12) is None


def test_where_eager_alone_waits_the_host_counts_for_eager_alone():
    """Eager takes 2.3 ms by its events and 2.9 in a batch; the candidate's calls were queued."""
    found = Readings(4, IDLE, (1 + 4 * 2.9,), (1 + 4 * 0.34,), queued=True, eager_waits=True)
    assert decide(found, 0.335, 2.3, "cuda").ok is True
    assert decide(found, 0.2, 2.3, "cuda").ok is False
    assert decide(replace(found, eager_waits=False), 0.335, 2.3, "cuda").ok is True
    unlike = replace(found, eager=(1 + 4 * 4.0,))
    assert decide(unlike, 0.335, 2.3, "cuda").ok is True
    assert decide(replace(unlike, eager_waits=False), 0.335, 2.3, "cuda").ok is None


def test_where_calls_cannot_be_queued_the_host_counts_as_it_does_for_eager():
    """A call of eager takes 0.1 ms of the device and 0.3 ms in a batch: 0.2 ms are the host's."""
    found = Readings(32, IDLE, (1 + 32 * 0.3,), (1 + 32 * 0.26,))
    assert decide(found, 0.05, 0.1, "cuda").ok is True
    slow = Readings(32, IDLE, (1 + 32 * 0.3,), (1 + 32 * 0.5,))
    assert decide(slow, 0.05, 0.1, "cuda").ok is False


def test_a_short_program_that_a_busy_host_launches_late_is_no_cheat():
    """A copy of 5 us, where eager returns a view and the calls could not be queued."""
    found = Readings(32, (0.1, 0.1, 0.1), (0.116,), (1.1,))
    assert decide(found, 0.0055, 0.0005, "cuda").ok is None
    assert decide(replace(found, queued=True), 0.0055, 0.0005, "cuda").ok is False
    assert decide(replace(found, candidate=(3.0,)), 0.0055, 0.0005, "cuda").ok is False


def test_batches_of_another_way_to_measure_are_forgotten():
    first = Readings(4).with_round((1.0, 1.1), 2.0, 3.0, queued=False)
    assert first == Readings(4, (1.0, 1.1), (2.0,), (3.0,))
    second = first.with_round((0.5, 0.6), 1.0, 1.5, queued=False)
    assert second.nothing == (1.0, 1.1, 0.5, 0.6) and second.candidate == (3.0, 1.5)
    assert second.with_round((9.0, 9.0), 9.0, 9.0, queued=True) == Readings(4, (9.0, 9.0), (9.0,), (9.0,), True)
    waits = first.with_round((9.0, 9.0), 9.0, 9.0, True, True)
    assert (
        waits == Readings(4, (9.0, 9.0), (9.0,), (9.0,), True, True) and waits.with_round((1.0,), 1, 1, True).calls == 4
    )


def test_what_the_device_waits_for_the_host_of_eager_is_not_hidden_by_a_program_of_one_launch():
    """Eager's 93 launches take the host 4 ms; queued, eager and a recorded graph of it take 1.3 and 1.15 ms."""
    found = Readings(5, (1.0, 1.01), (7.5,), (6.75,), queued=True)
    assert decide(found, 1.07, 4.2, "cuda").ok is False, "as if parameters had been read anew"
    assert decide(found, 1.07, 4.2, "cuda", late_ms=3.7).ok is True
    assert decide(found, 0.85, 4.2, "cuda", late_ms=3.7).ok is False, "the program's own time stays what it is"
    waits = replace(found, eager_waits=True)
    assert decide(waits, 1.07, 4.2, "cuda", late_ms=3.7) == decide(waits, 1.07, 4.2, "cuda")
