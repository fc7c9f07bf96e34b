"""Whole tasks on the GPUs of a cluster, such as a benchmark's problems: the face of `qimeng.bench.pool.Pool`.

A task stays on one GPU while it lives, so its baseline and its candidates are measured on the same card. Where this GPU
leaves, the whole task begins again on another one. Deals in tasks, places and time limits; knows nothing about what a
task is.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import cloudpickle

from qimeng.bench.pool import Outcome, Place, Pool, Queue
from qimeng.cluster.fleet import PROBE_S, Call, Fleet, packed
from qimeng.cluster.gpus import ClusterError, Gpu
from qimeng.cluster.supervisor import Reply
from qimeng.envs.workers.queueing import may_begin_again

T = TypeVar("T")
R = TypeVar("R")

ENDING_S = 5.0
"""Seconds that tasks which are ended may take to send what they have left behind."""
LISTEN_S = 0.5
"""Seconds between two looks for what a task has told."""
NEW_GPU_S = 2.0
"""Seconds between two looks for a GPU that has come, where tasks wait."""


class ClusterTasks(Pool):
    """Tasks on all GPUs of one generation; used as the pool of this machine is. Close it when done.

    A task whose process, keeper or node is lost is begun again, elsewhere where that is possible: see
    `qimeng.envs.workers.queueing.may_begin_again`. What a task raises, and one that took too long, are outcomes: they
    would be the same again. Only so many tasks are in flight as there are GPUs and slots.

    Args:
        fleet: the GPUs; the pool closes it.
        slots: tasks at once on each GPU.
        on_files: called in this process with the files that a task left in its folder
            (`qimeng.cluster.supervisor.TASK_FOLDER`), also where the task was ended.
        clock: seconds that only move forward.
        on_note: called in this process with what a task tells while it runs
            (`qimeng.cluster.supervisor.tell_driver`), and with None while a task waits for its turn.

    Attributes:
        again: tasks that were begun again, by the GPU that was lost.
    """

    def __init__(
        self,
        fleet: Fleet,
        slots: int = 1,
        on_files: Callable[[Mapping[str, bytes]], None] = lambda files: None,
        clock: Callable[[], float] = time.monotonic,
        on_note: Callable[[Any], None] | None = None,
    ):
        super().__init__((), clock)
        self._on_note, self._told = on_note, Counter[Call]()
        self._fleet, self._slots, self._on_files = fleet, slots, on_files
        self._begun: dict[Call, int] = {}
        self._places: dict[Gpu, Place] = {}
        self._again: list[int] = []
        self.again: Counter[str] = Counter()

    def close(self) -> None:
        """End what still runs."""
        self._begun.clear()
        self._fleet.close()

    def ask(self, work: Callable[[], R], limit_s: float = 120.0) -> R:
        """What `work()` returns at one of the GPUs, for example which device that is.

        Raises:
            ClusterError: it failed there.
        """
        (outcome,) = self.run([work], _result_of, limit_s)
        if outcome.failure is not None:
            raise ClusterError(f"a GPU of the cluster could not be asked: {outcome.failure}")
        found: Any = outcome.result
        return cast(R, found)

    def run(
        self,
        tasks: Iterable[T],
        work: Callable[[T], R],
        limit_s: float,
        stop_at: float = math.inf,
        start_before: float = math.inf,
        may_start: Callable[[T, Sequence[T]], bool] = lambda task, running: True,
        on_start: Callable[[T, Place], None] = lambda task, place: None,
    ) -> Iterator[Outcome[T, R]]:
        """See `qimeng.bench.pool.Pool.run`; the seconds that a task may take begin with its turn on the GPU.

        Raises:
            ClusterError: no GPU is left, and none came back in time.
        """
        every, clock, data = list(tasks), self._clock, packed(work)
        queue = Queue(range(len(every)), lambda n, beside: may_start(every[n], [every[m] for m in beside]))
        tried: dict[int, list[Gpu]] = {}
        gone: Counter[int] = Counter()
        try:
            while True:
                while clock() < start_before and (chosen := self._next(queue, tried)) is not None:
                    number, gpu = chosen
                    on_start(every[number], self._places[gpu])
                    tried.setdefault(number, []).append(gpu)
                    lane = next(lane for lane in range(self._slots) if lane not in self._lanes(gpu))
                    call = self._fleet.begin(gpu, lane, data, cloudpickle.dumps(every[number]), self._slots, limit_s)
                    self._begun[call] = number
                if not self._begun:
                    if not (queue or self._again) or clock() >= min(start_before, stop_at):
                        return
                    self._fleet.await_gpu()
                    self._fleet.pause(PROBE_S)
                    continue
                for call, reply in self._fleet.ended(self._seconds_to(stop_at, bool(queue or self._again))):
                    del self._told[call]
                    if (number := self._begun.pop(call, -1)) < 0:
                        continue
                    self._take(reply)
                    lost = reply.result is None and not reply.alive and not reply.late
                    self._fleet.rest(call.gpu, lost)
                    gone[number] += reply.gone
                    if lost and may_begin_again(len(tried[number]), gone[number]):
                        self.again[call.gpu.name] += 1
                        self._again.append(number)
                    else:
                        yield self._outcome(every[number], reply, limit_s, len(tried[number]))
                self._listen()
                if clock() >= stop_at:
                    for number in self._cut_off() + self._again:
                        yield Outcome(every[number], failure="cut off at the end of the run", interrupted=True)
                    return
        finally:
            self._cut_off()
            self._again.clear()

    # -- parts

    def _next(self, queue: Queue[int], tried: Mapping[int, Sequence[Gpu]]) -> tuple[int, Gpu] | None:
        """The next task and its GPU: one that was lost goes first, to a GPU where it has not been if there is one."""
        alive = self._fleet.gpus
        for gpu in alive:
            self._places.setdefault(gpu, Place(gpu.name, self._slots))
        free = [gpu for gpu in alive if self._fleet.ready(gpu) and len(self._lanes(gpu)) < self._slots]
        if queue or self._again:
            free = self._fleet.by_use(free)
        for number in self._again:
            fresh = [gpu for gpu in free if gpu not in tried[number]]
            if not fresh and all(gpu in tried[number] for gpu in alive):
                fresh = free
            if fresh:
                self._again.remove(number)
                return number, fresh[0]
        named = {gpu.name: gpu for gpu in free}
        running = [(self._places[gpu], [n for call, n in self._begun.items() if call.gpu == gpu]) for gpu in free]
        chosen = queue.take(running)
        return None if chosen is None else (chosen[0], named[chosen[1].name])

    def _lanes(self, gpu: Gpu) -> set[int]:
        return {call.lane for call in self._begun if call.gpu == gpu}

    def _seconds_to(self, stop_at: float, more: bool) -> float | None:
        """Seconds that may be waited for the end of a task; None for ever."""
        ends = [stop_at - self._clock()] if stop_at < math.inf else []
        if self._on_note is not None:
            ends.append(LISTEN_S)
        if more:  # a GPU may come meanwhile
            ends.append(NEW_GPU_S)
        return max(0.0, min(ends)) if ends else None

    def _listen(self) -> None:
        """Pass on what the tasks that run have told."""
        for call in self._begun if self._on_note is not None else ():
            notes = self._fleet.told(call, self._told[call])
            self._told[call] += len(notes or ())
            for note in [None] if notes is None else notes:
                assert self._on_note is not None
                self._on_note(note)

    def _outcome(self, task: Any, reply: Reply, limit_s: float, tried: int) -> Outcome[Any, Any]:
        if reply.late:
            return Outcome(task, failure=f"took longer than {limit_s:.0f} s")
        if reply.result is None:
            return Outcome(task, failure=reply.failure if reply.alive else f"{reply.failure} (tried {tried} times)")
        return Outcome(task, cloudpickle.loads(reply.result))

    def _cut_off(self) -> list[int]:
        """End what is in flight, and keep what it has left behind; the numbers of those tasks."""
        calls, ended = list(self._begun), list(self._begun.values())
        self._begun.clear()
        for reply in self._fleet.stopped(calls, ENDING_S):
            self._take(reply)
        return ended

    def _take(self, reply: Reply) -> None:
        if reply.files:
            self._on_files(reply.files)


def _result_of(work: Callable[[], Any]) -> Any:
    return work()


__all__ = ["ClusterTasks"]
