"""Tasks in worker processes, so that no task can take the run down.

Deals in processes, pipes and time limits: a worker that crashes, hangs or is killed costs one task, which comes back as
a failure in words. Knows nothing about what a task is.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Generic, TypeVar

import cloudpickle

T = TypeVar("T")
R = TypeVar("R")

DISMISSAL_S = 5.0
"""Seconds that an idle worker may take to end."""

_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Outcome(Generic[T, R]):
    """What came of one task.

    Attributes:
        task: the task.
        result: what the work returned; None where it failed.
        failure: how the worker ended, in words; None where it returned.
        interrupted: True where the run's own end cut the task off, which says nothing about the task.
    """

    task: T
    result: R | None = None
    failure: str | None = None
    interrupted: bool = False


@dataclass
class _Worker(Generic[T]):
    process: SpawnProcess
    pipe: Connection
    task: T | None = None
    deadline: float = 0.0


def run_tasks(
    tasks: Iterable[T],
    work: Callable[[T], R],
    jobs: int,
    limit_s: float,
    stop_at: float,
    start_before: float = math.inf,
    may_start: Callable[[T, Sequence[T]], bool] = lambda task, running: True,
    on_start: Callable[[T], None] = lambda task: None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Outcome[T, R]]:
    """Run `work` on each task, `jobs` at once, and yield the outcomes as they come.

    Args:
        tasks: what to do; of those that may start, the first one is next.
        work: pickled by cloudpickle; imports it needs happen in the worker.
        jobs: number of processes; each works on many tasks, one after another.
        limit_s: seconds that one task may take before its worker is killed with all its children.
        stop_at: the clock's time at which what still runs is cut off.
        start_before: the clock's time after which none is started.
        may_start: whether a task may run beside those that run; asked again when one of them ends.
        on_start: called when a task is started.
        clock: seconds that only move forward.
    """
    payload, waiting = cloudpickle.dumps(work), list(tasks)
    workers: list[_Worker[T]] = []
    try:
        while True:
            while clock() < start_before:
                running = [w.task for w in workers if w.task is not None]
                task = next((t for t in waiting if may_start(t, running)), None) if len(running) < jobs else None
                if task is None:
                    break
                waiting.remove(task)
                worker = next((w for w in workers if w.task is None), None)
                if worker is None:
                    worker = _start(payload)
                    workers.append(worker)
                on_start(task)
                worker.task, worker.deadline = task, clock() + limit_s
                worker.pipe.send_bytes(cloudpickle.dumps(task))
            busy = [w for w in workers if w.task is not None]
            if not busy:
                return
            until = min([stop_at, *(w.deadline for w in busy)])
            ready = wait([w.pipe for w in busy], timeout=max(0.0, until - clock()))
            for worker in busy:
                outcome = _collect(worker, worker.pipe in ready, clock(), limit_s, stop_at)
                if outcome is None:
                    continue
                worker.task = None
                if outcome.failure is not None:
                    _kill(worker)
                    workers.remove(worker)
                yield outcome
    finally:
        for worker in workers:
            _dismiss(worker)


def _collect(worker: _Worker[T], ready: bool, now: float, limit_s: float, stop_at: float) -> Outcome[T, Any] | None:
    """The outcome of the worker's task, or None while it runs."""
    assert worker.task is not None
    if ready:
        try:
            result, failure = cloudpickle.loads(worker.pipe.recv_bytes())
            return Outcome(worker.task, result, failure)
        except (EOFError, ConnectionResetError):
            worker.process.join(5)
            code = worker.process.exitcode
            ended = (
                f"signal {-code} ({signal.Signals(-code).name})"
                if code is not None and code < 0
                else f"exit code {code}"
            )
            return Outcome(worker.task, failure=f"the worker process died: {ended}")
    if now >= stop_at:
        return Outcome(worker.task, failure="cut off at the end of the run", interrupted=True)
    if now >= worker.deadline:
        return Outcome(worker.task, failure=f"took longer than {limit_s:.0f} s")
    return None


def _start(payload: bytes) -> _Worker[Any]:
    here, there = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_serve, args=(there, payload))
    process.start()
    there.close()
    return _Worker(process, here)


def _dismiss(worker: _Worker[Any]) -> None:
    """Let an idle worker end by itself, so that it ends what it started; kill one that is busy or does not."""
    if worker.task is None:
        worker.pipe.close()
        worker.process.join(DISMISSAL_S)
    _kill(worker)


def _kill(worker: _Worker[Any]) -> None:
    """End the worker and whatever it started; it leads a process group of its own."""
    assert worker.process.pid
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.kill()
    worker.process.join()
    worker.pipe.close()


def _serve(pipe: Connection, payload: bytes) -> None:
    """A worker's life: read a task, work, send result and failure, until the other end closes."""
    os.setsid()
    work = cloudpickle.loads(payload)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            task = cloudpickle.loads(pipe.recv_bytes())
            try:
                answer: tuple[Any, str | None] = (work(task), None)
            except Exception as error:  # noqa: BLE001 - whatever the work raises is the task's outcome
                traceback.print_exc()
                answer = (None, f"{type(error).__name__}: {error}")
            pipe.send_bytes(cloudpickle.dumps(answer))
