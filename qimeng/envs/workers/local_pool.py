"""An engine of several evaluators, each in a process of its own on this machine.

Deals in requests as JSON, processes and time limits: many requests are in flight, answers come in the order they end,
and a process that dies loses only the request that it was at. Knows nothing about how its evaluators judge.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait

from qimeng.envs.workers.task_process import TaskProcess
from qimeng.errors import RequestError
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import EngineReport, Evaluation, EvaluationRequest, Evaluator, Gate, Ticket

Make = Callable[[], tuple[Evaluator, OpGraph]]
"""Makes an evaluator, in the process that it works in, and the graph of the specification that it judges."""

DISMISSAL_S = 5.0
"""Seconds that an idle process may take to end."""


@dataclass(eq=False)
class _Job:
    """One distinct request.

    Attributes:
        request: what is asked.
        tickets: of all who asked it.
        process: that works on it; None while it waits.
        deadline: when it is given up (`time.monotonic`); None for never.
    """

    request: EvaluationRequest
    tickets: list[Ticket] = field(default_factory=list)
    process: TaskProcess | None = None
    deadline: float | None = None


class LocalPool(Evaluator):
    """Several evaluators behind one boundary, for one specification.

    Equal requests that are in flight together are judged once. A process that dies or takes too long answers its own
    request with a failure of class ``"judge"`` or ``"timeout"``, which is no verdict on the program; a fresh process
    takes the next one.

    Args:
        make: makes the evaluators; pickled by cloudpickle.
        kind: their class, whose name, version and kind of times the pool goes by.
        environments: variables of each process, such as ``{"CUDA_VISIBLE_DEVICES": "1"}``; one process for each.
    """

    def __init__(self, make: Make, kind: type[Evaluator], environments: Sequence[Mapping[str, str]] = ({}, {})):
        if not environments:
            raise RequestError("a pool needs at least one process")
        self._work = partial(_answer, make)
        self._name, self.version, self.estimated = kind.__name__, kind.version, kind.estimated
        self.at_once = len(environments)
        self._free: list[tuple[Mapping[str, str], TaskProcess | None]] = [(e, None) for e in environments]
        self._places: dict[TaskProcess, Mapping[str, str]] = {}
        self._waiting: deque[_Job] = deque()
        self._running: dict[TaskProcess, _Job] = {}
        self._answers: dict[Ticket, Evaluation] = {}
        self._reports: dict[TaskProcess, EngineReport] = {}
        self._ended: list[EngineReport] = []

    @property
    def name(self) -> str:
        """That of its evaluators."""
        return self._name

    @property
    def report(self) -> EngineReport:
        """The sum of what its evaluators said with their last answers."""
        reports = [*self._ended, *self._reports.values()]
        seconds: dict[str, float] = {}
        for report in reports:
            for part, spent in report.seconds.items():
                seconds[part] = seconds.get(part, 0.0) + spent
        known = next((r.reference for r in reports if r.reference is not None), None)
        return EngineReport(seconds, sum(r.stored for r in reports), known)

    def submit(self, request: EvaluationRequest) -> Ticket:
        """Queue a request; a process begins with it as soon as one is free."""
        ticket = Ticket(request)
        jobs = (*self._running.values(), *self._waiting)
        job = next((j for j in jobs if j.request.digest == request.digest), None)
        if job is None:
            job = _Job(request)
            self._waiting.append(job)
        job.tickets.append(ticket)
        self._start()
        return ticket

    def gather(self, tickets: Sequence[Ticket], timeout: float | None = None) -> Iterator[tuple[Ticket, Evaluation]]:
        """The answers in the order they end."""
        until = None if timeout is None else time.monotonic() + timeout
        left = list(tickets)
        known = {t for job in (*self._running.values(), *self._waiting) for t in job.tickets} | self._answers.keys()
        if any(ticket not in known for ticket in left):
            raise RequestError("a ticket that was answered before, or of another evaluator")
        while left:
            for ticket in [t for t in left if t in self._answers]:
                left.remove(ticket)
                yield ticket, self._answers.pop(ticket)
            if not left or (until is not None and time.monotonic() >= until):
                return
            self._wait(until)

    def close(self) -> None:
        """End every process; what is in flight stays unanswered."""
        for process in self._running:
            process.kill()
        for _, idle in self._free:
            if idle is not None:
                idle.dismiss(DISMISSAL_S)
        self._free = [(environment, None) for environment, _ in self._free]
        self._free += [(self._places[process], None) for process in self._running]
        self._running.clear()
        self._waiting.clear()

    # -- parts

    def _start(self) -> None:
        """Give waiting requests to free processes."""
        while self._waiting and self._free:
            environment, idle = self._free.pop(0)
            process = idle or TaskProcess(environment)
            self._places[process] = environment
            job = self._waiting.popleft()
            limit = job.request.seconds
            job.process, job.deadline = process, None if limit is None else time.monotonic() + limit
            self._running[process] = job
            process.send(self._work, job.request.to_json())

    def _wait(self, until: float | None) -> None:
        """Wait for the next answer, death or deadline, at most until then."""
        ends = [end for end in (until, *(job.deadline for job in self._running.values())) if end is not None]
        limit = max(0.0, min(ends) - time.monotonic()) if ends else None
        ready = wait([process.pipe for process in self._running], limit)
        for process, job in list(self._running.items()):
            if process.pipe in ready:
                result, failure, alive = process.receive()
                if failure is None:
                    text, self._reports[process] = result
                    self._settle(process, Evaluation.from_json(text), alive)
                else:
                    error = f"the judge could not go on: {failure}"
                    self._settle(process, Evaluation(Gate.PROGRAM, error, "judge"), alive)
            elif job.deadline is not None and time.monotonic() >= job.deadline:
                error = f"the judge took longer than {job.request.seconds:g} s"
                self._settle(process, Evaluation(Gate.PROGRAM, error, "timeout"), alive=False)

    def _settle(self, process: TaskProcess, evaluation: Evaluation, alive: bool) -> None:
        """Answer the request that `process` was at, and use its place for the next one."""
        job, environment = self._running.pop(process), self._places[process]
        self._answers |= dict.fromkeys(job.tickets, evaluation)
        if not alive:
            process.kill()
            del self._places[process]
            self._ended += [r for r in [self._reports.pop(process, None)] if r is not None]
        self._free.append((environment, process if alive else None))
        self._start()


# -- in the processes

_engines: list[tuple[Evaluator, OpGraph]] = []
"""The evaluator of this process, once it was asked."""


def _answer(make: Make, text: str) -> tuple[str, EngineReport]:
    """The answer to a request, both as JSON, and what the evaluator says about its work."""
    if not _engines:
        _engines.append(make())
    engine, graph = _engines[0]
    found = engine.ask(EvaluationRequest.from_json(text, graph))
    return found.to_json(), engine.report


__all__ = ["LocalPool", "Make"]
