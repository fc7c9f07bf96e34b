"""Submissions on a cluster: the same answers, from hosts that its nodes keep."""

from __future__ import annotations

import time

import pytest

from qimeng.interfaces import Asked
from qimeng.service.hosting import Settings
from qimeng.service.jobs import Job, Jobs, State
from qimeng.service.limits import Limits
from qimeng.service.messages import Candidate, Options, Reference, Submission
from qimeng.service.server import Place
from tests.service.test_hosting import FUNCTION, REFERENCE


@pytest.mark.slow
def test_a_cluster_answers_and_cancels() -> None:
    pytest.importorskip("ray", reason="ray is not installed (the extra cluster)")
    make, about = Place(cluster="local", settings=Settings("h100")).open()
    assert (about["device"], about["measured"]) == ("h100", False)
    jobs = Jobs(make, Limits(), about["versions"])
    try:
        found = _waited(jobs.submit(_submission(REFERENCE), "anna"), State.DONE)
        assert found.answer is not None and found.answer.correct is True
        held = _waited(jobs.submit(_submission("while True: pass\n"), "anna"), State.RUNNING)
        assert jobs.cancel(held.id, "anna").state is State.CANCELLED
    finally:
        jobs.close()


def _submission(reference: str) -> Submission:
    return Submission(Reference(reference), Candidate(FUNCTION), Options(Asked.TIMING))


def _waited(job: Job, state: State) -> Job:
    until = time.monotonic() + 300
    while job.state is not state and time.monotonic() < until:
        time.sleep(0.1)
    assert job.state is state
    return job
