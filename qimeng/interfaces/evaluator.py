"""The evaluation boundary: requests go in, tickets come out, answers are gathered in the order they end.

Deals in the two methods of an engine and what is built on them. Knows nothing about how a program is judged. The
engines that come with the library: `qimeng.envs.judge.gpu_evaluator`, `qimeng.envs.estimate.estimator` and
`qimeng.envs.workers.local_pool`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qimeng.errors import RequestError
from qimeng.interfaces.requests import EvaluationRequest
from qimeng.interfaces.results import Evaluation

if TYPE_CHECKING:
    from qimeng.interfaces.steps import Patch
    from qimeng.program.program import Program


@dataclass(frozen=True, eq=False)
class Ticket:
    """Stands for one submitted request; no two are equal.

    Attributes:
        request: what was submitted.
        at: when (`time.monotonic`).
    """

    request: EvaluationRequest
    at: float = field(default_factory=time.monotonic, kw_only=True)


@dataclass(frozen=True)
class ReferenceFacts:
    """What an engine that runs programs found out about the specification.

    Attributes:
        degenerate: why the result can be guessed (see `qimeng.envs.errors.degenerate`); empty where it cannot.
        eager_agrees: whether eager run twice passes KernelBench's own rule; None where that was not tried.
        exact_agrees: whether the float64 result passes that rule against eager; None where that was not checked.
    """

    degenerate: str = ""
    eager_agrees: bool | None = None
    exact_agrees: bool | None = None


@dataclass(frozen=True)
class EngineReport:
    """What an engine says about its work so far.

    Attributes:
        seconds: wall seconds by part since it was made, its own opening included; empty where it does not count them.
        stored: answers that came from a store.
        reference: what it found out about the specification; None where it runs no program.
        again: requests that it judged again, by whose fault that was (`qimeng.interfaces.Fault`).
        reason: why it did so last, in words; empty where it never did.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    stored: int = 0
    reference: ReferenceFacts | None = None
    again: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""


class Evaluator(ABC):
    """Judges programs: are they right, and how fast.

    An engine takes many requests at a time. A fault of a program is an answer (`Evaluation.failure`), never an
    exception. The name, the version and the kind of times are part of the key that answers are stored under.

    Attributes:
        version: of the rules that it judges by.
        estimated: whether its times are a model's; None where that follows from the device (measured on the GPU of this
            machine, estimated for any other).
        at_once: requests that it works on at a time; a search submits several ahead where that is more than one.
    """

    version: int = 1
    estimated: bool | None = None
    at_once: int = 1

    @property
    def name(self) -> str:
        """What the engine is called where its answers are stored; by default its class."""
        return type(self).__name__

    @property
    def report(self) -> EngineReport:
        """What it says about its work so far."""
        return EngineReport()

    @abstractmethod
    def submit(self, request: EvaluationRequest) -> Ticket:
        """Take a request; the answer comes from `gather`.

        Raises:
            RequestError: the request is for another specification, device or mode than the engine judges.
        """

    @abstractmethod
    def gather(self, tickets: Sequence[Ticket], timeout: float | None = None) -> Iterator[tuple[Ticket, Evaluation]]:
        """The answers to these requests, each as soon as it is there.

        Args:
            tickets: that `submit` of this engine gave; each is answered once.
            timeout: seconds after which no more answers are waited for; the rest can be gathered later.
        """

    @property
    def prepares(self) -> bool:
        """Whether `prepare` does anything."""
        return False

    def prepare(self, request: EvaluationRequest) -> None:  # noqa: B027  (most engines have nothing to begin with)
        """Begin in the background with what judging `request` would need, such as compiling; it may never be asked."""

    def left_aside(self, request: EvaluationRequest) -> Evaluation | None:
        """What is answered where a library has not compiled what `request` needs within its seconds; None otherwise."""
        return None

    def ask(self, request: EvaluationRequest, ticket: Ticket | None = None) -> Evaluation:
        """Submit one request and wait for its answer.

        Args:
            request: what is asked.
            ticket: where it was submitted before.

        Raises:
            RequestError: the engine gave no answer, or something else than an evaluation.
        """
        found = next((answer for _, answer in self.gather([ticket or self.submit(request)])), None)
        if not isinstance(found, Evaluation):
            raise RequestError(f"the evaluator {self.name} answered with {type(found).__name__}, not an Evaluation")
        return found

    def evaluate(self, program: Program, patch: Patch | None = None, **options: Any) -> Evaluation:
        """Judge `program`, or the best alternative of `patch` on it, and wait for the answer.

        Args:
            program: the program.
            patch: applied to it.
            options: further fields of the `EvaluationRequest`.
        """
        return self.ask(EvaluationRequest(program, patch, **options))

    def close(self) -> None:  # noqa: B027  (most engines hold nothing)
        """Give back processes and memory."""


class SerialEvaluator(Evaluator):
    """An engine that answers one request at a time, in the caller's thread, in the order they are gathered."""

    @abstractmethod
    def answer(self, request: EvaluationRequest) -> Evaluation:
        """The answer to one request."""

    def submit(self, request: EvaluationRequest) -> Ticket:
        """Take a request; it is answered when it is gathered."""
        return Ticket(request)

    def gather(self, tickets: Sequence[Ticket], timeout: float | None = None) -> Iterator[tuple[Ticket, Evaluation]]:
        """The answers, one after the other; none is begun after `timeout` seconds."""
        began = time.monotonic()
        for ticket in tickets:
            if timeout is not None and time.monotonic() - began >= timeout:
                return
            yield ticket, self.answer(ticket.request.after(time.monotonic() - ticket.at))


__all__ = ["EngineReport", "Evaluator", "ReferenceFacts", "SerialEvaluator", "Ticket"]
