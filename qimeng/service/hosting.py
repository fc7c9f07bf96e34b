"""What a process of the service does that judges for strangers: it keeps one sandboxed host at a time, and asks it.

The host (`qimeng.service.host_process`) has the stranger's reference; this process never loads it, reads JSON from it
and nothing else, and ends it with all that it started. A host serves all candidates of one reference, so that their
baseline is measured once. Deals in submissions as text; knows nothing about queues.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from qimeng.envs.workers.answering import no_verdict
from qimeng.envs.workers.forkserver import START_S, ForkServer, Process, WorkerFailed
from qimeng.envs.workers.plain_text import plain_text
from qimeng.envs.workers.shared_server import shared_server
from qimeng.interfaces import EngineReport, Evaluation, Fault, Gate
from qimeng.interfaces.faults import JUDGE_FAILED, MACHINE_FAILED
from qimeng.service.messages import REFERENCE_FAILED, Answer, Reference, Submission
from qimeng.version import VERSION

_HOST = "qimeng.service.host_process"
PRELOAD = ("torch", _HOST, "qimeng.envs.workers.preload:warm_up")
REQUIRED = ("environment", "files", "landlock", "seccomp")
"""Layers of the sandbox without which no stranger's code is run; the others are a second fence."""
IDLE_S = 300.0
"""Seconds after which a host that nobody asks is ended."""
MESSAGE_CHARS = 8000
"""The most that is kept of a message."""
ANSWER_CHARS = 1 << 20
"""The longest evaluation that a host may send."""
MOST_S = 86400.0
"""Seconds that a host may take for a candidate: the pool gives up before, and ends this process."""


@dataclass(frozen=True)
class Settings:
    """How submissions are judged.

    Attributes:
        device: name of the device to judge for; empty for the GPU of the machine, or estimates.
        reference_s: seconds that loading, checking and capturing a reference may take.
        compile_s: seconds that torch.compile may take in one mode.
    """

    device: str = ""
    reference_s: float = 120.0
    compile_s: float = 60.0


class Host:
    """A sandboxed process that has one reference.

    Args:
        server: starts it.
        locks: files that it may write besides its own: those by which judges share a GPU.
        reference: what it has.
        settings: how it judges.

    Raises:
        WorkerFailed: it could not be started.
        BadReference: the reference did not load, ended the process, or took too long.
    """

    def __init__(self, server: ForkServer, locks: Sequence[str], reference: Reference, settings: Settings):
        self.reference, self._settings, self._rest = reference, settings, ExitStack()
        self._process: Process = server.start(f"{_HOST}:main", sandbox="host", writable=locks)
        try:
            self._process.send("ready")
            entered = self._process.await_ready()["sandbox"]
            missing = [layer for layer in REQUIRED if layer not in entered]
            if missing:
                raise WorkerFailed(MACHINE_FAILED, f"strangers' code is not run here: no {', '.join(missing)}")
            self._open()
        except BaseException:
            self.close()
            raise

    def judge(self, submission: Submission) -> Evaluation:
        """The evaluation of its candidate.

        Raises:
            WorkerFailed: the host failed, or sent what is no evaluation.
        """
        asked = {"candidate": submission.candidate, "options": submission.options}
        return evaluation_from(self._ask("judge", MOST_S, **asked, compile_seconds=self._settings.compile_s))

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.alive

    def close(self) -> None:
        """End it with all that it started."""
        self._process.kill()

    def _open(self) -> None:
        limit = self._settings.reference_s
        try:
            self._ask("open", limit, reference=self.reference, device=self._settings.device)
        except WorkerFailed as failed:
            if failed.kind == MACHINE_FAILED:
                raise
            text = f"it did not load and capture within {limit:g} s" if failed.kind == "timeout" else str(failed)
            raise BadReference(f"the reference cannot be judged: {text}") from None

    def _ask(self, command: str, limit_s: float, **arguments: Any) -> Any:
        """Its answer; between two questions it is paused with all that it started."""
        self._rest.close()
        try:
            data, files = self._process.call(command, limit_s, **arguments)
        finally:
            if self._process.alive:
                self._rest.enter_context(self._process.paused())
        for fd in files:  # it has no reason to send any
            os.close(fd)
        return data


