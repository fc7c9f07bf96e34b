"""The fork servers that all evaluators of a process share: importing torch takes seconds, forking milliseconds.

Deals in the list of servers, one for each list of imports, and ends them with the process.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Sequence

from qimeng.envs.workers.forkserver import PRELOAD, ForkServer

_servers: dict[tuple[str, ...], ForkServer] = {}
_lock = threading.Lock()


def shared_server(preload: Sequence[str] = PRELOAD) -> ForkServer:
    """The server with these imports; it is started when it is first asked for, and ends with the process.

    Args:
        preload: see `qimeng.envs.workers.forkserver.ForkServer`.
    """
    with _lock:
        if tuple(preload) not in _servers:
            _servers[tuple(preload)] = ForkServer(preload)
        return _servers[tuple(preload)]


def close_shared_servers() -> None:
    """End all of them, and every process that they started; one that is asked for later is a new one."""
    with _lock:
        while _servers:
            _servers.popitem()[1].close()


atexit.register(close_shared_servers)

__all__ = ["close_shared_servers", "shared_server"]
