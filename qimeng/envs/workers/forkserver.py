"""Fresh processes in milliseconds: a server that has torch and triton loaded and forks on request.

Deals in processes as the judge sees them: start, request, exit status, and ending them with all their children. Knows
nothing about what a process computes. `qimeng.envs.workers.fork_loop` does the forking, in the server.
"""

from __future__ import annotations

import itertools
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from qimeng.envs.sandbox import Sandbox
from qimeng.envs.sandbox.limits import allow_open_files
from qimeng.envs.sandbox.surroundings import SETTINGS
from qimeng.envs.workers.channel import MAX_REPLY, SEND_S, Channel, Closed, Late, Malformed, pack, unpack_reply
from qimeng.envs.workers.foreign_folders import remove_folder
from qimeng.envs.workers.fork_loop import STATUS
from qimeng.envs.workers.plain_text import plain_text
from qimeng.errors import QimengError
from qimeng.interfaces.faults import MACHINE_FAILED
from qimeng.openmp import waiting

PRELOAD = ("torch", "qimeng.envs.workers.worker", "qimeng.envs.workers.compile", "qimeng.envs.workers.preload:warm_up")
"""Modules that the server imports before it forks; after a colon, a function that it calls."""
FEW_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "2"}
"""For processes that launch on one or two streams: the driver makes a context's queues one by one, all processes of a
machine in turns, and eight where nothing is said."""
_SIGNALS = {s.value: s.name for s in signal.Signals}
_CPU_CLOCK = 2
"""What Linux makes a process's id into the name of its clock with (``CPUCLOCK_SCHED``)."""
START_S = 120.0
"""Seconds that a process may take until it is ready; the first waits for the server's imports as well."""

SERVER_GONE, NOT_STARTED = "the fork server is gone", "the process could not be started"
"""How a process ends that is not of its own doing, nor of what runs in it."""

OWN_FAILURES = frozenset({"error", "exit", "memory", "illegal-access", "tampered", "mutated", "wrong"})
"""Classes of failure that a process may report itself (`qimeng.envs.workers.service`); how it ended is the judge's."""


class WorkerFailed(QimengError):
    """A process did not do what it was asked.

    Attributes:
        kind: ``"crash"`` (a signal), ``"exit"``, ``"timeout"``, ``"memory"``, ``"illegal-access"``, ``"error"``
            (an exception in it), ``"protocol"`` (it sent what is no message) or ``"machine"`` (the server that
            starts processes is gone, or could not start it).
    """

    code = "worker"

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


