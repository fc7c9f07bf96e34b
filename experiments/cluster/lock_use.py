"""How much of the time a GPU's lock is held, by looking at the system's list of locks every few milliseconds.

Deals in lock files (`qimeng.device_lock`). Looking takes no lock, so nobody waits for it.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from qimeng.device_lock import SHARED

LOCKS = Path("/proc/locks")
EVERY_S = 0.01
_HELD = re.compile(r"^\d+: FLOCK +\S+ +(READ|WRITE) +\S+ +\S+:(\d+) ", re.MULTILINE)
"""A lock that is held; one that is waited for has an arrow behind its number."""


def lock_files() -> list[Path]:
    """The lock files of the GPUs that somebody has used on this machine."""
    return sorted(Path(SHARED).glob(f"qimeng-*-{os.getuid()}.lock"))


class LockUse:
    """Looks at the locks in the background, from `begin` to `end`.

    Args:
        files: of the GPUs' locks.

    Attributes:
        looks: how many there were.
        seen: (file name, how) to the looks that found it held: ``"WRITE"`` to measure, ``"READ"`` to check.
    """

    def __init__(self, files: Sequence[Path]):
        self._names = {os.stat(file).st_ino: file.name for file in files}
        self.looks = 0
        self.seen: Counter[tuple[str, str]] = Counter()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def begin(self) -> None:
        """Begin to look."""
        self._thread.start()

    def end(self) -> dict[str, dict[str, float]]:
        """Stop, and say for each file which share of the looks found it held, and how; nothing without locks."""
        self._over.set()
        self._thread.join()
        return {
            name: {
                "measuring": round(self.seen[name, "WRITE"] / self.looks, 4),
                "checking": round(self.seen[name, "READ"] / self.looks, 4),
                "idle": round(1 - (self.seen[name, "WRITE"] + self.seen[name, "READ"]) / self.looks, 4),
            }
            for name in self._names.values()
            if self.looks
        }

    def _look(self) -> None:
        while not self._over.wait(EVERY_S):
            try:
                found = {(int(inode), how) for how, inode in _HELD.findall(LOCKS.read_text())}
            except OSError:
                return
            self.looks += 1
            for inode, how in found:
                if inode in self._names:
                    self.seen[self._names[inode], how] += 1


__all__ = ["LockUse", "lock_files"]
