"""The environment of a measurement: GPU, driver, versions, commit.

Deals in facts that the machine reports. Knows nothing about what is measured.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from qimeng.bench.row import Environment
from qimeng.device import Device

_DRIVER = Path("/proc/driver/nvidia/version")


def environment(device: Device) -> Environment:
    """The environment of this process, for times on `device`."""
    import torch

    name = torch.cuda.get_device_name(0) if device.measured else f"{device.name} (estimated)"
    return Environment(
        device=name,
        driver=driver_version() if device.measured else "",
        torch=str(torch.__version__),
        triton=_installed("triton"),
        python=platform.python_version(),
        commit=commit(),
    )


def driver_version() -> str:
    """Version of the NVIDIA driver; empty where there is none."""
    try:
        match = re.search(r"Module.*?(\d+\.\d+(?:\.\d+)?)", _DRIVER.read_text())
    except OSError:
        return ""
    return match[1] if match else ""


def commit() -> str:
    """The checkout's commit, marked where the package has changes; `QIMENG_COMMIT`, or the version, without git."""
    root = Path(__file__).resolve().parents[2]
    if given := os.environ.get("QIMENG_COMMIT"):
        return given
    if not (root / ".git").exists():
        return f"version {_installed('qimeng')}"
    head = _git(root, "rev-parse", "HEAD")
    return f"{head}-dirty" if _git(root, "status", "--porcelain", "--", "qimeng") else head


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


__all__ = ["commit", "driver_version", "environment"]
