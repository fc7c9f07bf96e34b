"""Which processes descend from which, as the kernel tells it.

Deals in process ids. Asks for the children of one process at a time: a machine with many cores has thousands of
processes, most of them the kernel's own, and reading them all takes 60 us each (measured), several times for each
process that a judge ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path


def children(pid: int) -> list[int]:
    """Processes that `pid` started or adopted and that were not reaped yet; empty if there is no such process."""
    if not _tells_children():
        return [p for p, parent in _parents().items() if parent == pid]
    found: dict[int, None] = {}
    for _ in range(2):  # where one ends while they are listed, another one may be passed over (proc(5))
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    found.update(dict.fromkeys(map(int, file.read().split())))
        except OSError:  # it has ended meanwhile
            break
    return list(found)


def tree(pid: int) -> list[int]:
    """`pid` and its descendants, parents first."""
    found, seen = [pid], {pid}
    for p in found:
        new = [c for c in children(p) if c not in seen]
        found += new
        seen.update(new)
    return found


def memory_file_bytes(pids: Iterable[int]) -> int:
    """Bytes that processes hold in memory files, each file once, and in shared memory that they have mapped.

    A file that is open and mapped counts twice.
    """
    files: dict[int, int] = {}
    mapped = 0
    for pid in pids:
        try:
            for entry in os.scandir(f"/proc/{pid}/fd"):
                if os.readlink(entry.path).startswith(("/memfd:", "/dev/shm/")):
                    found = os.stat(entry.path)
                    files[found.st_ino] = 512 * found.st_blocks
            status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        except OSError:  # it has ended meanwhile, or closed the file
            continue
        mapped += next((1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("RssShmem")), 0)
    return sum(files.values()) + mapped


@lru_cache(1)
def _tells_children() -> bool:
    """Whether this kernel lists children (CONFIG_PROC_CHILDREN)."""
    return os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def _parents() -> dict[int, int]:
    """Process id to that of its parent, of every process."""
    table = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text(errors="replace")
            except OSError:  # it has ended meanwhile
                continue
            table[int(entry)] = int(stat.rpartition(")")[2].split()[1])
    return table


__all__ = ["children", "memory_file_bytes", "tree"]
