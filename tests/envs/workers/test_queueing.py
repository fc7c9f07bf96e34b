"""Which request goes again and where: never a kernel's fault, always a measurement's or a machine's, a few times."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace

import pytest
import torch

from qimeng.device import Card
from qimeng.envs.workers import answering
from qimeng.envs.workers.answering import answer, failure_of, no_verdict
from qimeng.envs.workers.forkserver import WorkerFailed
from qimeng.envs.workers.queueing import TRIES, Job, QueueingEvaluator
from qimeng.errors import DeviceError, RequestError
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import FAULTS, LASTING, Evaluation, EvaluationRequest, Fault, Gate, SerialEvaluator, Timing
from qimeng.program.program import Program

NOTHING = OpGraph({}, ())
RIGHT = Evaluation(Gate.PASSED, timing=Timing(1.0))
MACHINE = no_verdict("it fell off the bus")


def request(text: str, seconds: float | None = None) -> EvaluationRequest:
    return EvaluationRequest(Program(NOTHING, (), {}, text), seconds=seconds)


class Scripted(QueueingEvaluator):
    """Two or three places at which `judge` answers at once; the job begun first ends first."""

    def __init__(self, judge: Callable[[str, Hashable], Evaluation], places: Sequence[str] = ("a", "b")):
        super().__init__(SerialEvaluator, len(places))
        self.judge, self.all, self.busy = judge, tuple(places), dict[Hashable, Job]()
        self.begun: list[tuple[str, Hashable]] = []
        self.stopped: list[Job] = []

    @property
    def _places(self) -> Collection[Hashable]:
        return self.all

    @property
    def _free(self) -> Sequence[Hashable]:
        return [place for place in self.all if place not in self.busy]

    def _begin(self, job: Job, place: Hashable) -> None:
        self.busy[place] = job
        self.begun.append((job.request.program.source, place))

    def _wait(self, until: float | None) -> None:
        limit = self._seconds_to(until)
        place, job = next(iter(self.busy.items()))
        found = self.judge(job.request.program.source, place)
        if found.failure == "never":
            assert limit is not None
            time.sleep(limit)
            return
        del self.busy[place]
        self._settle(job, place, found)

    def _stop(self, job: Job) -> None:
        self.stopped.append(job)
        self.busy = {place: busy for place, busy in self.busy.items() if busy is not job}


def asked(engine: Scripted, *texts: str) -> list[Evaluation]:
    tickets = [engine.submit(request(text)) for text in texts]
    found = dict(engine.gather(tickets))
    return [found[ticket] for ticket in tickets]


@pytest.mark.parametrize("failure", sorted(FAULTS))
def test_only_a_measurement_and_a_machine_are_asked_again(failure: str) -> None:
    bad = Evaluation(Gate.TIMING, "because", failure)
    engine = Scripted(lambda text, place: bad)
    (found,) = asked(engine, "x")
    again = bad.fault in (Fault.MEASUREMENT, Fault.MACHINE)
    assert [place for _, place in engine.begun] == (["a", "b", "a"] if again else ["a"])
    assert found == (replace(bad, error=f"because (tried {TRIES} times)") if again else bad)
    assert engine.report.again == ({bad.fault.value: TRIES - 1} if again and bad.fault else {})
    assert engine.report.reason == ("because" if again else "")


def test_a_request_is_cancelled_where_nobody_else_asked_it() -> None:
    engine = Scripted(lambda text, place: RIGHT, places=("a",))
    held, same, waiting, other = (engine.submit(request(text)) for text in ("x", "x", "y", "z"))
    assert [engine.has_begun(t) for t in (held, same, waiting)] == [True, True, False]
    engine.cancel(held)
    assert engine.stopped == [], "somebody else waits for it"
    engine.cancel(waiting)
    engine.cancel(same)
    assert [job.request.program.source for job in engine.stopped] == ["x"]
    assert dict(engine.gather([other])) == {other: RIGHT}
    assert engine.begun == [("x", "a"), ("z", "a")]
    engine.cancel(other)
    with pytest.raises(RequestError):
        list(engine.gather([held]))


def test_every_class_that_is_a_verdict_is_the_kernels_fault() -> None:
    assert {FAULTS[failure] for failure in LASTING} == {Fault.KERNEL}
    assert RIGHT.fault is None and Evaluation(Gate.WRITE, "not stored", "unknown").fault is None


def test_what_a_machine_could_not_judge_another_one_does() -> None:
    engine = Scripted(lambda text, place: MACHINE if place == "a" else RIGHT)
    assert asked(engine, "x") == [RIGHT] and engine.begun == [("x", "a"), ("x", "b")]
    assert engine.report.again == {"machine": 1} and "fell off the bus" in engine.report.reason


def test_a_sick_place_loses_nothing_and_meets_no_request_twice() -> None:
    engine = Scripted(lambda text, place: MACHINE if place == "a" else RIGHT, places="abc")
    texts = [f"x{i}" for i in range(50)]
    assert asked(engine, *texts) == [RIGHT] * 50
    tried_there = [text for text, place in engine.begun if place == "a"]
    assert len(tried_there) == len(set(tried_there)) == engine.report.again["machine"]
    assert len(engine.begun) == 50 + len(tried_there), "nothing was judged twice otherwise"


def test_a_request_waits_for_a_place_it_was_not_tried_at() -> None:
    outcomes = {("x", "a"): MACHINE}
    engine = Scripted(lambda text, place: outcomes.get((text, place), RIGHT))
    assert asked(engine, "x", "y", "z") == [RIGHT] * 3
    assert engine.begun == [("x", "a"), ("y", "b"), ("z", "a"), ("x", "b")], "a is free first, and takes another one"


def test_equal_requests_are_judged_once_and_all_who_asked_are_answered() -> None:
    engine = Scripted(lambda text, place: RIGHT)
    assert asked(engine, "x", "x", "x") == [RIGHT] * 3 and engine.begun == [("x", "a")]
    assert asked(engine, "x") == [RIGHT] and len(engine.begun) == 2, "an answer is not kept: a store does that"


def test_the_time_of_a_request_is_for_all_its_tries() -> None:
    slow = Evaluation(Gate.PROGRAM, "", "never")
    engine = Scripted(lambda text, place: MACHINE if place == "a" else slow)
    began = time.monotonic()
    (ticket,) = [engine.submit(request("x", seconds=0.2))]
    found = dict(engine.gather([ticket]))[ticket]
    assert 0.2 <= time.monotonic() - began < 30
    assert (found.failure, found.fault, found.error) == ("late", Fault.MACHINE, "the judge took longer than 0.2 s")
    assert len(engine.stopped) == 1 and not engine.busy
    assert engine.report.again == {"machine": 1}, "it was given up, not asked again"


def test_a_timeout_of_the_caller_leaves_the_request_in_flight() -> None:
    engine = Scripted(lambda text, place: RIGHT)
    ticket = engine.submit(request("x"))
    assert list(engine.gather([ticket], timeout=0.0)) == []
    assert dict(engine.gather([ticket])) == {ticket: RIGHT}


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (OSError("no space left"), "machine"),
        (MemoryError(), "machine"),
        (WorkerFailed("crash", "killed"), "machine"),
        (DeviceError("does not fit the free memory"), "machine"),
        (torch.OutOfMemoryError("CUDA out of memory"), "machine"),
        (RuntimeError("CUDA error: unspecified launch failure"), "machine"),
        (RuntimeError("No CUDA GPUs are available"), "machine"),
        (RuntimeError("size mismatch"), "judge"),
        (KeyError("CUDA"), "judge"),
    ],
)
def test_what_an_evaluator_raises_is_the_machines_fault_or_the_judges_own(error: Exception, failure: str) -> None:
    assert failure_of(error) == failure


def test_what_a_judge_raises_in_its_process_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "_engines", [])

    def broken() -> tuple[SerialEvaluator, OpGraph]:
        raise DeviceError("no room")

    text, report = answer(broken, request("x").to_json())
    found = Evaluation.from_json(text)
    assert found.fault is Fault.MACHINE and "DeviceError: no room" in (found.error or "") and not report.seconds


def test_an_evaluation_says_which_card_it_is_from() -> None:
    found = replace(RIGHT, card=Card("NVIDIA H100 PCIe", "580.65.06"))
    assert Evaluation.from_json(found.to_json()) == found and str(found.card) == "NVIDIA H100 PCIe, driver 580.65.06"
    older = found.to_json().replace('"card": {"driver": "580.65.06", "name": "NVIDIA H100 PCIe", "uuid": ""}, ', "")
    assert Evaluation.from_json(older) == RIGHT, "one that an older version stored"
