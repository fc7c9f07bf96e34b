"""Where the command line prints to.

Deals in consoles. Knows nothing about what is printed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

LOG_WIDTH = 160
"""Columns where the output is no terminal, so that tables in logs are not cut to 80."""


def console(stderr: bool = False) -> Console:
    """A console on standard output, or on standard error."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else LOG_WIDTH)


@contextmanager
def resumable(kept: Callable[[], str]) -> Iterator[None]:
    """Where Ctrl-C ends what is done inside, print what is `kept`, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"{kept()}; run the same command again to go on", file=sys.stderr)
        raise


__all__ = ["console", "resumable"]
