"""The end of the wall-clock time that a search has, however long it waits for a device that others use.

Deals in one signal and one exception. Knows nothing about what is ended, or what is made of it
(`qimeng.envs.steps.loop`).
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

SIGNAL = signal.SIGUSR2
"""Not SIGALRM, which `qimeng.spec.patience` uses."""


class TimeUp(KeyboardInterrupt):
    """The wall-clock time is over: the search ends like one that its user interrupts."""


@contextlib.contextmanager
def time_up_after(seconds: float) -> Iterator[None]:
    """Raise `TimeUp` in the block once `seconds` have passed, even while it waits for a lock.

    In the main thread only, which alone gets signals; elsewhere nothing is raised.

    Args:
        seconds: wall-clock seconds from now; infinite for never.
    """
    if seconds > threading.TIMEOUT_MAX or threading.current_thread() is not threading.main_thread():
        yield
        return
    main, ended, lock = threading.get_ident(), False, threading.Lock()

    def raise_it(*_: Any) -> None:
        if not ended:
            raise TimeUp

    def fire() -> None:
        with lock:
            if not ended:
                signal.pthread_kill(main, SIGNAL)

    before, timer = signal.signal(SIGNAL, raise_it), threading.Timer(max(seconds, 0.0), fire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        ended = True
        with lock:  # no signal is on its way from here on
            timer.cancel()
        signal.signal(SIGNAL, before if before is not None else signal.SIG_DFL)


__all__ = ["TimeUp", "time_up_after"]
