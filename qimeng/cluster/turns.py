"""Who uses a GPU next: the run of the highest priority, and among equals the one that has used it least.

Deals in runs, seconds and turns. Knows nothing about what is done in a turn, or about Ray.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

PERSON, NORMAL, BACKGROUND = 2, 1, 0
"""Priorities: somebody waits for the result, a benchmark, a collection of data."""


@dataclass(eq=False)
class Turn:
    """One use of the GPU, waited for or running.

    Attributes:
        run: whose it is.
        priority: higher ones go first.
        beside: how many turns may run at a time while this one does, itself counted.
        begun: set when it may begin.
        since: when it began (`time.monotonic`).
    """

    run: str
    priority: int = NORMAL
    beside: int = 1
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    since: float = 0.0


class Turns:
    """The turns of one GPU.

    A turn that may not begin yet keeps back those behind it, so none waits for ever behind smaller ones. What runs is
    not ended for a turn of higher priority, which waits for one turn at most.

    Args:
        clock: seconds that only move forward.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._waiting: list[Turn] = []
        self._running: list[Turn] = []
        self.used: dict[str, float] = {}

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """How many run."""
        return len(self._running)

    @asynccontextmanager
    async def turn(self, run: str, priority: int = NORMAL, beside: int = 1) -> AsyncIterator[Turn]:
        """Wait for a turn, and hold it in the block."""
        mine = Turn(run, priority, max(1, beside))
        if run not in self.used:  # a run that comes later owes nothing, and is owed nothing, for what was before
            self.used[run] = min(self.used.values(), default=0.0)
        self._waiting.append(mine)
        self._admit()
        try:
            await mine.begun.wait()
            yield mine
        finally:
            if mine in self._waiting:
                self._waiting.remove(mine)
            else:
                self._running.remove(mine)
                if run in self.used:
                    self.used[run] += self._clock() - mine.since
            self._admit()

    def forget(self, run: str) -> None:
        """Drop the count of a run that has ended."""
        self.used.pop(run, None)

    def _admit(self) -> None:
        while self._waiting:
            now = self._clock()
            used = dict(self.used)
            for turn in self._running:
                used[turn.run] = used.get(turn.run, 0.0) + now - turn.since
            first = min(self._waiting, key=lambda turn: (-turn.priority, used.get(turn.run, 0.0)))
            if len(self._running) >= min(turn.beside for turn in (first, *self._running)):
                return
            self._waiting.remove(first)
            self._running.append(first)
            first.since = now
            first.begun.set()


__all__ = ["BACKGROUND", "NORMAL", "PERSON", "Turn", "Turns"]
