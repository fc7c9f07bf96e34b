"""Records how long each part of an evaluation took.

Deals in seconds by part. Knows nothing about what the parts do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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


__all__ = ["Clock", "now_seconds"]
