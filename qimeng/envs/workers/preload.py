"""Preparation for processes that compile or launch kernels, done once in the server they are forked from.

Deals in the server's shared folder and in asking each backend. Knows nothing about languages.
"""

from __future__ import annotations

import os
from contextlib import suppress

from qimeng.backend.registry import backends
from qimeng.envs.workers.fork_loop import SHARED
from qimeng.errors import BackendError

_shared: list[str] = []
"""The folder that this process's server has warmed up; empty where it has not."""


def warm_up() -> None:
    """Let each backend that is installed do its work once; for a server, before it forks."""
    _shared.append(os.path.join(os.getcwd(), SHARED))
    for language, backend in backends().items():
        with suppress(BackendError):  # a fault of another package's shows where a kernel is compiled
            if backend.missing() is None:
                backend.warm_up(os.path.join(_shared[0], language))


def adopt_warm() -> None:
    """Take over, in a forked process, what the server has made ready."""
    if _shared:
        for language, backend in backends().items():
            with suppress(BackendError):
                backend.adopt(os.path.join(_shared[0], language))


__all__ = ["adopt_warm", "warm_up"]
