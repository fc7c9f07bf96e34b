"""The table of generated kernels beside PyTorch's: the fastest schedule of each case.

Deals in rows of `experiments.windows`, `experiments.attention` and `experiments.recurrent`. Knows nothing about
kernels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qimeng.bench.markdown import markdown, number

Row = Mapping[str, Any]


def read_beside(path: Path) -> list[Row]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def beside(rows: Sequence[Row]) -> str:
    """A line a case: times of PyTorch's ways and of the fastest generated kernel, and how they compare."""
    best: dict[str, Row] = {}
    for row in rows:
        if "ms" not in row:  # a schedule that does not compile
            continue
        if row["case"] not in best or row["ms"] < best[row["case"]]["ms"]:
            best[row["case"]] = row
    lines = []
    for case, row in best.items():
        fastest = min(v for k in ("eager_ms", "compiled_ms", "cudnn_ms") if (v := row.get(k)))
        times = [number(row.get(k), 3) for k in ("eager_ms", "compiled_ms", "cudnn_ms")]
        lines.append([case, *times, number(row["ms"], 3), number(fastest / row["ms"]), f"`{row['schedule']}`"])
    head = [
        "case",
        "eager, ms",
        "torch.compile, ms",
        "cuDNN, ms",
        "generated, ms",
        "over PyTorch's fastest",
        "schedule",
    ]
    cards = sorted({f"{r['environment']['device']}, commit {r['environment']['commit'][:7]}" for r in rows})
    return "; ".join(cards) + "\n\n" + markdown([head, *lines])


BESIDE: dict[str, Callable[[Sequence[Row]], str]] = {"beside": beside}

__all__ = ["BESIDE", "read_beside"]
