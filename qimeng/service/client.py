"""A client of the evaluation service.

Deals in HTTP requests. Needs neither PyTorch nor a GPU; needs `requests`, of the extra ``service``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from qimeng.interfaces import Asked
from qimeng.service.errors import ServiceError
from qimeng.service.messages import Answer, Candidate, Form, Options, Reference, Submission
from qimeng.service.tokens import VARIABLE

WAIT_S = 20.0
"""Seconds that one request waits for an answer."""
SLACK_S = 30.0


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


class EvaluationClient:
    """Asks an evaluation service. One client is for one thread.

    Args:
        url: such as ``"http://127.0.0.1:8460"``.
        token: of this client; by default that of the variable ``QIMENG_SERVICE_TOKEN``.

    Raises:
        ServiceError: the extra is not installed.
    """

    def __init__(self, url: str = "http://127.0.0.1:8460", token: str | None = None):
        try:
            import requests
        except ImportError:
            raise ServiceError("the client needs the extra `service`: pip install 'qimeng[service]'") from None

        self._url, self._session = url.rstrip("/"), requests.Session()
        token = os.environ.get(VARIABLE, "") if token is None else token
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
        self,
        reference: str | Path | Reference | Any,
        candidate: str | Path | Candidate,
        *,
        asked: str | Asked = Asked.FINAL,
        form: str | Form = Form.AUTO,
        compile_modes: Sequence[str] = (),
        seconds: float | None = None,
    ) -> Ticket:
        """Send a candidate to be judged.

        Args:
            reference: text or path of a KernelBench-style file, a `Reference`, or a `KernelSpec` made from a file.
            candidate: text or path of a program, or a `Candidate`.
            asked: see `Options`.
            form: see `Candidate`.
            compile_modes: see `Options`.
            seconds: see `Options`.

        Raises:
            ServiceFailed: the service does not take it.
        """
        options = Options(Asked(asked), tuple(compile_modes), seconds)
        written = candidate if isinstance(candidate, Candidate) else Candidate(_text(candidate), Form(form))
        submission = Submission(reference_of(reference), written, options)
        return Ticket(str(self._call("POST", "/v1/evaluations", json=asdict(submission))["id"]))

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
            pause = WAIT_S if len(left) == 1 else 0.0
            if until is not None:
                pause = min(pause, max(0.0, until - time.monotonic()))
            ended = [(t, data) for t in left if (data := self._find(t, pause))["state"] in ("done", "cancelled")]
            for ticket, data in ended:
                left.remove(ticket)
                yield ticket, None if data["answer"] is None else Answer.from_data(data["answer"])
            if until is not None and time.monotonic() >= until:
                return
            if left and not ended and not pause:
                time.sleep(0.2)

    def evaluate(
        self, reference: str | Path | Reference | Any, candidate: str | Path | Candidate, **options: Any
    ) -> Answer:
        """Send a candidate and wait for the answer; see `submit` for the arguments.

        Raises:
            ServiceFailed: the service does not take it, or somebody cancelled it.
        """
        (found,) = self.gather([self.submit(reference, candidate, **options)])
        if found[1] is None:
            raise ServiceFailed(0, "cancelled", "the submission was cancelled")
        return found[1]

    def cancel(self, ticket: Ticket) -> None:
        """End a submission.

        Raises:
            ServiceFailed: the service knows it no more.
        """
        self._call("DELETE", f"/v1/evaluations/{ticket.id}")

    def metrics(self) -> dict[str, Any]:
        """What judges, what waits, and counts of what was judged, by whose fault it failed.

        Raises:
            ServiceFailed: the service cannot be reached.
        """
        return self._call("GET", "/v1/metrics")

    def _find(self, ticket: Ticket, wait: float) -> dict[str, Any]:
        return self._call("GET", f"/v1/evaluations/{ticket.id}", params={"wait": wait})

    def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        import requests

        try:
            answer = self._session.request(method, self._url + path, timeout=WAIT_S + SLACK_S, **arguments)
            data = answer.json()
        except (requests.RequestException, ValueError) as error:
            raise ServiceFailed(0, "unreachable", f"no answer from {self._url}: {error}") from error
        if answer.status_code >= 400:
            said = data.get("error", {}) if isinstance(data, dict) else {}
            raise ServiceFailed(
                answer.status_code, said.get("reason", "unknown"), said.get("message", answer.text[:500])
            )
        return dict(data)


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
    return thing if isinstance(thing, str) and "\n" in thing else Path(thing).read_text()


__all__ = ["EvaluationClient", "ServiceFailed", "Ticket", "reference_of"]
