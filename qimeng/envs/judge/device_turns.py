"""Turns on a device that several processes use: checks beside each other, measurements alone.

Deals in the device's lock and in seconds by part. Knows nothing about what is done in a turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from qimeng.device_lock import DeviceLock
from qimeng.envs.judge.time_spent import Clock


class DeviceTurns:
    """Turns on one device.

    Args:
        lock: of the device; None where nobody else uses it.
    """

    def __init__(self, lock: DeviceLock | None):
        self.lock = lock

    @property
    def path(self) -> str:
        """The lock's file; empty without one."""
        return self.lock.path if self.lock is not None else ""

    @contextmanager
    def turn(self, part: str, clock: Clock, alone: bool = False) -> Iterator[None]:
        """Hold the device in the block. Its seconds count as `part`, those before it as ``"wait"``.

        Args:
            part: what the block is about.
            clock: of the evaluation.
            alone: True to measure; else shared with others that do not measure.
        """
        with ExitStack() as stack:
            if self.lock is not None:
                with clock.part("wait"):
                    stack.enter_context(self.lock.alone() if alone else self.lock.beside())
            with clock.part(part):
                yield

    def step_aside(self, clock: Clock) -> None:
        """Called between two parts of a check: let runs that wait to measure on the device go first."""
        if self.lock is not None:
            with clock.part("wait"):
                self.lock.step_aside()

    def close(self) -> None:
        """Give the lock up."""
        if self.lock is not None:
            self.lock.close()
            self.lock = None


__all__ = ["DeviceTurns"]
