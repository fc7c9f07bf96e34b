"""One drawn spec through everything: program, oracle, judge, mutants. Slow: it starts the oracle and interpreters."""

import pytest

from experiments.trust.mutants import Plan, try_subject
from experiments.trust.views import is_missed, is_wrong
from qimeng.device import DEVICES
from qimeng.planner.data.generate import Bytes


@pytest.mark.slow
def test_a_mutant_is_found_by_the_oracle_and_refused_by_the_judge() -> None:
    plan = Plan("cpu", DEVICES["h200"], seed=1, each=3, inputs=12, sizes=Bytes(1 << 12, 1 << 12))
    *mutants, subject = try_subject(plan, 15)
    assert "left_out" not in subject and subject["mutants"] == len(mutants) == 3
    assert subject["witness"]["found"] == "right" and subject["final"]["failure"] is None
    assert any(is_wrong(row) for row in mutants) and not any(is_missed(row) for row in mutants)
    assert all(row["diff"].startswith("- ") and row["subject"] == subject["key"] for row in mutants)
