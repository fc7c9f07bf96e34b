"""One optimization on a GPU of a cluster, as a whole: its files come back to the folder of the result.

Deals in a specification that travels there and files that travel back. Knows nothing about how anything is optimized
(`qimeng.api`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qimeng.cluster.gpus import ClusterError
from qimeng.cluster.supervisor import TASK_FOLDER, tell_driver
from qimeng.cluster.tasks import ClusterTasks

if TYPE_CHECKING:
    from qimeng.envs.steps.state import Progress

STORE = "store.sqlite"
"""Name of the store among the files."""
OVERHEAD_S = 300.0
"""Seconds that a run may take beyond its budget (capture, first compilation, verification) before it is ended."""


@dataclass(frozen=True)
class Wanted:
    """What is optimized there.

    Attributes:
        spec: `KernelSpec.to_bytes`.
        options: of `qimeng.plan_and_code`, all plain data.
        stored: the store that the run goes on from; empty for none.
    """

    spec: bytes
    options: Mapping[str, Any] = field(default_factory=dict)
    stored: bytes = b""


def _optimize_away(wanted: Wanted) -> None:
    """At a GPU of a cluster: optimize, tell each step, and leave result and store in the folder of the task."""
    from qimeng.api import plan_and_code
    from qimeng.envs.steps.setup import make_device
    from qimeng.spec import KernelSpec

    folder = Path(os.environ[TASK_FOLDER])
    if wanted.stored:
        (folder / STORE).write_bytes(wanted.stored)
    estimated = not make_device(wanted.options.get("device")).measured

    def tell(progress: Progress) -> None:
        tell_driver((progress, estimated))

    spec = KernelSpec.from_bytes(wanted.spec)
    plan_and_code(spec, store=folder / STORE, on_step=tell, **wanted.options).save(folder)


def optimize_there(pool: ClusterTasks, wanted: Wanted, seconds: float) -> None:
    """Have a GPU of the cluster optimize; the pool's `on_files` gets the files, also where the run is interrupted.

    Args:
        pool: the cluster.
        wanted: what is optimized.
        seconds: the run's budget.

    Raises:
        ClusterError: it failed there; the message has the reason.
    """
    (outcome,) = pool.run([wanted], _optimize_away, seconds + OVERHEAD_S)
    if outcome.failure is not None:
        raise ClusterError(f"the optimization failed on the cluster: {outcome.failure}")


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write what came back to the folder of the result.

    The store's journals come first: without them it would be an older one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(f"{STORE}-*"):
        path.unlink()
    for name, data in sorted(files.items(), reverse=True):
        (folder / Path(name).name).write_bytes(data)


__all__ = ["STORE", "Wanted", "optimize_there", "write_files"]
