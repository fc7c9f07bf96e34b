import pytest

from experiments.trust.cheats import PORTION, case_key, cases, judge_portion, portions
from experiments.trust.views import exploits
from qimeng.exploits import EXPLOITS, HONEST_CASES
from qimeng.exploits.cases import own_mark

WHERE = {"environment": {"device": "here", "commit": "1"}}


def test_portions_hold_every_case_once_and_one_specification_each() -> None:
    every = {c.name: c for c in (*EXPLOITS, *HONEST_CASES)}
    assert len(cases(gpu=True)) == len(every) > len(cases(gpu=False))
    found = portions(cases(gpu=True))
    assert sorted(name for names in found for name in names) == sorted(every)
    assert all(len(names) <= PORTION and len({every[n].spec for n in names}) == 1 for names in found)


@pytest.mark.slow
def test_a_portion_is_judged_and_told_in_rows() -> None:
    cheat = next(c for c in cases(gpu=False) if c.kind == "wrong result")
    honest = next(c for c in HONEST_CASES if c.spec == cheat.spec and not c.needs_gpu)
    rows = judge_portion(False, (honest.name, cheat.name))
    assert {r["key"] for r in rows} == {case_key(c, False) for c in (cheat, honest)}
    assert all(r["as_expected"] for r in rows) and [r["passed"] for r in rows] == [False, True]
    text = exploits([{**r, **WHERE} for r in rows])
    assert "| wrong result | 1 | 1 | 0 | 1 | 0 |" in text and "| honest | 1 | 0 | 1 | 1 | 0 |" in text
    odd = exploits([{**r, **WHERE, "as_expected": False} for r in rows])
    assert f"| {cheat.name} | wrong result | program (wrong) |" in odd and f"| {honest.name} | honest | passed, " in odd


def test_each_judge_knows_its_own_processes_by_a_name_that_linux_can_hold() -> None:
    assert len(own_mark().encode()) == 15
