"""A submodule that torch.export refuses stays as it is, and the module around it is captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.setup import make_task
from qimeng.envs.steps.state import Budget
from qimeng.graph.capture import CaptureError
from qimeng.planner.greedy import GreedySearch
from qimeng.program.program import Program, load_source
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from qimeng.testing import ScriptedPlanner

X = torch.rand(8, 6)
LABELS = ["linear", "relu", "torch.Branch", "native_layer_norm"]


class Branch(torch.nn.Module):
    """Control flow by the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, x: torch.Tensor, *, flip: bool = False, more: Any = None) -> Any:
        y = self.linear(x) * self.scale
        return (-y if flip else y) if y.sum() > 0 else y.sin()


class Numpy(torch.nn.Module):
    def forward(this, x: torch.Tensor) -> torch.Tensor:  # noqa: N805  not everyone calls it self
        return torch.from_numpy(x.numpy() * 2)


class Twice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.ModuleDict({"branch": Branch()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner["branch"](x.exp(), flip=True)
        return self.inner["branch"](y, more=None).cos() + 1


class Updating(torch.nn.Module):
    """A branch that also counts its calls in one buffer and puts another one in the place of a second."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean = self.mean * 0.5 + x.mean(0)
        return x - self.mean if x.sum() > 0 else -x * self.calls


class Twofold(torch.nn.Module):
    """Calls the branch that updates its buffers twice."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = Updating()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branch(self.branch(x.exp()).sin()).cos()


class Cut(torch.nn.Module):
    """Returns as many rows as the largest length says, and that number."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
        count = int(lengths.max())
        return x[:count].clone(), count


class Shortened(torch.nn.Module):
    def __init__(self, count: bool = False) -> None:
        super().__init__()
        self.cut, self.count = Cut(), count

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        y, count = self.cut(x.exp(), lengths)
        return y[:1].cos() * count if self.count else y.cos() * 2


class Growing(torch.nn.Module):
    """A branch that changes a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.data.add_(1)
        self.scale += 1
        return x * self.scale if x.sum() > 0 else -x


class Masked(torch.nn.Module):
    """Makes a mask only while it is traced, as models of transformers do where no row is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = Branch()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(8, 6, dtype=torch.bool) if torch.compiler.is_exporting() else None
        return self.branch(x, more=mask).cos()


def chain(middle: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.ReLU(), middle, torch.nn.LayerNorm(6))


@pytest.mark.parametrize(
    ("module", "labels"),
    [
        (chain(Branch()), LABELS),
        (chain(Numpy()), ["linear", "relu", "torch.Numpy", "native_layer_norm"]),
        (torch.nn.Sequential(chain(Branch()), torch.nn.Tanh()), [*LABELS, "tanh"]),
        (Twice(), ["exp", "torch.Branch", "torch.Branch", "cos", "add"]),
        (chain(Updating()), ["linear", "relu", "torch.Updating", "native_layer_norm"]),
        (Twofold(), ["exp", "torch.Updating", "clone", "clone", "sin", "torch.Updating", "cos"]),
        (chain(torch.nn.BatchNorm1d(6, momentum=None)), ["linear", "relu", "torch.BatchNorm1d", "native_layer_norm"]),
    ],
    ids=["branch", "numpy", "nested", "twice", "updating", "updating twice", "batch norm"],
)  # fmt: skip
def test_captured_around(module: torch.nn.Module, labels: list[str]) -> None:
    graph = capture_spec(KernelSpec.of(module, (X,)))
    program = Program.start(graph)
    assert [r.label() for r in program.regions] == labels
    model = program.load().Model()
    model.load_state_dict(module.state_dict())
    with torch.no_grad():
        for x in (X, -X, torch.randn(8, 6)):
            torch.testing.assert_close(model(x), module(x))
            torch.testing.assert_close(dict(model.named_buffers()), dict(module.named_buffers()))


def test_other_arguments_while_traced_are_refused() -> None:
    with pytest.raises(CaptureError, match="Branch cannot be traced .* called with other arguments"):
        capture_spec(KernelSpec.of(Masked(), (X,)))


def test_a_class_of_a_file_travels_in_the_program(tmp_path: Path) -> None:
    text = (
        "import torch\n\nclass Odd(torch.nn.Module):\n    def forward(self, x):\n"
        "        return x * 2 if x.sum() > 0 else x\n\n"
        "class Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.odd = Odd()\n\n    def forward(self, x):\n        return self.odd(x.sin()).cos()\n\n"
        "def get_inputs():\n    return [torch.rand(4, 6)]\n\ndef get_init_inputs():\n    return []\n"
    )
    spec = KernelSpec.from_source(text)
    program = Program.start(capture_spec(spec))
    assert [r.label() for r in program.regions] == ["sin", "torch.Odd", "cos"]
    model = load_source(program.source, folder=str(tmp_path)).Model()
    x = -torch.rand(4, 6)
    torch.testing.assert_close(model(x), x.sin().cos())


def test_what_changes_its_parameters_does_not_stand_apart() -> None:
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        capture_spec(KernelSpec.of(chain(Growing()), (X,)))


def test_a_worker_runs_it_beside_a_generated_kernel() -> None:
    task = make_task(chain(Branch()), (X,), device="h200")
    result = optimize(task, GreedySearch(ScriptedPlanner(["lowering"])), Budget(seconds=120, evaluations=3))
    step = result.steps[0]
    assert not task.reason and step.accepted and step.evaluation is not None
    assert step.evaluation.accuracy is not None and step.evaluation.generated_share


def test_a_submodule_that_returns_another_size_later_is_refused() -> None:
    module, lengths = Shortened(), torch.tensor([3, 4])
    model = Program.start(capture_spec(KernelSpec.of(module, (X, lengths)))).load().Model()
    torch.testing.assert_close(model(X, lengths), module(X, lengths))
    for other in (torch.tensor([3, 3]), torch.tensor([6, 1])):
        with pytest.raises(ValueError, match="made for inputs for which Cut returns"):
            model(X, other)


def test_a_submodule_whose_numbers_depend_on_values_does_not_stand_apart() -> None:
    with pytest.raises(CaptureError, match="made for inputs for which Cut returns"):
        capture_spec(KernelSpec.of(Shortened(count=True), (X, torch.tensor([3, 4]))))
