"""Combines the layers: which ones a process enters, in which order, with which arguments.

Deals in names of layers. A layer that this machine lacks is skipped and reported, so the same code runs anywhere. The
result lists the active layers. Knows nothing about how a layer works.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache

from qimeng.envs.sandbox import (
    landlock,
    limits,
    network,
    places,
    privileges,
    processes,
    seccomp,
    shared_memory,
    surroundings,
)
from qimeng.envs.sandbox.layer import Unavailable

LAYERS = (
    "environment", "files", "network", "shared_memory", "limits", "capabilities", "no_new_privs", "landlock", "seccomp",
)  # fmt: skip
"""Every layer, in the order in which they are entered: what a later one forbids, an earlier one may need."""

LEVELS: dict[str, tuple[str, ...]] = {
    "full": LAYERS, "tool": LAYERS, "host": (*LAYERS[:4], "processes", *LAYERS[4:]), "basic": ("no_new_privs",),
    "off": (),
}  # fmt: skip
"""What can be asked for, and its layers; ``"tool"`` allows sockets within a network of its own, which is up; ``"host"``
allows what a judge needs that starts sandboxed processes of its own."""

DEFAULT = "full"
"""What evaluators ask for unless told."""


@dataclass(frozen=True)
class Report:
    """What came of the layers.

    Attributes:
        entered: name of a layer to a few words about it.
        skipped: name of a layer that this machine lacks to the reason.
    """

    entered: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{name} ({text})" for name, text in self.entered.items()]
        parts += [f"no {name} ({text})" for name, text in self.skipped.items()]
        return "; ".join(parts) or "none"


_HERE = [Report()]


def close_sockets() -> None:
    """Refuse what CUDA alone needed when it began; before foreign code is loaded, where the filter is in force."""
    if "seccomp" in entered_here().entered:
        seccomp.close_sockets()


def entered_here() -> Report:
    """What came of the layers in this process."""
    return _HERE[0]


@dataclass(frozen=True)
class Sandbox:
    """What a process gives up before foreign code runs in it.

    Attributes:
        level: ``"full"`` (every layer), ``"tool"`` (the same for a tool that speaks to its target), ``"host"`` (the
            same for a judge whose specification is a stranger's: `qimeng.service`), ``"basic"`` (no new privileges) or
            ``"off"``.
    """

    level: str = "basic"

    def __post_init__(self) -> None:
        """Refuse an unknown level."""
        if self.level not in LEVELS:
            raise ValueError(f"no sandbox {self.level!r}; there are {', '.join(LEVELS)}")

    def enter(
        self,
        folder: str,
        writable: Sequence[str] = (),
        readable: Sequence[str] = (),
        variables: Collection[str] = (),
        files: Collection[int] = (),
    ) -> Report:
        """Enter the layers, for good; in a process of its own that has one thread.

        Args:
            folder: its scratch folder.
            writable: other folders that it may write (a compiler's cache).
            readable: folders that it may read, besides those where programs live.
            variables: environment variables to keep, besides the usual ones.
            files: open files to keep, besides the three standard ones.

        Raises:
            RuntimeError: it has several threads; the layers would hold for one of them only.
        """
        tool = self.level == "tool"
        layers = LEVELS[self.level]
        threads = len(os.listdir("/proc/self/task")) if set(LAYERS) <= set(layers) else 1
        if threads > 1:
            raise RuntimeError(f"a sandbox is entered by a process of one thread; this one has {threads}")
        may_read = [*places.readable(), *readable] if "landlock" in layers else []
        may_write = [folder, *writable]
        sockets = "local" if places.has_gpu() else "pairs"  # asked before landlock hides the device files
        entered: dict[str, str] = {}
        skipped: dict[str, str] = {}
        ways: dict[str, Callable[[], str]] = {
            "environment": lambda: surroundings.clean_environment(folder, variables),
            "files": lambda: surroundings.close_files(files),
            "network": lambda: network.enter(up=tool),
            "shared_memory": shared_memory.enter,
            "processes": lambda: processes.enter(own_mounts="shared_memory" in entered),
            "limits": limits.enter,
            "capabilities": privileges.drop_capabilities,
            "no_new_privs": privileges.no_new_privileges,
            "landlock": lambda: landlock.enter(
                may_read,
                [*may_write, *places.shared_memory(own="shared_memory" in entered)],
                places.devices(processes="processes" in entered),
                network="network" not in entered or not tool,
            ),
            "seccomp": lambda: seccomp.enter(
                "all" if tool and "network" in entered else sockets, seccomp.HOSTS if self.level == "host" else ()
            ),
        }
        for name in layers:
            try:
                entered[name] = ways[name]()
            except (Unavailable, OSError, ValueError) as error:
                skipped[name] = str(error)
        _HERE[:] = [Report(entered, skipped)]
        return _HERE[0]

    def layers_available(self) -> Report:
        """Which layers this machine has: a process of its own enters them and says what came of it.

        Raises:
            RuntimeError: the process ended without a report.
        """
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "qimeng.envs.sandbox", self.level, folder]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode != 0:
            raise RuntimeError(f"a process in the sandbox ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        return Report(**json.loads(done.stdout))


@lru_cache(1)
def needs_landlock() -> str | None:
    """What to say where foreign text cannot be run here, since nothing would keep it from files; else None."""
    try:
        landlock.version()
    except Unavailable as error:
        return (
            f"text that no template printed runs behind landlock only, which this machine lacks ({error}): use Linux "
            "5.19 or later with landlock enabled, or coder='template'"
        )
    return None


def main(level: str, folder: str) -> None:
    """Enter the sandbox with `folder` as scratch, and print the report as JSON."""
    print(json.dumps(asdict(Sandbox(level).enter(folder))))


__all__ = [
    "DEFAULT", "LAYERS", "LEVELS", "Report", "Sandbox", "close_sockets", "entered_here", "main", "needs_landlock",
]  # fmt: skip
