"""What is left on the machine: processes, files, memory.

Deals in ``/proc``, folders and the GPU's own figures. Knows nothing about who left it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from qimeng.exploits.cases import MARK, own_mark

SHARED = (Path("/tmp"), Path("/dev/shm"))
"""Folders that everybody may write to, where files are looked for by name."""


@dataclass(frozen=True)
class Remains:
    """What there is at one moment.

    Attributes:
        rss_mib: memory of this process.
        processes: living descendants of this process.
        marked: living processes, whoever's children, that call themselves what this process's exploits do.
        files: files in this process's folder for temporary files, and those in shared folders with that name.
        gpu_mib: memory in use on the GPU (all of them, where the whole machine is looked at), by anybody; 0 without.
    """

    rss_mib: float
    processes: int
    marked: int
    files: int
    gpu_mib: float


def look(folder: Path | str, gpu: bool) -> Remains:
    """What there is now.

    Args:
        folder: this process's folder for temporary files.
        gpu: whether to ask the GPU.
    """
    living = _living()
    marked = sum(name == own_mark() for _, name in living.values())
    return Remains(_rss_mib(), len(_descendants(os.getpid(), living)), marked, _files(Path(folder)), _gpu_mib(gpu))


def look_at_machine() -> Remains:
    """What all judges of this machine have left; nothing of this process's own."""
    marked = sum(name.startswith(MARK) for _, name in _living().values())
    files = sum(1 for place in SHARED if place.is_dir() for _ in place.glob(f"{MARK}*"))
    return Remains(0.0, 0, marked, files, _all_gpus_mib())


def _living() -> dict[int, tuple[int, str]]:
    """Every process that is no zombie, with its parent and its name."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
            name, rest = (entry / "stat").read_text().rsplit(")", 1)
            state, parent = rest.split()[:2]
            if state != "Z":
                found[int(entry.name)] = (int(parent), name.partition("(")[2])
    return found


def _descendants(pid: int, living: dict[int, tuple[int, str]]) -> set[int]:
    found: set[int] = set()
    new = {pid}
    while new:
        new = {p for p, (parent, _) in living.items() if parent in new} - found
        found |= new
    return found


def _files(folder: Path) -> int:
    own = sum(len(names) for _, _, names in os.walk(folder))
    return own + len(shared_files())


def shared_files() -> frozenset[Path]:
    """Files with the name of this process's exploits in the folders that everybody may write to."""
    return frozenset(path for place in SHARED if place.is_dir() for path in place.glob(f"{own_mark()}*"))


def _rss_mib() -> float:
    fields = Path("/proc/self/statm").read_text().split()
    return round(int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20), 1)


def _gpu_mib(gpu: bool) -> float:
    if not gpu:
        return 0.0
    import torch

    free, total = torch.cuda.mem_get_info()
    return round((total - free) / (1 << 20), 1)


def _all_gpus_mib() -> float:
    """As the driver tells, so that no context has to be made for it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0.0
    query = [tool, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    told = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    return float(sum(int(line) for line in told.split() if line.isdigit()))


__all__ = ["Remains", "look", "look_at_machine", "shared_files"]
