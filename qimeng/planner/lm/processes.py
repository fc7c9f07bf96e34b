"""Work on many things at once, by one process on each core.

Deals in functions and processes. Knows nothing about what is done.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from qimeng.envs.sandbox.layer import end_with_parent

T = TypeVar("T")
R = TypeVar("R")

MANY = 16
"""So many things or more are worth several processes, which take seconds to start."""

MOST = 16
"""Processes."""


def in_processes(work: Callable[[T], R], items: Sequence[T], chunk: int = 0) -> list[R]:
    """What `work` makes of each of `items`, in their order.

    `MANY` items are dealt out to processes that import the script that is running: keep what it does below
    ``if __name__ == "__main__":``.

    Args:
        work: can be pickled, and so can what it takes and returns.
        items: what it is called with.
        chunk: items that are sent at a time; what they share is sent once. 0 for an equal part for each process.
    """
    count = min(len(os.sched_getaffinity(0)), MOST)
    if len(items) < MANY or count == 1:
        return [work(item) for item in items]
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), end_with_parent) as pool:
        return list(pool.map(work, items, chunksize=chunk or math.ceil(len(items) / count)))


__all__ = ["MANY", "MOST", "in_processes"]
