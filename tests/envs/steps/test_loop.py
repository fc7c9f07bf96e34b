"""The step loop: advance, repair, roll back, stop, verify the winner, walk back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from qimeng.envs.steps.caching import UNKNOWN, subject_of
from qimeng.envs.steps.loop import established, optimize
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import ACCIDENTS, FINAL, Budget, Progress
from qimeng.errors import CoderError
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Action, Evaluation, Gate, Patch
from qimeng.planner.greedy import GreedySearch
from qimeng.planner.random import RandomPlanner
from qimeng.program.program import Program
from qimeng.testing import FakeClock, FakeCoder, FakeEvaluator, ScriptedCoder, fake_task
from tests.envs.steps.scripts import FUSE_ALL, Timed, first, scripted, started

Run = Callable[..., Any]


# ---- one step


def test_a_right_patch_advances_the_state(graph: OpGraph) -> None:
    session = started(graph)
    step = session.step(first(session, "lowering"))
    assert step.accepted and step.evaluation is not None and step.evaluation.ok
    assert session.state.parent is not None
    assert len(session.state.recipe()) == 1
    assert session.state.history == (step,)
    assert session.ledger.evaluations == 2


def test_a_slower_program_advances_but_is_not_the_best(graph: OpGraph) -> None:
    session = started(graph, evaluator=Timed(10.0, 12.0))
    session.step(first(session, "lowering"))
    assert session.state.ms == 12.0
    assert session.ledger.best is not None and session.ledger.best.ms == 10.0


def test_a_change_of_the_graph_alone_costs_no_evaluation(graph: OpGraph) -> None:
    session = started(graph)
    regions = len(session.state.program.regions)
    step = session.step(first(session, "fusion"))
    assert step.accepted and step.evaluation is None
    assert session.ledger.evaluations == 1
    assert len(session.state.program.regions) == regions - 1
    assert session.state.ms == session.ledger.start.ms  # type: ignore[union-attr]
    assert session.state.evaluation is not None
    assert sum(session.state.evaluation.region_ms.values()) == pytest.approx(session.state.ms)
    assert not session.state.judged


def test_a_graph_change_that_drops_a_kernel_says_so(graph: OpGraph) -> None:
    seen: list[Progress] = []
    session = Session(fake_task(graph), on_step=seen.append)
    session.begin()
    session.step(first(session, "fusion"))
    (fused,) = (r for r in session.state.program.regions if len(r.ops) == 2)
    session.step(Action("lowering", (fused.id,)))
    session.step(Action("unfuse", (fused.id,)))
    assert "drops 1 generated kernel" in seen[-1].text
    assert session.state.ms is None
    assert session.state.evaluation is not None and session.state.evaluation.region_ms


def test_a_wrong_patch_rolls_back_and_masks_the_action(graph: OpGraph) -> None:
    start = Program.start(graph).digest
    wrong = FakeEvaluator(wrong=lambda p: None if p.digest == start else "error 3.0 (maximum, 0.1 allowed)")
    session = started(graph, evaluator=wrong)
    action = first(session, "lowering")
    step = session.step(action)
    assert not step.accepted and step.evaluation is not None
    assert step.evaluation.gate is Gate.REGION and "3.0" in (step.evaluation.error or "")
    assert session.state.program.digest == start
    assert action not in session.observe().actions
    assert Action("stop") in session.observe().actions


def test_a_mask_holds_where_the_program_comes_back(graph: OpGraph) -> None:
    bad: list[str] = []
    session = started(graph, evaluator=FakeEvaluator(wrong=lambda p: "no" if any(b in p.source for b in bad) else None))
    refused = first(session, "lowering")
    region = session.state.program.region(refused.regions[0])
    bad.append(f"fake_{region.signature}")
    session.step(refused)
    other = next(a for a in session.observe().actions if a.kind == "lowering")
    session.step(other)
    assert refused not in session.observe().actions  # the region has the same kernel: it would be refused again
    merged = next(a for a in session.observe().actions if a.kind == "fusion" and refused.regions[0] in a.regions)
    session.step(merged)
    assert any(a.kind == "lowering" for a in session.observe().actions)  # another region
    fresh = session.fork()
    fresh.state = session.state.path()[0]
    fresh.state = replace(fresh.state, masked=session.ledger.refused[fresh.state.program.digest])
    assert refused not in fresh.observe().actions


def test_what_was_taken_from_here_is_not_offered_again(graph: OpGraph) -> None:
    session = started(graph)
    before, digest = set(session.observe().actions), session.state.program.digest
    fusion = first(session, "fusion")
    session.step(fusion)
    session.step(unfuse := first(session, "unfuse"))
    assert session.state.program.digest == digest and set(session.observe().actions) == before - {fusion}
    session.step(other := first(session, "lowering"))
    session.step(Action("library", other.regions))
    assert session.state.program.digest == digest
    assert set(session.observe().actions) == before - {fusion, other}
    assert fusion in started(graph).observe().actions and unfuse not in before


def test_an_illegal_action_is_a_refused_step(graph: OpGraph) -> None:
    session = started(graph)
    step = session.step(Action("lowering", ("r00000000",)))
    assert not step.accepted and step.evaluation is not None
    assert (step.evaluation.gate, step.evaluation.failure) == (Gate.WRITE, "illegal")
    assert "no region r00000000" in (step.evaluation.error or "")
    assert session.ledger.evaluations == 1


def test_a_coder_that_cannot_write_is_a_refused_step(graph: OpGraph) -> None:
    session = started(graph, coder=ScriptedCoder([CoderError("the model said no")]))
    step = session.step(first(session, "lowering"))
    assert step.evaluation is not None
    assert (step.evaluation.failure, step.evaluation.error) == ("coder", "the model said no")


def test_an_empty_patch_is_refused(graph: OpGraph) -> None:
    session = started(graph, coder=ScriptedCoder([Patch()]))
    step = session.step(first(session, "lowering"))
    assert not step.accepted and step.evaluation is not None and "empty patch" in (step.evaluation.error or "")


def test_stop_ends_the_trajectory(graph: OpGraph) -> None:
    session = started(graph)
    assert session.step(Action("stop")).accepted
    assert session.exhausted() == "stop"
    assert len(session.state.recipe()) == 0


# ---- repair


def test_a_refused_patch_is_repaired_with_the_reason(graph: OpGraph) -> None:
    coder = ScriptedCoder(repairs=2)
    evaluator = FakeEvaluator(wrong=lambda p: "off by one" if "attempt 0" in p.source else None)
    session = started(graph, coder=coder, evaluator=evaluator)
    step = session.step(first(session, "lowering"))
    assert step.accepted
    assert [r.reason for r in coder.requests] == [None, "off by one"]
    assert coder.requests[1].failed is not None
    assert "attempt 1" in session.state.program.source
    assert session.ledger.evaluations == 3


def test_repairs_are_limited(graph: OpGraph) -> None:
    coder = ScriptedCoder(repairs=9)
    evaluator = FakeEvaluator(wrong=lambda p: "wrong" if "attempt" in p.source else None)
    session = Session(fake_task(graph, evaluator, coder), Budget(repairs=2))
    session.begin()
    assert not session.step(first(session, "lowering")).accepted
    assert len(coder.requests) == 3
    assert len(session.state.history) == 1


def test_a_repair_that_repeats_itself_is_not_judged_again(graph: OpGraph) -> None:
    session = started(graph, evaluator=FakeEvaluator(wrong=lambda p: "wrong" if "attempt" in p.source else None))
    action = first(session, "lowering")
    same = FakeCoder().write(session_request(session, action))
    session = started(graph, coder=ScriptedCoder([same, same, same]), evaluator=session.task.evaluator)
    session.step(action)
    assert session.ledger.evaluations == 2


def session_request(session: Session, action: Action) -> Any:
    from qimeng.interfaces import Request

    return Request(session.state.program, action, session.task.context.device)


# ---- budgets


@pytest.mark.parametrize(
    ("budget", "reason"),
    [(Budget(steps=5), "steps"), (Budget(evaluations=3), "evaluations"), (Budget(steps=0), "steps")],
)
def test_budgets_end_the_search(graph: OpGraph, budget: Budget, reason: str) -> None:
    result = optimize(fake_task(graph), GreedySearch(RandomPlanner(0)), budget)
    assert result.stopped == reason
    assert result.evaluations <= budget.evaluations and len(result.steps) <= budget.steps


def test_seconds_end_the_search_and_leave_time_to_verify(graph: OpGraph) -> None:
    clock = FakeClock(tick=0.25)
    result = optimize(fake_task(graph), GreedySearch(RandomPlanner(0)), Budget(seconds=20, steps=1000), clock=clock)
    assert result.stopped == "seconds"
    assert 0 < len(result.steps) < 80
    assert result.seconds == pytest.approx(20, abs=2)


def test_a_result_says_that_no_step_was_begun(graph: OpGraph) -> None:
    clock = FakeClock(tick=0.25)
    result = optimize(fake_task(graph), GreedySearch(RandomPlanner(0)), Budget(seconds=0.75), clock=clock)
    assert result.stopped == "seconds" and not result.steps
    (note,) = result.notes
    assert re.fullmatch(r"no step was begun: .* expected to take \d+ s, more than was left; give more seconds", note)


def test_the_seconds_may_have_begun_before(graph: OpGraph) -> None:
    clock = FakeClock()
    clock.now = 100.0
    session = Session(fake_task(graph), Budget(seconds=60), clock=clock, began=30.0)
    assert session.ledger.seconds_left == -10 and session.exhausted() == "seconds"


@pytest.mark.parametrize("by_region", [True, False])
def test_seconds_are_left_for_a_final_verification_by_what_the_first_evaluation_took(
    graph: OpGraph, by_region: bool
) -> None:
    spent = {"reference": 4.0, "check": 2.0, "time": 1.0}

    class Slow(FakeEvaluator):
        def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
            return replace(super().judge(program, patch), seconds=spent)

    clock, task = FakeClock(), replace(fake_task(graph, evaluator=Slow()), by_region=by_region)
    session = Session(task, Budget(seconds=60), clock=clock)
    session.begin()
    expected = sum(FINAL[part] * seconds for part, seconds in spent.items())
    assert session.ledger.final == session.final_s() == expected and session.exhausted() is None
    clock.now = 60 - expected - session.ledger.longest + 0.5
    assert session.exhausted() == "seconds"


def test_how_long_a_step_takes_is_told_by_the_last_ones(graph: OpGraph) -> None:
    clock = FakeClock()
    session = Session(fake_task(graph), Budget(seconds=60), clock=clock)
    session.ledger.took.extend([9.0, 2.0, 1.0])
    assert session.ledger.longest == 9.0
    session.ledger.took.append(3.0)
    assert session.ledger.longest == session.clone().ledger.longest == 3.0


def test_the_same_question_is_asked_once(graph: OpGraph) -> None:
    class Listening(FakeEvaluator):
        asked: list[str] = []

        def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
            self.asked.append(subject_of(program, patch))
            return super().judge(program, patch)

        def verify(self, program: Program) -> Evaluation:
            return super().judge(program)

    evaluator = Listening()
    result = optimize(fake_task(graph, evaluator), GreedySearch(RandomPlanner(3)), Budget(steps=80, evaluations=60))
    assert len(set(evaluator.asked)) == len(evaluator.asked) == result.evaluations


class Busy(FakeEvaluator):
    """Generated programs come to an accident the first few times."""

    def __init__(self, times: int, failure: str = "timeout"):
        super().__init__()
        self.times, self.failure, self.asked = times, failure, 0

    def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
        if patch is None:
            return super().judge(program)
        self.asked += 1
        return (
            Evaluation(Gate.PROGRAM, "busy", self.failure)
            if self.asked <= self.times
            else super().judge(program, patch)
        )


def tried_again(session: Session, action: Action) -> bool:
    """Come back to the start program and take `action` once more, where it is offered."""
    session.return_to(session.state.path()[0])
    return action in session.observe().actions and session.step(action).accepted


def test_an_accident_is_judged_again_when_it_is_asked_again(graph: OpGraph) -> None:
    evaluator = Busy(1)
    session = started(graph, evaluator=evaluator)
    action = first(session, "lowering")
    assert not session.step(action).accepted and action not in session.observe().actions, "set aside for now"
    assert tried_again(session, action)
    assert evaluator.asked == 2 and session.ledger.evaluations == 3
    assert tried_again(session, action) and evaluator.asked == 2, "what was found out stays"


@pytest.mark.parametrize(("failure", "asked"), [("timeout", ACCIDENTS), ("wrong", 1), (UNKNOWN, 1)])
def test_a_failure_is_believed_after_so_many_times(graph: OpGraph, failure: str, asked: int) -> None:
    evaluator = Busy(99, failure)
    session = started(graph, evaluator=evaluator)
    action = first(session, "lowering")
    session.step(action)
    for _ in range(5):
        assert not tried_again(session, action)
    assert evaluator.asked == asked
    assert action in session.ledger.refused[session.state.program.digest]
    twin = session.clone()
    twin.ledger.accidents.clear()
    assert bool(session.ledger.accidents) == (failure != "wrong")


# ---- the winner


def test_the_best_program_is_returned_with_its_recipe(graph: OpGraph) -> None:
    result = optimize(fake_task(graph), scripted(*FUSE_ALL, "tiling"))
    assert result.program is not None and result.speedup is not None and result.speedup > 1
    assert result.recipe.replay(graph).digest == result.program.digest
    assert result.stopped == "stop"
    assert "fusion" in result.report() and "measured" in result.report()


def test_gains_within_the_noise_add_no_step(graph: OpGraph) -> None:
    evaluator = Timed(10.0, 8.0, 7.95, final=(8.0,), spread=0.01)
    result = optimize(fake_task(graph, evaluator), scripted("lowering", "lowering"))
    assert len(result.recipe) == 1


def test_small_gains_add_up_to_one_above_the_noise(graph: OpGraph) -> None:
    session = started(graph, evaluator=Timed(10.0, 9.85, 9.75, 9.65, spread=0.01))
    for _ in range(3):
        session.step(first(session, "lowering"))
    assert session.ledger.best is not None
    assert [s.ms for s in established(session.ledger.best)] == [10.0, 9.85, 9.65]  # the first is mostly generated


def test_where_even_the_start_is_slower_the_reference_is_returned(graph: OpGraph) -> None:
    task = replace(fake_task(graph, Timed(10.0, eager=5.0)), whole=Program(OpGraph({}, ()), (), {}, "# as written"))
    result = optimize(task, scripted())
    assert result.source == "# as written" and result.speedup == 1.0
    assert any("returned as it was written" in note for note in result.notes)


def test_a_start_program_that_is_wrong_on_some_inputs_is_judged_on_others(graph: OpGraph) -> None:
    class Once(FakeEvaluator):
        asked = 0

        def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
            self.asked += 1
            return Evaluation(Gate.PROGRAM, "output 0", "wrong") if self.asked == 1 else super().judge(program, patch)

    session = started(graph, evaluator=Once())
    assert session.begin().ok and session.ledger.evaluations == 2
    assert session.step(first(session, "lowering")).accepted


def test_what_cannot_be_judged_is_returned_as_it_was_written(graph: OpGraph) -> None:
    whole = Program(OpGraph({}, ()), (), {}, "# as written")
    task = replace(fake_task(graph, FakeEvaluator(wrong=lambda p: "differs from run to run")), whole=whole)
    result = optimize(task, scripted("lowering"))
    assert (result.stopped, result.source, result.speedup) == ("unjudged", "# as written", 1.0)
    assert "(not judged)" in result.report()
    assert not result.evaluation.ok and "differs from run to run" in result.report()


# ---- interruption and progress


def test_an_interrupted_search_keeps_the_best(graph: OpGraph) -> None:
    class Interrupted(FakeEvaluator):
        def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
            if len(self.calls) == 3:
                self.calls.append("interrupted")
                raise KeyboardInterrupt
            return super().judge(program, patch)

    result = optimize(fake_task(graph, Interrupted()), scripted(*FUSE_ALL[1:], "tiling", "pipeline", "tiling"))
    assert result.stopped == "interrupted"
    assert result.evaluation.ok and result.speedup is not None and result.speedup > 1


def test_an_interrupted_verification_still_gives_a_result(graph: OpGraph) -> None:
    class Interrupted(FakeEvaluator):
        def verify(self, program: Program) -> Evaluation:
            raise KeyboardInterrupt

    result = optimize(fake_task(graph, Interrupted()), scripted(*FUSE_ALL))
    assert result.speedup is not None and result.speedup > 1
    assert result.unchecked == "the final verification was interrupted"
    assert "UNCHECKED** (measured)" in result.report() and result.headline.endswith("eager, UNCHECKED")


def test_progress_tells_what_is_tried(graph: OpGraph) -> None:
    seen: list[Progress] = []
    optimize(fake_task(graph), scripted("fusion", "lowering"), on_step=seen.append)
    assert [p.phase for p in seen] == ["start", "done", "try", "done", "final", "end"]
    assert seen[3].text.endswith("right, 0.06103 -> 0.0667 ms") and seen[3].evaluations == 2 and seen[3].steps == 2
    assert seen[3].best_ms is not None and seen[3].eager_ms is not None and seen[3].seconds_left > 0


def test_estimated_times_say_so_wherever_they_are_told(graph: OpGraph) -> None:
    seen: list[str] = []
    task = fake_task(graph, FakeEvaluator(estimated=True))
    task = replace(task, conditions=replace(task.conditions, estimated=True))
    result = optimize(task, scripted("fusion", "lowering"), on_step=lambda progress: seen.append(progress.text))
    assert seen[3].endswith(" ms estimated") and seen[-1].endswith("x PyTorch eager (estimated)")
    assert "| ms, estimated |" in result.report() and "measured" not in result.report()


def test_what_only_a_measurement_can_judge_is_not_offered_on_estimates(graph: OpGraph) -> None:
    def options(estimated: bool) -> set[str]:
        task = fake_task(graph, FakeEvaluator(estimated=estimated))
        session = Session(replace(task, conditions=replace(task.conditions, estimated=estimated)), Budget())
        session.begin()
        return {a.param for a in session.offered()[0] if a.kind == "library"}

    assert "inductor" in options(False) and not options(True)


# ---- branches


def test_branches_share_the_budget_and_the_best(graph: OpGraph) -> None:
    session = started(graph)
    branch = session.fork()
    branch.step(first(branch, "lowering"))
    assert session.state.history == () and branch.state.history
    assert session.ledger is branch.ledger and session.ledger.evaluations == 2


def test_a_branch_may_let_a_library_compile_for_longer_than_the_budget_leaves(graph: OpGraph) -> None:
    session = Session(fake_task(graph), Budget(seconds=0.0))
    branch = session.fork(library_least_s=7.0)
    assert (session.library_s(), branch.library_s(), branch.fork().library_s()) == (0.0, 7.0, 0.0)


def test_a_clone_shares_nothing_that_changes(graph: OpGraph) -> None:
    session = started(graph)
    twin = session.clone()
    session.step(first(session, "lowering"))
    assert twin.ledger.evaluations == 1 and twin.ledger.attempts == [] and twin.state.history == ()


def test_an_interrupted_verification_of_the_start_is_the_computation_itself(graph: OpGraph) -> None:
    class Interrupted(FakeEvaluator):
        def verify(self, program: Program) -> Evaluation:
            raise KeyboardInterrupt

    result = optimize(fake_task(graph, Interrupted()), scripted("stop"))
    assert result.on_pytorch and result.unchecked == "" and result.speedup == 1.0


class Unable(FakeEvaluator):
    """Times everything and can check nothing."""

    def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
        return replace(super().judge(program, patch), accuracy=None, unchecked="the interpreter lacks what it uses")


def test_what_was_not_checked_is_called_unchecked_everywhere(graph: OpGraph) -> None:
    seen: list[Progress] = []
    result = optimize(fake_task(graph, Unable()), scripted(*FUSE_ALL), on_step=seen.append)
    report, data = result.report(), json.loads(result.to_json())
    assert report.splitlines()[2].startswith(f"**{result.speedup:.2f} x PyTorch eager, UNCHECKED** (measured)")
    assert "| verification | UNCHECKED: the interpreter lacks what it uses |" in report
    assert "| kept, UNCHECKED |" in report and "| kept |" not in report and "right" not in report
    assert data["checked"] is False and data["verification"].startswith("UNCHECKED: ")
    assert "UNCHECKED" in seen[-1].text and not any("right" in p.text for p in seen)
    checked = optimize(fake_task(graph), scripted(*FUSE_ALL))
    assert json.loads(checked.to_json())["checked"] is True and "UNCHECKED" not in checked.report()
    assert "| verification | right, in a fresh process |" in checked.report()


def test_what_is_left_on_pytorch_is_by_definition_as_fast(graph: OpGraph) -> None:
    whole = Program(OpGraph({}, ()), (), {}, "# as written")
    noisy = Timed(10.0, final=(9.7,))  # 1.03 x, were it another program
    for script in (("stop",), ("fusion", "stop")):
        result = optimize(replace(fake_task(graph, noisy), whole=whole), scripted(*script))
        assert result.on_pytorch and (result.speedup, result.source) == (1.0, "# as written")
        assert result.evaluation.speedup == 1.0 and result.evaluation.timing == result.evaluation.eager
        assert "**1.00 x PyTorch eager**" in result.report() and json.loads(result.to_json())["speedup"] == 1.0
        assert "none needed: it is left on PyTorch as it was written" in result.report()
