"""Which values of inputs a computation takes at all.

Some modules look at what they are given: a binary cross entropy at whether its target lies in [0, 1], a distribution
at whether its scale is positive. On a CPU they raise, in the middle of a kernel on a GPU they take the whole process
with them. Deals in finding that out beforehand, on the CPU. Knows nothing about references or verdicts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from qimeng.spec import KernelSpec

SECONDS = 2.0
"""After this no further distribution is tried."""


def refused_distributions(spec: KernelSpec, names: Iterable[str]) -> set[str]:
    """Those of `names` on whose inputs `spec` raises where it runs on inputs as given; at reduced size, on the CPU.

    Nothing is known, and none refused, where that takes long or does not run.
    """
    small, began = spec.reduced(), time.monotonic()
    if not small.is_small:
        return set()

    def runs(distribution: str) -> bool:
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                small.module()(*small.inputs(1, "cpu", distribution))
        except Exception:  # noqa: BLE001  the user's module may raise anything
            return False
        return True

    others = [n for n in names if n != "given"]
    if not others or not runs("given"):
        return set()
    return {n for n in others if time.monotonic() - began < SECONDS and not runs(n)}


__all__ = ["refused_distributions"]
