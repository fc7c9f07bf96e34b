"""The GPUs of this machine as places for a benchmark's workers.

Deals in environment variables and shares of the processor's cores. Knows nothing about problems.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from qimeng.bench.pool import Place
from qimeng.errors import QimengError

OVERLAP = 1.5
"""Threads for each core: a problem that waits for its GPU leaves its cores to others."""


class GpuError(QimengError):
    """More GPUs are asked for than there are."""

    code = "gpus"


def visible_gpus() -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES calls the GPUs that this process may use; none without a GPU."""
    import torch

    count = torch.cuda.device_count()
    listed = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return tuple(listed or map(str, range(count)))[:count]


def gpu_places(gpus: int, jobs: int, visible: Sequence[str], cores: int | None = None) -> tuple[Place, ...]:
    """One place a GPU, whose workers see that GPU only; one place with nothing to see where there is none.

    Args:
        gpus: how many to use, the first of `visible`; 0 for all.
        jobs: problems at once on each.
        visible: see `visible_gpus`.
        cores: of the processor, to share among all workers: PyTorch's CPU threads, and with them the compilers that an
            evaluator starts, follow OMP_NUM_THREADS, which is left alone where it is set already.

    Raises:
        GpuError: there are not so many.
    """
    if gpus > max(len(visible), 1):
        raise GpuError(f"--gpus {gpus}: this machine shows {len(visible)} (CUDA_VISIBLE_DEVICES may hide some)")
    used = visible[: gpus or None]
    shared = {} if "OMP_NUM_THREADS" in os.environ else share_of_cores(max(len(used), 1) * jobs, cores)
    if not used:
        return (Place("cpu", jobs, shared),)
    return tuple(Place(f"gpu {name}", jobs, {**shared, "CUDA_VISIBLE_DEVICES": name}) for name in used)


def share_of_cores(workers: int, cores: int | None = None) -> dict[str, str]:
    """The variables that share the cores of this machine, or so many, among workers."""
    cores = cores or len(os.sched_getaffinity(0))
    return {"OMP_NUM_THREADS": str(max(1, round(OVERLAP * cores / workers)))}


__all__ = ["GpuError", "gpu_places", "share_of_cores", "visible_gpus"]
