"""Where programs live: the files that Python, PyTorch, Triton's compilers and CUDA's driver need to read or open.

Deals in lists of paths of this machine. Homes, temporary folders, `/run`, most of `/etc` and the judge's own folders
are not among them. Knows nothing about how the lists are enforced.
"""

from __future__ import annotations

import os
import sys
from glob import glob
from pathlib import Path

_PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/nix/store", "/gnu/store", "/sys", "/proc")
_ETC = (
    "alternatives", "group", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ld.so.preload", "localtime", "mime.types",
    "nsswitch.conf", "nvidia", "OpenCL", "os-release", "passwd", "timezone",
)  # fmt: skip
_VARIABLES = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "TRITON_PTXAS_PATH", "TRITON_LIBCUDA_PATH")
_NODES = ("null", "zero", "full", "random", "urandom")
_GPUS = ("/dev/nvidia*", "/dev/dxg", "/dev/kfd", "/dev/dri")


def readable() -> list[str]:
    """Files and folders that a process needs to read; asked before its environment is cleaned."""
    own = [sys.prefix, sys.base_prefix, sys.exec_prefix, *(p for p in sys.path if p)]
    named = [p for name in _VARIABLES for p in os.environ.get(name, "").split(os.pathsep)]
    given = [p for p in (*own, *named) if os.path.isabs(p) and not _holds_home(Path(p))]
    this_package = str(Path(__file__).resolve().parents[2])
    return [*_PROGRAMS, *(f"/etc/{name}" for name in _ETC), this_package, *dict.fromkeys(given)]


def devices() -> list[str]:
    """Device files that a process needs: harmless ones, GPUs, and what the kernel shows of the process itself.

    Drivers name their threads by writing to the last.
    """
    return [*(f"/dev/{name}" for name in _NODES), *_gpus(), "/proc/self"]


def shared_memory() -> list[str]:
    """The folder of shared memory where there is a GPU: PyTorch counts in it who uses a tensor handed over."""
    return ["/dev/shm"] if _gpus() else []


def _gpus() -> list[str]:
    return [path for pattern in _GPUS for path in sorted(glob(pattern))]


def _holds_home(path: Path) -> bool:
    """Whether a folder is the user's home or holds it; one on Python's path there would open the whole home."""
    home = Path(os.path.expanduser("~")).resolve()
    path = path.resolve()
    return path == home or path in home.parents


__all__ = ["devices", "readable", "shared_memory"]
