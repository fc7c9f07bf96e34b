"""Submissions on a cluster: the same answers, from hosts that its nodes keep."""

from __future__ import annotations

import os
import time
from importlib.util import find_spec

import pytest

from qimeng.envs.workers.task_process import TaskProcess
from qimeng.interfaces import Asked
from qimeng.service.hosting import Settings
from qimeng.service.jobs import Job, Jobs, State
from qimeng.service.limits import Limits
from qimeng.service.messages import Candidate, Options, Reference, Submission
from qimeng.service.server import Place
from tests.service.test_hosting import FUNCTION, REFERENCE


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("QIMENG_FULL_SCALE"), reason="takes 40 seconds of a core: QIMENG_FULL_SCALE=1")
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed (the extra cluster)")
def test_a_cluster_answers_and_cancels() -> None:
    process = TaskProcess()  # Ray keeps what it was first told, for as long as a process lives
    try:
        process.send(answer_and_cancel, None)
        found, failure, _ = process.receive()
    finally:
        process.kill()
    assert failure is None, failure
    assert found == (True, "cancelled")


def answer_and_cancel(nothing: None) -> tuple[bool | None, str]:
    """In a process of its own: whether a right candidate passes, and the state of a submission that was cancelled."""
    make, about = Place(cluster="local", settings=Settings("h100")).open()
    jobs = Jobs(make, Limits(), about["versions"])
    try:
        done = _waited(jobs.submit(_submission(REFERENCE), "anna"), State.DONE)
        held = _waited(jobs.submit(_submission("while True: pass\n"), "anna"), State.RUNNING)
        assert done.answer is not None
        return done.answer.correct, jobs.cancel(held.id, "anna").state.value
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
