"""A call of a user's code that may never end is ended.

Deals in seconds and threads. Knows nothing about what is called.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from qimeng.errors import SpecError

LIMIT_S: ContextVar[float] = ContextVar("LIMIT_S", default=60.0)
"""Seconds that a call may take; `plan_and_code` sets its budget, at least `LEAST_S`."""

BRIEF_S = 10.0
"""Most seconds for a call on inputs that the user did not give: one that takes longer is done without."""

LEAST_S = 20.0
"""Nobody who gives a small budget wants a large module refused because its first call takes longer."""


class TooLong(SpecError):
    """A call did not return in time."""


class _Stop(BaseException):
    """Raised in the thread that waits; not an `Exception`, so that what is called does not catch it by accident."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Calls of the user's code may take a budget of so many `seconds` inside."""
    token = LIMIT_S.set(max(seconds, LEAST_S))
    try:
        yield
    finally:
        LIMIT_S.reset(token)


@contextlib.contextmanager
def patience(what: str, most: float = math.inf) -> Iterator[None]:
    """Give what runs inside `LIMIT_S`, at most `most` seconds.

    In the main thread a signal ends it, so that a sleep is ended as well; elsewhere, Python between two instructions.

    Args:
        what: is running, for the message.
        most: seconds, where something else can be done than to wait.

    Raises:
        TooLong: it did not end in time.
    """
    limit, thread, lock = min(LIMIT_S.get(), most), threading.get_ident(), threading.Lock()
    over: list[bool] = []

    def stop(*_: Any) -> None:
        if not over:
            raise _Stop

    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, stop) if in_main else None
    fired: list[bool] = []

    def fire() -> None:
        with lock:
            if over:
                return
            fired.append(True)
            if in_main:
                signal.pthread_kill(thread, signal.SIGALRM)
            else:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Stop))

    timer = threading.Timer(limit, fire)
    timer.daemon = True
    timer.start()
    try:
        try:
            yield
        finally:
            timer.cancel()
            with lock:
                over.append(True)
    except _Stop:
        raise TooLong(f"{what} did not end within {limit:.3g} s; a computation must end on its own inputs") from None
    finally:
        if fired and not in_main:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)
        if in_main:
            time.sleep(0.001 if fired else 0.0)  # a signal on its way arrives before the handler is gone
            signal.signal(signal.SIGALRM, before if before is not None else signal.SIG_DFL)


__all__ = ["BRIEF_S", "LEAST_S", "LIMIT_S", "TooLong", "patience", "within"]
