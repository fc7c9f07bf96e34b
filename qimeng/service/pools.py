"""The engines behind the service: the pool of this machine, or that of a cluster, whose processes judge apart.

Deals in where a submission is judged. What is queued, joined, given up and asked again is the pools' own
(`qimeng.envs.workers.queueing`); what a process does with a submission is `qimeng.service.hosting`. Knows nothing about
HTTP or clients.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

from qimeng.cluster.pool import ClusterPool
from qimeng.envs.estimate.estimator import EstimatingEvaluator
from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.envs.workers.answering import Make
from qimeng.envs.workers.local_pool import LocalPool
from qimeng.envs.workers.queueing import Job, QueueingEvaluator
from qimeng.envs.workers.task_process import TaskProcess
from qimeng.errors import DeviceError
from qimeng.service.hosting import Settings, describe, judge_apart
from qimeng.service.messages import Reference, Submission

if TYPE_CHECKING:
    from qimeng.cluster.fleet import Fleet

_NO_MAKE = cast(Make, None)
"""The processes of these pools make their evaluators in hosts."""


class _Apart(QueueingEvaluator):
    """Prefers a place that has the reference of a submission already."""

    def _best(self, job: Job, free: Sequence[Hashable]) -> Hashable:
        reference = cast(Submission, job.request).reference
        chosen = next((place for place in free if self._has.get(place) == reference), free[0])
        self._has[chosen] = reference
        return chosen

    @cached_property
    def _has(self) -> dict[Hashable, Reference]:
        """The reference that each place had last."""
        return {}


class LocalApart(_Apart, LocalPool):
    """A pool of this machine that judges submissions.

    Args:
        settings: how they are judged.
        measured: whether a GPU judges.
        environments: variables of each process; one process for each.
    """

    def __init__(self, settings: Settings, measured: bool, environments: Sequence[Mapping[str, str]]):
        super().__init__(_NO_MAKE, _kind(measured), environments)
        self._work = partial(judge_apart, settings)


class ClusterApart(_Apart, ClusterPool):
    """A pool of a cluster that judges submissions, on every GPU of one generation.

    Args:
        settings: how they are judged.
        measured: whether GPUs judge.
        fleet: the GPUs; the pool closes it.
        lanes: submissions at a time on each GPU.
    """

    def __init__(self, settings: Settings, measured: bool, fleet: Fleet, lanes: int = 1):
        from qimeng.cluster.fleet import packed

        super().__init__(_NO_MAKE, _kind(measured), fleet, pinned=False, lanes=lanes)
        self._work = packed(partial(judge_apart, settings))


def described_here(settings: Settings, environment: Mapping[str, str]) -> dict[str, Any]:
    """What `describe` says in a process of this machine that ends with that.

    Raises:
        DeviceError: it failed.
    """
    process = TaskProcess(environment)
    try:
        process.send(describe, settings)
        found, failure, _ = process.receive()
    finally:
        process.kill()
    if failure is not None:
        raise DeviceError(f"this machine cannot judge: {failure}")
    return dict(found)


def _kind(measured: bool) -> type[GpuEvaluator] | type[EstimatingEvaluator]:
    return GpuEvaluator if measured else EstimatingEvaluator


__all__ = ["ClusterApart", "LocalApart", "described_here"]
