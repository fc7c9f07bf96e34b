"""The queue of an engine that judges at several places at a time: which request goes where, and which goes again.

Deals in requests, places and answers. Equal requests are judged once; the fault of a measurement or a machine sends a
request to another place, a few times. Knows nothing about what a place is: `qimeng.envs.workers.local_pool` has
processes of this machine, `qimeng.cluster.pool` the GPUs of a cluster.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from qimeng.errors import RequestError
from qimeng.interfaces import ASKED_AGAIN, EngineReport, Evaluation, EvaluationRequest, Evaluator, Gate, Ticket
from qimeng.interfaces.faults import LATE

TRIES = 3
"""Times that a request is begun; a fault of a measurement or a machine at the last one is its answer."""
LOSSES = 10
"""Times that a request is begun once more because its place has gone, which says nothing about the request."""


@dataclass(eq=False)
class Job:
    """One distinct request.

    Attributes:
        request: what is asked.
        digest: of the request.
        tickets: of all who asked it.
        tried: the places at which it was begun and not judged, in order.
        gone: how many of these have gone meanwhile.
        deadline: when it is given up (`time.monotonic`), on whatever place; None for never, or before it was begun.
    """

    request: EvaluationRequest
    digest: str
    tickets: list[Ticket] = field(default_factory=list)
    tried: list[Hashable] = field(default_factory=list)
    gone: int = 0
    deadline: float | None = None


class QueueingEvaluator(Evaluator):
    """An engine with a queue, for one specification. Its places are a subclass's.

    Args:
        kind: class of the evaluators that judge, whose name, version and kind of times the engine goes by.
        at_once: see `Evaluator`.
    """

    def __init__(self, kind: type[Evaluator], at_once: int):
        self._name, self.version, self.estimated, self.at_once = kind.__name__, kind.version, kind.estimated, at_once
        self._waiting: OrderedDict[str, Job] = OrderedDict()
        self._running: dict[str, Job] = {}
        self._asked: dict[Ticket, Job] = {}
        self._answers: dict[Ticket, Evaluation] = {}
        self._reports: dict[Hashable, EngineReport] = {}
        self._ended = EngineReport()
        self._again: Counter[str] = Counter()
        self._reason = ""

    @property
    def name(self) -> str:
        """That of its evaluators."""
        return self._name

    @property
    def report(self) -> EngineReport:
        """The sum of what its evaluators said with their last answers, and what was asked again."""
        found = self._ended
        for report in self._reports.values():
            found = _sum(found, report)
        return replace(found, again=dict(self._again), reason=self._reason)

    def submit(self, request: EvaluationRequest) -> Ticket:
        """Queue a request; it is begun as soon as a place is free."""
        ticket, digest = Ticket(request), request.digest
        job = self._running.get(digest) or self._waiting.get(digest)
        if job is None:
            job = self._waiting[digest] = Job(request, digest)
        job.tickets.append(ticket)
        self._asked[ticket] = job
        self._start()
        return ticket

    def gather(self, tickets: Sequence[Ticket], timeout: float | None = None) -> Iterator[tuple[Ticket, Evaluation]]:
        """The answers in the order they end."""
        until = None if timeout is None else time.monotonic() + timeout
        left = set(tickets)
        if any(ticket not in self._asked and ticket not in self._answers for ticket in left):
            raise RequestError("a ticket that was answered before, or of another evaluator")
        while left:
            for ticket in [t for t in self._answers if t in left]:
                left.remove(ticket)
                yield ticket, self._answers.pop(ticket)
            if not left or (until is not None and time.monotonic() >= until):
                return
            self._wait(until)
            self._give_up()

    def has_begun(self, ticket: Ticket) -> bool:
        """Whether a request is at a place now, or was answered."""
        job = self._asked.get(ticket)
        return job is None or self._running.get(job.digest) is job

    def cancel(self, ticket: Ticket) -> None:
        """Forget a request; where nobody else asked the same, the work on it is ended."""
        self._answers.pop(ticket, None)
        job = self._asked.pop(ticket, None)
        if job is None:
            return
        job.tickets.remove(ticket)
        if job.tickets:
            return
        if self._running.pop(job.digest, None) is not None:
            self._stop(job)
        else:
            self._waiting.pop(job.digest, None)
        self._start()

    def close(self) -> None:
        """End every place; what is in flight stays unanswered."""
        self._waiting.clear()
        self._running.clear()
        self._asked.clear()

    # -- what a subclass has

    @property
    @abstractmethod
    def _places(self) -> Collection[Hashable]:
        """Every place, busy ones included."""

    @property
    @abstractmethod
    def _free(self) -> Sequence[Hashable]:
        """The places with nothing to do, the one to use next first."""

    @abstractmethod
    def _begin(self, job: Job, place: Hashable) -> None:
        """Have `job` judged at a place that is free."""

    @abstractmethod
    def _wait(self, until: float | None) -> None:
        """Wait for what happens next, at most until then (`time.monotonic`), and `_settle` what has ended."""

    @abstractmethod
    def _stop(self, job: Job) -> None:
        """End the work on a job; its place is free after that."""

    # -- for a subclass

    def _start(self) -> None:
        """Give waiting requests to free places."""
        while (found := self._next()) is not None:
            job, place = found
            del self._waiting[job.digest]
            self._running[job.digest] = job
            if job.deadline is None and job.request.seconds is not None:
                job.deadline = time.monotonic() + job.request.seconds
            self._begin(job, place)

    def _settle(self, job: Job, place: Hashable, evaluation: Evaluation, gone: bool = False) -> None:
        """Answer a job that has ended at `place`, or queue it again, before all others.

        Args:
            job: which is running.
            place: where.
            evaluation: its answer, or that there is none.
            gone: whether the place itself was lost, such as a machine that left.
        """
        del self._running[job.digest]
        fault = evaluation.fault
        if fault is not None and fault in ASKED_AGAIN:
            job.tried.append(place)
            job.gone += gone
            self._reason = evaluation.error or ""
            if may_begin_again(len(job.tried), job.gone):
                self._again[fault.value] += 1
                self._waiting[job.digest] = job
                self._waiting.move_to_end(job.digest, last=False)
                return
            evaluation = replace(evaluation, error=f"{evaluation.error} (tried {len(job.tried)} times)")
        self._answer(job, evaluation)

    def _seconds_to(self, until: float | None) -> float | None:
        """Seconds that may be waited for an answer, until then and until the next job is given up; None for ever."""
        ends = [end for end in (until, *(job.deadline for job in self._begun())) if end is not None]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _forget(self, who: Hashable) -> None:
        """Keep the last report of an evaluator that has ended, as part of the sum."""
        if who in self._reports:
            self._ended = _sum(self._ended, self._reports.pop(who))

    # -- parts

    def _next(self) -> tuple[Job, Hashable] | None:
        """The next job and its place: one at which it was not tried, unless there is no such place."""
        free = self._free
        if not free:
            return None
        for job in self._waiting.values():
            fresh = [place for place in free if place not in job.tried]
            if fresh:
                return job, self._best(job, fresh)
            if all(place in job.tried for place in self._places):
                return job, self._best(job, free)
        return None

    def _best(self, job: Job, free: Sequence[Hashable]) -> Hashable:
        """The place for a job among free ones."""
        return free[0]

    def _give_up(self) -> None:
        """Answer the jobs whose time is used up."""
        now = time.monotonic()
        for job in [j for j in self._begun() if j.deadline is not None and now >= j.deadline]:
            if self._running.pop(job.digest, None) is not None:
                self._stop(job)
            else:
                del self._waiting[job.digest]
            text = f"the judge took longer than {job.request.seconds:g} s"
            self._answer(job, Evaluation(Gate.PROGRAM, text, LATE))
        self._start()

    def _begun(self) -> list[Job]:
        """The jobs that were begun and are not answered: those at a place, and those that wait for another one."""
        again = []
        for job in self._waiting.values():  # they are the first
            if not job.tried:
                break
            again.append(job)
        return [*self._running.values(), *again]

    def _answer(self, job: Job, evaluation: Evaluation) -> None:
        for ticket in job.tickets:
            del self._asked[ticket]
            self._answers[ticket] = evaluation


def may_begin_again(tried: int, gone: int) -> bool:
    """Whether work is begun once more that was begun `tried` times, at places of which `gone` were lost meanwhile."""
    return tried - gone < TRIES and gone <= LOSSES


def _sum(a: EngineReport, b: EngineReport) -> EngineReport:
    seconds = {part: a.seconds.get(part, 0.0) + b.seconds.get(part, 0.0) for part in {**a.seconds, **b.seconds}}
    return EngineReport(seconds, a.stored + b.stored, a.reference or b.reference)


__all__ = ["LOSSES", "TRIES", "Job", "QueueingEvaluator", "may_begin_again"]
