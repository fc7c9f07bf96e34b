"""What a function that prepares buffers takes: which inputs of a region its variables are made of.

Deals in lines of the host's text. Knows nothing about what is prepared.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


def made_of(names: set[str], prelude: Sequence[str]) -> tuple[tuple[int, ...], list[str]]:
    """Numbers of the region's inputs that the variables `names` are made of, and the lines of `prelude` that do it."""
    wanted, lines = set(names), list[str]()
    for line in reversed(prelude):
        target, call = line.split(" = ", 1)
        if target in wanted:
            wanted |= set(re.findall(r"\b[wx]\d+", call))
            lines.insert(0, line)
    return tuple(sorted(int(n[1:]) for n in wanted if n[0] == "x")), lines


__all__ = ["made_of"]
