"""A client of the evaluation service.

Deals in HTTP requests. Needs neither PyTorch nor a GPU; needs `requests`, of the extra ``service``.
"""

from __future__ import annotations

import json
import math
import os
import time
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

from qimeng.interfaces import Asked
from qimeng.service.errors import ServiceError
from qimeng.service.messages import Answer, Candidate, Form, Options, Reference, Submission
from qimeng.service.tokens import VARIABLE

WAIT_S = 20.0
"""Seconds that one request waits for an answer."""
SLACK_S = 30.0
PATIENCE_S = 60.0
"""Seconds for which a service that does not answer is asked again: it may be starting anew."""
BATCH, BATCH_BYTES = 64, 900_000
"""The most submissions of one request, and their characters: what the service takes by default (`Limits`)."""
_PATH = "/v1/evaluations"
ASKED = (Asked.CHECK, Asked.TIMING, Asked.FINAL)
"""What the service may be asked."""
FULL = "queue-full"
"""The reason of a refusal after which the same may be sent again, once others have ended."""


class ServiceFailed(ServiceError):
    """The service refused a request, or could not be reached.

    Attributes:
        status: number of the HTTP answer; 0 where there was none.
        reason: in one word, such as ``"queue-full"``.
    """

    def __init__(self, status: int, reason: str, message: str):
        super().__init__(message)
        self.status, self.reason = status, reason


@dataclass(frozen=True)
class Ticket:
    """Stands for one submission.

    Attributes:
        id: that the service gave it.
    """

    id: str


class Asking(TypedDict, total=False):
    """What is asked of a candidate; nothing needs to be said.

    Attributes:
        asked: see `Options`; a final verification by default.
        form: see `Candidate`; found out from the text by default.
        compile_modes: see `Options`.
        seconds: see `Options`.
    """

    asked: str | Asked
    form: str | Form
    compile_modes: Sequence[str]
    seconds: float | None


