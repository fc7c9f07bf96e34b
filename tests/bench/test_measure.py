import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qimeng.api import run_task
from qimeng.bench import measure as measured
from qimeng.bench.measure import measure, step_rows
from qimeng.bench.row import Row, Settings
from qimeng.bench.suite import Problem, SpecFile
from qimeng.coder.llm.coder import LLMCoder
from qimeng.envs.steps import setup
from qimeng.envs.steps.result import Result
from qimeng.envs.steps.state import Attempt, Budget
from qimeng.envs.steps.time_up import TimeUp
from qimeng.interfaces import (
    Action,
    EngineReport,
    Evaluation,
    EvaluationRequest,
    FinalOptions,
    Gate,
    ReferenceFacts,
    Timing,
)
from qimeng.program.program import Program
from qimeng.spec import KernelSpec
from qimeng.testing import FakeEvaluator
from tests.coder.llm.scripted import ScriptedChat, kernel

TEXT = """
import torch
class Model(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
    def forward(self, x):
        return torch.relu(x * self.scale) + 1
def get_inputs():
    return [torch.rand(16, 32)]
def get_init_inputs():
    return [2.0]
"""
SETTINGS = Settings(coder="fake", seconds=20, evaluations=8)


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(setup.CODERS, "fake", "qimeng.testing:FakeCoder")
    monkeypatch.setattr(
        setup, "make_evaluator", lambda spec, start, context, **unused: FakeEvaluator(context.device, estimated=True)
    )


def problem(folder: Path, text: str = TEXT) -> Problem:
    path = folder / "7_Problem.py"
    path.write_text(text)
    return Problem("mine", "part/7", "part", SpecFile(path, "Problem"))


def test_a_problem_becomes_a_row(tmp_path: Path) -> None:
    row = measure(problem(tmp_path), SETTINGS, device="h200")
    assert (row.id, row.family, row.captured, row.error) == ("part/7", "pointwise", True, None)
    assert row.right and row.kernelbench and row.estimated
    assert row.speedup is not None and row.speedup > 1
    assert row.floor_ms is not None and row.floor_ms > 0 and row.flops == 0
    assert 0 < row.evaluations <= 8
    assert {s.kind for s in row.steps} >= {"fusion", "lowering"}
    assert any(s.gain for s in row.steps)
    assert row.seconds["total"] >= row.seconds["optimize"] > row.seconds["capture"] > 0
    assert row.recipe.startswith("{") and len(row.source_digest) == 16
    assert "estimated" in row.environment.device and row.environment.driver == ""
    assert Row.from_json(row.to_json()) == row


def test_a_spec_of_a_python_suite_becomes_a_row_in_its_own_dtype() -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * 2) + 1

    spec = KernelSpec.from_function(scaled, (torch.rand(16, 32).bfloat16(),), mode="high")
    row = measure(Problem("mine", "relu", "light", spec), replace(SETTINGS, dtype="own", mode="own"), device="h200")
    assert (row.id, row.suite, row.group, row.digest, row.error) == ("relu", "mine", "light", spec.digest, None)
    assert row.right and row.floor_ms is not None
    full = measure(Problem("mine", "relu", "light", spec), replace(SETTINGS, dtype="float32"), device="h200")
    assert full.floor_ms is not None and full.floor_ms > row.floor_ms  # twice the bytes


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import torch\n", "SpecError"),
        (TEXT.replace("x * self.scale", "x @ x"), "SpecError"),
        (TEXT.replace("torch.relu(x * self.scale)", "x.mul_(2)"), "SpecError"),
    ],
)
def test_what_cannot_be_optimized_is_a_row_with_the_reason(text: str, error: str, tmp_path: Path) -> None:
    row = measure(problem(tmp_path, text), SETTINGS, device="h200")
    assert row.right is None
    assert row.error is not None and row.error.startswith(error)
    assert row.seconds["total"] > 0


