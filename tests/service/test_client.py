"""The client against a server that listens; the pool behind it is a fake."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from qimeng.service.client import EvaluationClient, ServiceFailed, reference_of
from qimeng.service.errors import ServiceError
from qimeng.service.messages import Answer, Candidate, Reference, Submission
from qimeng.spec import KernelSpec
from tests.service.conftest import TOKEN
from tests.service.fakes import PASSED, submission

REFERENCE = "import torch\nclass Model(torch.nn.Module): pass\n"


@pytest.fixture
def client(address: str) -> Iterator[EvaluationClient]:
    pytest.importorskip("requests")
    with EvaluationClient(address, TOKEN) as made:
        yield made


def test_an_answer_arrives_as_it_was_given(client: EvaluationClient, tmp_path: Path) -> None:
    found = client.evaluate(REFERENCE, "right # first\n")
    assert found == Answer.of(PASSED)
    candidate = tmp_path / "candidate.py"
    candidate.write_text("wrong\n")
    found = client.evaluate(Reference(REFERENCE, "bfloat16"), candidate, asked="timing", seconds=9)
    assert found.fault is not None and (found.fault.kind, found.correct) == ("kernel", False)


def test_answers_are_gathered_as_they_end(client: EvaluationClient) -> None:
    texts = ["right", "wrong", "broken text"]
    tickets = {client.submit(REFERENCE, f"{text} # gathered\n"): text for text in texts}
    held = client.submit(REFERENCE, "hold\n")
    found = {tickets[t]: a for t, a in client.gather([*tickets, held], timeout=1) if t in tickets}
    assert {text: a.correct for text, a in found.items() if a is not None} == dict(
        zip(texts, (True, False, False), strict=True)
    )
    assert list(client.gather([held], timeout=0.1)) == []
    client.cancel(held)
    assert list(client.gather([held])) == [(held, None)]
    assert client.metrics()["counts"]["cancelled"] == 1


def test_what_the_service_refuses_is_an_error(client: EvaluationClient, address: str) -> None:
    with pytest.raises(ServiceFailed, match="compile_modes") as error:
        client.submit(REFERENCE, Candidate("right\n"), compile_modes=["fast"])
    assert (error.value.status, error.value.reason) == (422, "invalid")
    with EvaluationClient(address, "no token of anybody") as other, pytest.raises(ServiceFailed, match="Bearer"):
        other.metrics()
    with EvaluationClient("http://127.0.0.1:9", TOKEN, 0) as nowhere, pytest.raises(ServiceFailed, match="no answer"):
        nowhere.metrics()


def test_what_cannot_be_sent_is_an_error_before_it_is(client: EvaluationClient, address: str) -> None:
    with EvaluationClient(address, f" {TOKEN}\r\n") as as_read_from_a_file:
        assert as_read_from_a_file.metrics()["queued"] == 0
    for token in ("tök€n of somebody", f"{TOKEN}\n{TOKEN}"):
        with pytest.raises(ServiceError, match="one line of ASCII") as error:
            EvaluationClient(address, token)
        assert token not in str(error.value) and TOKEN not in str(error.value)
    with pytest.raises(ServiceError, match="give one like http://127.0.0.1:8460"):
        EvaluationClient(address.removeprefix("http://"), TOKEN)
    with pytest.raises(ValueError, match="seconds must be a number, got nan"):
        client.submit(REFERENCE, "right\n", seconds=float("nan"))
    with pytest.raises(ValueError, match="asked must be one of check, timing, final, got 'speed'"):
        client.submit(REFERENCE, "right\n", asked="speed")
    with pytest.raises(ServiceError, match="'none.py' is no file, and no text of several lines"):
        client.submit(REFERENCE, "none.py")


def test_files_are_read_as_python_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "reference.py"
    file.write_bytes(b"\xef\xbb\xbf" + REFERENCE.replace("\n", "\r\n").encode())
    assert reference_of(file).source == REFERENCE


def test_a_spec_of_a_file_is_a_reference(tmp_path: Path) -> None:
    file = tmp_path / "problem.py"
    file.write_text(
        "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return x + 1\n"
        "def get_inputs():\n    return [torch.rand(4)]\ndef get_init_inputs():\n    return []\n"
    )
    spec = KernelSpec.from_file(file, dtype="bfloat16", mode="high", training=False)
    assert reference_of(spec) == Reference(file.read_text(), "bfloat16", "high", False)
    assert reference_of(file) == reference_of(file.read_text()) == Reference(file.read_text())
    with pytest.raises(ValueError, match="declared domains"):
        reference_of(spec.with_(domains=("positive",)))


def test_submissions_are_known_by_content() -> None:
    first = submission("right", seconds=5.0)
    assert Submission.from_json(first.to_json()) == first
    assert first.digest == submission("right").digest
    others = [submission("right "), submission("right", compile_modes=("default",))]
    assert len({s.digest for s in (first, *others)}) == 3