class EvaluationClient:
    """Asks an evaluation service. One client is for one thread.

    What a service that was started anew knows no more is sent again.

    Args:
        url: such as ``"http://127.0.0.1:8460"``.
        token: of this client; by default that of the variable ``QIMENG_SERVICE_TOKEN``.
        patience: seconds for which a service that cannot be reached is tried again.

    Raises:
        ServiceError: the extra is not installed, or the token or the address is malformed.
    """

    def __init__(self, url: str = "http://127.0.0.1:8460", token: str | None = None, patience: float = PATIENCE_S):
        try:
            import requests
        except ImportError:
            raise ServiceError("the client needs the extra `service`: pip install 'qimeng[service]'") from None

        self._url, self._session, self._patience = url.rstrip("/"), requests.Session(), patience
        self._sent: dict[Ticket, Submission] = {}
        self._ids: dict[Ticket, str] = {}
        token = (os.environ.get(VARIABLE, "") if token is None else token).strip()
        if not (token.isascii() and token.isprintable()):  # no header holds it; the message must not either
            raise ServiceError("a token is one line of ASCII characters, as `qimeng serve` wrote it")
        if not self._url.startswith(("http://", "https://")):
            raise ServiceError(f"{url!r} is no address of a service: give one like http://127.0.0.1:8460")
        if token:
            self._session.headers["Authorization"] = f"Bearer {token}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; what was submitted goes on."""
        self._session.close()

    def submit(
        self, reference: str | Path | Reference | Any, candidate: str | Path | Candidate, **options: Unpack[Asking]
    ) -> Ticket:
        """Send a candidate to be judged.

        Args:
            reference: text or path of a KernelBench-style file, a `Reference`, or a `KernelSpec` made from a file.
            candidate: text or path of a program, or a `Candidate`.
            options: see `Asking`.

        Raises:
            ServiceFailed: the service does not take it.
        """
        submission = _submission(reference, candidate, **options)
        return self._kept(submission, self._call("POST", _PATH, json=asdict(submission)))

    def gather(self, tickets: Sequence[Ticket], timeout: float | None = None) -> Iterator[tuple[Ticket, Answer | None]]:
        """The answers, each as soon as it is there; None for a submission that was cancelled.

        Args:
            tickets: that `submit` gave.
            timeout: seconds after which no more answers are waited for.

        Raises:
            ServiceFailed: the service knows a ticket no more, or cannot be reached.
        """
        until = None if timeout is None else time.monotonic() + timeout
        left = list(dict.fromkeys(tickets))
        while left:
            pause = WAIT_S if until is None else min(WAIT_S, max(0.0, until - time.monotonic()))
            asked = left[:BATCH]
            ended = [(t, data) for t, data in zip(asked, self._found(asked, pause), strict=True) if _has_ended(data)]
            for ticket, data in ended:
                left.remove(ticket)
                self._sent.pop(ticket, None), self._ids.pop(ticket, None)
                yield ticket, None if data["answer"] is None else Answer.from_data(data["answer"])
            left = left[len(asked) - len(ended) :] + left[: len(asked) - len(ended)]  # the others' turn
            if until is not None and time.monotonic() >= until:
                return

    def evaluate(
        self, reference: str | Path | Reference | Any, candidate: str | Path | Candidate, **options: Unpack[Asking]
    ) -> Answer:
        """Send a candidate and wait for the answer; see `submit` for the arguments.

        Raises:
            ServiceFailed: the service does not take it, or somebody cancelled it.
        """
        (found,) = self.gather([self.submit(reference, candidate, **options)])
        if found[1] is None:
            raise ServiceFailed(0, "cancelled", "the submission was cancelled")
        return found[1]

    def evaluate_all(
        self,
        reference: str | Path | Reference | Any,
        candidates: Sequence[str | Path | Candidate],
        **options: Unpack[Asking],
    ) -> list[Answer]:
        """The answers to many candidates of one reference, in their order; see `submit` for the options.

        They are sent many at a time. Where the service takes no more for the moment, the rest is sent later.

        Raises:
            ServiceFailed: the service does not take one of them, or somebody cancelled it.
        """
        submissions = [_submission(reference, candidate, **options) for candidate in candidates]
        found: dict[int, Answer] = {}
        tickets: dict[Ticket, int] = {}
        left = list(range(len(submissions)))
        while len(found) < len(submissions):
            batch = left[: _fitting([submissions[number] for number in left])]
            for number, data in zip(batch, self._send([submissions[n] for n in batch]), strict=True):
                if "error" not in data:
                    tickets[self._kept(submissions[number], data)] = number
                elif data["error"]["reason"] != FULL:
                    raise _refusal(422, data)
            left = [number for number in left if number not in tickets.values() and number not in found]
            for ticket, answer in self.gather(list(tickets), timeout=1.0 if left else None):
                if answer is None:
                    raise ServiceFailed(0, "cancelled", "a submission was cancelled")
                found[tickets.pop(ticket)] = answer
            if left and not tickets:
                time.sleep(1.0)  # others have filled the queue
        return [found[number] for number in range(len(submissions))]

    def cancel(self, ticket: Ticket) -> None:
        """End a submission.

        Raises:
            ServiceFailed: the service knows it no more.
        """
        self._call("DELETE", f"{_PATH}/{self._ids.get(ticket, ticket.id)}")

    def metrics(self) -> dict[str, Any]:
        """What judges, what waits, and counts of what was judged, by whose fault it failed.

        Raises:
            ServiceFailed: the service cannot be reached.
        """
        return self._call("GET", "/v1/metrics")

    def _kept(self, submission: Submission, data: dict[str, Any]) -> Ticket:
        ticket = Ticket(str(data["id"]))
        self._sent[ticket] = submission
        return ticket

    def _send(self, submissions: Sequence[Submission]) -> list[dict[str, Any]]:
        """What the service says of each."""
        if not submissions:
            return []
        data = self._call("POST", "/v1/batches", json={"submissions": [asdict(one) for one in submissions]})
        return list(data["evaluations"])

    def _found(self, tickets: Sequence[Ticket], wait: float) -> list[dict[str, Any]]:
        """What the service knows of each, once one of them has ended; what it knows no more is sent again."""
        ids = ",".join(self._ids.get(ticket, ticket.id) for ticket in tickets)
        found = self._call("GET", _PATH, params={"ids": ids, "wait": wait})["evaluations"]
        for number, (ticket, data) in enumerate(zip(tickets, found, strict=True)):
            if "error" in data:
                if ticket not in self._sent:
                    raise _refusal(404, data)
                found[number] = self._call("POST", _PATH, json=asdict(self._sent[ticket]))
                self._ids[ticket] = str(found[number]["id"])
        return list(found)

    def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        import requests

        until = time.monotonic() + self._patience
        while True:
            try:
                answer = self._session.request(method, self._url + path, timeout=WAIT_S + SLACK_S, **arguments)
                break
            except requests.RequestException as error:
                if time.monotonic() >= until or not isinstance(error, requests.ConnectionError):
                    raise ServiceFailed(0, "unreachable", f"no answer from {self._url}: {error}") from error
                time.sleep(0.5)
        try:
            data = answer.json()
        except ValueError:
            data = {"error": {"reason": "unknown", "message": answer.text[:500]}}
        if answer.status_code >= 400 or not isinstance(data, dict):
            raise _refusal(answer.status_code, data)
        return dict(data)


