"""GPUs in virtual time: each has a lock and turns, and answers requests after the seconds that others have taken.

Deals in seconds of the parts of an evaluation. The turns are the real ones (`qimeng.cluster.turns`), the lock has the
rules of `qimeng.device_lock`. Knows nothing about Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from qimeng.cluster.turns import Turns

MEASURING, CHECKING = "measuring", "checking"


@dataclass(frozen=True)
class Service:
    """Seconds of one evaluation, without those it waited.

    Attributes:
        beside: compiling and what else needs no turn on the GPU.
        check: on the GPU beside other checks.
        measure: on the GPU alone.
    """

    beside: float
    check: float
    measure: float


class Lock:
    """A GPU's lock: measured alone, checked beside others; a check begins when nobody measures or waits to.

    Args:
        clock: the virtual time.

    Attributes:
        held: (begin, end, how) of every hold.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock, self._changed = clock, asyncio.Condition()
        self._checks = self._waiting = 0
        self._measured = False
        self.held: list[tuple[float, float, str]] = []

    @asynccontextmanager
    async def hold(self, how: str) -> AsyncIterator[None]:
        """Hold it in the block, after waiting for it."""
        alone = how == MEASURING
        async with self._changed:
            self._waiting += alone
            try:
                await self._changed.wait_for(lambda: self._free(alone))
            finally:
                self._waiting -= alone
            self._measured, self._checks = alone or self._measured, self._checks + (not alone)
        began = self._clock()
        try:
            yield
        finally:
            self.held.append((began, self._clock(), how))
            async with self._changed:
                self._measured, self._checks = self._measured and not alone, self._checks - (not alone)
                self._changed.notify_all()

    def _free(self, alone: bool) -> bool:
        return not self._measured and not (self._checks if alone else self._waiting)


@dataclass
class Spell:
    """A while in which a GPU cannot be timed, since it is throttled."""

    begin: float
    end: float


@dataclass(eq=False)
class SimulatedGpu:
    """One GPU.

    Attributes:
        clock: the virtual time.
        opening: seconds that a judge takes to open.
        throttled: when no time of it can be told.
        turns: who uses it next.
        lock: its lock.
        opened: (run, lane) of the judges that are open.
    """

    clock: Callable[[], float]
    opening: float
    throttled: list[Spell] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.turns, self.lock = Turns(self.clock), Lock(self.clock)
        self.opened: set[tuple[str, int]] = set()

    async def judge(self, run: str, lane: int, service: Service, priority: int, beside: int) -> bool:
        """Take a turn and judge; whether the time could be told."""
        async with self.turns.turn(run, priority, beside):
            if (run, lane) not in self.opened:
                await asyncio.sleep(self.opening)
                self.opened.add((run, lane))
            await asyncio.sleep(service.beside)
            async with self.lock.hold(CHECKING):
                await asyncio.sleep(service.check)
            async with self.lock.hold(MEASURING):
                await asyncio.sleep(service.measure)
            return not any(spell.begin <= self.clock() < spell.end for spell in self.throttled)


__all__ = ["CHECKING", "MEASURING", "Lock", "Service", "SimulatedGpu", "Spell"]
