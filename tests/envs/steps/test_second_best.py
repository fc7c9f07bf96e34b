"""A program that the final verification finds wrong is repaired by another way to write its last kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qimeng import KernelSpec
from qimeng.coder.template.coder import TemplateCoder
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.result import Result
from qimeng.envs.steps.second_best import REPAIRS
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import Budget, State, Unchosen
from qimeng.interfaces import Action, Evaluation, Patch, Request, Timing
from qimeng.program.program import Implementation, Program
from qimeng.program.verify import capture_spec
from qimeng.testing import FakeClock, FakeEvaluator, fake_task

X, Y = torch.randn(512, 8192), torch.randn(8192, 512)


class Judge(FakeEvaluator):
    """Generated programs are faster; those of some precisions are found wrong, in the final verification alone."""

    def __init__(self, wrong: set[str]):
        super().__init__()
        self.refused, self.finals = wrong, list[str]()

    def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
        ms = 10.0 if patch is None and program.on_pytorch else 1.0
        return replace(super().judge(program, patch), timing=Timing(ms, 0.01), eager=Timing(10.0, 0.01))

    def verify(self, program: Program) -> Evaluation:
        found = [s.precision for s in schedules(program)]
        self.finals += found
        self.wrong = lambda _: "too far off" if self.refused & set(found) else None
        try:
            return super().verify(program)
        finally:
            self.wrong = lambda _: None


def schedules(program: Program) -> list[GemmSchedule]:
    made = (program.implementation(r).schedule for r in program.called)
    return [s for s in made if isinstance(s, GemmSchedule)]


class Lower:
    """Lowers the product."""

    def run(self, session: Session) -> str:
        session.step(next(a for a in session.observe().actions if a.kind == "lowering"))
        return "done"


def result(judge: Judge, coder: TemplateCoder | None = None) -> Result:
    graph = capture_spec(KernelSpec.from_function(torch.matmul, (X, Y)), verify=False)
    return optimize(fake_task(graph, judge, coder or TemplateCoder()), Lower())


def test_the_fastest_way_that_computes_otherwise_takes_its_place() -> None:
    plain = Judge(set())
    (first,) = schedules(result(plain).program)
    judge = Judge({first.precision})
    found = result(judge)
    (second,) = schedules(found.program)
    assert second.precision != first.precision and judge.finals[:2] == [first.precision, second.precision]
    assert found.speedup is not None and not found.on_pytorch
    assert "the program of 1 steps is not returned: gate region: too far off" in found.notes


class ThreeWays(TemplateCoder):
    """Writes each kernel a third way too."""

    def write(self, request: Request) -> Patch:
        patch = super().write(request)
        first = patch.alternatives[0]
        assert isinstance(first.schedule, GemmSchedule)
        third = replace(first, source=f"{first.source}# third", schedule=first.schedule.but(precision="bf16x6"))
        return replace(patch, alternatives=(*patch.alternatives, third))


def test_where_two_ways_are_wrong_a_third_takes_their_place() -> None:
    judge = Judge({"ieee", "fp16x3"})
    found = result(judge, ThreeWays())
    assert [s.precision for s in schedules(found.program)] == ["bf16x6"]
    assert judge.finals[:3] == ["ieee", "fp16x3", "bf16x6"]
    assert "another way to write its last kernel is not returned: gate region: too far off" in found.notes


class Slow(Judge):
    """Finds all but the first program of a final verification slower than PyTorch."""

    def verify(self, program: Program) -> Evaluation:
        found = super().verify(program)
        return replace(found, timing=Timing(20.0, 0.01)) if len(self.finals) > 1 else found


def test_where_a_way_is_too_slow_no_slower_one_is_tried() -> None:
    judge = Slow({"ieee"})
    assert result(judge, ThreeWays()).on_pytorch and judge.finals == ["ieee", "fp16x3"]


def test_where_there_is_no_time_no_other_way_is_tried() -> None:
    clock, judge = FakeClock(), Judge({"ieee"})

    class Late(Lower):
        def run(self, session: Session) -> str:
            session.ledger.milestone, clock.now = 30.0, 60.0
            return super().run(session)

    graph = capture_spec(KernelSpec.from_function(torch.matmul, (X, Y)), verify=False)
    found = optimize(fake_task(graph, judge, ThreeWays()), Late(), Budget(1e6, wall_seconds=100.0), clock=clock)
    assert judge.finals == ["ieee"] and found.on_pytorch


def test_where_three_ways_are_wrong_pytorch_stays() -> None:
    judge = Judge({"ieee", "fp16x3", "bf16x6"})
    found = result(judge, ThreeWays())
    assert found.on_pytorch and len(judge.finals) == 1 + REPAIRS


def test_where_every_way_is_wrong_pytorch_stays() -> None:
    judge = Judge({"ieee", "fp16x3", "bf16x3", "bf16x6", "tf32", "fp16"})
    found = result(judge)
    assert found.on_pytorch and len(judge.finals) == 2


@pytest.mark.parametrize("chosen", [0, 2])
def test_what_rounds_alike_is_no_other_way(chosen: int) -> None:
    ways = tuple(
        Implementation("triton", f"# {i}", "entry", schedule=GemmSchedule(precision=p, warps=w))
        for i, (p, w) in enumerate([("fp16x3", 4), ("fp16x3", 8), ("ieee", 4)])
    )
    program = Program.start(capture_spec(KernelSpec.from_function(torch.matmul, (X, Y)), verify=False))
    patch = Patch(target=program.regions[0].id, alternatives=ways)
    left = Unchosen.of(State(program), Action("lowering", (program.regions[0].id,)), patch, chosen)
    assert left is not None and left.patch.alternatives == (ways[2:] if chosen == 0 else ways[:2])
    assert Unchosen.of(State(program), Action("lowering"), patch.only(0), 0) is None
