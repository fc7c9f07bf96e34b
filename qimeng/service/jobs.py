"""The jobs of the service: who asked what, how far it is, and what was answered before.

Deals in submissions, states and counts. One thread owns the pool, whose methods are not for several threads at once;
all others speak to it here. Answers that would be the same again are known by the content of their submission. Knows
nothing about HTTP.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, cast

from qimeng.envs.workers.answering import failure_of, no_verdict
from qimeng.envs.workers.queueing import QueueingEvaluator
from qimeng.errors import in_words
from qimeng.interfaces import Evaluation, EvaluationRequest, Ticket
from qimeng.service.known import KnownAnswers
from qimeng.service.limits import Limits, Refused
from qimeng.service.messages import Answer, Submission

_LOG = logging.getLogger(__name__)

TICK_S = 0.05
"""Seconds between two looks for new submissions while others are judged."""


class State(str, Enum):
    """How far a job is."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether nothing more comes."""
        return self in (State.DONE, State.CANCELLED)


@dataclass
class Job:
    """One submission of one client.

    Attributes:
        id: names it to the client; nobody can guess it.
        client: who asked.
        digest: of the submission.
        state: how far it is.
        answer: once it is done.
        known: whether the answer was known from an equal submission before.
    """

    id: str
    client: str
    digest: str
    state: State = State.QUEUED
    answer: Answer | None = None
    known: bool = False


class Jobs:
    """All jobs of a server. Close it when done.

    Args:
        make: makes the pool, and another one where that raised.
        limits: what is taken.
        versions: of what judges, for the answers.
        known: answers that are known already, and where new ones are kept; in memory by default. The jobs close it.
    """

    def __init__(
        self,
        make: Callable[[], QueueingEvaluator],
        limits: Limits,
        versions: dict[str, str] | None = None,
        known: KnownAnswers | None = None,
    ):
        self.limits, self._make, self._versions = limits, make, dict(versions or {})
        self._known = known or KnownAnswers(None, limits.kept, self._versions)
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._open: dict[str, Job] = {}
        self._tickets: dict[str, Ticket] = {}
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self._again: dict[str, int] = {}
        self._pool = make()
        self._thread = threading.Thread(target=self._work, name="qimeng-service", daemon=True)
        self._thread.start()

    def submit(self, submission: Submission, client: str) -> Job:
        """Take a submission; where an equal one was answered before, that answer is its own.

        Raises:
            Refused: it is too large or cannot be asked, or too many wait.
        """
        self.limits.check(submission)
        if submission.options.seconds is None:
            submission = replace(submission, options=replace(submission.options, seconds=self.limits.seconds))
        with self._lock:
            self.counts["submitted"] += 1
            job = Job(secrets.token_urlsafe(16), client, submission.digest)
            known = self._known.get(job.digest)
            if known is not None:
                self.counts["known"] += 1
                job.state, job.answer, job.known = State.DONE, known, True
            else:
                self._refuse_more(client)
                self._open[job.id] = job
                self._orders.put(lambda: self._begin(job, submission))
            self._jobs[job.id] = job
            self._forget_old()
        return job

    def find(self, job_id: str, client: str) -> Job:
        """The job of this client.

        Raises:
            Refused: with status 404: there is none.
        """
        with self._lock:
            job = self._jobs.get(job_id)
        if job is None or job.client != client:
            raise Refused(404, "unknown-job", "no such job; what has ended is forgotten after a while")
        return job

    def cancel(self, job_id: str, client: str) -> Job:
        """End a job; one that has ended stays as it is.

        Raises:
            Refused: as for `find`.
        """
        job = self.find(job_id, client)
        with self._lock:
            if not job.state.ended:
                job.state = State.CANCELLED
                self.counts["cancelled"] += 1
                del self._open[job.id]
                self._orders.put(lambda: self._drop(job))
        return job

    def metrics(self) -> dict[str, Any]:
        """Counts since the start, and what waits now."""
        with self._lock:
            states = Counter(job.state.value for job in self._open.values())
            return {
                "queued": states["queued"],
                "running": states["running"],
                "clients": len({job.client for job in self._open.values()}),
                "counts": {name: self.counts[name] for name in ("submitted", "known", "judged", "passed", "cancelled")},
                "faults": dict(self.faults),
                "again": dict(self._again),
            }

    def close(self) -> None:
        """End all work; open jobs stay unanswered."""
        self._orders.put(None)
        self._thread.join()
        with self._lock:
            self._known.close()

    # -- in any thread, with the lock

    def _refuse_more(self, client: str) -> None:
        mine = sum(job.client == client for job in self._open.values())
        if mine >= self.limits.per_client:
            raise Refused(429, "queue-full", f"{mine} of your submissions are open, which is the most; wait for some")
        if len(self._open) >= self.limits.in_all:
            raise Refused(503, "queue-full", "the service is busy; try again later")

    def _forget_old(self) -> None:
        for job_id in list(self._jobs)[: max(0, len(self._jobs) - len(self._open) - self.limits.kept)]:
            if self._jobs[job_id].state.ended:
                del self._jobs[job_id]

    # -- in the thread that owns the pool

    def _work(self) -> None:
        while True:
            while not (self._tickets and self._orders.empty()):
                order = self._orders.get()
                if order is None:
                    self._pool.close()
                    return
                self._guarded(order)
            self._guarded(self._gather)

    def _gather(self) -> None:
        of = {ticket: job_id for job_id, ticket in self._tickets.items()}
        for ticket, found in self._pool.gather(list(of), timeout=TICK_S):
            self._finish(of[ticket], found)
            if not self._orders.empty():
                break
        begun = [job_id for job_id, ticket in self._tickets.items() if self._pool.has_begun(ticket)]
        with self._lock:
            for job_id in begun:
                if (job := self._open.get(job_id)) is not None:
                    job.state = State.RUNNING
            self._again = dict(self._pool.report.again)

    def _begin(self, job: Job, submission: Submission) -> None:
        if not job.state.ended:
            self._tickets[job.id] = self._pool.submit(cast(EvaluationRequest, submission))

    def _drop(self, job: Job) -> None:
        if (ticket := self._tickets.pop(job.id, None)) is not None:
            self._pool.cancel(ticket)

    def _finish(self, job_id: str, found: Evaluation) -> None:
        self._tickets.pop(job_id, None)
        answer = Answer.of(found, self._versions)
        with self._lock:
            job = self._open.pop(job_id, None)
            if job is None:
                return
            job.state, job.answer = State.DONE, answer
            self.counts["judged"] += 1
            self.counts["passed"] += answer.fault is None
            if answer.fault is not None:
                self.faults[answer.fault.kind] += 1
            if found.lasting and answer.fault is not None or found.ok:
                self._known.put(job.digest, answer)

    def _guarded(self, order: Callable[[], None]) -> None:
        """Do as ordered; where the pool raises, all that is open is answered with that, and a new pool is made."""
        try:
            order()
        except Exception as error:  # noqa: BLE001  whatever an engine raises, the service goes on
            _LOG.exception("what judges failed; all open submissions are answered with that")
            found = no_verdict(in_words(error), failure_of(error))
            with self._lock:
                waiting = list(self._open)
            for job_id in waiting:
                self._finish(job_id, found)
            try:
                self._pool.close()
                self._pool = self._make()
            except Exception:  # noqa: BLE001  an engine may raise anything; the next submission tries again
                _LOG.exception("no other judge could be made")


__all__ = ["Job", "Jobs", "State"]
