"""Evaluations as the small JSON of a file of trees.

Deals in the fields that planners learn from. Knows nothing about trees.
"""

from __future__ import annotations

from typing import Any

from qimeng.interfaces import Evaluation, Gate, Timing


def sparse(e: Evaluation) -> dict[str, Any]:
    """The fields that `qimeng.planner.data.tree_store.compact` keeps, those with their usual value left out."""
    data = {
        "gate": "" if e.ok else e.gate.value,
        "error": e.error,
        "failure": e.failure,
        "timing": _timing_data(e.timing),
        "eager": _timing_data(e.eager),
        "chosen": e.chosen,
        "region_ms": dict(e.region_ms),
        "generated_share": e.generated_share,
        "configurations": e.configurations - 1,
    }
    return {key: value for key, value in data.items() if value or key == "generated_share" and value is not None}


def dense(data: dict[str, Any]) -> Evaluation:
    """The evaluation that `sparse` gave."""
    return Evaluation(
        gate=Gate(data.get("gate", Gate.PASSED.value)),
        error=data.get("error"),
        failure=data.get("failure"),
        timing=_timing(data.get("timing")),
        eager=_timing(data.get("eager")),
        chosen=data.get("chosen", 0),
        region_ms=data.get("region_ms", {}),
        generated_share=data.get("generated_share"),
        configurations=data.get("configurations", 0) + 1,
    )


def _timing_data(t: Timing | None) -> list[Any] | None:
    return None if t is None else [t.device_ms, t.spread, t.wall_ms, t.calls, int(t.estimated)]


def _timing(data: list[Any] | None) -> Timing | None:
    if data is None:
        return None
    device_ms, spread, wall_ms, calls, estimated = data
    return Timing(device_ms, spread, wall_ms, calls, bool(estimated))


__all__ = ["dense", "sparse"]
