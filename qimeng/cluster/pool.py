"""An engine whose evaluators work on the GPUs of a cluster.

Deals in which GPU a request goes to. The boundary, the queue and what is asked again are those of the pool of this
machine (`qimeng.envs.workers.local_pool`). Knows nothing about how its evaluators judge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from functools import partial

import cloudpickle

from qimeng.cluster.fleet import PROBE_S, Call, Fleet, packed
from qimeng.cluster.gpus import ClusterError, Gpu
from qimeng.envs.workers.answering import Make, answer, no_verdict
from qimeng.envs.workers.queueing import Job, QueueingEvaluator
from qimeng.errors import RequestError
from qimeng.interfaces import Evaluation, EvaluationRequest, Evaluator, Fault, Ticket
from qimeng.interfaces.faults import JUDGE_FAILED, MACHINE_FAILED

LANES = 2
"""Requests at a time on a GPU, as in the pool of this machine: while one is measured, the other is compiled."""


class GpuLeft(ClusterError):
    """The GPU that a search was pinned to has left, and what it measured does not compare with another one's times.

    Start the search again, with the same pool after `ClusterPool.begin_again`: baseline and candidates are then
    measured on another GPU.
    """


class ClusterPool(QueueingEvaluator):
    """Evaluators on a cluster behind one boundary, for one specification.

    A pool is pinned to one GPU: all its times are of one card, the baseline's too, so that they compare. Where this GPU
    leaves before it has measured anything, another one of the same generation takes its place; later, `GpuLeft` is
    raised. A pool that is not pinned uses all GPUs of one generation. Each of its answers is then to be taken by
    itself: its baseline was measured beside it, on the card that it names (`Evaluation.card`).

    Where a process, a keeper or a node is lost, the request is judged again elsewhere (`TRIES`, `LOSSES`), at the
    pinned GPU where there is no other choice. A kernel's fault is never asked again. An answer counts once, whatever
    comes later from a place that was given up.

    Args:
        make: makes the evaluators; pickled by cloudpickle.
        kind: their class, whose name, version and kind of times the pool goes by.
        fleet: the GPUs; the pool closes it.
        pinned: whether to stay on one GPU.
        moves: whether a pinned pool goes on at another GPU where its own leaves, instead of raising `GpuLeft`: for
            whoever compares only what an answer holds, a program's time beside its own baseline's.
        lanes: requests at a time on each GPU.
        beside: turns that may run on a GPU at a time while one of the pool's does, those of other runs counted; `lanes`
            by default.
    """

    def __init__(
        self,
        make: Make,
        kind: type[Evaluator],
        fleet: Fleet,
        pinned: bool = True,
        lanes: int = LANES,
        moves: bool = False,
        beside: int = 0,
    ):
        if lanes < 1:
            raise RequestError("a pool needs at least one lane on a GPU")
        super().__init__(kind, lanes)
        self._work, self._fleet, self._pinned, self._lanes = packed(partial(answer, make)), fleet, pinned, lanes
        self._calls: dict[Call, Job] = {}
        self._used: dict[Gpu, int] = {}
        self._begun_calls = 0
        self._home: Gpu | None = None
        self._moves, self._measured, self._beside = moves, 0, beside or lanes
        if not pinned:
            self.at_once = lanes * len(fleet.gpus)

    @property
    def home(self) -> Gpu | None:
        """The GPU that a pinned pool is on; None before it was needed, and where the pool is not pinned."""
        return self._home

    def submit(self, request: EvaluationRequest) -> Ticket:
        """Queue a request; it is begun as soon as a GPU is free.

        Raises:
            GpuLeft: see the class.
        """
        self._stay()
        return super().submit(request)

    def gather(self, tickets: Sequence[Ticket], timeout: float | None = None) -> Iterator[tuple[Ticket, Evaluation]]:
        """The answers in the order they end.

        Raises:
            GpuLeft: see the class.
            ClusterError: no GPU is left, and none came back in time.
        """
        self._stay()
        yield from super().gather(tickets, timeout)

    def begin_again(self) -> None:
        """Forget what was measured and asked, and go on at another GPU, after `GpuLeft`."""
        for job in list(self._running.values()):
            self._stop(job)
        self._waiting.clear()
        self._running.clear()
        self._asked.clear()
        self._answers.clear()
        self._home, self._measured = None, 0

    def close(self) -> None:
        """End every process; what is in flight stays unanswered."""
        self._calls.clear()
        super().close()
        self._fleet.close()

    @property
    def _places(self) -> Collection[Hashable]:
        self._stay()
        return self._fleet.gpus if self._home is None else (self._home,)

    @property
    def _free(self) -> Sequence[Hashable]:
        """The one that was used least recently first."""
        self._stay()
        gpus = self._fleet.gpus if self._home is None else (self._home,)
        busy = Counter(call.gpu for call in self._calls)
        free = [gpu for gpu in gpus if busy[gpu] < self._lanes and self._fleet.ready(gpu)]
        return sorted(free, key=lambda gpu: (busy[gpu], self._used.get(gpu, 0)))

    def _stay(self) -> None:
        """Choose the home of a pinned pool, or see whether it is still there."""
        if not self._pinned or self._home in (gpus := self._fleet.gpus):
            return
        if self._home is not None and self._measured and not self._moves:
            raise GpuLeft(
                f"{self._home.name} has left the cluster, or cannot be used; {self._measured} answers of it do not "
                "compare with another GPU's: start this search again (ClusterPool.begin_again)"
            )
        self._home = next(iter(self._fleet.by_use([gpu for gpu in gpus if gpu != self._home])), None)

    def _begin(self, job: Job, place: Hashable) -> None:
        assert isinstance(place, Gpu)
        self._begun_calls += 1
        self._used[place] = self._begun_calls
        taken = {call.lane for call in self._calls if call.gpu == place}
        lane = next(lane for lane in range(self._lanes) if lane not in taken)
        self._calls[self._fleet.begin(place, lane, self._work, job.request.to_json(), self._beside)] = job

    def _wait(self, until: float | None) -> None:
        if not self._calls:
            self._fleet.await_gpu()
            self._start()
            if not self._calls:  # a keeper was lost a moment ago
                left = self._seconds_to(until)
                self._fleet.pause(PROBE_S if left is None else min(PROBE_S, left))
        for call, reply in self._fleet.ended(self._seconds_to(until)):
            job = self._calls.pop(call, None)
            if job is None:  # given up before
                continue
            if reply.result is not None:
                text, self._reports[call.gpu, call.lane] = cloudpickle.loads(reply.result)
                found = Evaluation.from_json(text)
            else:
                found = no_verdict(reply.failure or "", JUDGE_FAILED if reply.alive else MACHINE_FAILED)
            self._fleet.rest(call.gpu, found.fault is Fault.MACHINE)
            if found.fault is Fault.MACHINE:
                self._forget((call.gpu, call.lane))
                if reply.alive:  # what is broken in its process would be for the next request
                    self._fleet.stop(call)
            elif found.timing is not None and not found.timing.estimated:
                self._measured += 1
            self._settle(job, call.gpu, found, reply.gone)

    def _stop(self, job: Job) -> None:
        for call in [call for call, busy in self._calls.items() if busy is job]:
            del self._calls[call]
            self._fleet.stop(call)


__all__ = ["LANES", "ClusterPool", "GpuLeft"]
