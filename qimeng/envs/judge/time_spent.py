"""Records how long each part of an evaluation took.

Deals in seconds by part. Knows nothing about what the parts do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def now_seconds() -> float:
    """Wall seconds."""
    return time.perf_counter()


class Clock:
    """Wall seconds by part; what is spent in a part inside another one counts for the inner one only."""

    def __init__(self, now: Callable[[], float] = now_seconds):
        self.now = now
        self.seconds: dict[str, float] = {}
        self._inner = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`."""
        began, before = self.now(), self._inner
        self._inner = 0.0
        try:
            yield
        finally:
            passed = self.now() - began
            self.seconds[name] = self.seconds.get(name, 0.0) + passed - self._inner
            self._inner = before + passed

    def each(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """`items` one after the other; the time that each takes to make counts for `name`. None is held meanwhile."""
        source = iter(items)
        while True:
            with self.part(name):
                found = list(islice(source, 1))
            if not found:
                return
            yield found.pop()


__all__ = ["Clock", "now_seconds"]