def _refusal(status: int, data: Any) -> ServiceFailed:
    said = data.get("error", {}) if isinstance(data, dict) else {}
    return ServiceFailed(status, said.get("reason", "unknown"), said.get("message", "the answer is none of a service"))


def _has_ended(data: dict[str, Any]) -> bool:
    return data["state"] in ("done", "cancelled")


def _submission(
    reference: str | Path | Reference | Any,
    candidate: str | Path | Candidate,
    asked: str | Asked = Asked.FINAL,
    form: str | Form = Form.AUTO,
    compile_modes: Sequence[str] = (),
    seconds: float | None = None,
) -> Submission:
    written = candidate if isinstance(candidate, Candidate) else Candidate(_text(candidate), Form(form))
    if seconds is not None and not math.isfinite(seconds):  # JSON has no such number
        raise ValueError(f"seconds must be a number, got {seconds!r}")
    if asked not in ASKED:
        raise ValueError(f"asked must be one of {', '.join(a.value for a in ASKED)}, got {asked!r}")
    return Submission(reference_of(reference), written, Options(Asked(asked), tuple(compile_modes), seconds))


def _fitting(submissions: Sequence[Submission]) -> int:
    """How many of them, from the first on, fit into one request; one does in any case."""
    room, number = BATCH_BYTES, 0
    while number < min(len(submissions), BATCH):
        room -= len(json.dumps(asdict(submissions[number])))
        if room < 0 and number:
            break
        number += 1
    return number


def reference_of(thing: str | Path | Reference | Any) -> Reference:
    """A reference from a text, a path, or a spec that was made from a file's text.

    Raises:
        ValueError: a spec of a live module, which has no text, or with fields that a reference lacks.
    """
    if isinstance(thing, Reference):
        return thing
    if isinstance(thing, str | Path):
        return Reference(_text(thing))
    if not thing.source or thing.weights or thing.declared:
        raise ValueError(
            f"{thing.name}: the service judges files; declared domains and stored weights it does not know"
        )
    return Reference(thing.source, thing.dtype, thing.mode, thing.training)


def _text(thing: str | Path | Any) -> str:
    """A text with a line break is taken as it is, other text as a path."""
    if isinstance(thing, str) and "\n" in thing:
        return thing
    if not os.path.isfile(thing):
        raise ServiceError(f"{str(thing)!r} is no file, and no text of several lines")
    with tokenize.open(thing) as file:  # in the encoding that it declares, without a byte order mark
        return file.read()


__all__ = ["Asking", "EvaluationClient", "ServiceFailed", "Ticket", "reference_of"]
