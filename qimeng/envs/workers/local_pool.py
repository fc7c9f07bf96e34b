"""An engine of several evaluators, each in a process of its own on this machine.

Deals in processes: many requests are in flight, answers come in the order they end, and a process that dies loses only
the request that it was at, which another one takes. Knows nothing about how its evaluators judge.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import wait

from qimeng.envs.workers.answering import Make, answer, no_verdict
from qimeng.envs.workers.queueing import Job, QueueingEvaluator
from qimeng.envs.workers.task_process import TaskProcess
from qimeng.errors import RequestError
from qimeng.interfaces import Evaluation, Evaluator, Fault
from qimeng.interfaces.faults import JUDGE_FAILED, MACHINE_FAILED

DISMISSAL_S = 5.0
"""Seconds that an idle process may take to end."""


class LocalPool(QueueingEvaluator):
    """Several evaluators behind one boundary, for one specification.

    Equal requests that are in flight together are judged once. Where a process dies, a fresh one judges its request
    again, in another environment if there is one (`qimeng.envs.workers.queueing.TRIES`); one that takes longer than the
    request allows is ended. Neither is a verdict on the program: see `qimeng.interfaces.faults`.

    Args:
        make: makes the evaluators; pickled by cloudpickle.
        kind: their class, whose name, version and kind of times the pool goes by.
        environments: variables of each process, such as ``{"CUDA_VISIBLE_DEVICES": "1"}``; one process for each.
    """

    def __init__(self, make: Make, kind: type[Evaluator], environments: Sequence[Mapping[str, str]] = ({}, {})):
        if not environments:
            raise RequestError("a pool needs at least one process")
        super().__init__(kind, len(environments))
        self._work = partial(answer, make)
        self._environments = tuple(environments)
        self._order = list(range(len(environments)))
        self._processes: dict[Hashable, TaskProcess] = {}
        self._busy: dict[Hashable, Job] = {}

    def close(self) -> None:
        """End every process; what is in flight stays unanswered."""
        for place in list(self._processes):
            if place in self._busy:
                self._end(place)
            else:
                self._forget(self._processes[place])
                self._processes.pop(place).dismiss(DISMISSAL_S)
        self._busy.clear()
        super().close()

    @property
    def _places(self) -> Collection[Hashable]:
        """Numbers of the environments."""
        return self._order

    @property
    def _free(self) -> Sequence[Hashable]:
        """The one that was used least recently first."""
        return [place for place in self._order if place not in self._busy]

    def _begin(self, job: Job, place: Hashable) -> None:
        assert isinstance(place, int)
        self._order.remove(place)
        self._order.append(place)
        if place not in self._processes:
            self._processes[place] = TaskProcess(self._environments[place])
        self._busy[place] = job
        self._processes[place].send(self._work, job.request.to_json())

    def _wait(self, until: float | None) -> None:
        ready = wait([self._processes[place].pipe for place in self._busy], self._seconds_to(until))
        for place, job in list(self._busy.items()):
            process = self._processes[place]
            if process.pipe not in ready:
                continue
            result, failure, alive = process.receive()
            if failure is None:
                text, self._reports[process] = result
                found = Evaluation.from_json(text)
            else:
                found = no_verdict(failure, JUDGE_FAILED if alive else MACHINE_FAILED)
            del self._busy[place]
            if not alive or found.fault is Fault.MACHINE:  # what is broken in it would be for the next request
                self._end(place)
            self._settle(job, place, found)

    def _stop(self, job: Job) -> None:
        place = next(place for place, busy in self._busy.items() if busy is job)
        del self._busy[place]
        self._end(place)

    def _end(self, place: Hashable) -> None:
        process = self._processes.pop(place)
        process.kill()
        self._forget(process)


__all__ = ["LocalPool", "Make"]
