"""The measurement of families beside libraries: cases, a call without a library, the table."""

from __future__ import annotations

import pytest

from experiments.libraries import OURS, cases, library
from experiments.rivals import rivals


def test_the_cases_have_names_of_their_own_and_run_as_they_are() -> None:
    found = cases(tiny=True)
    assert len({c.name for c in found}) == len(found) >= 20
    for case in found:
        case.function(*case.inputs("cpu"))


def test_a_missing_library_fails_when_it_is_called() -> None:
    call = library("a_library_that_is_missing", "function")
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_missing"):
        call()


def test_the_table_sets_the_result_beside_the_libraries() -> None:
    row = {"case": "softmax", "turns_ms": {OURS: 1.0, "eager": 2.0, "quack": 0.9}}
    table = rivals([row | {"environment": {"device": "GPU", "commit": "1234567"}, "steps": ["lowering"]}])
    assert "over eager | over quack" in table and "| softmax | 1000.0 | 2.00 | 0.90 |" in table
