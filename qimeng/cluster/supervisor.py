"""What keeps one GPU of a cluster: it gives turns on it, and owns the processes that work there.

Deals in runs, processes and time limits, as an actor of Ray that never touches CUDA itself: what would break it breaks
a process, which is ended. What is worked on passes through as bytes, and is read in those processes alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from qimeng.bench.gpus import share_of_cores
from qimeng.cluster.cpu_tasks import CpuTasks
from qimeng.cluster.turns import Turns
from qimeng.envs.workers.offload import Errand, offer
from qimeng.envs.workers.task_process import Question, TaskProcess, ask_parent
from qimeng.errors import in_words

T = TypeVar("T")

LEASE_S = 60.0
"""Seconds after which the work of a run is ended whose driver has not been heard of."""
DISMISSAL_S = 5.0
"""Seconds that an idle process may take to end."""
PIPE_BYTES = 32 << 10
"""What a pipe takes at once, whether its other end reads or not; Linux' have twice as much."""
TASK_FOLDER = "QIMENG_TASK_FOLDER"
"""Variable of the processes: an empty folder whose files go back with what the task returns, and are removed."""
FILES_BYTES = 256 << 20
"""The most that goes back of a task's folder; larger files stay away."""


@dataclass(frozen=True)
class Reply:
    """What became of one call.

    Attributes:
        result: what the work returned, pickled; None where it did not return.
        failure: why it did not, in words.
        alive: whether the process lives on, so that the work itself raised.
        late: whether it was ended because it took too long.
        gone: whether the keeper or its node was lost, with all that was there.
        files: what the task left in its folder (`TASK_FOLDER`), by name, also where it was ended.
    """

    result: bytes | None = None
    failure: str | None = None
    alive: bool = True
    late: bool = False
    gone: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Note:
    """What a task tells its driver while it runs, as a `Question` that wants no answer; pickled."""

    data: bytes


def tell_driver(thing: Any) -> None:
    """In a process of a GPU, within a task: whoever waits for the task gets `thing` (`Supervisor.notes`)."""
    ask_parent(Note(cloudpickle.dumps(thing)))


