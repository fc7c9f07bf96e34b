"""What a host sends is taken for an evaluation only where it is one."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from qimeng.envs.workers.forkserver import WorkerFailed
from qimeng.service.hosting import MESSAGE_CHARS, evaluation_from
from qimeng.service.messages import Answer
from tests.service.fakes import ANSWERS, PASSED

SENT = json.loads(PASSED.to_json())


@pytest.mark.parametrize("name", ANSWERS)
def test_an_evaluation_is_read_as_it_was_sent(name: str) -> None:
    assert evaluation_from(json.loads(ANSWERS[name].to_json())) == ANSWERS[name]


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "passed",
        {},
        {**SENT, "gate": "heaven"},
        {**SENT, "failure": ["wrong"]},
        {**SENT, "error": {"a": 1}},
        {**SENT, "timing": {"device_ms": "fast"}},
        {**SENT, "timing": {"device_ms": 1e-308}, "eager": {"device_ms": 1e308}},
        {**SENT, "compiled": {"default": 3}},
        {**SENT, "notes": "x"},
        {**SENT, "notes": ["x" * 100] * 20_000},
        {**SENT, "region_ms": {"a": []}},
    ],
    ids=lambda data: str(data)[:20],
)
def test_anything_else_is_the_hosts_failure(data: Any) -> None:
    with pytest.raises(WorkerFailed, match="no evaluation"):
        evaluation_from(data)


def test_a_failure_that_nobody_knows_has_no_kind_of_its_own() -> None:
    found = evaluation_from({**SENT, "gate": "program", "error": "", "failure": "made up"})
    fault = Answer.of(found).fault
    assert fault is not None and (fault.kind, fault.failure) == ("unknown", "made up")


def test_texts_are_cut() -> None:
    found = evaluation_from({**SENT, "gate": "program", "error": "x" * 10**5, "failure": "wrong"})
    assert len(found.error or "") < MESSAGE_CHARS + 10


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_read_as_it_was_written(name: str) -> None:
    answer = Answer.of(ANSWERS[name], {"torch": "2"})
    assert Answer.from_data({**json.loads(json.dumps(asdict(answer))), "later": 1}) == answer
