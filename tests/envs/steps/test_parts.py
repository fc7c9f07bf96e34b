"""A step of many kernels keeps those that are right and not slower."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qimeng.actions import Context, legal_actions
from qimeng.device import device_named
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import Budget
from qimeng.envs.steps.task import Task
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Action, Evaluation, Patch, Request, Timing
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from qimeng.store import Conditions
from qimeng.testing import FakeCoder, FakeEvaluator

H200 = device_named("h200")
ALL = Action("lower_all")


def rows(x: torch.Tensor) -> torch.Tensor:
    """Forty operators, of eight unlike kinds."""
    for _ in range(5):
        x = x.sin().cumsum(1).tanh().cumsum(0).exp().softmax(1).sqrt().softmax(0)
    return x


GRAPH = capture_spec(KernelSpec.of(rows, (torch.rand(4, 8),)))


class Judge(FakeEvaluator):
    """A region takes 1 ms on PyTorch and half as long in a kernel, but for those of one label.

    Args:
        slow: label of the regions whose kernel takes twice as long as PyTorch.
        wrong: label of the regions whose kernel is wrong.
        message: what is said about that, with the region's id.
    """

    def __init__(self, slow: str = "", wrong: str = "", message: str = "wrong result"):
        def refusal(program: Program) -> str | None:
            found = (r for r in program.regions if r.label() == wrong and program.implementation(r).generated)
            return next((message.format(r.id) for r in found), None)

        super().__init__(H200, refusal, estimated=True)
        self.slow = slow

    def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
        """The same verdict, with those times."""
        found, after = super().judge(program, patch), program if patch is None else patch.apply(program)
        if not found.ok:
            return found
        factor = {"triton": 0.5, "torch": 1.0}
        times = {
            r.id: 2.0 if r.label() == self.slow and made.generated else factor[made.language]
            for r, made in ((r, after.implementation(r)) for r in after.regions)
        }
        return replace(found, timing=Timing(sum(times.values()), estimated=True), region_ms=times)


def session(evaluator: FakeEvaluator, evaluations: int = 40, graph: OpGraph = GRAPH, action: Action = ALL) -> Session:
    start = Program.start(graph)
    task = Task(start, Context(H200, FakeCoder()), evaluator, Conditions("x", H200.name, estimated=True))
    made = Session(task, Budget(seconds=1e9, evaluations=evaluations))
    made.begin()
    assert action in legal_actions(start, task.context)
    return made


def lowered(made: Session) -> set[str]:
    program = made.state.program
    return {r.label() for r in program.regions if program.implementation(r).generated}


@pytest.mark.parametrize(("message", "evaluations"), [("wrong result", 7), ("the kernel of region {} is wrong", 3)])
def test_a_kernel_that_is_wrong_is_left_out(message: str, evaluations: int) -> None:
    made = session(Judge(wrong="exp", message=message))
    everything = {r.label() for r in made.state.program.regions}
    assert len({r.signature for r in made.state.program.regions}) == 8
    step = made.step(ALL)
    assert step.accepted and lowered(made) == everything - {"exp"}
    assert made.ledger.evaluations == evaluations, "halves, or all but what the message names"
    assert made.state.recipe().replay(GRAPH).digest == made.state.program.digest


def test_the_search_ends_with_the_budget_and_keeps_what_was_right() -> None:
    made = session(Judge(wrong="exp"), evaluations=4)
    made.step(ALL)
    assert made.ledger.evaluations == 4 and lowered(made) and "exp" not in lowered(made)


def test_kernels_that_take_longer_are_left_out() -> None:
    made = session(Judge(slow="exp"))
    everything = {r.label() for r in made.state.program.regions}
    assert made.step(ALL).accepted and lowered(made) == everything - {"exp"}
    assert made.ledger.evaluations == 3 and made.ledger.best is made.state


def test_compiling_many_kernels_is_not_expected_of_the_next_step() -> None:
    now = [0.0]

    class Compiling(Judge):
        def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
            now[0] += 21.0 if patch is not None else 0.5
            return replace(super().judge(program, patch), seconds={"compile": 20.0 if patch is not None else 0.0})

    start = Program.start(GRAPH)
    task = Task(start, Context(H200, FakeCoder()), Compiling(), Conditions("x", H200.name, estimated=True))
    made = Session(task, Budget(seconds=60.0), clock=lambda: now[0])
    made.begin()
    assert made.step(ALL).accepted and made.ledger.longest == 1.0 and made.exhausted() is None


def test_a_step_of_which_nothing_is_right_is_refused() -> None:
    wrong = FakeEvaluator(H200, wrong=lambda p: None if p.on_pytorch else "wrong", estimated=True)
    made = session(wrong, evaluations=6)
    assert not made.step(ALL).accepted
    assert made.state.program.on_pytorch and ALL in made.state.masked


def test_kernels_that_are_wrong_are_written_once_in_the_precision_of_fp32() -> None:
    """PyTorch computes in it where it may take TF32, and then the kernels on tensor cores are too far off."""

    class Modes(FakeCoder):
        def write(self, request: Request) -> Patch:
            patch = super().write(request)
            made = [replace(i, source=f"# {request.mode}\n{i.source}") for i in patch.alternatives]
            return replace(patch, alternatives=tuple(made))

    def coarse(program: Program) -> str | None:
        written = [program.implementation(r).source for r in program.regions if program.implementation(r).generated]
        return "wrong result" if any(text.startswith("# default") for text in written) else None

    start, judge = Program.start(GRAPH), FakeEvaluator(H200, coarse, estimated=True)
    made = Session(Task(start, Context(H200, Modes()), judge, Conditions("x", H200.name, estimated=True)), Budget(1e9))
    made.begin()
    assert made.step(ALL).accepted and made.ledger.evaluations == 3
    assert lowered(made) == {r.label() for r in start.regions}


LAYERS = Action("algebra", (), "layers")
RECURRENT = capture_spec(KernelSpec.of(torch.nn.GRU(8, 8, 2, bidirectional=True), (torch.rand(3, 2, 8),)))


def loops(made: Session) -> list[str]:
    """The languages of the loops over steps."""
    program = made.state.program
    return [program.implementation(r).language for r in program.regions if "recurrence" in r.label()]


def test_a_recurrent_layer_becomes_kernels_in_the_step_that_makes_its_loops() -> None:
    made = session(FakeEvaluator(H200, estimated=True), graph=RECURRENT, action=LAYERS)
    before = made.ledger.evaluations
    assert made.step(LAYERS).accepted and made.ledger.evaluations == before + 1
    assert loops(made) == ["triton"] * 2, "no loop was judged on PyTorch"
    assert made.state.recipe().replay(RECURRENT).digest == made.state.program.digest


def test_a_loop_whose_kernel_is_wrong_stays_on_pytorch() -> None:
    def last(program: Program) -> str | None:
        found = [r for r in program.regions if "recurrence" in r.label()]
        return "wrong result" if found and program.implementation(found[-1]).generated else None

    made = session(FakeEvaluator(H200, last, estimated=True), graph=RECURRENT, action=LAYERS)
    assert made.step(LAYERS).accepted and loops(made) == ["triton", "torch"]
    assert made.state.recipe().replay(RECURRENT).digest == made.state.program.digest


def test_a_recurrent_layer_is_rewritten_where_no_kernel_is_printed() -> None:
    class Model(FakeCoder):
        schedules = False

    start = Program.start(RECURRENT)
    patch = Model().write(Request(start, LAYERS, H200))
    assert patch.rewrites and not patch.others
