"""Work on many things by several processes: results in order, and few things by this process."""

from __future__ import annotations

import os

from qimeng.planner.lm.processes import MANY, in_processes


def test_many_things_are_dealt_out_and_few_are_not() -> None:
    assert in_processes(abs, range(-MANY, 0)) == list(range(MANY, 0, -1))
    assert in_processes(worker, range(2)) == [os.getpid()] * 2
    if len(os.sched_getaffinity(0)) > 1:
        assert os.getpid() not in in_processes(worker, range(MANY))


def worker(item: int) -> int:
    """The process that it is called in."""
    return os.getpid()
