"""Limits the files that a process may open, with landlock: it reads programs and writes only its own folder.

Deals in rights on files and folders, on devices, on TCP ports, and in signals and abstract sockets to processes
outside, as far as the kernel's version of landlock knows them. A process under landlock can also not trace, nor read
the memory, environment and open files of, any process outside. Knows nothing about system calls that open no file.
Source: https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from qimeng.envs.sandbox.layer import Unavailable, prctl, syscall

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same on all architectures
_EXECUTE, _WRITE, _READ, _LIST = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REFER, _TRUNCATE, _IOCTL = 1 << 13, 1 << 14, 1 << 15
_MAKE_AND_REMOVE = sum(1 << bit for bit in (4, 5, 7, 8, 9, 10, 12))
"""Remove folders and files; make folders, files, sockets, pipes and links; no devices."""
_DEVICES = (1 << 6) | (1 << 11)
"""Make character and block devices: handled, granted nowhere."""
_TCP = 0b11
_SCOPES = 0b11  # abstract unix sockets, signals

READS = _EXECUTE | _READ | _LIST
WRITES = READS | _WRITE | _TRUNCATE | _REFER | _MAKE_AND_REMOVE
USES = _READ | _WRITE | _TRUNCATE | _IOCTL
"""Rights on a device."""
_ON_FILES = _EXECUTE | _READ | _WRITE | _TRUNCATE | _IOCTL


class _Handled(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def version() -> int:
    """Version of the kernel's landlock.

    Raises:
        Unavailable: it has none, or version 1, under which no file can be renamed into another folder (Triton's cache
            does that).
    """
    found = syscall(_CREATE, None, 0, 1)
    if found < 2:
        raise Unavailable(f"landlock {found} cannot rename across folders; 2 is needed")
    return found


def enter(readable: Iterable[str], writable: Iterable[str], devices: Iterable[str], network: bool = True) -> str:
    """Allow nothing on files but what is named, for this process and its children; paths that are missing are left out.

    Args:
        readable: files and folders with all below them, to read and run.
        writable: the same, to write as well.
        devices: device files, or folders of them, to open, read, write and control.
        network: whether TCP is forbidden too.
    """
    found = version()
    handled = READS | _WRITE | _MAKE_AND_REMOVE | _DEVICES | _REFER
    handled |= _TRUNCATE if found >= 3 else 0
    handled |= _IOCTL if found >= 5 else 0
    rules = _Handled(handled, _TCP if found >= 4 and network else 0, _SCOPES if found >= 6 else 0)
    size = 8 if found < 4 else 16 if found < 6 else 24
    ruleset = syscall(_CREATE, ctypes.byref(rules), size, 0)
    try:
        for paths, rights in ((readable, READS), (writable, WRITES), (devices, USES)):
            for path in paths:
                _allow(ruleset, path, rights & handled)
        prctl(38, 1)  # PR_SET_NO_NEW_PRIVS, without which only root may
        syscall(_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)
    more = [name for name, since in (("TCP", 4), ("devices", 5), ("signals", 6)) if found >= since]
    return f"version {found}: {', '.join(['files', *more])}"


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _ON_FILES
        syscall(_ADD, ruleset, 1, ctypes.byref(_Beneath(rights, fd)), 0)
    finally:
        os.close(fd)


__all__ = ["READS", "USES", "WRITES", "enter", "version"]
