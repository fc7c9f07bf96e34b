"""Shared by all layers of the sandbox: the error for an unavailable layer, and a thin wrapper of the C library.

Deals in errors and numbers of system calls' errors. Knows nothing about what a layer forbids.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when its parent ends, however that ends."""


class Unavailable(Exception):
    """A layer cannot be had on this machine; the message says why, in a few words."""


def checked(result: int, what: str) -> int:
    """`result` of a C function.

    Raises:
        Unavailable: it is negative; `what` failed, with the reason that the C library gives.
    """
    if result < 0:
        raise Unavailable(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def prctl(option: int, *arguments: int) -> int:
    """Turn the process's own switch number `option`; its manual page names them.

    Raises:
        Unavailable: the kernel refuses.
    """
    padded = [ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:4]]
    return checked(LIBC.prctl(option, *padded), f"prctl {option}")


def end_with_parent() -> None:
    """Have this process killed when its parent ends, however that ends; a pool's workers begin with it."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def syscall(number: int, *arguments: object) -> int:
    """System call `number`; Python's integers go over as long, pointers as they are.

    Raises:
        Unavailable: the kernel refuses or does not know it.
    """
    as_c = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return checked(int(LIBC.syscall(ctypes.c_long(number), *as_c)), f"system call {number}")


def machine() -> str:
    """The kernel's architecture, ``"x86_64"`` or ``"aarch64"``.

    Raises:
        Unavailable: it is another one, whose numbers of system calls are not known here.
    """
    name = platform.machine()
    if name not in ("x86_64", "aarch64"):
        raise Unavailable(f"the numbers of {name}'s system calls are not known")
    return name


__all__ = ["LIBC", "Unavailable", "checked", "end_with_parent", "machine", "prctl", "syscall"]
