"""The experiments with clusters: what is simulated is said to be, and the tables read the rows."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from experiments.cluster.lock_use import LockUse
from experiments.cluster.scaling import Scenario, Times, simulate
from experiments.cluster.simulated_gpus import Service
from experiments.cluster.views import cluster_scaling
from qimeng.device_lock import DeviceLock

TIMES = Times((Service(1.0, 0.4, 0.1), Service(2.0, 0.2, 0.3)), 4, 3.0, 0.001, None, "made up")


@pytest.mark.parametrize(
    "scenario", [Scenario("steady", 2), Scenario("mixed", 4, mixed=True), Scenario("nodes leave", 4, losses=2)]
)
def test_a_simulated_run_answers_every_request_once_and_says_what_it_is(scenario: Scenario) -> None:
    row = simulate(scenario, TIMES, each=20)
    assert row["simulated"] and row["answers"] == row["passed"] == row["requests"]
    assert row["most_answers_to_one"] == 1
    assert (row["lost"] > 0) == bool(scenario.losses) == bool(row["again"])
    assert 0 <= row["idle"] <= 1 - row["measuring"] <= 1
    assert "Simulated, with the seconds of `made up`" in cluster_scaling([row])


def test_two_gpus_answer_twice_as_much_as_one() -> None:
    one, two = (simulate(Scenario("steady", gpus), TIMES, each=40)["an_hour_a_gpu"] for gpus in (1, 2))
    assert two > 0.8 * one


def test_the_use_of_a_lock_is_seen_from_outside(tmp_path: Path) -> None:
    path = tmp_path / "gpu.lock"
    lock = DeviceLock(str(path))
    for hold, how in ((lock.alone, "measuring"), (lock.beside, "checking")):
        use = LockUse([path])
        with hold():
            use.begin()
            while use.looks < 3:
                time.sleep(0.01)
            found = use.end()["gpu.lock"]
        assert found[how] == 1.0 and found["idle"] == 0.0
    lock.close()
