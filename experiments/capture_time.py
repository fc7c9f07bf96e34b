"""Seconds of a capture, and of one by torch.export's public decomposition, which gives the same graphs.

On a CPU; nothing is allocated and nothing verified.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from qimeng.bench.environment import environment
from qimeng.bench.kernelbench import load_levels
from qimeng.bench.row import append_line
from qimeng.device import target_device
from qimeng.errors import QimengError
from qimeng.graph import decompose
from qimeng.planner.data.generate import draw_many
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec


@contextmanager
def public() -> Iterator[None]:
    """`decompose.decomposed` takes the public way inside."""
    kept = decompose._parts

    def unknown(namespaces: tuple[str, ...]) -> tuple[decompose.Table, decompose.Table]:
        raise AttributeError("left out for the comparison")

    decompose._parts = unknown  # type: ignore[assignment]
    try:
        yield
    finally:
        decompose._parts = kept


def timed(spec: KernelSpec) -> tuple[str, float]:
    """The graph as text, or why there is none, and the seconds it took."""
    began = time.perf_counter()
    try:
        found = repr(capture_spec(spec, verify=False))
    except QimengError as error:
        found = str(error)
    return found, time.perf_counter() - began


def row(name: str, specs: Iterable[KernelSpec]) -> dict[str, object]:
    """Both ways for each spec in turns."""
    short, long, count, different = 0.0, 0.0, 0, []
    for spec in specs:
        ours, seconds = timed(spec)
        short += seconds
        with public():
            theirs, seconds = timed(spec)
        long, count = long + seconds, count + 1
        different += [spec.name] if ours != theirs else []
    mean = {"seconds": round(short / count, 4), "seconds_public": round(long / count, 4)}
    return {"specs": name, "count": count, **mean, "different": different}


def capture_time(out: Path, specs: int = 100, root: Path | None = None) -> None:
    """Append a row for drawn specs, and one for each of KernelBench's levels 1 and 2.

    Args:
        out: file of rows.
        specs: drawn specs.
        root: a local checkout of KernelBench; without one, drawn specs only.
    """
    drawn = [d.spec for d in draw_many(77, specs)]
    parts: dict[str, list[KernelSpec]] = {"drawn": drawn}
    for level in (1, 2) if root is not None else ():
        parts[f"kernelbench level {level}"] = [p.spec() for p in load_levels(root or Path(), str(level))]
    timed(drawn[0])  # what is imported and made once
    with public():
        timed(drawn[0])
    for name, some in parts.items():
        found = {**row(name, some), "environment": asdict(environment(target_device()))}
        append_line(out, json.dumps(found))
        print(found, flush=True)


__all__ = ["capture_time"]
