"""Shares one device among all runs of this machine: exclusive to measure, shared to check or to generate.

Deals in lock files. Knows nothing about what is done meanwhile.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SHARED = "/tmp"
"""Folder that all processes of a user share."""


class DeviceLock:
    """A pair of lock files for one device.

    A process holds the device exclusively to measure times. It shares the device to run programs whose time does not
    matter. A shared turn may begin only when no process measures or waits to measure. An exclusive turn waits for the
    running checks, and several exclusive turns in a row wait for them only once. Every process checks before it
    measures, so checks are not blocked forever. The system releases the locks of a process that dies.

    Args:
        path: of the lock file; made, with another for the gate, where it is not there.
    """

    def __init__(self, path: str):
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._turn = os.open(path, flags, 0o666)
        self._gate = os.open(f"{path}.gate", flags, 0o666)  # held together by all who measure or wait to

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the device exclusively in the block, after waiting for it."""
        fcntl.flock(self._gate, fcntl.LOCK_SH)
        try:
            fcntl.flock(self._turn, fcntl.LOCK_EX)
            yield
        finally:
            fcntl.flock(self._turn, fcntl.LOCK_UN)
            fcntl.flock(self._gate, fcntl.LOCK_UN)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Share the device with other checks in the block, after waiting until no process measures or waits to."""
        self._join()
        try:
            yield
        finally:
            fcntl.flock(self._turn, fcntl.LOCK_UN)

    def step_aside(self) -> None:
        """Let processes that wait for exclusive use go first; call it between two parts of a check.

        Otherwise they would wait for the longest running check, while no new check may begin.
        """
        if self.wanted:
            fcntl.flock(self._turn, fcntl.LOCK_UN)
            self._join()

    @property
    def wanted(self) -> bool:
        """Whether a process holds the device exclusively, or waits to."""
        try:
            fcntl.flock(self._gate, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._gate, fcntl.LOCK_UN)
        return False

    def _join(self) -> None:
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._turn, fcntl.LOCK_SH)
        finally:
            fcntl.flock(self._gate, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the files."""
        os.close(self._turn)
        os.close(self._gate)


def lock_path(device: torch.device) -> str:
    """The lock file of a GPU, the same for every evaluator of this machine, whatever number it sees the GPU under.

    It lies in /tmp, since TMPDIR may be another for each process; where that cannot be written, in TMPDIR.
    """
    name = torch.cuda.get_device_properties(device).uuid
    folder = SHARED if os.access(SHARED, os.W_OK) else tempfile.gettempdir()
    return os.path.join(folder, f"qimeng-{name}-{os.getuid()}.lock")


__all__ = ["SHARED", "DeviceLock", "lock_path"]
