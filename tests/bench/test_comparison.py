from dataclasses import replace

import pytest

from qimeng.bench.comparison import compare
from qimeng.bench.row import Settings
from qimeng.bench.tables import comparison
from qimeng.interfaces import Timing
from tests.bench.rows import HERE, row

RANDOM = Settings(planner="random")


def test_runs_are_compared_over_the_problems_that_all_have() -> None:
    rows = [
        row(1, 1.0),
        row(2, 0.5),
        row(3, 0.1),
        row(4, 1.0, family="gemm"),
        row(1, 2.0, settings=RANDOM, evaluations=8, seconds={"total": 30.0, "optimize": 20.0}),
        row(2, 4.0, settings=RANDOM, evaluations=10, generated_share=0.2),
        row(4, None, settings=RANDOM, family=""),
    ]
    light, other, gemm, failed = compare(rows)
    assert (light.group, light.problems, light.timed) == ("pointwise and reduction", 2, 2)
    assert light.over_eager == pytest.approx(8**0.5) and other.over_eager == pytest.approx(0.5**0.5)
    assert (light.half_generated, other.half_generated) == (1.0, 0.5)
    assert (light.median_evaluations, other.median_evaluations) == (4.0, 9.0)
    assert (light.median_seconds, other.median_seconds) == (10.0, 15.0)
    assert light.run.startswith("heuristic") and other.run.startswith("random")
    assert (gemm.group, failed.group) == ("gemm", "gemm")
    assert (gemm.right, failed.right, gemm.timed) == (1.0, 0.0, 0) and gemm.over_eager is None
    assert "2, 0 timed" not in comparison(rows) and "1, 0 timed in all" in comparison(rows)


def test_estimates_are_not_compared_with_measurements_and_devices_are_named() -> None:
    estimate = Timing(1.0, estimated=True)
    elsewhere = replace(HERE, device="NVIDIA H100")
    rows = [row(1, 1.0), row(1, 1.0, settings=RANDOM, candidate=estimate, eager=estimate, compiled=None)]
    assert [c.run for c in compare(rows)] == [Settings().label]
    found = compare([row(1, 1.0), row(1, 0.5, environment=elsewhere)])
    assert [c.run.rpartition(" on ")[2] for c in found] == ["NVIDIA H200", "NVIDIA H100"]


def test_without_rows_there_is_nothing_to_compare() -> None:
    assert compare([]) == ()
