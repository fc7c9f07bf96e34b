"""A sampling profile of the main thread: which calls it is in, and for how long.

Deals in stacks of Python frames. A line of the file is a stack, its frames separated by ``;`` from the outermost on,
and the number of samples in it: the form that flame graph tools read. Knows nothing about what runs.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

EVERY_S = 0.02
"""Seconds between two samples."""


@contextmanager
def profiled(file: Path | None, every_s: float = EVERY_S) -> Iterator[None]:
    """Sample the calling thread in the block, and write the stacks to `file`, the most frequent first; None: do not."""
    if file is None:
        yield
        return
    stacks: Counter[str] = Counter()
    over, caller = threading.Event(), threading.get_ident()

    def sample() -> None:
        while not over.wait(every_s):
            stacks[_stack(sys._current_frames().get(caller))] += 1

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        file.write_text("".join(f"{stack} {count}\n" for stack, count in stacks.most_common()))


def _stack(frame: FrameType | None) -> str:
    calls: list[str] = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        calls.append(f"{path.parent.name}/{path.name}:{frame.f_code.co_name}")
        frame = frame.f_back
    return ";".join(reversed(calls))


__all__ = ["EVERY_S", "profiled"]
