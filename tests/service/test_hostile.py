"""Hostile submissions to the real pool, one after the other: each has a typed answer, and the next one is judged."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from qimeng.interfaces import Asked
from qimeng.service.hosting import Settings
from qimeng.service.jobs import Job, Jobs, State
from qimeng.service.limits import Limits
from qimeng.service.messages import Answer, Candidate, Options, Reference, Submission
from qimeng.service.pools import LocalApart
from tests.service.test_hosting import FUNCTION, REFERENCE

pytestmark = pytest.mark.slow

SECRET = "a secret of the server"


def entry(line: str) -> str:
    """A right candidate that does this first."""
    return FUNCTION.replace("    o = torch", f"    {line}\n    o = torch", 1)


def beside(line: str) -> str:
    """The reference, which does this when it is loaded."""
    return REFERENCE.replace("\n", f"\n{line}\n", 1)


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QIMENG_SERVICE_TOKEN", SECRET)
        made = Jobs(lambda: LocalApart(Settings("h100", reference_s=60), False, ({},)), Limits(seconds=120), {})
        yield made
        made.close()


def judged(jobs: Jobs, candidate: str, reference: str = REFERENCE, seconds: float = 120) -> Answer:
    asked = Submission(Reference(reference), Candidate(candidate), Options(Asked.TIMING, (), seconds))
    job: Job = jobs.submit(asked, "mallory")
    until = time.monotonic() + 300
    while job.state is not State.DONE and time.monotonic() < until:
        time.sleep(0.05)
    assert job.answer is not None
    return job.answer


@pytest.mark.parametrize(
    "line",
    [
        "import os; print(os.environ)",
        "torch.os.kill(torch.os.getppid(), 9)",
        "open('/tmp/written', 'w').write('x' * 10**12)",
        "torch.utils._import_utils.os.fork()",
        "__import__('socket').create_connection(('127.0.0.1', 22))",
        "torch.save(x, '/tmp/written')",
        "torch.load('/root/.qimeng/tokens')",
        "getattr(torch, 'o' + 's').system('kill -9 -1')",
    ],
)
def test_what_no_kernel_needs_is_refused_before_it_runs(jobs: Jobs, line: str) -> None:
    found = judged(jobs, entry(line))
    assert found.fault is not None and (found.fault.kind, found.correct) == ("kernel", False), found
    assert found.fault.gate in ("write", "compile"), found.fault


@pytest.mark.parametrize(
    ("line", "failures"),
    [
        ("keep = [torch.empty(1 << 30) for _ in range(1000)]", ("memory", "error", "crash", "exit")),
        ("while True: print('x' * 10**6)", ("timeout", "late")),
    ],
)
def test_what_never_ends_or_takes_all_memory_is_ended(jobs: Jobs, line: str, failures: tuple[str, ...]) -> None:
    found = judged(jobs, entry(line), seconds=120 if "memory" in failures else 3)
    assert found.fault is not None and found.fault.failure in failures and not found.correct, found.fault
    assert len(found.fault.message) < 10_000


def test_references_that_take_what_they_can_are_ended_and_the_server_lives(jobs: Jobs) -> None:
    for line, seconds, kind in (
        ("x = [torch.empty(1 << 30) for _ in range(1000)]", 120, "reference"),
        ("import time; time.sleep(600)", 3, "machine"),  # the client gave less time than a reference may take
    ):
        found = judged(jobs, FUNCTION, beside(line), seconds)
        assert found.fault is not None and found.fault.kind == kind, (line, found.fault)
        assert SECRET not in found.fault.message
    assert judged(jobs, FUNCTION).correct is True
    assert judged(jobs, FUNCTION.replace("tl.maximum(total, 0.0)", "total")).correct is False
