"""The fork server's process: it imports everything once, forks on request, and cleans up ended children.

Deals in process ids. The server never uses CUDA, so its children can. Each child is its own session, and processes that
it leaves behind are killed when it ends. When the judge ends, the server and all children end too. Knows nothing about
what a process computes, or about the layers of a sandbox.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from typing import Any

from qimeng.envs.sandbox import Report, Sandbox
from qimeng.envs.sandbox.limits import allow_open_files, memory_bytes
from qimeng.envs.sandbox.places import SHARED_MEMORY
from qimeng.envs.sandbox.surroundings import settle
from qimeng.envs.workers.channel import Channel, Closed, unpack
from qimeng.envs.workers.process_tree import children as processes_of
from qimeng.envs.workers.process_tree import memory_file_bytes, tree

_HANDLED = (signal.SIGCHLD, signal.SIGTERM)
_PAUSE = {"pause": signal.SIGSTOP, "resume": signal.SIGCONT}
STATUS = struct.Struct("<i")
"""What is written to a process's status descriptor when it has ended: the status of `waitpid`, or -1 for no process."""

SHARED = "shared"
"""Folder in the server's own that its processes may read and not write: what it has built for all."""

PROCESSES = 256
"""Maximum number of processes in a full sandbox or a host's, children included; more are killed."""
MEMORY_FILE_BYTES = memory_bytes() // 2
"""Most bytes of memory files (`memfd_create`) and shared memory that these may hold together; no other limit counts
them. Files that were sent and not yet received are not seen."""
_COUNT_EVERY_MS = 250

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class Child:
    """A process of the server: the judge's name for it, where its end is written, whether its children are counted."""

    token: int
    status: int
    counted: bool


def enter_sandbox(
    level: str,
    folder: str,
    channel: int,
    environment: Mapping[str, str],
    readable: Sequence[str],
    writable: Sequence[str],
) -> Report:
    """Drop everything that a candidate does not need, permanently; called in each process before untrusted code runs.

    Args:
        level: of `Sandbox`.
        folder: the process's own.
        channel: the open file by which it speaks with the judge.
        environment: variables that it was given.
        readable: folders that it may read, besides the usual ones.
        writable: folders that it may write, besides its own.
    """
    shared = os.path.join(os.path.dirname(folder), SHARED)
    return Sandbox(level).enter(folder, writable, [shared, *readable], environment, [channel])


def run_server(fd: int, preload: Sequence[str]) -> None:
    """The server's main loop; runs in a process of its own until the judge closes `fd`."""
    control = Channel(socket.socket(fileno=fd))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    allow_open_files()
    for name in preload:
        module, _, function = name.partition(":")
        loaded = importlib.import_module(module)
        if function:
            getattr(loaded, function)()
    warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
    gc.collect()
    gc.freeze()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    for number in _HANDLED:  # until here SIGTERM ends the server, which has no children yet
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wake_write)
    children: dict[int, Child] = {}  # by process id
    while True:
        poll = select.poll()
        poll.register(control.socket, select.POLLIN)
        poll.register(wake_read, select.POLLIN)
        counted = [pid for pid, child in children.items() if child.counted]
        ready = {f for f, _ in poll.poll(_COUNT_EVERY_MS if counted else None)}
        _kill_greedy(counted)
        if wake_read in ready:
            os.read(wake_read, 4096)
            _reap(children)
        if control.socket.fileno() not in ready:
            continue
        try:
            body, files = control.receive()
        except Closed:
            _kill_all(children)
            return
        message = unpack(body)
        if message[0] == "kill":
            for pid in [p for p, child in children.items() if child.token == message[1]]:
                _kill_tree(pid)
            continue
        if message[0] == "import":
            _import(message[1])
            continue
        if message[0] in _PAUSE:
            for pid in [p for p, child in children.items() if child.token == message[1]]:
                _signal_tree(pid, _PAUSE[message[0]])
            for pid in _orphans(children):
                _signal_tree(pid, _PAUSE[message[0]])
            continue
        _fork(control, (wake_read, wake_write), children, message, files)


