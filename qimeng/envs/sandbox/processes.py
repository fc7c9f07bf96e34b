"""A private `/proc` in which nothing may be written but the folders of the process itself and of what it starts.

CUDA's driver names its threads by writing below `/proc/self`, which landlock allows for one process alone, and only
once it is there. A process that starts others that use CUDA therefore needs to write below `/proc`. So all that is the
kernel's there is mounted read-only over itself, and processes that may not be traced (with landlock: all outside) are
hidden where the kernel allows it. Deals in mounts, within the mount namespace of `shared_memory`, which comes before.
Source: proc(5), mount(2).
"""

from __future__ import annotations

import os
from contextlib import suppress

from qimeng.envs.sandbox.layer import LIBC, Unavailable, checked

PROC = "/proc"
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_EXEC, _REMOUNT, _BIND, _RECURSIVE = 1, 2, 4, 8, 32, 4096, 16384
_KEPT = _NO_SUID | _NO_DEVICES | _NO_EXEC
"""Flags that a mount keeps; `statvfs` numbers them as mount does."""


def enter(own_mounts: bool) -> str:
    """Mount it, in a process of one thread.

    Args:
        own_mounts: whether the process has a mount namespace of its own; in another, all of the machine would see it.

    Raises:
        Unavailable: it may not be mounted here.
    """
    if not own_mounts:
        raise Unavailable("no mounts of its own")
    text = "nothing of the kernel's may be written"
    with suppress(Unavailable):  # who is not root needs a namespace of processes for that
        checked(_mount("proc", PROC, "proc", _KEPT, "hidepid=ptraceable"), "a folder of processes")
        text += ", others are hidden"
    for entry in os.scandir(PROC):
        if entry.name.isdigit() or entry.is_symlink():
            continue
        flags = os.statvfs(entry.path).f_flag & _KEPT
        checked(_mount(entry.path, entry.path, None, _BIND | _RECURSIVE), f"{entry.path} over itself")
        checked(_mount(None, entry.path, None, _REMOUNT | _BIND | _READ_ONLY | flags), f"{entry.path} read-only")
    return text


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> int:
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    return int(LIBC.mount(*texts[:3], flags, texts[3]))


__all__ = ["PROC", "enter"]