class Process:
    """A forked process, seen from the judge.

    Attributes:
        pid: its id, as it said before foreign code ran in it; 0 before that.
    """

    def __init__(self, server: ForkServer, token: int, channel: Channel, status_fd: int, log_fd: int, folder: Path):
        self._server, self._token, self._channel = server, token, channel
        self._status_fd, self._log_fd = status_fd, log_fd
        self.folder = folder
        self._ended: str | None = None
        self._asked = 0
        self.pid = 0

    def call(self, command: str, timeout_s: float, **arguments: Any) -> tuple[Any, list[int]]:
        """Ask for `command` and wait for the answer: JSON data, and open files that the caller closes.

        Raises:
            WorkerFailed: it crashed, ended, raised, hung or sent an invalid message. After any kind but ``"error"`` it
                is gone.
        """
        self.send(command, **arguments)
        return self.answer(timeout_s)

    def send(self, command: str, **arguments: Any) -> None:
        """Ask for `command`; `answer` waits for what comes of it.

        Raises:
            WorkerFailed: it is gone.
        """
        try:
            self._asked = secrets.randbits(62)
            self._channel.send(pack((command, arguments, self._asked)))
        except Late:
            self.kill()
            raise WorkerFailed("timeout", f"it did not read the request within {SEND_S:g} s; killed") from None
        except (Closed, OSError) as error:
            raise self._gone() from error

    def answer(self, timeout_s: float) -> tuple[Any, list[int]]:
        """The answer to the command sent last; see `call`."""
        try:
            body, files = self._channel.receive(time.monotonic() + timeout_s, MAX_REPLY, also=(self._status_fd,))
        except Late:
            self.kill()
            raise WorkerFailed("timeout", f"no answer within {timeout_s:g} s; killed") from None
        except (Closed, OSError) as error:
            raise self._gone() from error
        except Malformed as error:
            self.kill()
            raise WorkerFailed("protocol", f"the process sent no message: {error}") from error
        try:
            reply = unpack_reply(body)
        except Malformed as error:
            self._discard(files)
            self.kill()
            raise WorkerFailed("protocol", f"the process sent no message: {error}") from error
        if reply.get("to") != self._asked:
            self._discard(files)
            self.kill()
            raise WorkerFailed("protocol", "the process sent an answer to no question")
        if "failed" in reply:
            self._discard(files)
            kind, text = str(reply["failed"])[:40], str(reply.get("error", ""))[:4000]
            if kind != "error":
                self.kill()
            raise WorkerFailed(kind if kind in OWN_FAILURES else "protocol", text)
        return reply.get("ok"), files

    def await_ready(self) -> Any:
        """The answer to `ready`, the first command that was sent; its `pid` is known from then on."""
        data, files = self.answer(START_S)
        self._discard(files)
        if isinstance(data, dict) and type(data.get("pid")) is int:
            self.pid = data["pid"]
        return data

    def cpu_seconds(self) -> float:
        """Processor time that its threads have taken, as the system counts it; 0.0 where the system does not tell."""
        try:
            return time.clock_gettime((~self.pid << 3) | _CPU_CLOCK) if self.pid else 0.0
        except OSError:
            return 0.0

    @property
    def channel_fd(self) -> int:
        """Descriptor that becomes readable when an answer is there, for waiting on several processes."""
        return self._channel.socket.fileno()

    @property
    def status_fd(self) -> int:
        """Descriptor that becomes readable when the process has ended."""
        return self._status_fd

    @property
    def alive(self) -> bool:
        """False once it has ended or was killed."""
        if self._status_fd < 0:
            return False
        if self._ended is None and readable_within([self._status_fd], 0):
            self._read_status()
        return self._ended is None

    def log(self, limit: int = 2000) -> str:
        """The end of what it wrote to stderr."""
        if self._log_fd < 0:
            return ""
        size = os.fstat(self._log_fd).st_size
        return plain_text(os.pread(self._log_fd, limit, max(size - limit, 0)).decode(errors="replace"))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause it and its descendants in the block, so that they do not disturb a measurement."""
        self._server.tell("pause", self._token)
        try:
            yield
        finally:
            self._server.tell("resume", self._token)

    def kill(self, wait: bool = True) -> None:
        """End it and all its descendants, and remove its folder; harmless when it has ended.

        Args:
            wait: whether to wait for its end, which takes as long as giving its memory back; else call `kill` again.
        """
        if self._status_fd < 0:
            return
        self._server.tell("kill", self._token)
        if not wait:
            return
        if self._ended is None:
            self._await_end()
        self.release()

    def release(self) -> None:
        """Close this side's files and remove its folder; the process is ended by `kill`."""
        if self._status_fd < 0:
            return
        os.close(self._status_fd)
        os.close(self._log_fd)
        self._status_fd = self._log_fd = -1
        self._channel.close()
        self._server.forget(self._token)
        remove_folder(self.folder)

    def _await_end(self) -> None:
        if readable_within([self._status_fd], 10.0):
            self._read_status()
        else:
            self._ended = "it was killed and has not ended within 10 s"

    def _read_status(self) -> None:
        raw = os.read(self._status_fd, STATUS.size)
        status = STATUS.unpack(raw)[0] if len(raw) == STATUS.size else None
        if status is None:
            self._ended = SERVER_GONE
        elif status < 0:
            self._ended = NOT_STARTED
        elif os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            self._ended = f"killed by signal {number} ({_SIGNALS.get(number, 'a real-time signal')})"
        else:
            self._ended = f"ended with exit status {os.WEXITSTATUS(status)}"

    def _gone(self) -> WorkerFailed:
        """What became of a process that no longer answers."""
        if self._ended is None and self._status_fd >= 0:
            if not readable_within([self._status_fd], 1.0):  # it closed its channel and lives on
                self._server.tell("kill", self._token)
            self._await_end()
        reason, log = self._ended or "it was ended before", self.log().strip()
        self.kill()
        kind = (
            MACHINE_FAILED if reason in (SERVER_GONE, NOT_STARTED) else "exit" if "exit status" in reason else "crash"
        )
        return WorkerFailed(kind, reason + (f"; its last output: {log[-600:]}" if log else ""))

    @staticmethod
    def _discard(files: Sequence[int]) -> None:
        for fd in files:
            os.close(fd)


