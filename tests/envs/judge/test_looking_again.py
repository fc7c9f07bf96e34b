"""What the first call returned is held against what it was, with sums over its bits and, where these differ, again."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from qimeng.envs.judge.reference import References
from qimeng.envs.judge.verdicts import Comparison, Judge
from qimeng.envs.workers.forkserver import Process
from qimeng.spec import KernelSpec

NOBODY = cast(Process, SimpleNamespace())


@pytest.fixture(params=[False, True], ids=["room", "tidy"])
def judge(request: pytest.FixtureRequest) -> Judge:
    spec = KernelSpec.from_module(torch.nn.Linear(64, 32), (torch.randn(16, 64),))
    references = References(spec, None, torch.device("cpu"))
    references.plan = replace(references.plan, tidy=request.param)
    return Judge(references, lambda: 60.0)


def first_of(judge: Judge) -> tuple[Any, torch.Tensor]:
    trial = next(iter(judge.references.fresh(1)))
    held = trial.outputs[0].value.clone()
    return judge._kept(trial, Comparison(judge.references.facts, [held], None, live=True)), held


def test_what_stayed_as_it_was_needs_neither_the_worker_nor_what_is_expected(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = first_of(judge)
    assert (first.trial is None) == judge.references.plan.tidy
    monkeypatch.delattr(References, "make")
    monkeypatch.setattr(Judge, "_wrong", None)
    assert judge._look_again(NOBODY, first) is None


def test_what_changed_within_its_budget_is_still_right(judge: Judge) -> None:
    first, held = first_of(judge)
    held[3, 4] = torch.nextafter(held[3, 4], torch.tensor(torch.inf))
    assert judge._look_again(NOBODY, first) is None


def test_what_changed_beyond_it_is_wrong(judge: Judge) -> None:
    first, held = first_of(judge)
    held[3, 4] += 7.0
    assert "a later call changed" in (judge._look_again(NOBODY, first) or "")


def test_elements_that_changed_places_are_seen(judge: Judge) -> None:
    first, held = first_of(judge)
    held.copy_(held.flip(0).clone())
    assert "a later call changed" in (judge._look_again(NOBODY, first) or "")


def test_where_memory_is_tight_nothing_is_held_of_the_first_trial(judge: Judge) -> None:
    """The worker stands for a program on a GPU, whose outputs the judge sees where they are."""
    references, made = judge.references, list[Any]()
    references.plan = replace(references.plan, tidy=True)

    def one(worker: Process, number: int, trial: Any, tally: Any, runs: int) -> tuple[Comparison, None]:
        held = [e.value.clone() for e in trial.expected]
        made.append((trial.draw, held))
        return Comparison(references.facts, held, None, live=True), None

    judge._one = one  # type: ignore[method-assign]
    worker = cast(Process, SimpleNamespace(call=lambda *a, **k: (None, [])))
    assert judge.check(worker, references.fresh(2)).ok
    assert len(made) == 4, "the first trial runs three times"

    def spoiled(worker: Process, number: int, trial: Any, tally: Any, runs: int) -> tuple[Comparison, None]:
        found = one(worker, number, trial, tally, runs)
        if number == 3:
            made[-4][1][0].zero_()
        return found

    judge._one = spoiled  # type: ignore[method-assign]
    found = judge.check(worker, references.fresh(2))
    assert found.failure == "wrong" and "a later call changed" in (found.error or "")