class Supervisor:
    """The keeper of one GPU; an actor with one thread, whose methods take turns at every `await`.

    Each lane of a run has a process of its own, which works on one call after another. Processes inherit the
    environment of the actor: Ray has set there which GPU is theirs. Their number of threads is not Ray's, which is one.

    Args:
        name: of the GPU.
        generation: of the GPU.
        beside: GPUs of its node, which share the cores.
        cpu_tasks: does what needs no GPU for the processes; without it, they do it themselves.
    """

    def __init__(self, name: str, generation: str, beside: int = 1, cpu_tasks: CpuTasks | None = None):
        self._name, self._generation, self._beside, self._cpu = name, generation, beside, cpu_tasks
        self._folders: dict[tuple[str, int], Path] = {}
        self._turns = Turns()
        self._processes: dict[tuple[str, int], TaskProcess] = {}
        self._stopped: dict[tuple[str, int], asyncio.Event] = {}
        self._notes: dict[tuple[str, int], list[bytes]] = {}
        self._locks: dict[tuple[str, int], asyncio.Lock] = {}
        self._seen: dict[str, float] = {}
        self._done, self._failed, self._since = 0, 0, time.time()
        self._watch: asyncio.Task[None] | None = None

    async def describe(self) -> dict[str, Any]:
        """What it is and does, for people: no process is started for that."""
        return {
            "gpu": self._name,
            "generation": self._generation,
            "host": socket.gethostname(),
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "pid": os.getpid(),
            "running": self._turns.running,
            "waiting": self._turns.waiting,
            "runs": len(self._seen),
            "done": self._done,
            "failed": self._failed,
            **(self._cpu.described() if self._cpu else {}),
            "since": self._since,
        }

    async def see(self, run: str) -> None:
        """The driver of `run` lives; nothing where the run has had no work here."""
        if run in self._seen:
            self._seen[run] = time.monotonic()

    async def work(
        self, run: str, lane: int, work: bytes, task: Any, priority: int, beside: int, limit_s: float | None
    ) -> Reply:
        """Call ``work(task)`` in the process of this lane, when it is the run's turn.

        Args:
            run: whose it is.
            lane: of the run; one call at a time in each.
            work: a function, pickled by cloudpickle.
            task: its argument, pickled as well where it is bytes.
            priority: see `qimeng.cluster.turns`.
            beside: see `qimeng.cluster.turns.Turn`.
            limit_s: seconds that it may take, from when its turn begins; None for no limit.
        """
        self._seen[run] = time.monotonic()
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._end_the_unseen())
        key, stopped = (run, lane), asyncio.Event()
        async with self._locks.setdefault(key, asyncio.Lock()):  # one that was stopped may still be ending
            self._stopped[key] = stopped
            try:
                async with self._turns.turn(run, priority, beside):
                    self._notes[key] = []
                    reply = Reply(failure="stopped", alive=False)
                    if not stopped.is_set():
                        reply = await self._called(key, work, task, beside, limit_s, stopped)
            finally:
                del self._stopped[key]
                self._notes.pop(key, None)
        self._done += 1
        self._failed += reply.failure is not None
        return reply

    async def notes(self, run: str, lane: int, since: int) -> list[bytes] | None:
        """What the task of this lane has told from note number `since` on; None while it waits for its turn."""
        told = self._notes.get((run, lane))
        return None if told is None else told[since:]

    async def stop(self, run: str, lane: int) -> None:
        """End the process of this lane of a run, and what it is at."""
        if (event := self._stopped.get((run, lane))) is not None:
            event.set()
        elif (process := self._processes.pop((run, lane), None)) is not None:
            process.kill()

    async def end(self, run: str) -> None:
        """End all that a run has here; its idle processes are let go."""
        for (other, _), event in list(self._stopped.items()):
            if other == run:
                event.set()
        busy = {lane for lane in self._stopped if lane[0] == run}
        idle = [self._processes.pop(lane) for lane in list(self._processes) if lane[0] == run and lane not in busy]
        self._seen.pop(run, None)
        for process in idle:
            await asyncio.to_thread(process.dismiss, DISMISSAL_S)
        for key in [key for key, lock in self._locks.items() if key[0] == run and not lock.locked()]:
            del self._locks[key]
            if key in self._folders:
                shutil.rmtree(self._folders.pop(key), ignore_errors=True)
        self._turns.forget(run)

    # -- parts

    async def _called(
        self, lane: tuple[str, int], work: bytes, task: Any, beside: int, limit_s: float | None, stopped: asyncio.Event
    ) -> Reply:
        try:
            if lane not in self._folders:
                self._folders[lane] = Path(tempfile.mkdtemp(prefix="qimeng_task_"))
            if lane not in self._processes:
                shared = share_of_cores(self._beside * beside)
                self._processes[lane] = TaskProcess({**shared, TASK_FOLDER: str(self._folders[lane])})
        except OSError as error:
            return Reply(failure=f"no process could be started: {error}", alive=False)
        reply = await self._answered(lane, self._processes[lane], (work, task), limit_s, stopped)
        folder = self._folders[lane]
        return replace(reply, files=await asyncio.to_thread(_taken, folder)) if os.listdir(folder) else reply

    async def _answered(
        self,
        lane: tuple[str, int],
        process: TaskProcess,
        pair: tuple[bytes, Any],
        limit_s: float | None,
        stopped: asyncio.Event,
    ) -> Reply:
        work = _called if self._cpu is None else _called_with_errands
        await _sent(process.send, work, pair, size=sum(len(x) for x in pair if isinstance(x, (bytes, str))))
        end = None if limit_s is None else time.monotonic() + limit_s
        message = None
        while await _in_time(_readable(process), stopped, end):
            message = process.receive()
            if not isinstance(message[0], Question):
                break
            asked, message = message[0].asked, None
            if isinstance(asked, Note):
                self._notes[lane].append(asked.data)
                process.reply(None)
                continue
            assert self._cpu is not None  # nobody else has its processes send errands
            if (replies := await _in_time(self._cpu.run(asked), stopped, end)) is None:
                break
            await _sent(process.reply, replies, size=sum(len(x) for x in replies if x is not None))
        if message is None:
            del self._processes[lane]
            process.kill()
            why = "stopped" if stopped.is_set() else f"took longer than {limit_s:.0f} s"
            return Reply(failure=why, alive=False, late=not stopped.is_set())
        found, failure, alive = message
        result, broken = found or (None, "")
        if broken:
            failure, alive = broken, False
        if not alive:
            del self._processes[lane]
            process.kill()
        return Reply(result, failure, alive)

    async def _end_the_unseen(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 4)
            now = time.monotonic()
            for run in [run for run, seen in self._seen.items() if now - seen > LEASE_S]:
                with contextlib.suppress(OSError):
                    await self.end(run)