def _import(names: Sequence[str]) -> None:
    """Import what can be imported; for the rest, whoever needs it gets the reason why it cannot."""
    for name in names:
        with contextlib.suppress(Exception):  # a package's own code runs, and may raise anything
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _fork(control: Channel, wake: tuple[int, int], children: dict[int, Child], message: Any, files: list[int]) -> None:
    _, token, target, arguments, environment, folder, access = message
    sock, status, log = files
    server = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        os.write(status, STATUS.pack(-1))
        pid = -1
    if pid == 0:
        for other in (control.socket.fileno(), *wake, status, *(child.status for child in children.values())):
            os.close(other)
        _child(server, sock, log, target, arguments, environment, folder, access)
    os.close(sock)
    os.close(log)
    if pid < 0:
        os.close(status)
    else:
        children[pid] = Child(token, status, access[0] in ("full", "host"))


def _child(
    server: int,
    sock: int,
    log: int,
    target: str,
    arguments: bytes,
    environment: dict[str, str],
    folder: str,
    access: tuple[str, Sequence[str], Sequence[str]],
) -> None:
    """Run `target` and end; never returns."""
    code = 1
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:  # the server died before the line above
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for number in _HANDLED:
            signal.signal(number, signal.SIG_DFL)
        os.dup2(log, 2)
        os.dup2(log, 1)
        os.close(log)
        settle(folder)
        os.environ.update(environment)
        module, _, function = target.partition(":")
        run = getattr(importlib.import_module(module), function)  # it may lie where the sandbox reads nothing
        level, readable, writable = access
        enter_sandbox(level, folder, sock, environment, readable, writable)
        run(Channel(socket.socket(fileno=sock)), *unpack(arguments))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001  whatever it was is written down, and ends here, not in the server's loop
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)


def _reap(children: dict[int, Child]) -> None:
    ended = False
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == 0:
            break
        if pid not in children:
            continue
        ended = True
        fd = children.pop(pid).status
        _signal_group(pid, signal.SIGKILL)
        _empty_shared_memory(pid)
        with contextlib.suppress(BrokenPipeError):  # the judge no longer asks
            os.write(fd, STATUS.pack(status))
        os.close(fd)
    if ended:
        _kill_orphans(children)


def _empty_shared_memory(pid: int) -> None:
    """Remove what PyTorch in an ended process has left in the shared memory of all, where it had none of its own."""
    for path in glob(f"{SHARED_MEMORY}/torch_{pid}_*"):
        with contextlib.suppress(OSError):
            os.unlink(path)


def _kill_tree(pid: int) -> None:
    _signal_tree(pid, signal.SIGKILL)


def _signal_tree(pid: int, number: int) -> None:
    """Signal `pid`, its group and its descendants, children first seen last so that none can be missed."""
    below = tree(pid)
    _signal_group(pid, number)
    for p in below:
        _signal(p, number)


def _orphans(children: Mapping[int, Any]) -> list[int]:
    """Orphaned processes; as subreaper, the server is now their parent."""
    return [p for p in processes_of(os.getpid()) if p not in children]


def _kill_orphans(children: Mapping[int, Any]) -> None:
    """Kill what ended processes left behind."""
    for _ in range(100):
        orphans = _orphans(children)
        if not orphans:
            return
        for p in orphans:
            _kill_tree(p)
            try:
                os.waitpid(p, 0)
            except ChildProcessError:
                continue


def _kill_greedy(counted: Sequence[int]) -> None:
    """Kill those of the processes `counted` that have too many children or hold too much in memory files."""
    if not counted:
        return
    adopted = Counter(group for p in processes_of(os.getpid()) if (group := _group(p)) != p)
    for pid in counted:
        below = tree(pid)
        if len(below) + adopted[pid] > PROCESSES or memory_file_bytes(below) > MEMORY_FILE_BYTES:
            _kill_tree(pid)


def _kill_all(children: dict[int, Child]) -> None:
    for pid in list(children):
        _kill_tree(pid)
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:
            continue
    _kill_orphans({})


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


__all__ = ["PROCESSES", "SHARED", "STATUS", "Child", "enter_sandbox", "run_server"]
