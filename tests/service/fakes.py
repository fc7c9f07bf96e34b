"""A pool without processes, whose answers follow from the candidate's text, and what tests send to it."""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Sequence
from typing import Any, cast

from qimeng.device import Card
from qimeng.envs.workers.answering import no_verdict
from qimeng.envs.workers.queueing import Job, QueueingEvaluator
from qimeng.interfaces import Accuracy, Evaluation, EvaluationRequest, Gate, SerialEvaluator, Timing
from qimeng.service.messages import REFERENCE_FAILED, Candidate, Options, Reference, Submission

PASSED = Evaluation(
    Gate.PASSED,
    timing=Timing(0.5, 0.01, calls=40),
    eager=Timing(2.0, 0.02, calls=40),
    accuracy=Accuracy(1e-7, 1e-8, 1e-6, 1e-7, kernelbench=True),
    generated_share=0.97,
    compiled={"default": Timing(1.0)},
    card=Card("a card"),
)
ANSWERS = {
    "right": PASSED,
    "wrong": Evaluation(Gate.PROGRAM, "output 0: off by 1", "wrong"),
    "broken text": Evaluation(Gate.COMPILE, "no such name", "compile"),
    "hack": Evaluation(Gate.COMPILE, "line 1: os.environ: no kernel needs it", "forbidden"),
    "decoy": Evaluation(Gate.TIMING, "PyTorch does the work", "not-a-kernel"),
    "busy": Evaluation(Gate.TIMING, "another program uses the GPU", "not-timed"),
    "endless": Evaluation(Gate.WRITE, "it did not load within 1 s", REFERENCE_FAILED),
    "sick": no_verdict("the GPU fell off the bus"),
}


class Kind(SerialEvaluator):
    """Names the fake's answers."""

    version, estimated = 3, False

    def answer(self, request: EvaluationRequest) -> Evaluation:
        raise NotImplementedError


class FakePool(QueueingEvaluator):
    """One place at a time; `hold` is never answered, and `raise` raises. Counts what it was given."""

    def __init__(self) -> None:
        super().__init__(Kind, 1)
        self.begun: list[str] = []
        self.stopped: list[str] = []
        self.closed = False
        self._at: Job | None = None

    @property
    def _places(self) -> Collection[Hashable]:
        return (0,)

    @property
    def _free(self) -> Sequence[Hashable]:
        return (0,) if self._at is None else ()

    def _begin(self, job: Job, place: Hashable) -> None:
        self.begun.append(text_of(job))
        if text_of(job) == "raise":
            raise RuntimeError("the pool is broken")
        self._at = job

    def _wait(self, until: float | None) -> None:
        job = self._at
        if job is None or text_of(job) == "hold":
            time.sleep(min(0.01, self._seconds_to(until) or 0.0))
            return
        self._at = None
        self._settle(job, 0, ANSWERS[text_of(job)])

    def _stop(self, job: Job) -> None:
        self.stopped.append(text_of(job))
        self._at = None

    def close(self) -> None:
        self.closed = True
        super().close()


def text_of(job: Job) -> str:
    return cast(Submission, job.request).candidate.source.partition("#")[0].strip()


def submission(candidate: str, **options: Any) -> Submission:
    return Submission(Reference("import torch\n"), Candidate(candidate), Options(**options))


def body(candidate: str, **more: Any) -> dict[str, Any]:
    return {"reference": {"source": "import torch\n"}, "candidate": {"source": candidate}, **more}
