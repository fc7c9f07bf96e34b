"""While a step is judged, the engine is told which kernels the next steps are likely to need."""

from __future__ import annotations

import pytest
import torch

from qimeng import KernelSpec
from qimeng.actions.large import MANY
from qimeng.coder.template.coder import TemplateCoder
from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.next_kernels import NEXT, prepare_actions, prepare_next
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import Budget
from qimeng.interfaces import Action, Asked, Evaluation, EvaluationRequest, Observation, Patch, Planner
from qimeng.planner.greedy import GreedySearch
from qimeng.planner.heuristic import HeuristicPlanner
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
    prepare_next(session, Action("lowering"), Patch())
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
        prepare_next(session, Action("launch"), Patch())
    assert len(judge.told) == 2, "in the mode's precision and in fp32's"
    assert all(request.patch is not None and len(request.patch.others) >= 2 for request in judge.told)


def test_the_first_lowerings_are_compiled_before_the_start_program_is_judged() -> None:
    def fused(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w).cumsum(-1)

    spec = KernelSpec.from_function(fused, (torch.rand(64, 64), torch.rand(64, 64)))
    start, judged = Program.start(capture_spec(spec, verify=False)), []

    class Listening(Preparing):
        def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
            judged.append(len(self.told))
            return super().judge(program, patch)

    judge = Listening()
    session = session_of(start, judge)
    GreedySearch(HeuristicPlanner()).ahead(session)
    told = [program for request in judge.told for program in request.candidates]
    assert told and not judged and len(session.state.program.regions) == 3 and not session.state.history
    assert all(len(program.regions) < 3 for program in told), "the fusion before them is taken as right"
    judge.told.clear()
    optimize(fake_task(start.graph, judge), GreedySearch(HeuristicPlanner()), Budget(evaluations=9))
    assert judged[0] > 0


def test_what_a_planner_by_rule_does_next_on_other_regions_is_compiled_ahead(start: Program) -> None:
    def texts(request: EvaluationRequest) -> set[str]:
        return {made.source for made in request.patch.alternatives} if request.patch is not None else set()

    def compiled_ahead(planner: Planner) -> int:
        """How many steps had all their kernels compiled before them."""
        found: list[bool] = []

        class Comparing(Preparing):
            def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
                if patch is not None and patch.alternatives:
                    told = set().union(*map(texts, self.told))
                    found.append({made.source for made in patch.alternatives} <= told)
                return super().judge(program, patch)

        task = fake_task(start.graph, Comparing(), TemplateCoder())
        optimize(task, GreedySearch(planner), Budget(evaluations=16))
        return sum(found)

    class Other(Planner):
        """Chooses likewise, and is not asked ahead."""

        def choose(self, observation: Observation) -> Action:
            return HeuristicPlanner().choose(observation)

    assert compiled_ahead(HeuristicPlanner()) > compiled_ahead(Other())


def test_guesses_leave_the_search_as_it_was(start: Program) -> None:
    def steps(prepares: bool) -> list[tuple[Action, bool]]:
        judge = Preparing()
        judge.prepares = prepares  # type: ignore[misc]
        task = fake_task(start.graph, judge, TemplateCoder())
        return [(s.action, s.accepted) for s in optimize(task, GreedySearch(HeuristicPlanner()), Budget()).steps]

    assert steps(True) == steps(False)


def test_a_search_that_explores_has_nothing_compiled_that_is_guessed_and_keeps_no_time_for_the_end(start) -> None:
    judge = Preparing()
    session = session_of(start, judge)
    session.begin()
    session.ledger.explores = True
    assert session.step(Action("lowering", (start.regions[-1].id,))).accepted
    assert not judge.told and session.final_s() == 0.0


def test_known_actions_are_written_and_compiled_ahead(start: Program) -> None:
    judge = Preparing(fails=True)
    session = session_of(start, judge)
    session.begin()
    session.ledger.explores = True
    prepare_actions(session, [Action("lowering", (r.id,)) for r in start.regions])
    assert [r.patch.target for r in judge.told if r.patch] == [r.id for r in start.regions]
    assert len(session.ledger.written) == len(start.regions) and not session.ledger.attempts
    assert session.step(Action("lowering", (start.regions[0].id,))).accepted


def test_the_winner_is_compiled_anew_ahead(start: Program) -> None:
    judge = Preparing()
    result = optimize(fake_task(start.graph, judge), GreedySearch(HeuristicPlanner()), Budget(evaluations=9))
    last = judge.told[-1]
    assert last.asked is Asked.FINAL and last.program.digest == result.program.digest and last.patch is None
