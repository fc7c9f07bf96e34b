"""Compiling on other machines: the binaries come back as bytes, into the cache of the machine that asks.

Deals in jobs (`qimeng.envs.workers.compile`) as errands (`qimeng.envs.workers.offload`). Only a machine with the same
compilers and the same sandbox does one, so that its result is the one that would be had here; the candidate's text runs
in a full sandbox there as it does here. Knows nothing about who takes an errand.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from qimeng.backend.compiled import Compiled
from qimeng.backend.registry import backend_named
from qimeng.backend.triton_cache import LAUNCHER
from qimeng.device import Device
from qimeng.envs.sandbox import needs_landlock
from qimeng.envs.workers.compile import Compilers, Job
from qimeng.envs.workers.foreign_folders import read_folder, remove_folder, write_folder
from qimeng.envs.workers.forkserver import WorkerFailed
from qimeng.envs.workers.offload import NotHere, done_elsewhere, offered
from qimeng.envs.workers.shared_server import shared_server
from qimeng.interfaces import LASTING, Fault
from qimeng.interfaces.faults import FAULTS
from qimeng.program.content import digest_of
from qimeng.version import VERSION

MOST_BYTES = 64 << 20
"""The most that comes back of one implementation; with more, it is compiled here."""
_NAME = re.compile(r"[\w-][\w.-]{0,200}/[\w-][\w.-]{0,200}")
"""What a file of a cache is called: its folder, which is named by a hash, and its name."""


@dataclass(frozen=True)
class Binaries:
    """What came of compiling one implementation on another machine.

    Attributes:
        compiled: the kernels.
        files: of Triton's cache folder, ``folder/name`` to content.
        digest: of the files.
    """

    compiled: Compiled
    files: Mapping[str, bytes]
    digest: str

    @property
    def lasting(self) -> bool:
        """Whether it would be the same again (`Compilers` keeps such results, too)."""
        return self.compiled.failure is None or self.compiled.failure in LASTING


class OffloadingCompilers(Compilers):
    """Compilers that have done elsewhere what can be, and do the rest themselves; the results are the same."""

    def compile(self, jobs: Sequence[Job]) -> list[Compiled]:
        """Compile `jobs`, each in a process of its own, on this machine or another; see `Compilers.compile`."""
        there = self._elsewhere(jobs)
        here = iter(super().compile([job for job, found in zip(jobs, there, strict=True) if found is None]))
        return [next(here) if found is None else found for found in there]

    def _elsewhere(self, jobs: Sequence[Job]) -> list[Compiled | None]:
        """What was compiled on other machines, with the binaries in the cache; None for what is left to this one."""
        found: list[Compiled | None] = [None] * len(jobs)
        if not offered() or self.sandbox != "full" or self.cache is None:
            return found
        tools = [tools_here(job.implementation.language, self.device) for job in jobs]
        numbers = [n for n, known in enumerate(tools) if known]
        wanted = self.device.measured
        works = [
            (
                _key(jobs[n], self.device, tools[n], wanted),
                partial(compile_for_another, jobs[n], self.device, tools[n], self.timeout_s, wanted),
            )
            for n in numbers
        ]
        for n, came in zip(numbers, done_elsewhere(works, self.timeout_s), strict=True):
            if came is None:
                continue
            folder = os.path.join(self.cache, jobs[n].implementation.digest)
            if not put_into_cache(came, folder):
                continue
            found[n] = came.compiled
            if wanted and came.compiled.kernels and not _can_be_launched(jobs[n], came):
                found[n] = None  # compiled once more here: the binaries are found, and what starts them is linked
        return found


def compile_for_another(job: Job, device: Device, tools: str, timeout_s: float, wanted: bool) -> Binaries:
    """On a machine with cores to spare: compile one implementation for a machine that has these tools.

    Args:
        job: what to compile.
        device: what to compile for.
        tools: see `tools_here`.
        timeout_s: seconds that it may take.
        wanted: whether the binaries are, beside what is known of them.

    Raises:
        NotHere: other tools are installed here.
        WorkerFailed: it failed for a reason that is not the implementation's.
    """
    server = shared_server()  # it loads meanwhile
    if tools_here(job.implementation.language, device) != tools:
        raise NotHere(f"other compilers than those of the machine that asks: {tools}")
    folder = tempfile.mkdtemp(prefix="qimeng_compile_")
    try:
        (found,) = Compilers(server, device, folder, 1, timeout_s, "full").compile([job])
        if found.failure is not None and FAULTS.get(found.failure) is not Fault.KERNEL:
            raise WorkerFailed(found.failure, found.error or "")  # a kernel's fault is an answer, and not asked again
        files = read_folder(os.path.join(folder, job.implementation.digest), MOST_BYTES) if wanted else {}
        files = {name: data for name, data in files.items() if _NAME.fullmatch(name)}
        return Binaries(found, files, _digest(files))
    finally:
        remove_folder(folder)


def put_into_cache(binaries: Binaries, folder: str) -> bool:
    """Write binaries of another machine into a cache folder of Triton's; False where they are not what was sent."""
    files = binaries.files
    if _digest(files) != binaries.digest or not all(map(_NAME.fullmatch, files)):
        return False
    try:
        write_folder(folder, {name: _in_folder(name, files, folder) for name in files})
    except OSError:  # a text that was compiled into it before has left a link there
        return False
    return True


@lru_cache(16)
def tools_here(language: str, device: Device) -> str:
    """Versions of all that decides what an implementation is compiled to; empty where that is not known.

    The sandbox belongs to it: where one has landlock and another has not, texts are refused at one of them alone.
    """
    compiler = backend_named(language).tools(device)
    if not compiler:
        return ""
    import torch

    parts = (
        compiler,
        f"torch {torch.__version__.partition('+')[0]}",
        f"qimeng {VERSION}",
        f"python {platform.python_version()}",
        " ".join((platform.machine(), *platform.libc_ver())),
        "no landlock" if needs_landlock() else "landlock",
    )
    return ", ".join(parts)


def _key(job: Job, device: Device, tools: str, wanted: bool) -> str:
    return digest_of("compile", job.implementation.digest, job.inputs, device, tools, wanted, size=16)


def _can_be_launched(job: Job, came: Binaries) -> bool:
    """Whether all is there that a worker needs to launch: without a driver, Triton's stub cannot be linked."""
    return job.implementation.language != "triton" or any(LAUNCHER in name for name in came.files)


def _digest(files: Mapping[str, bytes]) -> str:
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(f"{name} {len(files[name])}\n".encode())
        total.update(files[name])
    return total.hexdigest()


def _in_folder(name: str, files: Mapping[str, bytes], folder: str) -> bytes:
    """A file as it has to be in `folder`: Triton's list of the files of one kernel holds whole paths."""
    inner, _, last = name.partition("/")
    if not last.startswith("__grp__"):
        return files[name]
    try:
        listed = json.loads(files[name])["child_paths"]
    except (ValueError, TypeError, KeyError):
        listed = ()
    kept = [child for child in listed if f"{inner}/{child}" in files]
    return json.dumps({"child_paths": {child: os.path.join(folder, inner, child) for child in kept}}).encode()


__all__ = ["Binaries", "OffloadingCompilers", "compile_for_another", "put_into_cache", "tools_here"]
