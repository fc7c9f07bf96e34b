"""Rows for tests: made up, with figures that are easy to check by hand."""

from dataclasses import replace
from typing import Any

from qimeng.bench.row import Environment, Row, Settings, StepRow
from qimeng.interfaces import Timing

HERE = Environment("NVIDIA H200", "580.1", "2.11", "3.6", "3.12", "abc")


def row(number: int, ms: float | None, **changes: Any) -> Row:
    """A right result of `ms` against an eager of 2 ms and a torch.compile of 1 ms; a failure where `ms` is None."""
    made = Row(
        id=f"level1/{number}",
        name=f"P{number}",
        digest=f"d{number}",
        settings=Settings(),
        environment=HERE,
        family="pointwise",
        right=True,
        kernelbench=True,
        candidate=Timing(ms or 1.0, 0.01),
        eager=Timing(2.0, 0.01),
        compiled=Timing(1.0),
        compiled_best=Timing(0.8),
        compiled_best_mode="max-autotune",
        generated_share=1.0,
        flops=0,
        floor_ms=0.5,
        peak_bytes=100,
        eager_peak_bytes=100,
        evaluations=4,
        steps=(StepRow("lowering", "", True, "passed", 2.0, 1), StepRow("tiling", "taller", False, "compile")),
        seconds={"total": 10.0, "compile": 4.0, "time": 2.0},
        suite="kernelbench",
        group="level1",
    )
    if ms is None:
        made = replace(made, right=None, kernelbench=None, candidate=None, error="broke", generated_share=None)
    return replace(made, **changes)
