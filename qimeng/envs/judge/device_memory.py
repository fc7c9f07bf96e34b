"""Turns on a device's memory: evaluations beside each other, or one alone where memory ran out while others held some.

Deals in lock files beside the device's own (`qimeng.device_lock`). Knows nothing about what is evaluated.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import TypeVar

from qimeng.device_lock import DeviceLock
from qimeng.envs.judge.time_spent import Clock

T = TypeVar("T")


class DeviceMemory:
    """The memory of one device.

    Args:
        path: of the device's lock file; empty where nobody else uses the device.
    """

    def __init__(self, path: str):
        self._lock, self._users = None, -1
        if path:
            self._lock = DeviceLock(f"{path}.memory")
            self._users = os.open(f"{path}.users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._users, fcntl.LOCK_SH)

    @property
    def others(self) -> bool:
        """Whether other processes evaluate on the device too, now or between two evaluations."""
        if self._users < 0:
            return False
        try:
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            fcntl.flock(self._users, fcntl.LOCK_SH)
        return False

    @property
    def wanted(self) -> bool:
        """Whether another process waits for the memory, because its own evaluation ran out of it."""
        return self._lock is not None and self._lock.wanted

    def use(self, evaluate: Callable[[], T], ran_out: Callable[[T], bool], clock: Clock) -> T:
        """What `evaluate` returns, beside others; where memory `ran_out` and there are others, again while none runs.

        Waiting counts as ``"wait"`` on `clock`.
        """
        if self._lock is None:
            return evaluate()
        found = _within(self._lock.beside(), evaluate, clock)
        if not ran_out(found) or not self.others:
            return found
        return _within(self._lock.alone(), evaluate, clock)

    def close(self) -> None:
        """Give the locks up."""
        if self._lock is not None:
            self._lock.close()
            os.close(self._users)
            self._lock, self._users = None, -1


def _within(turn: AbstractContextManager[None], evaluate: Callable[[], T], clock: Clock) -> T:
    with ExitStack() as stack:
        with clock.part("wait"):
            stack.enter_context(turn)
        return evaluate()


__all__ = ["DeviceMemory"]
