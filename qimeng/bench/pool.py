"""Runs tasks in worker processes, so that no task can end the run.

Deals in processes, pipes, places and time limits: if a worker crashes, hangs or is killed, one task is lost and
reported as a failure. Knows nothing about what a task is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from qimeng.envs.workers.task_process import TaskProcess

T = TypeVar("T")
R = TypeVar("R")

DISMISSAL_S = 5.0
"""Seconds that an idle worker may take to end."""

PATIENCE = 12
"""A task that fits nowhere may be overtaken so often; then a place is kept free for it."""


@dataclass(frozen=True)
class Place:
    """Where workers run, a GPU for example.

    Attributes:
        name: what people call it.
        slots: tasks at once.
        environment: variables of its workers, set before they import anything.
    """

    name: str = ""
    slots: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome(Generic[T, R]):
    """The outcome of one task.

    Attributes:
        task: the task.
        result: what the work returned; None where it failed.
        failure: how the worker ended, in words; None where it returned.
        interrupted: True if the end of the run stopped the task, which is no failure of the task.
    """

    task: T
    result: R | None = None
    failure: str | None = None
    interrupted: bool = False


@dataclass
class _Worker:
    process: TaskProcess
    place: Place
    task: Any = None
    deadline: float = 0.0


class Pool:
    """Worker processes at some places; each works on many tasks, one after another. Close it when done.

    Args:
        places: where workers run; they are started when the first task needs them.
        clock: seconds that only move forward.
    """

    def __init__(self, places: Sequence[Place] = (Place(),), clock: Callable[[], float] = time.monotonic):
        self.places, self._clock = tuple(places), clock
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, busy ones at once."""
        for worker in self._workers:
            if worker.task is None:
                worker.process.pipe.close()
        for worker in self._workers:
            worker.process.dismiss(DISMISSAL_S if worker.task is None else 0.0)
        self._workers.clear()

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
        """Run `work` on each task and yield the outcomes as they come; what still runs when this is closed is ended.

        The first task that can start anywhere is next, at the place with the fewest running tasks. A task that was
        overtaken `PATIENCE` times reserves that place, while others continue elsewhere.

        Args:
            tasks: what to do.
            work: pickled by cloudpickle; imports it needs happen in the worker.
            limit_s: seconds that one task may take before its worker is killed with all its children.
            stop_at: the clock's time at which what still runs is cut off.
            start_before: the clock's time after which none is started.
            may_start: whether a task may run at a place beside those that run there; asked again when one of them ends.
            on_start: called when a task is started.
        """
        queue, clock = Queue(tasks, may_start), self._clock
        try:
            while True:
                while clock() < start_before:
                    chosen = queue.take([(place, self._running(place)) for place in self.places])
                    if chosen is None:
                        break
                    task, place = chosen
                    on_start(task, place)
                    worker = self._idle(place)
                    worker.task, worker.deadline = task, clock() + limit_s
                    worker.process.send(work, task)
                busy = [w for w in self._workers if w.task is not None]
                if not busy:
                    return
                until = min([stop_at, *(w.deadline for w in busy)])
                ready = wait(
                    [w.process.pipe for w in busy], timeout=max(0.0, until - clock()) if until < math.inf else None
                )
                for worker in busy:
                    outcome = _collect(worker, worker.process.pipe in ready, clock(), limit_s, stop_at)
                    if outcome is None:
                        continue
                    worker.task = None
                    if outcome.failure is not None:
                        self._end(worker)
                    yield outcome
        finally:
            for worker in [w for w in self._workers if w.task is not None]:
                self._end(worker)

    def _running(self, place: Place) -> list[Any]:
        return [w.task for w in self._workers if w.place is place and w.task is not None]

    def _idle(self, place: Place) -> _Worker:
        """A worker at `place` with nothing to do; a new one where there is none."""
        for worker in self._workers:
            if worker.place is place and worker.task is None:
                return worker
        self._workers.append(_Worker(TaskProcess(place.environment), place))
        return self._workers[-1]

    def _end(self, worker: _Worker) -> None:
        worker.process.kill()
        self._workers.remove(worker)


@dataclass(eq=False)
class _Waiting(Generic[T]):
    """A task, and how often another was started before it."""

    task: T
    overtaken: int = 0


class Queue(Generic[T]):
    """Tasks that wait, in order.

    Args:
        tasks: what waits.
        may_start: see `Pool.run`.
    """

    def __init__(self, tasks: Iterable[T], may_start: Callable[[T, Sequence[T]], bool]):
        self._waiting, self._may_start = [_Waiting(task) for task in tasks], may_start

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, running: Sequence[tuple[Place, Sequence[T]]]) -> tuple[T, Place] | None:
        """The next task and its place; None where none may start now.

        Args:
            running: the tasks that run at each place.
        """
        places = sorted(running, key=lambda pair: len(pair[1]))
        passed: list[_Waiting[T]] = []
        for waiting in self._waiting:
            free = [(place, beside) for place, beside in places if len(beside) < place.slots]
            if not free:
                return None
            place = next((place for place, beside in free if self._may_start(waiting.task, beside)), None)
            if place is not None:
                self._waiting.remove(waiting)
                for other in passed:
                    other.overtaken += 1
                return waiting.task, place
            if waiting.overtaken >= PATIENCE:
                places = places[1:]
            passed.append(waiting)
        return None


def _collect(worker: _Worker, ready: bool, now: float, limit_s: float, stop_at: float) -> Outcome[Any, Any] | None:
    """The outcome of the worker's task, or None while it runs."""
    if ready:
        result, failure, _ = worker.process.receive()
        return Outcome(worker.task, result, failure)
    if now >= stop_at:
        return Outcome(worker.task, failure="cut off at the end of the run", interrupted=True)
    if now >= worker.deadline:
        return Outcome(worker.task, failure=f"took longer than {limit_s:.0f} s")
    return None


__all__ = ["Outcome", "Place", "Pool", "Queue"]
