"""State that forward keeps in plain attributes, as KernelBench's recurrent cell does, or in buffers it replaces."""

from __future__ import annotations

import pytest
import torch

from qimeng.envs.estimate.interpret import Interpreter
from qimeng.graph.capture import CaptureError
from qimeng.graph.state import updated_tables
from qimeng.program.program import Program, load_source
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

X = torch.linspace(-2, 2, 24).reshape(4, 6)


class Cell(torch.nn.Module):
    """A recurrence over calls; its state is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)
        self.state = torch.full((4, 6), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = torch.tanh(self.layer(x) + self.state)
        return self.state * 2


class Drawn(Cell):
    def __init__(self) -> None:
        super().__init__()
        self.state = torch.randn(4, 6)


class Part(Cell):
    """Changes a part of its state."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state[1:3].add_(x[1:3])
        return self.state @ x.T


class Given(Cell):
    """Begins with the state that it is given, if any, as KernelBench's cell does."""

    def forward(self, x: torch.Tensor, state: torch.Tensor | None = None) -> torch.Tensor:
        if state is not None:
            self.state.copy_(state)
        return super().forward(x)


class Buffer(Cell):
    def __init__(self) -> None:
        super().__init__()
        del self.state
        self.register_buffer("state", torch.full((4, 6), 0.5))


class Count(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = torch.tensor(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return x * self.steps


class Noted(Cell):
    """Keeps what no call reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = self.layer(x)
        return self.state.relu()


class First(Cell):
    """Makes its state for the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.state = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.state is None:
            self.state = torch.zeros(len(x), 6)
        return super().forward(x)


class Longer(Cell):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = torch.cat([self.state, x])
        return self.state.exp()


class Fading(Cell):
    """Yields what `Cell` does in its first call, and keeps something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.layer(x) + self.state)
        self.state = y * 0.5
        return y * 2


class Inside(torch.nn.Module):
    def __init__(self, cell: torch.nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x).relu()


@pytest.mark.parametrize("make", [Cell, Drawn, Part, Count, Buffer, lambda: Inside(Cell()), lambda: Inside(Buffer())])
def test_a_program_goes_on_from_call_to_call_as_its_module(make, tmp_path):
    torch.manual_seed(0)
    module = make()
    spec = KernelSpec.from_module(module, (X,))
    graph = capture_spec(spec)
    assert len(graph.mutations) == 1
    model = load_source(Program.start(graph).source, "stateful", tmp_path).Model()
    model.load_state_dict(module.state_dict())
    with torch.no_grad():
        for step in range(3):
            torch.testing.assert_close(model(X + step), module(X + step))


@pytest.mark.parametrize("buffer", [False, True])
def test_replaced_state_is_judged(buffer):
    spec = KernelSpec.from_module((Buffer if buffer else Cell)(), (X,))
    graph = capture_spec(spec)
    assert updated_tables(graph) == (() if buffer else ("state",)) and ("state" in spec.module().state_dict()) == buffer
    interpreter = Interpreter(spec.with_(updated=updated_tables(graph)))
    verdict = interpreter.check(Program.start(graph)).verdict
    assert verdict is not None and verdict.ok, verdict
    assert interpreter._reduced.references.mutated == ("state",)
    other = interpreter.check(Program.start(capture_spec(KernelSpec.from_module(Fading(), (X,))))).verdict
    assert other is not None and not other.ok and other.accuracy.max_error > other.accuracy.max_budget, other


@pytest.mark.parametrize(("make", "inputs"), [(Given, (X, X * 2)), (Noted, (X,))])
def test_state_that_no_call_reads_is_left_out(make, inputs):
    graph = capture_spec(KernelSpec.from_module(make(), inputs))
    assert not graph.mutations and not [n for n in graph.nodes.values() if n.kind == "buffer"]


def test_state_made_at_the_first_call_is_carried_once_it_is_there():
    module = First()
    with pytest.raises(CaptureError, match=r"forward keeps state in state\. To have it optimized, register it .*call"):
        capture_spec(KernelSpec.from_module(module, (X,)))
    with torch.no_grad():
        module(X)
    assert updated_tables(capture_spec(KernelSpec.from_module(module, (X,)))) == ("state",)


def test_state_that_grows_is_refused():
    with pytest.raises(CaptureError, match=r"has shape .* from the module: forward keeps state in state\."):
        capture_spec(KernelSpec.from_module(Longer(), (X,)))
