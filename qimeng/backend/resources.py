"""Whether compiled kernels fit a device.

Deals in registers, shared memory and threads beside a device's limits. Triton's compiler checks none of them. Knows
nothing about how kernels are compiled or timed.
"""

from __future__ import annotations

from collections.abc import Iterable

from qimeng.backend.facts import KernelFacts
from qimeng.device import Device
from qimeng.interfaces import Resources

MAX_THREADS = 1024
"""Threads of a block on every device of the table."""

MAX_SPILLS = 2048
"""Bytes of local memory a thread above which a kernel is not worth timing: a register file gives a thread 1020."""


def refusal(kernels: Iterable[KernelFacts], device: Device) -> str | None:
    """Why a kernel cannot run on `device`, with the numbers, or None."""
    label = device.target
    for k in kernels:
        if k.shared_bytes > device.shared_per_block:
            return (
                f"kernel {k.name} needs {k.shared_bytes} B of shared memory, {label} allows "
                f"{device.shared_per_block} B a block; smaller blocks or fewer stages need less"
            )
        if k.threads > MAX_THREADS:
            return f"kernel {k.name} has {k.threads} threads a block ({k.warps} warps), {label} allows {MAX_THREADS}"
        if k.registers is not None and k.registers * k.threads > device.registers_per_sm:
            return (
                f"kernel {k.name} needs {k.registers} registers a thread x {k.threads} threads, {label} has "
                f"{device.registers_per_sm} an SM; fewer warps need less"
            )
    return None


def too_many_spills(kernels: Iterable[KernelFacts]) -> str | None:
    """Which kernel spills more registers than the analytic model can make a time of, with the numbers, or None."""
    for k in kernels:
        if k.spills is not None and k.spills > MAX_SPILLS:
            return (
                f"kernel {k.name} spills {k.spills} B of registers a thread (at most {MAX_SPILLS} B are worth timing); "
                "smaller blocks or more warps spill less"
            )
    return None


def largest(kernels: Iterable[KernelFacts]) -> Resources:
    """The most that any of the kernels needs."""
    found = list(kernels)

    def most(values: list[int | None]) -> int | None:
        known = [v for v in values if v is not None]
        return max(known, default=None)

    return Resources(
        registers=most([k.registers for k in found]),
        spills=most([k.spills for k in found]),
        shared_bytes=most([k.shared_bytes for k in found]),
        kernels=len(found),
    )


__all__ = ["MAX_SPILLS", "MAX_THREADS", "largest", "refusal", "too_many_spills"]
