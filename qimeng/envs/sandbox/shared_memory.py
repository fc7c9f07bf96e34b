"""A small private folder of shared memory, removed with the process.

Deals in a mount namespace and a file system in memory over `/dev/shm`. The process cannot see or reach others' files
there. It needs the same rights as the private network, and comes after it. Knows nothing about memory files
(`memfd_create`), which the fork server counts.
"""

from __future__ import annotations

from qimeng.envs.sandbox.layer import LIBC, checked
from qimeng.envs.sandbox.places import SHARED_MEMORY

BYTES = 64 << 20
FILES = 4096
_NEWNS = 0x00020000
_PRIVATE, _NO_SUID_DEV_EXEC = 0x40000 | 0x4000, 0x2 | 0x4 | 0x8


def enter() -> str:
    """Mount it; the process has one thread.

    Raises:
        Unavailable: it may not be mounted here.
    """
    checked(LIBC.unshare(_NEWNS), "a mount namespace")
    checked(LIBC.mount(None, b"/", None, _PRIVATE, None), "mounts of its own")
    options = f"size={BYTES},nr_inodes={FILES},mode=1777".encode()
    checked(
        LIBC.mount(b"tmpfs", SHARED_MEMORY.encode(), b"tmpfs", _NO_SUID_DEV_EXEC, options), "a file system in memory"
    )
    return f"{BYTES >> 20} MiB of its own"


__all__ = ["BYTES", "enter"]
