"""Connections of the service on which nothing happens: they are closed, so that they take no place from others.

Deals in uvicorn's protocol for HTTP/1.1, which by itself waits for ever for the first request of a connection, or for
the rest of its head.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Patient(H11Protocol):
    """Closes a connection on which no request has begun for `seconds`, or up to twice as long."""

    seconds = 20.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to watch."""
        super().connection_made(transport)
        self._seen: Any = None
        self._watch = self.loop.call_later(self.seconds, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Watch no more."""
        self._watch.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        request = self.cycle
        if request is self._seen and (request is None or request.response_complete):
            self.transport.write(_SLOW)
            self.transport.close()
            return
        self._seen = request
        self._watch = self.loop.call_later(self.seconds, self._look)


def patient_for(seconds: float) -> type[Patient]:
    """The protocol of a server whose connections may be silent for so long."""
    return type("PatientFor", (Patient,), {"seconds": seconds})


__all__ = ["Patient", "patient_for"]
