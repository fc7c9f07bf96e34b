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
    """Why a kernel cannot run on `device`, with the numbers, and which others cannot; or None."""
    return _together((k.name, _refusal(k, device)) for k in kernels)


def _refusal(k: KernelFacts, device: Device) -> str | None:
    label = device.target
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
    """Which kernels spill more registers than the analytic model can make a time of, with the numbers; or None."""
    spilling = (k for k in kernels if k.spills is not None and k.spills > MAX_SPILLS)
    return _together(
        (
            k.name,
            f"kernel {k.name} spills {k.spills} B of registers a thread (at most {MAX_SPILLS} B are worth timing); "
            "smaller blocks or more warps spill less",
        )
        for k in spilling
    )


def _together(reasons: Iterable[tuple[str, str | None]]) -> str | None:
    """The first kernel's reason, and the names of the others that have one."""
    found: dict[str, str] = {}
    for name, reason in reasons:
        if reason is not None:
            found.setdefault(name, reason)
    if not found:
        return None
    (_, first), *others = found.items()
    return first + (f" (likewise {', '.join(name for name, _ in others)})" if others else "")


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
