"""Judges of single specs on the GPUs of a cluster, for whoever trains a planner on live answers.

Deals in a pool for each spec, on the GPU with the least work when it is opened. Knows nothing about training.
"""

from __future__ import annotations

from functools import partial

from qimeng.cluster.fleet import Fleet
from qimeng.cluster.pool import ClusterPool
from qimeng.cluster.tasks import ClusterTasks
from qimeng.device import Device, current_card
from qimeng.envs.steps.setup import evaluator_kind, judge_of, make_device, versions_here
from qimeng.interfaces import Evaluator
from qimeng.planner.lm.live import Elsewhere
from qimeng.spec import KernelSpec

BESIDE = 4
"""Judges that are at work on a GPU at a time: one measures while others start, compile, or check."""


def judges_of(address: str, generation: str = "", device: str = "", coder: str = "template") -> Elsewhere:
    """The judges of a cluster.

    The pool of a spec has one process, and so one GPU; where this leaves, another one goes on. An answer's times are
    compared with eager's beside them, which were measured on the same card.

    Args:
        address: see `qimeng.cluster.connection.connect`.
        generation: of the GPUs to use; by default the one with the most.
        device: name of the device to estimate for, where the cluster has no GPU.
        coder: name of the coder, which estimates go by.

    Raises:
        ClusterError: there is no such cluster, or no such GPU.
    """
    fleet = Fleet(address, generation)
    with ClusterTasks(fleet) as tasks:
        row, versions = tasks.ask(partial(_what_judges, device))

    def make(spec: KernelSpec) -> Evaluator:
        work = partial(judge_of, spec.to_bytes(), device or None, coder)
        return ClusterPool(work, evaluator_kind(row), fleet.another(), lanes=1, moves=True, beside=BESIDE)

    return Elsewhere(row, versions, make)


def _what_judges(device: str) -> tuple[Device, tuple[tuple[str, str], ...]]:
    """At a GPU of the cluster: the device that is judged for, and the versions of what judges."""
    row = make_device(device or None)
    kind = evaluator_kind(row)
    versions = versions_here(f"{kind.__name__} {kind.version}")
    card = current_card() if row.measured else None
    return row, (*versions, *((("card", card.name),) if card is not None else ()))


__all__ = ["BESIDE", "judges_of"]
