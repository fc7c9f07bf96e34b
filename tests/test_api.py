"""`plan_and_code` and the package's face, with the fakes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import qimeng
from qimeng import KernelSpec, Progress, QimengError, Result, SpecError, Store, plan_and_code
from qimeng.envs.steps.result import Result as ResultClass
from qimeng.envs.steps.setup import make_coder, make_device
from qimeng.errors import DeviceError
from qimeng.interfaces import Evaluation, EvaluationRequest, FinalOptions, Timing
from qimeng.planner.greedy import GreedySearch
from qimeng.program.program import Program
from qimeng.testing import FakeCoder, FakeEvaluator, ScriptedPlanner

PROBLEM = """
import torch

class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x):
        return torch.softmax(torch.relu(self.linear(x)) * 2 + 1, -1)

def get_inputs():
    return [torch.rand(16, 32)]

def get_init_inputs():
    return [32]
"""


def gate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x * y + 1.0) + x


def branches(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if float(x.sum()) > 0 else x


QUICK: dict[str, Any] = {"planner": "heuristic", "search": "greedy"}
"""A planner that decides in no time."""


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    path = tmp_path / "problem.py"
    path.write_text(PROBLEM)
    return path


@pytest.fixture
def result(problem: Path) -> Result:
    return plan_and_code(problem, evaluator=FakeEvaluator(), coder=FakeCoder(), **QUICK)


def test_a_file_becomes_a_drop_in_module(problem: Path, result: Result) -> None:
    assert result.speedup is not None and result.speedup > 1 and len(result.recipe) >= 2
    reference, x = KernelSpec.from_file(problem).module(), torch.randn(16, 32)
    assert result.module.state_dict().keys() == reference.state_dict().keys()
    torch.testing.assert_close(result.module(x), reference(x))
    with torch.no_grad():
        reference.linear.weight.normal_()
    result.module.load_state_dict(reference.state_dict())
    torch.testing.assert_close(result.module(x), reference(x))
    with pytest.raises(ValueError, match="made for shape"):
        result.module(torch.randn(8, 32))


def test_a_function_with_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(64, 32), torch.randn(64, 32)
    result = plan_and_code(gate, (x, y), evaluator=FakeEvaluator(), coder=FakeCoder(), planner="random", search="beam")
    torch.testing.assert_close(result.module(x, y), gate(x, y))
    assert result.name == "gate"


def test_what_cannot_be_captured_is_returned_as_it_is() -> None:
    x = torch.randn(8, 8)
    result = plan_and_code(branches, (x,), evaluator=FakeEvaluator(), coder=FakeCoder(), **QUICK)
    assert result.stopped == "opaque" and len(result.recipe) == 0
    assert any("left on PyTorch" in note for note in result.notes)
    assert "left on PyTorch" in result.report()
    torch.testing.assert_close(result.module(x), branches(x))


def test_a_planner_comes_with_the_package(problem: Path) -> None:
    result = plan_and_code(
        problem, evaluator=FakeEvaluator(), coder=FakeCoder(), evaluations=6, planner="lm", search="best-of-n"
    )
    assert result.evaluations == 6 and result.speedup is not None and result.speedup > 1


def test_the_templates_are_the_default_coder(problem: Path) -> None:
    result = plan_and_code(problem, evaluator=FakeEvaluator(), evaluations=3, **QUICK)
    assert result.evaluations == 3 and "@triton.jit" in result.source


def test_a_search_brings_its_own_planner(problem: Path) -> None:
    search = GreedySearch(ScriptedPlanner(["fusion"]))
    result = plan_and_code(problem, evaluator=FakeEvaluator(), coder=FakeCoder(), search=search, planner="random")
    assert [s.action.kind for s in result.steps] == ["fusion", "stop"]


def test_saved_results_are_read_again(result: Result, tmp_path: Path) -> None:
    folder = result.save(tmp_path / "saved")
    assert {p.name for p in folder.iterdir()} == {
        "program.py",
        "recipe.json",
        "report.md",
        "result.json",
        "steps.jsonl",
    }
    again = ResultClass.load(folder)
    assert again.report() == result.report()
    assert (again.recipe, again.evaluation, again.start) == (result.recipe, result.evaluation, result.start)
    assert (again.steps, again.speedup, again.source) == (result.steps, result.speedup, result.source)
    module = again.module
    module.load_state_dict(result.module.state_dict())
    x = torch.randn(16, 32)
    torch.testing.assert_close(module(x), result.module(x))
    with pytest.raises(QimengError, match="holds no result"):
        ResultClass.load(tmp_path)
    (folder / "result.json").write_text("{")
    with pytest.raises(QimengError, match="is damaged or unfinished .* optimize again"):
        ResultClass.load(folder)


def test_a_saved_program_needs_nothing_of_this_library(result: Result, tmp_path: Path) -> None:
    folder = result.save(tmp_path / "saved")
    code = "import sys, program; program.Model(); print([m for m in sys.modules if m.startswith('qimeng')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, check=True)
    assert done.stdout.strip() == "[]"


def test_a_store_answers_the_second_time(problem: Path, tmp_path: Path) -> None:
    evaluators = [FakeEvaluator(), FakeEvaluator()]
    found = [
        plan_and_code(problem, evaluator=e, coder=FakeCoder(), store=tmp_path / "store.sqlite", planner="random")
        for e in evaluators
    ]
    assert evaluators[0].calls and evaluators[1].calls == []
    assert found[0].recipe == found[1].recipe and found[1].cached == found[1].evaluations + 1
    with Store(tmp_path / "store.sqlite") as store:
        assert store.counts()["specs"] == 1


def test_estimates_say_so(problem: Path) -> None:
    result = plan_and_code(problem, evaluator=FakeEvaluator(estimated=True), coder=FakeCoder(), device="a100", **QUICK)
    assert result.estimated and result.device == "a100"
    assert "(estimated)" in result.report() and "measured" not in result.report()


def test_progress_is_told(problem: Path) -> None:
    seen: list[Progress] = []
    plan_and_code(problem, evaluator=FakeEvaluator(), coder=FakeCoder(), on_step=seen.append, **QUICK)
    assert seen[0].phase == "start" and seen[-1].phase == "end"


def test_mistakes_are_one_clear_error(problem: Path, tmp_path: Path) -> None:
    fake = FakeEvaluator()
    with pytest.raises(ValueError, match="unknown planner 'x'; known"):
        plan_and_code(problem, planner="x", evaluator=fake)
    with pytest.raises(ValueError, match="unknown search 'x'; known"):
        plan_and_code(problem, search="x", evaluator=fake)
    with pytest.raises(ValueError, match="unknown coder 'x'; known"):
        plan_and_code(problem, coder="x", evaluator=fake)
    with pytest.raises(DeviceError, match="unknown device 'x'; known"):
        plan_and_code(problem, device="x", evaluator=fake)
    with pytest.raises(SpecError, match="precision mode 'x'"):
        plan_and_code(problem, mode="x", evaluator=fake)
    with pytest.raises(SpecError, match="none.py"):
        plan_and_code(tmp_path / "none.py", evaluator=fake)
    with pytest.raises(SpecError, match="example inputs"):
        plan_and_code(gate, evaluator=fake)


def test_devices_and_coders_by_name() -> None:
    assert make_device("h200").name == "h200"
    assert make_device(make_device("a100")).name == "a100"
    coder = FakeCoder()
    assert make_coder(coder) is coder


def test_the_face_is_what_all_says() -> None:
    assert sorted(qimeng.__all__) == list(qimeng.__all__) == dir(qimeng)
    assert all(getattr(qimeng, name) is not None for name in qimeng.__all__)
    assert set(qimeng._HOME) | {"__version__"} == set(qimeng.__all__)
    public = {n for n in vars(qimeng) if not n.startswith("_")}
    modules = {n for n in public if isinstance(vars(qimeng)[n], type(sys))}
    assert public - modules <= set(qimeng.__all__) | {"annotations", "import_module", "Any", "TYPE_CHECKING"}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(qimeng, "nothing")  # noqa: B009


def test_torch_compile_stands_beside_the_result(problem: Path, tmp_path: Path) -> None:
    class Comparing(FakeEvaluator):
        asked: set[FinalOptions]

        def answer(self, request: EvaluationRequest) -> Evaluation:
            self.asked = {*getattr(self, "asked", ()), request.options}
            return super().answer(request)

        def verify(self, program: Program) -> Evaluation:
            found = super().verify(program)
            return replace(found, compiled={"default": Timing(2 * (found.ms or 0)), "reduce-overhead": Timing(9.0)})

    judge = Comparing()
    result = plan_and_code(
        problem, evaluator=judge, coder=FakeCoder(), seconds=30, compile_modes=("default", "reduce-overhead"), **QUICK
    )
    assert judge.asked == {FinalOptions(("default", "reduce-overhead"), 15.0)}, "from the first request on"
    assert result.evaluation.over_compile == pytest.approx(2.0)
    assert "2.00 x torch.compile" in result.report() and "torch.compile, mode reduce-overhead | 9 ms" in result.report()
    assert Result.load(result.save(tmp_path / "saved")).evaluation == result.evaluation
    silent = Comparing()
    plan_and_code(problem, evaluator=silent, coder=FakeCoder(), compile_modes=(), **QUICK)
    assert {options.compile_modes for options in silent.asked} == {()}


@pytest.mark.slow
@pytest.mark.parametrize("function", [lambda x: x, lambda x: x.t()[2:]], ids=["nothing", "views"])
def test_a_computation_without_a_kernel(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    result = plan_and_code(function, (torch.rand(8, 6),), device="h200", seconds=20, **QUICK)
    assert result.evaluation.ok and result.speedup == 1.0 and "1.00 x PyTorch eager" in result.report()
    x = torch.rand(8, 6)
    assert torch.equal(result.module(x), function(x))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")
def test_a_module_with_kernels_says_that_there_is_no_gpu(result: Result):
    kernels = replace(result, source=f"{result.source}\n_KERNEL = '''@triton.jit'''\n")
    assert result.module(torch.rand(16, 32)).shape == (16, 32)
    with pytest.raises(QimengError, match="run on a GPU and there is none here"):
        kernels.module(torch.rand(16, 32))
