"""Answers outlive a server, and a client does not notice that another one took its place."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from qimeng.service.client import EvaluationClient, ServiceFailed
from qimeng.service.errors import ServiceError
from qimeng.service.jobs import Jobs, State
from qimeng.service.known import KnownAnswers
from qimeng.service.limits import Limits
from qimeng.service.messages import Answer
from tests.service.conftest import TOKEN, serving
from tests.service.fakes import ANSWERS, PASSED, FakePool, submission

JUDGE = {"device": "h100", "versions": {"evaluator": "Fake 1"}}


def test_answers_are_known_after_a_restart(tmp_path: Path) -> None:
    path, pools = tmp_path / "folder" / "answers.sqlite", list[FakePool]()

    def make() -> FakePool:
        pools.append(FakePool())
        return pools[-1]

    for known in (False, True):
        jobs = Jobs(make, Limits(), {}, KnownAnswers(path, 10, JUDGE))
        for text, right in (("right", True), ("wrong", False), ("busy", True)):
            job = jobs.submit(submission(text), "anna")
            until = time.monotonic() + 120
            while job.state is not State.DONE and time.monotonic() < until:
                time.sleep(0.01)
            assert job.answer is not None and (job.answer.correct, job.known) == (right, known and text != "busy")
        jobs.close()
    assert (pools[0].begun.count("right"), pools[1].begun.count("right")) == (1, 0)
    assert pools[1].begun.count("busy") > 0, "a measurement's fault is asked again"


def test_only_answers_of_the_same_judge_are_known(tmp_path: Path) -> None:
    answer = Answer.of(PASSED, {"torch": "2"})
    known = KnownAnswers(tmp_path / "answers", 2, JUDGE)
    known.put("a", answer)
    assert known.get("a") == answer and known.get("b") is None
    other = KnownAnswers(tmp_path / "answers", 2, {**JUDGE, "device": "h200"})
    assert other.get("a") is None
    for name in "bc":
        known.put(name, Answer.of(ANSWERS["wrong"]))
    assert known.get("a") is None and known.get("c") is not None, "the oldest is forgotten"
    known.close(), other.close()


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    path.write_text("a text of somebody's" * 100)
    with pytest.raises(ServiceError, match="name another file"):
        KnownAnswers(path, 10, JUDGE)


def test_a_file_that_fails_costs_answers_only(tmp_path: Path) -> None:
    known = KnownAnswers(tmp_path / "answers", 10, JUDGE)
    known.close()
    known.put("a", Answer.of(PASSED))
    assert known.get("a") is None


def test_a_client_goes_on_with_a_server_that_was_started_anew(kept_port: int) -> None:
    pytest.importorskip("requests")
    with EvaluationClient(f"http://127.0.0.1:{kept_port}", TOKEN, patience=120) as client:
        with serving(port=kept_port):
            held, right = client.submit("x\n", "hold\n"), client.submit("x\n", "right\n")
            stranger = client.submit("x\n", "hold # 2\n")
        client._sent.pop(stranger)
        with serving(port=kept_port):
            (found,) = client.gather([right])
            assert found[0] == right and found[1] is not None and found[1].correct
            assert list(client.gather([held], timeout=0.2)) == [], "it was sent again, and waits"
            client.cancel(held)
            with pytest.raises(ServiceFailed) as refused:
                list(client.gather([stranger]))
            assert (refused.value.status, refused.value.reason) == (404, "unknown-job")


def test_a_client_waits_for_a_server_that_is_starting(kept_port: int) -> None:
    pytest.importorskip("requests")
    found: list[object] = []

    def ask() -> None:
        with EvaluationClient(f"http://127.0.0.1:{kept_port}", TOKEN, patience=120) as client:
            found.append(client.evaluate("x\n", "right\n").correct)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.3)
    with serving(port=kept_port):
        asking.join(120)
    assert found == [True]