def evaluation_from(data: Any) -> Evaluation:
    """The evaluation that a host sent, which may say anything.

    Args:
        data: JSON of the channel (`qimeng.envs.workers.channel`): finite numbers and plain texts.

    Raises:
        WorkerFailed: it is none.
    """
    from pydantic import TypeAdapter

    try:
        if len(json.dumps(data)) > ANSWER_CHARS:
            raise ValueError("it is too long")
        found: Evaluation = TypeAdapter(Evaluation).validate_python(_cut(data))
        json.dumps(asdict(Answer.of(found)), allow_nan=False)
        return found
    except (ValueError, TypeError, ArithmeticError) as error:
        raise WorkerFailed("protocol", f"the host sent no evaluation: {type(error).__name__}") from error


class BadReference(Exception):
    """A reference that cannot be judged; the message says why."""


_hosts: list[Host] = []
_lock = threading.Lock()
_timers: list[threading.Timer] = []


def judge_apart(settings: Settings, text: str) -> tuple[str, EngineReport]:
    """The answer to a submission as JSON, as `qimeng.envs.workers.answering.answer` gives it for requests.

    Args:
        settings: how it is judged.
        text: the submission's JSON.
    """
    submission = Submission.from_json(text)
    with _lock:
        return _judged(settings, submission).to_json(), EngineReport()


def _judged(settings: Settings, submission: Submission) -> Evaluation:
    while _timers:
        _timers.pop().cancel()
    try:
        found = _hosted(settings, submission.reference).judge(submission)
    except BadReference as error:
        found = Evaluation(Gate.WRITE, _cut(str(error)), REFERENCE_FAILED)
    except WorkerFailed as failed:
        machine = failed.kind in (MACHINE_FAILED, "crash", "memory")
        found = no_verdict(str(failed), MACHINE_FAILED if machine else JUDGE_FAILED)
    if found.fault in (Fault.MACHINE, Fault.JUDGE):  # what is broken in the host would be for the next submission
        _close_hosts()
    _timers.append(threading.Timer(IDLE_S, close_hosts))
    _timers[0].daemon = True
    _timers[0].start()
    return found


def describe(settings: Settings) -> dict[str, Any]:
    """What would judge here: ``device``, ``gpu`` (its name; empty without one), ``measured`` and ``versions``.

    It opens the device, so it is called in a process of its own.

    Raises:
        DeviceError: an unknown device.
    """
    from qimeng.device import current_card
    from qimeng.envs.steps.setup import evaluator_kind, make_device, versions_here

    device = make_device(settings.device or None)
    kind = evaluator_kind(device)
    return {
        "device": device.name,
        "gpu": str(current_card() or ""),
        "measured": device.measured,
        "versions": {"qimeng": VERSION, **dict(versions_here(f"{kind.__name__} {kind.version}"))},
    }


def close_hosts() -> None:
    """End the host of this process."""
    with _lock:
        _close_hosts()


def _close_hosts() -> None:
    while _hosts:
        _hosts.pop().close()


def _hosted(settings: Settings, reference: Reference) -> Host:
    if _hosts and (_hosts[0].reference != reference or not _hosts[0].alive):
        _close_hosts()
    if not _hosts:
        _hosts.append(Host(shared_server(PRELOAD), _locks(), reference, settings))
    return _hosts[0]


@lru_cache(1)
def _locks() -> tuple[str, ...]:
    process = shared_server(PRELOAD).start(f"{_HOST}:lock_files")
    try:
        process.send("ready")
        process.await_ready()
        return tuple(process.call("make", START_S)[0])
    finally:
        process.kill()


def _cut(item: Any) -> Any:
    if isinstance(item, str):
        text = plain_text(item)
        return text if len(text) <= MESSAGE_CHARS else text[: MESSAGE_CHARS // 2] + " … " + text[-MESSAGE_CHARS // 2 :]
    if isinstance(item, list):
        return [_cut(x) for x in item]
    return {key: _cut(value) for key, value in item.items()} if isinstance(item, dict) else item


__all__ = [
    "MESSAGE_CHARS",
    "PRELOAD",
    "BadReference",
    "Host",
    "REQUIRED",
    "Settings",
    "close_hosts",
    "describe",
    "evaluation_from",
    "judge_apart",
]