async def _sent(send: Callable[..., None], *message: Any, size: int) -> None:
    """Send a message to a process; a large one waits until the process reads it, which nobody else has to."""
    if size < PIPE_BYTES:
        send(*message)
    else:
        await asyncio.to_thread(send, *message)


async def _readable(process: TaskProcess) -> bool:
    """True as soon as a process has sent something, or has ended."""
    loop, fd, ready = asyncio.get_running_loop(), process.pipe.fileno(), asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        return await ready.wait()
    finally:
        loop.remove_reader(fd)


async def _in_time(doing: Coroutine[Any, Any, T], stopped: asyncio.Event, end: float | None) -> T | None:
    """What `doing` returns; None where it is stopped before, or has not ended then (`time.monotonic`)."""
    task, waiter = asyncio.ensure_future(doing), asyncio.ensure_future(stopped.wait())
    left = None if end is None else max(0.0, end - time.monotonic())
    try:
        await asyncio.wait((task, waiter), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        waiter.cancel()


def _taken(folder: Path) -> dict[str, bytes]:
    """The files of a folder, largest last and up to `FILES_BYTES` in all; the folder is empty then."""
    found, room = {}, FILES_BYTES
    for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_size):
        if path.is_file() and path.stat().st_size <= room:
            found[path.name] = path.read_bytes()
            room -= len(found[path.name])
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return found


def _called_with_errands(pair: tuple[bytes, Any]) -> tuple[bytes | None, str]:
    """The same, where the keeper has done what needs no GPU."""
    offer(_through_the_keeper)
    return _called(pair)


def _through_the_keeper(errands: Sequence[Errand]) -> Sequence[bytes | None]:
    found: Sequence[bytes | None] = ask_parent(errands)
    return found


def _called(pair: tuple[bytes, Any]) -> tuple[bytes | None, str]:
    """In a process of the GPU: the work done on the task, pickled; or why nothing can be done here any more."""
    work, task = pair
    made = cloudpickle.loads(work)
    try:
        return cloudpickle.dumps(made(cloudpickle.loads(task) if isinstance(task, bytes) else task)), ""
    except RuntimeError as error:
        if not _is_driver_error(error):
            raise
        return None, f"the GPU or its driver failed: {in_words(error)}"


def _is_driver_error(error: RuntimeError) -> bool:
    """Whether CUDA itself failed, after which this process can do nothing more; memory that ran out is the task's."""
    import torch  # the keeper itself does without

    from qimeng.envs.workers.answering import failure_of
    from qimeng.interfaces.faults import MACHINE_FAILED

    return failure_of(error) == MACHINE_FAILED and not isinstance(error, torch.OutOfMemoryError)


__all__ = ["LEASE_S", "TASK_FOLDER", "Note", "Reply", "Supervisor", "tell_driver"]
