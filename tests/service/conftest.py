"""A real server on a free port of the loopback interface, with a fake pool behind it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from qimeng.service.jobs import Jobs
from qimeng.service.limits import Limits
from qimeng.service.tokens import Tokens
from tests.service.fakes import FakePool

TOKEN = "t" * 24


@contextmanager
def serving(pool: Callable[[], Any] = FakePool, limits: Limits | None = None, port: int = 0) -> Iterator[str]:
    """The address of a server; on a free port, where none is given."""
    uvicorn = pytest.importorskip("uvicorn")
    from qimeng.service.app import make_app
    from qimeng.service.server import config_of

    taken = limits or Limits()
    jobs = Jobs(pool, taken, {})
    with socket.socket() as listening:
        _bind(listening, port)
        listening.listen()
        app = make_app(jobs, Tokens({"anna": TOKEN}))
        server = uvicorn.Server(config_of(app, taken, log_level="critical", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
            jobs.close()


def _bind(made: socket.socket, port: int) -> None:
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        made.setsockopt(socket.SOL_SOCKET, option, 1)
    made.bind(("127.0.0.1", port))


@pytest.fixture
def kept_port() -> Iterator[int]:
    """A port on which nobody listens, and which no other process gets meanwhile: `serving` may listen there."""
    with socket.socket() as made:
        _bind(made, 0)
        yield made.getsockname()[1]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as found:
        yield found