def test_a_model_is_asked_once_for_a_problem_however_often_it_is_run(tmp_path: Path) -> None:
    settings, answers, asked = replace(SETTINGS, coder="fake:model"), tmp_path / "rows.sqlite", []
    for script in (["no kernel", *[kernel(str(n)) for n in range(30)]], []):
        coder: LLMCoder = pickle.loads(pickle.dumps(LLMCoder(ScriptedChat(*script))))
        row = measure(problem(tmp_path), settings, "h200", coder, answers)
        assert row.right and row.error is None and row.settings.coder == "fake:model"
        asked.append(coder.account.calls - coder.account.replayed)
        assert sum(n.startswith("fake:model: ") for n in row.notes) == 1
    assert asked[0] > 1 and asked[1] == 0


class MeasuringFake(FakeEvaluator):
    """A fake that times baselines as the judge of a GPU does; one mode of torch.compile fails."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[FinalOptions] = set()

    @property
    def report(self) -> EngineReport:
        return EngineReport(
            {"reference": 0.001, "baselines": 0.002}, reference=ReferenceFacts("zeros pass", False, True)
        )

    def answer(self, request: EvaluationRequest) -> Evaluation:
        self.asked.add(request.options)
        return super().answer(request)

    def verify(self, program: Program) -> Evaluation:
        compiled = {"default": Timing(2.0), "reduce-overhead": Timing(1.0)}
        return replace(super().verify(program), compiled=compiled, notes=("torch.compile max-autotune is not timed",))


def test_baselines_come_from_the_final_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = MeasuringFake()
    monkeypatch.setattr(setup, "make_evaluator", lambda spec, start, context, **unused: judge)
    modes = ("default", "reduce-overhead", "max-autotune")
    row = measure(problem(tmp_path), replace(SETTINGS, compile_modes=modes, compile_seconds=5.0), device="h200")
    assert row.error is None
    assert judge.asked == {FinalOptions(modes, 5.0)}
    assert row.compiled == Timing(2.0)
    assert row.compiled_modes == {"default": Timing(2.0), "reduce-overhead": Timing(1.0)}
    assert (row.compiled_best, row.compiled_best_mode) == (Timing(1.0), "reduce-overhead")
    assert row.notes[-1] == "torch.compile max-autotune is not timed"
    assert row.eager_unstable is True and row.exact_fails is False and row.degenerate == "zeros pass"
    seconds = dict(row.seconds)
    total, wall = seconds.pop("total"), seconds.pop("optimize") + 0.002
    assert seconds["baselines"] == 0.002 and wall <= total + 0.002
    assert sum(seconds.values()) == pytest.approx(wall, abs=0.01)
    assert Row.from_json(row.to_json()) == row


def test_a_row_is_there_before_the_problem_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[Budget] = []

    class Waiting(MeasuringFake):
        def verify(self, program: Program) -> Evaluation:
            raise TimeUp  # while it waits for the GPU

    def run(*arguments: Any, **options: Any) -> Result:
        budgets.append(arguments[2])
        assert options["waited"]() == 0.0
        return run_task(*arguments, **options)

    monkeypatch.setattr(setup, "make_evaluator", lambda spec, start, context, **unused: Waiting())
    monkeypatch.setattr(measured, "run_task", run)
    row = measure(problem(tmp_path), SETTINGS, device="h200", limit_s=90.0)
    assert [budget.wall_seconds for budget in budgets] == [90.0 - measured.RESERVE_S]
    assert row.error is None and row.right and row.speedup == 1.0
    assert any("right in the search" in note and "no time for a final verification" in note for note in row.notes)


def test_gains_are_over_the_program_a_step_was_applied_to() -> None:
    def judged(ms: float) -> Evaluation:
        return Evaluation(Gate.PASSED, timing=Timing(ms), configurations=3)

    wrong = Evaluation(Gate.REGION, "off by one", "wrong")
    steps = (
        Attempt(Action("fusion"), None, True, before_ms=4.0),
        Attempt(Action("lowering"), judged(2.0), True, before_ms=4.0, gain=2.0),
        Attempt(Action("tiling", param="taller"), wrong, False, before_ms=2.0),
        Attempt(Action("tiling", param="wider"), judged(4.0), True, before_ms=None),
    )
    rows = step_rows(steps)
    assert [r.gain for r in rows] == [None, 2.0, None, None]
    assert [r.gate for r in rows] == ["", "passed", "region", "passed"]
    assert rows[1].configurations == 3
