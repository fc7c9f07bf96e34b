"""Plans how a reference and a worker fit into a device's memory.

Deals in bytes. The float64 reference takes two or four times the memory of the computation, next to a worker with its
own inputs and outputs. If it does not fit, it is held on the host or in smaller parts. The last resort is no float64
reference. Knows nothing about tensors or the computation.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

SHARE = 0.92
"""Share of the device's memory that is planned; the rest is fragments, libraries' workspaces and others' contexts."""
POOL_SHARE = 0.1
"""Share of the device's memory that trials kept for later candidates may take; several judges may share a device."""
CONTEXTS = 4 << 29
"""Bytes of the CUDA contexts of judge, baseline, worker and the next worker: half a GiB each."""
HOST_FLOP = 4e12
"""Floating-point operations of products above which float64 on the host would take minutes."""

SLICE_BYTES = 1 << 31
"""Bytes that the float64 run of a slice may take, where one row does not take more."""

WAYS = ("device", "slices", "steps", "host", "none")
"""Where float64 results are made: on the device, two at a time; there of some rows at a time; there one at a time (the
first is rounded to the output's dtype before the second is made); on the host; nowhere: eager in mode ``"highest"`` is
the reference."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of a computation in the specification's dtype.

    Attributes:
        inputs: of one set of inputs.
        state: of parameters and buffers.
        outputs: of the result.
        temporaries: what eager holds at its peak beyond these.
        itemsize: bytes of an element: 4, or 2 for half types.
        flop: floating-point operations of its products; None where not known.
        rows: along the leading axis, where these may be computed apart; 1 where they may not.
    """

    inputs: int
    state: int
    outputs: int
    temporaries: int = 0
    itemsize: int = 4
    flop: float | None = None
    rows: int = 1

    def double(self, results: int) -> int:
        """Bytes of runs in float64 at their peak, with `results` results held; the inputs are raised one by one."""
        factor = 8 // self.itemsize
        run = factor * (self.inputs + self.state + self.temporaries + results * self.outputs)
        return max(self.inputs + factor * (self.inputs + self.state), run)


@dataclass(frozen=True)
class Plan:
    """How memory is used.

    Attributes:
        way: one of `WAYS`.
        tidy: whether a worker gives its memory back after each trial.
        copies: whether inputs are compared with a copy after a call; else with sums over their bits.
        pool_bytes: what trials kept for later candidates may take.
        peak_bytes: what is held at once at most, the pool not counted.
        fits: False where even the last way may run out of memory.
    """

    way: str
    tidy: bool
    copies: bool
    pool_bytes: int = 0
    peak_bytes: int = 0
    fits: bool = True

    @property
    def key(self) -> tuple[str, bool, bool]:
        """Equal for plans that differ in numbers only."""
        return self.way, self.tidy, self.copies

    def __str__(self) -> str:
        where = {
            "device": "float64 results are made on the device",
            "slices": "float64 results are made on the device of some rows at a time",
            "steps": "float64 results are made on the device one after the other",
            "host": "float64 results are made on the host",
            "none": "float64 does not fit: eager in mode highest is the reference",
        }[self.way]
        parts = [where]
        parts += ["workers give memory back after each trial"] if self.tidy else []
        parts += [] if self.copies else ["inputs are held against sums of their bits, not against a copy"]
        parts += [] if self.fits else ["even so it may run out of memory"]
        return f"{'; '.join(parts)} ({self.peak_bytes / 2**30:.1f} GiB at most)"


_ORDER = (
    Plan("device", tidy=False, copies=True),
    Plan("device", tidy=True, copies=True),
    Plan("slices", tidy=True, copies=True),
    Plan("slices", tidy=True, copies=False),
    Plan("steps", tidy=True, copies=True),
    Plan("steps", tidy=True, copies=False),
    Plan("host", tidy=True, copies=False),
    Plan("none", tidy=True, copies=False),
)
"""What is tried, the quickest first."""


def memory_plan(
    sizes: Sizes, device_bytes: int, host_bytes: int, after: Plan | None = None, free_bytes: int | None = None
) -> Plan:
    """The quickest way to hold a computation of `sizes` that fits.

    Args:
        sizes: bytes of the computation.
        device_bytes: memory of the device.
        host_bytes: memory of the host that may be used.
        after: a plan under which the memory ran out; only those that take less are tried.
        free_bytes: what others leave of the device; None where nobody else uses it.
    """
    room = int(SHARE * device_bytes)
    room = room if free_bytes is None else min(room, free_bytes)
    tried = [p.key for p in _ORDER].index(after.key) + 1 if after else 0
    for plan in _ORDER[tried:]:
        peak = _peak(sizes, plan)
        last = plan is _ORDER[-1]
        possible = _on_host(sizes, plan, host_bytes) and (plan.way != "slices" or sizes.rows > 1)
        if last or (peak <= room and possible):
            pool = 0 if plan.tidy else min(int(POOL_SHARE * device_bytes), room - peak)
            return replace(plan, pool_bytes=pool, peak_bytes=peak, fits=peak <= room)
    raise AssertionError("the last plan is always taken")


def slice_rows(sizes: Sizes) -> int:
    """Rows whose float64 results are made at a time."""
    return max(1, min(sizes.rows, sizes.rows * SLICE_BYTES // max(sizes.double(2), 1)))


def device_bytes(device: torch.device) -> int:
    """Bytes of a device's memory; of the CPU 8 GiB, as workers count it."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 1 << 33


def free_bytes(device: torch.device) -> int | None:
    """Bytes of a GPU that this process holds or may still take; None of the CPU.

    Contexts of other processes of a judge may be there already, and are planned for (`CONTEXTS`) all the same.
    """
    if device.type != "cuda":
        return None
    return int(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))


def free_host_bytes() -> int:
    """Bytes of memory that programs on this host may still take (`MemAvailable`), at most those that are physical."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _peak(s: Sizes, plan: Plan) -> int:
    """Bytes on the device: while a trial is made, or while a worker runs, whichever takes more.

    A worker holds the reference's state and the program's, the first output (looked at again at the end) and the
    present one. The judge holds its own state, and what is expected of the present output beside a worker that runs.
    What is expected of the first one is held too, unless memory is tight.
    """
    worker = (2 if plan.copies else 1) * s.inputs + 2 * s.state + 2 * s.outputs + s.temporaries
    idle = 2 * s.state + s.outputs if plan.tidy else worker
    judge = s.state + (0 if plan.tidy else s.outputs)
    eager = s.inputs + s.outputs + s.temporaries
    making = {
        "device": s.double(2),
        "slices": eager + s.outputs + s.double(2) * slice_rows(s) // max(s.rows, 1) + (8 // s.itemsize) * s.state,
        "steps": s.double(1) + s.outputs,
        "host": eager + s.outputs,
        "none": eager + s.outputs,
    }[plan.way]
    return CONTEXTS + judge + max(making + idle, worker + s.outputs)


def _on_host(s: Sizes, plan: Plan, host_bytes: int) -> bool:
    """Whether the host can do its part."""
    if plan.way != "host":
        return True
    return s.double(1) + s.inputs + s.outputs <= host_bytes and s.flop is not None and s.flop <= HOST_FLOP


__all__ = [
    "POOL_SHARE",
    "Plan",
    "Sizes",
    "WAYS",
    "device_bytes",
    "free_bytes",
    "free_host_bytes",
    "memory_plan",
    "slice_rows",
]
