"""Finds the candidate's own kernels in a call, and their share of the time.

Deals in names and milliseconds of kernels from PyTorch's profiler. If names could mislead, the judge renames kernels
first (`qimeng.envs.judge.kernel_renaming`). A generated region must be computed by its own kernels. Kernels of a
vendor's library, PyTorch or another compiler do not count, and a dummy kernel takes no time. Copies and fills by the
driver are ignored. Knows nothing about how a program was made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping

import torch

from qimeng.backend.compiled import Compiled
from qimeng.backend.registry import backend_named
from qimeng.program.program import Implementation

LEAST = 0.3
"""Minimum share of the time of generated regions in their own kernels. Small helpers may take the rest, such as a sum
of partial results or zeroed memory."""

Launch = tuple[str, float, float]
"""Name of a kernel, when it began and when it ended: milliseconds of the device."""

_DRIVER = re.compile(r"Memcpy|Memset")
_NAME = re.compile(r"(?:void\s+)?(?:[\w]+::)*([A-Za-z_]\w*)\s*(?:<.*)?(?:\(.*)?$", re.DOTALL)


def launches_of(call: Callable[[], object]) -> list[Launch]:
    """Every kernel that runs on the GPU during `call`; empty where the profiler does not work here."""
    try:
        # not `torch.profiler.profile`, which imports the whole of Inductor before it starts
        with torch.autograd.profiler.profile(use_cpu=False, use_device="cuda", use_kineto=True) as profiler:
            call()
            torch.cuda.synchronize()
        events = profiler.function_events or []
    except (RuntimeError, AssertionError):  # no CUDA activity is known, or no access to the GPU's counters
        return []
    on_gpu = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    return [(str(e.name), float(e.time_range.start) / 1e3, float(e.time_range.end) / 1e3) for e in on_gpu]


def busy_ms(launches: Iterable[Launch]) -> float:
    """Milliseconds in which at least one kernel, copy or fill ran.

    >>> busy_ms([("add", 1.0, 2.0), ("mul", 1.5, 3.0), ("Memcpy DtoD", 5.0, 5.5)])
    2.5
    """
    total, until = 0.0, -math.inf
    for _, began, ended in sorted(launches, key=lambda launch: launch[1]):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


def own_kernels(parts: Iterable[tuple[Implementation, Compiled | None]]) -> dict[str, int | None]:
    """Kernels that belong to a program, by name: how many launches of it one call makes, None where that is not known.

    Args:
        parts: for each region with a generated implementation, that and what came of compiling it.
    """
    found: dict[str, int | None] = {}
    for implementation, compiled in parts:
        if compiled is None or compiled.error is not None:
            found.update(dict.fromkeys(kernel_names(implementation)))  # the code around them was not run to its end
        else:
            for k in compiled.kernels:
                if not k.prepares and found.get(k.name, 0) is not None:
                    found[k.name] = (found.get(k.name) or 0) + k.launches
    return found


def kernel_names(implementation: Implementation) -> list[str]:
    """Names of the kernels in the text of a generated implementation, each once."""
    return backend_named(implementation.language).kernel_names(implementation.source)


def own_share(launches: Iterable[Launch], own: Mapping[str, int | None]) -> float | None:
    """Share of the kernels' time that a program's own take, 0 to 1; None where no kernel ran.

    If a name is launched more often than the program launches it, another program uses it too. Then only the shortest
    launches count.

    Args:
        launches: what ran.
        own: see `own_kernels`.

    >>> own_share([("void gemm<float>(float*)", 0.0, 3.0), ("add", 3.0, 4.0), ("Memcpy DtoD", 4.0, 9.0)], {"add": 1})
    0.25
    """
    times: dict[str, list[float]] = {}
    total = 0.0
    for name, began, ended in launches:
        if not _DRIVER.match(name):
            total += ended - began
            times.setdefault(base_name(name), []).append(ended - began)
    mine = sum(sum(sorted(times.get(name, ()))[:count]) for name, count in own.items())
    return mine / total if total else None


def base_name(kernel: str) -> str:
    """A kernel's own name, without namespaces, template arguments and parameters.

    >>> base_name("void at::native::add<float, 4>(int, float*)"), base_name("add")
    ('add', 'add')
    """
    found = _NAME.match(kernel.replace("(anonymous namespace)::", "").strip())
    return found[1] if found else kernel


__all__ = ["LEAST", "Launch", "base_name", "busy_ms", "kernel_names", "launches_of", "own_kernels", "own_share"]
