"""Checks the replies of a worker before they are used.

Deals in JSON from an untrusted process. Each function returns a value of the requested type, or raises `WorkerFailed`
of class ``"protocol"``. Knows nothing about whether a reply is true.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qimeng.envs.workers.forkserver import WorkerFailed
from qimeng.envs.workers.stopwatch import Samples

LONGEST = 1 << 20
"""Times in one answer."""
LARGEST = 1e18
"""Neither milliseconds nor bytes reach it."""
SHORTEST_MS = 1e-6
"""No call is shorter than a nanosecond."""


def entry_of(data: Any, name: str) -> Any:
    """The entry `name` of an answer that is a table."""
    if not isinstance(data, Mapping) or name not in data:
        raise WorkerFailed("protocol", f"the answer makes no sense: it has no {name}")
    return data[name]


def times_of(items: Any) -> tuple[float, ...]:
    """Milliseconds: one or more finite numbers, none negative."""
    if not isinstance(items, list) or not 0 < len(items) <= LONGEST:
        raise WorkerFailed("protocol", "the answer makes no sense: no list of times")
    if not all(_is_amount(x) for x in items):
        raise WorkerFailed("protocol", "the answer makes no sense: times that are none")
    return tuple(float(x) for x in items)


def samples_of(data: Any) -> Samples:
    """Times of calls on the device and on the wall clock, as many of the one as of the other, none of them zero."""
    device_ms, wall_ms = times_of(entry_of(data, "device_ms")), times_of(entry_of(data, "wall_ms"))
    if len(device_ms) != len(wall_ms) or min(device_ms) < SHORTEST_MS:
        raise WorkerFailed("protocol", "the answer makes no sense: times of no calls")
    return Samples(device_ms, wall_ms)


def launches_from(items: Any) -> list[tuple[str, float, float]]:
    """Names of kernels and when each began and ended, in milliseconds after the first."""
    if not isinstance(items, list) or len(items) > LONGEST:
        raise WorkerFailed("protocol", "the answer makes no sense: no list of kernels")
    found = []
    for item in items:
        if not isinstance(item, list) or len(item) != 3 or not isinstance(item[0], str):
            raise WorkerFailed("protocol", "the answer makes no sense: a kernel that is none")
        if not (_is_amount(item[1]) and _is_amount(item[2]) and item[1] <= item[2]):
            raise WorkerFailed("protocol", "the answer makes no sense: a kernel that ends before it begins")
        found.append((item[0], float(item[1]), float(item[2])))
    return found


def amount_of(item: Any) -> float | None:
    """A finite number that is not negative, or None."""
    if item is None:
        return None
    if not _is_amount(item):
        raise WorkerFailed("protocol", "the answer makes no sense: an amount that is none")
    return float(item)


def _is_amount(item: Any) -> bool:
    return type(item) in (int, float) and 0 <= item < LARGEST


__all__ = ["amount_of", "entry_of", "launches_from", "samples_of", "times_of"]
