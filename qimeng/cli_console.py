"""Where the command line prints to.

Deals in consoles. Knows nothing about what is printed.
"""

from __future__ import annotations

import sys

from rich.console import Console

LOG_WIDTH = 160
"""Columns where the output is no terminal, so that tables in logs are not cut to 80."""


def console(stderr: bool = False) -> Console:
    """A console on standard output, or on standard error."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else LOG_WIDTH)


__all__ = ["console"]
