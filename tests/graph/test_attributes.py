"""State that forward keeps in plain attributes, as KernelBench's recurrent cell does, or in buffers it replaces."""

from __future__ import annotations

import copy
import pickle
from collections import deque
from types import SimpleNamespace

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


class Listed(Cell):
    """Keeps its state in a list, and in another one after each call."""

    def __init__(self) -> None:
        super().__init__()
        self.state = [torch.full((4, 6), 0.5)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = [torch.tanh(self.layer(x) + self.state[0])]
        return self.state[0] * 2


class ListedPart(Listed):
    """Changes the tensor in the list."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state[0][1:3].add_(x[1:3])
        return self.state[0] @ x.T


class Window(Cell):
    """A cache of the last keys, in a dict beside a number."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"keys": torch.zeros(8, 6), "scale": 0.5}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state["keys"] = torch.cat([self.state["keys"][4:], self.layer(x)])
        return torch.softmax(x @ self.state["keys"].T * self.state["scale"], -1) @ self.state["keys"]


class Delayed(Cell):
    """Its tensors change places."""

    def __init__(self) -> None:
        super().__init__()
        self.state = deque([torch.zeros(4, 6)] * 2, maxlen=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        late = self.state[0] + 1
        self.state.append(self.layer(x))
        return late * self.state[1]


class Pair(Cell):
    """The two states of a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.state = (torch.zeros(4, 6), torch.zeros(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, c = self.state
        c = torch.tanh(self.layer(x) + h) * 0.5 + c
        self.state = (torch.tanh(c), c)
        return self.state[0]


class ListedFading(Listed):
    """Yields what `Listed` does in its first call, and keeps something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.layer(x) + self.state[0])
        self.state[0] = y * 0.5
        return y * 2


class Keys(Cell):
    """A cache that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.state = None
        self.keys: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.keys.append(self.layer(x))
        return torch.cat(self.keys).sum(0)


class Twice(Listed):
    """Its list grows in the second call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.layer(x) + self.state[-1])
        self.state[0] = y
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 2:
            self.state.append(y)
        return y


class Remembered:
    def __init__(self) -> None:
        self.layers = [SimpleNamespace(keys=torch.zeros(4, 6))]


class InObject(Cell):
    def __init__(self) -> None:
        super().__init__()
        self.state = Remembered()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state.layers[0].keys = torch.tanh(self.layer(x) + self.state.layers[0].keys)
        return self.state.layers[0].keys * 2


class Steps(Cell):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"steps": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state["steps"] += 1
        return self.layer(x) * self.state["steps"]


class Inside(torch.nn.Module):
    def __init__(self, cell: torch.nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x).relu()


@pytest.mark.parametrize(
    "make",
    [
        Cell, Drawn, Part, Count, Buffer, lambda: Inside(Cell()), lambda: Inside(Buffer()),
        Listed, ListedPart, Window, Delayed, Pair, lambda: Inside(Listed()),
    ],
)  # fmt: skip
def test_a_program_goes_on_from_call_to_call_as_its_module(make, tmp_path):
    torch.manual_seed(0)
    module = make()
    spec = KernelSpec.from_module(module, (X,))
    graph = capture_spec(spec)
    assert len(graph.mutations) == (2 if isinstance(module, (Delayed, Pair)) else 1)
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


class Box:
    def __init__(self):
        self.rows = torch.zeros(4, 6)


class Boxed(torch.nn.Module):
    """State in an object, as a cache of keys and values is, whose tensors are buffers as well or are not."""

    def __init__(self, *, buffer: bool):
        super().__init__()
        self.box = Box()
        if buffer:
            self.register_buffer("rows", self.box.rows)

    def forward(self, x):
        self.box.rows.index_copy_(0, torch.arange(2), x)
        return self.box.rows * 2


@pytest.mark.parametrize("buffer", [True, False])
def test_state_in_an_object_is_refused_by_the_name_of_the_attribute(buffer):
    with pytest.raises(CaptureError, match=r"forward keeps state in box\. To have it optimized, register it"):
        capture_spec(KernelSpec.from_module(Boxed(buffer=buffer), (torch.randn(2, 6),)))


def test_state_in_a_list_is_judged_and_copied():
    spec = KernelSpec.from_module(Listed(), (X,))
    graph = capture_spec(spec)
    assert updated_tables(graph) == ("state_0",)
    interpreter = Interpreter(spec.with_(updated=updated_tables(graph)))
    verdict = interpreter.check(Program.start(graph)).verdict
    assert verdict is not None and verdict.ok, verdict
    other = interpreter.check(Program.start(capture_spec(KernelSpec.from_module(ListedFading(), (X,))))).verdict
    assert other is not None and not other.ok and other.accuracy.max_error > other.accuracy.max_budget, other
    module = spec.module()
    twin = pickle.loads(pickle.dumps(copy.deepcopy(module)))
    with torch.no_grad():
        module(X), module(X)
        assert torch.equal(twin(X), Listed.forward(spec.origin.module(0, "cpu"), X)), "a state of its own"
        assert torch.equal(twin.state_0, twin.state[0]) and not torch.equal(twin.state_0, module.state_0)
        assert twin.double()(X.double()).dtype is twin.state[0].dtype is torch.float64


def test_a_reference_whose_list_changes_its_structure_is_the_module_as_written():
    spec = KernelSpec.from_module(Twice(), (X,))
    reference, own = spec.module(), Twice()
    own.load_state_dict(reference.state_dict())
    assert spec.stateful == ("state_0",)
    with torch.no_grad():
        for step in range(4):
            assert torch.equal(reference(X + step), own(X + step))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Longer, r"has shape .* from the module: forward keeps state in state\. To have it optimized, register it"),
        (Keys, r"differs .*: forward keeps state in keys\. To have it optimized, register it"),
        (InObject, r"differs .*: forward keeps state in state\. To have it optimized, register it"),
        (Steps, r"differs .*: forward changes state, and a graph keeps tensors only"),
        (Twice, r"forward changes calls"),
    ],
)
def test_state_that_no_buffer_can_stand_for_is_refused_by_name(make, words):
    with pytest.raises(CaptureError, match=words):
        capture_spec(KernelSpec.from_module(make(), (X,)))
