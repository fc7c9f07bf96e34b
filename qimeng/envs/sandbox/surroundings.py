"""The surroundings of a process: its folder, environment and open files.

Makes all of these private: the process inherits only what it is given, and shares only named caches. Knows nothing
about rights; other layers keep a process in its folder.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection

SETTINGS = (
    "PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "PYTHONHASHSEED", "VIRTUAL_ENV",
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_PATH", "CUDA_MODULE_LOADING",
    "CUDA_LAUNCH_BLOCKING", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY", "TRITON_PTXAS_PATH", "TRITON_LIBCUDA_PATH", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
)  # fmt: skip
"""Environment variables that stay, where this machine's programs and devices are; all else goes: tokens, what is loaded
beforehand, other settings and caches of Triton's and PyTorch's."""

OWN_FOLDERS = (
    "HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "CUDA_CACHE_PATH", "TRITON_HOME", "TORCH_HOME",
    "TORCH_EXTENSIONS_DIR",
)  # fmt: skip
"""Environment variables that name the process's own folder."""


def settle(folder: str) -> None:
    """Work, and keep temporary files, in `folder`."""
    os.chdir(folder)
    tempfile.tempdir = folder  # Triton writes through `tempfile`, which has cached the parent's folder
    os.environ["TMPDIR"] = folder


def clean_environment(folder: str, keep: Collection[str] = ()) -> str:
    """Keep the `SETTINGS` and the variables in `keep`, drop all others; home and caches are in `folder`.

    Triton's cache as well, unless it is set. TorchInductor's is a folder in it: its folders have names of two letters,
    such as ``z3``, which Python would import from the folder that a process works in.
    """
    settle(folder)
    for name in [n for n in os.environ if n not in SETTINGS and n not in keep]:
        del os.environ[name]
    os.environ.update(dict.fromkeys(OWN_FOLDERS, folder))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, "inductor")
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(folder, "triton"))
    return "own folder, home and caches"


def close_files(keep: Collection[int]) -> str:
    """Close every open file but standard input, output and error, and those in `keep`."""
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd > 2 and fd not in keep:
            try:
                os.close(fd)
            except OSError:  # the listing's own
                continue
    return "none inherited"


__all__ = ["OWN_FOLDERS", "SETTINGS", "clean_environment", "close_files", "settle"]