class ForkServer:
    """Starts processes by forking one that is warm; close it when done.

    If something ends the server, it is restarted when it is next needed.

    Args:
        preload: what the server imports, and calls, before its first fork; see `PRELOAD`.
        folder: where each process gets its scratch folder; a new temporary folder by default.
    """

    def __init__(self, preload: Sequence[str] = PRELOAD, folder: Path | None = None):
        self.folder = folder or Path(tempfile.mkdtemp(prefix="qimeng_"))
        self._owns_folder = folder is None
        self._preload = tuple(preload)
        allow_open_files()
        self._tokens = itertools.count(1)
        self._lock = threading.Lock()
        self._processes: dict[int, Process] = {}
        self._prepared: set[str] = set()
        self._launch()

    def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        environment = plain_environment()
        environment["PYTHONPATH"] = os.pathsep.join(p for p in (str(_root()), *sys.path) if p)
        # a process works in a folder that its candidate writes to: nothing is imported from there by accident
        code = "import sys; sys.path[:] = [p for p in sys.path if p]; "
        code += (
            f"from qimeng.envs.workers.fork_loop import run_server; run_server({theirs.fileno()}, {self._preload!r})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            env=environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self._channel = Channel(ours)

    def _relaunch(self) -> None:
        self._prepared.clear()
        self._channel.close()
        self._process.kill()
        self._process.wait()
        self._launch()

    def prepare(self, names: Sequence[str]) -> None:
        """Import modules in the server: processes that start from now on have them and need no time for it.

        Returns at once; a server that was restarted since does without.

        Args:
            names: of modules that neither use CUDA nor start threads when they are imported.
        """
        new = tuple(name for name in names if name not in self._prepared)
        if not new:
            return
        self._prepared.update(new)
        with suppress(Closed, OSError), self._lock:
            self._channel.send(pack(("import", new)))

    def start(
        self,
        target: str,
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        sandbox: str = "basic",
        readable: Sequence[str] = (),
        writable: Sequence[str] = (),
    ) -> Process:
        """A fresh process that runs `target` (``"package.module:function"``) as ``function(channel, *arguments)``.

        Its working folder, `tempfile` folder and home of caches is a scratch folder of its own.

        Args:
            target: what it runs.
            arguments: for it.
            environment: variables that it gets.
            sandbox: level of `qimeng.envs.sandbox.Sandbox`: ``"full"`` for a process in which foreign code runs.
            readable: folders that it may read in a full sandbox, besides those where programs live.
            writable: folders that it may write in a full sandbox, besides its own.
        """
        access = (Sandbox(sandbox).level, tuple(readable), tuple(writable))
        token = next(self._tokens)
        folder = self.folder / f"p{token}"
        folder.mkdir(parents=True)
        ours, theirs = socket.socketpair()
        status_read, status_write = os.pipe()
        log = os.memfd_create("log")
        message = ("start", token, target, pack(arguments), dict(environment or {}), str(folder), access)
        try:
            with self._lock:
                if self._process.poll() is not None:
                    self._relaunch()
                self._channel.send(pack(message), [theirs.fileno(), status_write, log])
        except (Closed, OSError) as error:
            raise WorkerFailed(MACHINE_FAILED, SERVER_GONE) from error
        finally:
            theirs.close()
            os.close(status_write)
        process = Process(self, token, Channel(ours), status_read, log, folder)
        self._processes[token] = process
        return process

    def forget(self, token: int) -> None:
        """Drop the record of a process that has ended."""
        self._processes.pop(token, None)

    def tell(self, what: str, token: int) -> None:
        """``"kill"``, ``"pause"`` or ``"resume"`` the process with this token and its descendants."""
        try:
            with self._lock:
                self._channel.send(pack((what, token)))
        except (Closed, OSError):  # the server is gone, and its processes with it
            return

    def close(self) -> None:
        """End the server and every process it started."""
        self._channel.close()
        self._process.terminate()  # ends it at once while it imports; later it goes by the channel
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for process in list(self._processes.values()):
            process.release()
        if self._owns_folder:
            remove_folder(self.folder)


def readable_within(files: Sequence[int], seconds: float) -> bool:
    """Whether one of `files` becomes readable in that time; their numbers may be larger than `select` knows."""
    poll = select.poll()
    for fd in files:
        poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def plain_environment() -> dict[str, str]:
    """The variables that processes get: where things are; no tokens or keys, no caches and settings of the user's."""
    return {k: v for k, v in os.environ.items() if k in SETTINGS or k == "HOME"} | waiting(os.environ)


def _root() -> Path:
    import qimeng

    assert qimeng.__file__ is not None
    return Path(qimeng.__file__).resolve().parent.parent


__all__ = [
    "FEW_QUEUES",
    "PRELOAD",
    "START_S",
    "ForkServer",
    "Process",
    "WorkerFailed",
    "plain_environment",
    "readable_within",
]
