"""A process that works on one task after the other for its parent, and can be ended at any time with all its children.

Deals in one process, its pipe and its end in words. What is sent is pickled by cloudpickle, so both sides trust each
other: nobody else's code runs here but in processes of its own (`qimeng.envs.workers.forkserver`). Knows nothing about
what a task is.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from qimeng.envs.sandbox.layer import end_with_parent
from qimeng.openmp import waiting

_SPAWN = multiprocessing.get_context("spawn")
_starting = threading.Lock()
"""Held while a process starts: what it inherits is set for all threads."""


@dataclass(frozen=True)
class Question:
    """What the work asks the parent (`ask_parent`), received in place of a result; `TaskProcess.reply` answers it.

    Attributes:
        asked: whatever both sides agree on.
    """

    asked: Any


class TaskProcess:
    """A fresh Python process that leads a process group of its own and ends with its parent.

    Args:
        environment: variables that it has before it imports anything.

    Attributes:
        pipe: becomes readable when a result is there, or when the process has ended.
    """

    def __init__(self, environment: Mapping[str, str] | None = None):
        here, there = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(there,))
        with _starting, _variables({**waiting(os.environ), **(environment or {})}), _without_main():
            self._process.start()
        there.close()
        self.pipe: Connection = here

    def send(self, work: Callable[[Any], Any], task: Any) -> None:
        """Have it call `work(task)`; a process that is gone is found by `receive`."""
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(cloudpickle.dumps((work, task)))

    def receive(self) -> tuple[Any, str | None, bool]:
        """What the work returned, why it failed (None where it did not), and whether the process lives on.

        A `Question` is no result: the work goes on once it has its reply.
        """
        try:
            result, failure = cloudpickle.loads(self.pipe.recv_bytes())
            return result, failure, True
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            code = self._process.exitcode
            signalled = code is not None and code < 0
            how = (
                f"signal {-code} ({signal.Signals(-code).name})"
                if code is not None and signalled
                else f"exit code {code}"
            )
            return None, f"the worker process died: {how}", False

    def reply(self, answer: Any) -> None:
        """Answer the question that was received last."""
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(cloudpickle.dumps(answer))

    def dismiss(self, seconds: float) -> None:
        """Let it end by itself once it is idle, within `seconds`; then end it."""
        self.pipe.close()
        self._process.join(seconds)
        self.kill()

    def kill(self) -> None:
        """End it and whatever it started."""
        assert self._process.pid
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self.pipe.close()


@contextlib.contextmanager
def _variables(environment: Mapping[str, str]) -> Iterator[None]:
    """Have these variables in the block, for a process started in it to inherit."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide where the main module is from, in the block: a process that is started in it does not import that again.

    It has no use for it, as cloudpickle sends what is defined there whole. A main module may be slow to import (that of
    Ray's workers takes a second), or do its work anew.
    """
    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {name: vars(main)[name] for name in ("__file__", "__spec__") if name in vars(main)}
    vars(main).update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        vars(main).update(hidden)


_parent: list[Connection] = []
_asking = threading.Lock()


def ask_parent(asked: Any) -> Any:
    """In such a process, within its work: what the parent replies to a question, which it has to be ready for."""
    with _asking:
        _parent[0].send_bytes(cloudpickle.dumps((Question(asked), None)))
        return cloudpickle.loads(_parent[0].recv_bytes())


def _serve(pipe: Connection) -> None:
    """Read work and a task, do it, send result and failure, until the other end closes."""
    end_with_parent()
    _parent[:] = [pipe]
    os.setsid()
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            work, task = cloudpickle.loads(pipe.recv_bytes())
            try:
                answer: tuple[Any, str | None] = (work(task), None)
            except Exception as error:  # noqa: BLE001 - whatever the work raises is the task's outcome
                traceback.print_exc()
                answer = (None, f"{type(error).__name__}: {error}")
            pipe.send_bytes(cloudpickle.dumps(answer))


__all__ = ["Question", "TaskProcess", "ask_parent"]
