"""The table of generated kernels beside what else computes the same: the fastest configuration of each case.

Deals in rows of `experiments.sparse`, `experiments.lowprecision` and `experiments.irregular`. Knows nothing about
kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qimeng.bench.markdown import markdown, number

Row = Mapping[str, Any]


def rivals(rows: Sequence[Row]) -> str:
    """A line a case: microseconds of the fastest configuration of ours, its speedup over each rival's, its name."""
    timed = [(row, *_best(row)) for row in rows if row.get("turns_ms")]
    others = list(dict.fromkeys(name for row, _, _ in timed for name in row["turns_ms"] if not _is_ours(name, row)))
    lines = []
    for row, name, ms in timed:
        over = [number(t / ms if (t := row["turns_ms"].get(other)) and ms else None) for other in others]
        lines.append([row["case"], number(1e3 * ms, 1) if ms else "–", *over, f"`{name}`" if ms else "refused"])
    cards = sorted({f"{r['environment']['device']}, commit {r['environment']['commit'][:7]}" for r, _, _ in timed})
    head = ["case", "generated, µs", *(f"over {name}" for name in others), "configuration"]
    return "; ".join(cards) + "\n\n" + markdown([head, *lines])


def _best(row: Row) -> tuple[str, float]:
    """Name and milliseconds of the fastest configuration of ours; nothing and 0 where there is none."""
    ours = {name: ms for name, ms in row["turns_ms"].items() if _is_ours(name, row)}
    return min(ours.items(), key=lambda pair: pair[1], default=("", 0.0))


def _is_ours(name: str, row: Row) -> bool:
    """A schedule, which has brackets, or what the row names as its best: a library that an action chose, say."""
    return "(" in name or name == row.get("best_schedule")


RIVALS: dict[str, Callable[[Sequence[Row]], str]] = {"rivals": rivals}

__all__ = ["RIVALS", "rivals"]
