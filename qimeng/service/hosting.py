"""What a process of the service does that judges for strangers: it keeps one sandboxed host at a time, and asks it.

The host (`qimeng.service.host_process`) has the stranger's reference; this process never loads it, reads JSON from it
and nothing else, and ends it with all that it started. A host serves all candidates of one reference, so that their
baseline is measured once. Deals in submissions as text; knows nothing about queues.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qimeng.envs.sandbox.sandbox import needs_landlock
from qimeng.envs.workers.answering import no_verdict
from qimeng.envs.workers.forkserver import ForkServer, Process, WorkerFailed
from qimeng.envs.workers.plain_text import plain_text
from qimeng.interfaces import EngineReport, Evaluation, Gate
from qimeng.interfaces.faults import JUDGE_FAILED, MACHINE_FAILED
from qimeng.service.messages import REFERENCE_FAILED, Reference, Submission

PRELOAD = ("torch", "qimeng.service.host_process", "qimeng.envs.workers.preload:warm_up")
MESSAGE_CHARS = 8000
"""The most that is kept of a message."""
ANSWER_BYTES = 1 << 20
"""The longest evaluation that a host may send."""
MOST_S = 86400.0


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
        reference: what it has.
        settings: how it judges.

    Raises:
        WorkerFailed: it could not be started.
        BadReference: the reference did not load, ended the process, or took too long.
    """

    def __init__(self, server: ForkServer, reference: Reference, settings: Settings):
        self.reference, self._settings = reference, settings
        self._process: Process = server.start(
            "qimeng.service.host_process:main", sandbox="host", writable=_locks(server)
        )
        try:
            self._process.send("ready")
            self.layers = tuple(self._process.await_ready()["sandbox"])
            self.versions = self._open()
        except BaseException:
            self.close()
            raise

    def judge(self, submission: Submission) -> Evaluation:
        """The evaluation of its candidate.

        Raises:
            WorkerFailed: the host failed, or sent what is no evaluation.
        """
        data, _ = self._process.call(
            "judge",
            MOST_S,
            candidate=submission.candidate,
            options=submission.options,
            compile_seconds=self._settings.compile_s,
        )
        if not isinstance(data, str) or len(data) > ANSWER_BYTES:
            raise WorkerFailed("protocol", "the answer is no evaluation")
        try:
            return Evaluation.from_json(Evaluation.from_json(data).to_json())
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise WorkerFailed("protocol", f"the answer is no evaluation: {type(error).__name__}") from error

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.alive

    def close(self) -> None:
        """End it with all that it started."""
        self._process.kill()

    def _open(self) -> Mapping[str, str]:
        limit = self._settings.reference_s
        try:
            data, _ = self._process.call("open", limit, reference=self.reference, device=self._settings.device)
        except WorkerFailed as failed:
            if failed.kind == MACHINE_FAILED:
                raise
            text = f"it did not load and capture within {limit:g} s" if failed.kind == "timeout" else str(failed)
            raise BadReference(f"the reference cannot be judged: {text}", failed.kind) from None
        return data if isinstance(data, dict) else {}


class BadReference(Exception):
    """A reference that cannot be judged.

    Attributes:
        kind: how it failed, as of `WorkerFailed`.
    """

    def __init__(self, message: str, kind: str):
        super().__init__(message)
        self.kind = kind


_servers: list[ForkServer] = []
_hosts: list[Host] = []


def judge_apart(settings: Settings, text: str) -> tuple[str, EngineReport]:
    """The answer to a submission as JSON, as `qimeng.envs.workers.answering.answer` gives it for requests.

    Args:
        settings: how it is judged.
        text: the submission's JSON.
    """
    submission = Submission.from_json(text)
    try:
        found = _hosted(settings, submission.reference).judge(submission)
    except BadReference as error:
        found = Evaluation(Gate.WRITE, str(error), REFERENCE_FAILED)
    except WorkerFailed as failed:
        close_hosts()
        machine = failed.kind in (MACHINE_FAILED, "crash", "memory")
        found = no_verdict(str(failed), MACHINE_FAILED if machine else JUDGE_FAILED)
    return _bounded(found).to_json(), EngineReport()


def close_hosts() -> None:
    """End the host of this process."""
    while _hosts:
        _hosts.pop().close()


def _hosted(settings: Settings, reference: Reference) -> Host:
    if not _servers:
        if missing := needs_landlock():
            raise WorkerFailed(MACHINE_FAILED, missing)
        _servers.append(ForkServer(PRELOAD))
    if _hosts and (_hosts[0].reference != reference or not _hosts[0].alive):
        close_hosts()
    if not _hosts:
        _hosts.append(Host(_servers[0], reference, settings))
    return _hosts[0]


def _locks(server: ForkServer) -> list[str]:
    return []


def _bounded(found: Evaluation) -> Evaluation:
    """The evaluation with plain text of bounded length."""
    return Evaluation.from_json(json.dumps(_cut(json.loads(found.to_json()))))


def _cut(item: Any) -> Any:
    if isinstance(item, str):
        text = plain_text(item)
        return text if len(text) <= MESSAGE_CHARS else text[: MESSAGE_CHARS // 2] + " … " + text[-MESSAGE_CHARS // 2 :]
    if isinstance(item, list):
        return [_cut(x) for x in item]
    return {key: _cut(value) for key, value in item.items()} if isinstance(item, dict) else item


__all__ = ["PRELOAD", "BadReference", "Host", "Settings", "close_hosts", "judge_apart"]
