"""Time limits for calls of a user's code, which may never end.

Deals in seconds and threads. Knows nothing about what is called.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

from qimeng.errors import SpecError

LIMIT_S: ContextVar[float] = ContextVar("LIMIT_S", default=60.0)
"""Seconds that a call may take; `plan_and_code` sets its budget, at least `LEAST_S`."""

BRIEF_S = 10.0
"""Time limit in seconds for calls on inputs that the user did not give. The caller continues without their result."""

LEAST_S = 15.0
"""Minimum limit in seconds, so that a small budget does not refuse a large module whose first call is slow."""

FEW_S = 4.0
"""Seconds that a call inside `together` gets at least."""

LEAST_WAIT_S = 0.02
"""Seconds between two looks at how long a thread has run."""

AGAIN_S = 2.0
"""Seconds after which a call is stopped again: Python drops what is raised in callbacks, as of weak references."""


_END: ContextVar[float] = ContextVar("_END", default=math.inf)
"""The clock's time when the calls inside `together` must have ended."""


class TooLong(SpecError):
    """A call did not return in time."""

    code = "slow"


class _Stop(BaseException):
    """Raised in the waiting thread. Not an `Exception`, so that the called code does not catch it by accident."""


def _dropped_in_silence() -> None:
    """Let Python print nothing where it drops a `_Stop`: `patience` raises it again."""
    shown = sys.unraisablehook
    if getattr(shown, "drops_stops", False):
        return

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if not isinstance(unraisable.exc_value, _Stop):
            shown(unraisable)

    hook.drops_stops = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Inside this block, calls of the user's code may take `seconds`."""
    token = LIMIT_S.set(max(seconds, LEAST_S))
    try:
        yield
    finally:
        LIMIT_S.reset(token)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Inside this block, calls that are limited to `left_s()` share `LIMIT_S` seconds. An outer block ends no later."""
    token = _END.set(min(_END.get(), time.monotonic() + LIMIT_S.get()))
    try:
        yield
    finally:
        _END.reset(token)


def left_s() -> float:
    """Seconds that the calls inside `together` have left, at least `FEW_S`; outside of it `LIMIT_S`."""
    return min(LIMIT_S.get(), max(_END.get() - time.monotonic(), FEW_S))


def _processor_clock() -> Callable[[], float]:
    """Seconds of the processor that this thread has used, for other threads to read while it runs.

    Where the system does not tell (macOS), those of the whole process.
    """
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time
    return partial(time.clock_gettime, time.pthread_getcpuclockid(threading.get_ident()))


@contextlib.contextmanager
def patience(what: str, most: float = math.inf, busy: float = math.inf) -> Iterator[None]:
    """Limit the code inside to `LIMIT_S` seconds, or to `most` if that is less.

    In the main thread a signal ends it, even during a sleep. In other threads it ends between two Python instructions.

    Args:
        what: is running, for the message.
        most: a lower limit in seconds, for calls that the caller can do without.
        busy: seconds of the processor that the calling thread may use besides: a busy machine does not shorten it. For
            code that computes in this thread alone.

    Raises:
        TooLong: it did not end in time.
    """
    limit, thread, lock = min(LIMIT_S.get(), most), threading.get_ident(), threading.Lock()
    used = _processor_clock() if busy < limit else time.monotonic
    end, enough = time.monotonic() + limit, used() + min(busy, limit)
    over: list[bool] = []

    def stop(*_: Any) -> None:
        if not over:
            raise _Stop

    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, stop) if in_main else None
    fired: list[bool] = []

    def fire() -> None:
        wait = min(busy, limit)
        while not ended.wait(min(wait, threading.TIMEOUT_MAX)):
            with lock:
                if over:
                    return
                left = min(end - time.monotonic(), enough - used())
                if left > 0 and not fired:
                    wait = max(left, LEAST_WAIT_S)  # no sooner can the thread have used that
                    continue
                fired.append(True)
                _dropped_in_silence()
                if in_main:
                    signal.pthread_kill(thread, signal.SIGALRM)
                else:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Stop))
            wait = AGAIN_S

    ended = threading.Event()
    _thread.start_new_thread(fire, ())  # `threading.Thread` would wait for its start: longer than many a call takes
    try:
        try:
            yield
        finally:
            ended.set()
            with lock:
                over.append(True)
    except _Stop:
        raise TooLong(
            f"{what} did not end within {min(busy, limit):.3g} s; a computation must end on its own inputs; if it is "
            "only slow, give more seconds"
        ) from None
    finally:
        if fired and not in_main:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)
        if in_main:
            if fired:
                time.sleep(0.001)  # a signal on its way arrives before the handler is gone
            signal.signal(signal.SIGALRM, before if before is not None else signal.SIG_DFL)


__all__ = ["BRIEF_S", "FEW_S", "LEAST_S", "LIMIT_S", "TooLong", "left_s", "patience", "together", "within"]
