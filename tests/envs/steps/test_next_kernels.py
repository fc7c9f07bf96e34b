"""While a step is judged, the engine is told which kernels the next steps are likely to need."""

from __future__ import annotations

import pytest
import torch

from qimeng import KernelSpec
from qimeng.actions.large import MANY
from qimeng.coder.template.coder import TemplateCoder
from qimeng.envs.steps.next_kernels import NEXT, prepare_next
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import Budget
from qimeng.interfaces import Action, EvaluationRequest
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.testing import FakeEvaluator, fake_task


class Preparing(FakeEvaluator):
    """Notes what it is told ahead."""

    prepares = True

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.told: list[EvaluationRequest] = []
        self.fails = fails

    def prepare(self, request: EvaluationRequest) -> None:
        self.told.append(request)
        if self.fails:
            raise RuntimeError("no cores")


@pytest.fixture(scope="module")
def start() -> Program:
    def three(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ w, -1).cumsum(-1)

    spec = KernelSpec.from_function(three, (torch.rand(64, 64), torch.rand(64, 64)))
    return Program.start(capture_spec(spec, verify=False))


def session_of(start: Program, evaluator: FakeEvaluator, evaluations: int = 9) -> Session:
    return Session(fake_task(start.graph, evaluator), Budget(evaluations=evaluations))


@pytest.mark.parametrize("fails", [False, True])
def test_the_kernels_of_regions_without_one_are_compiled_ahead_each_once(start, fails):
    judge = Preparing(fails)
    session = session_of(start, judge)
    product, *others = (r.id for r in start.regions)
    assert session.step(Action("lowering", (others[0],))).accepted
    told = [r.patch.target for r in judge.told if r.patch]
    assert told[0] == product and set(told) == {product, *others[1:]}
    assert session.step(Action("lowering", (product,))).accepted
    assert [r.patch.target for r in judge.told if r.patch] == told


def test_a_region_that_is_refused_stops_no_other(start):
    judge = Preparing()
    session = session_of(start, judge)
    product, softmax, scan = (r.id for r in start.regions)
    prepare_next(session, start)
    assert len(judge.told) == NEXT and scan not in [r.patch.target for r in judge.told if r.patch]
    judge.wrong = lambda program: "off by one"
    assert not session.step(Action("lowering", (product,))).accepted
    judge.wrong = lambda program: None
    assert session.step(Action("lowering", (softmax,))).accepted
    assert scan in [r.patch.target for r in judge.told if r.patch]


def test_nothing_is_begun_that_cannot_be_asked(start):
    judge = Preparing()
    session = session_of(start, judge, evaluations=2)  # the start program's, and one more
    assert session.step(Action("lowering", (start.regions[0].id,))).accepted
    assert not judge.told


def test_all_kernels_of_a_large_program_are_compiled_ahead():
    def many(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(MANY):
            x = torch.softmax(x @ w, -1)
        return x

    spec = KernelSpec.from_function(many, (torch.rand(16, 16), torch.rand(16, 16)))
    program, judge = Program.start(capture_spec(spec, verify=False)), Preparing()
    session = Session(fake_task(program.graph, judge, TemplateCoder()), Budget(evaluations=9))
    for _ in range(2):
        prepare_next(session, program)
    assert len(judge.told) == 2, "in the mode's precision and in fp32's"
    assert all(request.patch is not None and len(request.patch.others) >= 2 for request in judge.told)
