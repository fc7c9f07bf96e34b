"""The files that Python, PyTorch, Triton's compilers and CUDA's driver need to read or open.

Deals in lists of paths of this machine. Homes, temporary folders, `/run`, most of `/etc`, the judge's own folders, the
folder that the user works in and other folders of the user's own modules are not among them: a specification's own
classes travel by value. Knows nothing about how the lists are enforced.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from glob import glob
from pathlib import Path

_PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/nix/store", "/gnu/store", "/sys", "/proc")
_ETC = (
    "alternatives", "group", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "ld.so.preload", "localtime", "mime.types",
    "nsswitch.conf", "nvidia", "OpenCL", "os-release", "passwd", "timezone",
)  # fmt: skip
_VARIABLES = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "TRITON_PTXAS_PATH", "TRITON_LIBCUDA_PATH")
SHARED_MEMORY = "/dev/shm"
_NODES = ("null", "zero", "full", "random", "urandom")
_GPUS = ("/dev/nvidia*", "/dev/dxg", "/dev/kfd", "/dev/dri")
_GPU_NODES = (*map(str, range(32)), "ctl", "-uvm", "-uvm-tools", "-modeset", "-caps", "-caps-imex-channels")
"""What may follow ``/dev/nvidia``, for a process in a sandbox: it may open these files, but not list their folder."""


def readable() -> list[str]:
    """Files and folders that a process needs to read; asked before its environment is cleaned."""
    own = [sys.prefix, sys.base_prefix, sys.exec_prefix, *filter(_is_of_packages, sys.path)]
    named = [p for name in _VARIABLES for p in os.environ.get(name, "").split(os.pathsep)]
    given = [p for p in (*own, *named) if os.path.isabs(p) and not _holds_home(Path(p))]
    this_package = str(Path(__file__).resolve().parents[2])
    return [*_PROGRAMS, *(f"/etc/{name}" for name in _ETC), this_package, *dict.fromkeys(given)]


def devices(processes: bool = False) -> list[str]:
    """Device files that a process needs: harmless ones, GPUs, and what the kernel shows of the process itself.

    Drivers name their threads by writing to the last.

    Args:
        processes: whether nothing else may be written below `/proc` (`processes`): then what it starts may as well.
    """
    return [*(f"/dev/{name}" for name in _NODES), *_gpus(), "/proc" if processes else "/proc/self"]


def shared_memory(own: bool) -> list[str]:
    """The folder of shared memory, where it may be written.

    Args:
        own: whether it is the process's own; else it may be written where there is a GPU, for PyTorch makes a file in
            it for each tensor that it hands over.
    """
    return [SHARED_MEMORY] if own or _gpus() else []


def has_gpu() -> bool:
    """Whether this machine shows device files of a GPU."""
    return bool(_gpus())


def _gpus() -> list[str]:
    listed = [path for pattern in _GPUS for path in sorted(glob(pattern))]
    return listed or [path for path in (f"/dev/nvidia{name}" for name in _GPU_NODES) if os.path.exists(path)]


def _is_of_packages(path: str) -> bool:
    """Whether an entry of Python's path is a folder (or archive) of installed packages, or of Python itself.

    What pip installs into a folder of another name (``--target``) has its records there.
    """
    if not path:
        return False
    with suppress(OSError):  # a folder that this user may not read
        if any(Path(path).glob("*.dist-info/RECORD")):
            return True
    parts = Path(path).parts
    prefixes = {Path(p).resolve() for p in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    return bool({"site-packages", "dist-packages"} & set(parts)) or bool(prefixes & set(Path(path).resolve().parents))


def _holds_home(path: Path) -> bool:
    """Whether a folder is the user's home or holds it; one on Python's path there would open the whole home."""
    home = Path(os.path.expanduser("~")).resolve()
    path = path.resolve()
    return path == home or path in home.parents


__all__ = ["SHARED_MEMORY", "devices", "has_gpu", "readable", "shared_memory"]
