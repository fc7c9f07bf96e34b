"""An event loop whose time is made up: waiting costs nothing, and the clock goes on to what happens next.

Deals in asyncio alone.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class _Jumping(selectors.DefaultSelector):
    """Does not wait for files; the seconds that it should wait go by at once."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("nothing will ever happen in this simulation")
        self.loop.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time.

    Attributes:
        now: seconds since the beginning.
    """

    def __init__(self) -> None:
        self.now = 0.0
        selector = _Jumping()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        """The virtual time."""
        return self.now


__all__ = ["VirtualLoop"]
