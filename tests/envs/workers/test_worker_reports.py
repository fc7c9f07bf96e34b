"""What a worker says is a value of the type that was asked for, or a failure of class "protocol"."""

from __future__ import annotations

import math

import pytest

from qimeng.envs.workers.forkserver import WorkerFailed
from qimeng.envs.workers.worker_reports import amount_of, entry_of, launches_from, samples_of, times_of


def test_what_makes_sense_is_taken():
    found = samples_of({"device_ms": [1, 2.5], "wall_ms": [1.5, 3.0]})
    assert found.device_ms == (1.0, 2.5) and found.wall_ms == (1.5, 3.0)
    assert times_of([0.0, 1]) == (0.0, 1.0)
    assert amount_of(None) is None and amount_of(3) == 3.0
    assert entry_of({"a": None}, "a") is None


NONSENSE = [None, 1.0, "1.0", [], {}, ["1.0"], [True], [-1.0], [math.nan], [math.inf], [None], [[1.0]], [1.0, 10**400]]


@pytest.mark.parametrize("items", NONSENSE, ids=lambda x: repr(x)[:20])
def test_times_that_are_none(items):
    for ask in (times_of, lambda x: samples_of({"device_ms": x, "wall_ms": [1.0]})):
        with pytest.raises(WorkerFailed) as failed:
            ask(items)
        assert failed.value.kind == "protocol"


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {"device_ms": [1.0]},
        {"device_ms": [0.0], "wall_ms": [1.0]},
        {"device_ms": [1.0], "wall_ms": [1.0, 2.0]},
    ],
)
def test_samples_that_are_none(data):
    with pytest.raises(WorkerFailed, match="makes no sense"):
        samples_of(data)


@pytest.mark.parametrize("item", ["1", True, -1, math.nan, math.inf, [1], 10**400], ids=lambda x: repr(x)[:20])
def test_amounts_that_are_none(item):
    with pytest.raises(WorkerFailed, match="makes no sense"):
        amount_of(item)


@pytest.mark.parametrize(
    "items",
    [None, 1, [1], [["a"]], [["a", 1.0]], [["a", "b", 1.0]], [[1, 0.0, 1.0]], [["a", -1.0, 1.0]], [["a", 2.0, 1.0]]],
    ids=repr,
)
def test_kernels_that_are_none(items):
    with pytest.raises(WorkerFailed, match="makes no sense"):
        launches_from(items)


def test_kernels_by_name_and_time():
    assert launches_from([["add", 0, 1.5]]) == [("add", 0.0, 1.5)] and launches_from([]) == []
