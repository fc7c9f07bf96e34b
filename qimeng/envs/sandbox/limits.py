"""Limits on what one process may use of the machine (setrlimit).

Deals in bytes and counts. Private memory is limited, not the address space: CUDA and PyTorch's expandable segments
reserve more addresses than any machine has memory. Knows nothing about a GPU's memory, or about time, which the judge
keeps.
"""

from __future__ import annotations

import os
import resource

FILE_BYTES = 16 << 30
"""Largest file, memory files included."""
OPEN_FILES = 16384
TASKS = 2048
"""Processes and threads beyond those that the user has already; the kernel does not count root's."""


def memory_bytes() -> int:
    """Private memory that a process may have: half of the machine's."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def enter() -> str:
    """Set the limits, hard ones too; no larger than what was allowed before."""
    memory = memory_bytes()
    limits = {
        resource.RLIMIT_DATA: memory,
        resource.RLIMIT_FSIZE: min(FILE_BYTES, memory),
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if os.getuid() != 0:
        limits[resource.RLIMIT_NPROC] = _tasks_of(os.getuid()) + TASKS
    for which, most in limits.items():
        hard = resource.getrlimit(which)[1]
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (allowed, allowed))
    return f"{memory >> 20} MiB of private memory, files of {min(FILE_BYTES, memory) >> 30} GiB"


def allow_open_files() -> None:
    """Let this process, and those that it starts, have as many files open as `OPEN_FILES`, where the user may.

    Large tensors on a GPU go from one process to another as hundreds of files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _tasks_of(user: int) -> int:
    count = 0
    for entry in os.scandir("/proc"):
        try:
            if entry.name.isdigit() and entry.stat().st_uid == user:
                count += len(os.listdir(f"{entry.path}/task"))
        except OSError:  # it has ended meanwhile, or is not ours to see
            continue
    return count


__all__ = ["FILE_BYTES", "OPEN_FILES", "TASKS", "allow_open_files", "enter", "memory_bytes"]
