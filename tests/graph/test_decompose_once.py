"""Decomposing each kind of operator once gives the graph of decomposing the whole program."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qimeng.graph import capture, decompose, decompose_once
from qimeng.graph.decompose_once import NotByKinds
from qimeng.graph.opgraph import OpGraph
from qimeng.graph.parts import IGNORED
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from tests.suite.problem import Problem, problems


class Simple(nn.Module):
    """A recurrent network; its steps are stacked in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(5, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        state, found = x.new_zeros(x.shape[0], 8), []
        for t in range(x.shape[1]):
            state = torch.tanh(self.into(x[:, t]) + self.out(state))
            found.append(state)
        several = torch.stack(found), torch.stack(found, 1), torch.stack(found, -1)
        return *several, torch.cat(found), torch.cat(found, 1), torch.cat([f.T for f in found], 1), found[3] * found[-1]


class Gated(nn.Module):
    """A network with two gates, each a part of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.new = nn.Linear(13, 16), nn.Linear(13, 8)

    def forward(self, x: Tensor) -> Tensor:
        state, found = x.new_zeros(x.shape[0], 8), []
        for t in range(x.shape[1]):
            keep, reset = torch.sigmoid(self.gates(torch.cat([x[:, t], state], -1))).chunk(2, -1)
            state = torch.lerp(state, torch.tanh(self.new(torch.cat([x[:, t], reset * state], -1))), keep)
            found.append(state.unsqueeze(1))
        return torch.cat(found, 1)


class Memory(nn.Module):
    """A network with two states, from the last step to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(5, 32), nn.Linear(8, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state = memory = x.new_zeros(x.shape[0], 8)
        found = []
        for step in reversed(x.unbind(1)):
            i, f, g, o = (self.into(step) + self.out(state)).split(8, -1)
            memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
            state = o.sigmoid() * memory.tanh()
            found.append(state)
        return torch.stack(found[::-1], 1), memory


class Scan(nn.Module):
    """A selective scan that begins with zeros of another dtype."""

    def forward(self, x: Tensor) -> Tensor:
        state, found = torch.zeros(x.shape[0], x.shape[2], 4, dtype=torch.bfloat16), []
        wide = x[..., None].expand(*x.shape, 4)
        for t in range(x.shape[1]):
            state = torch.exp(-(wide[:, t] ** 2)) * state + wide[:, t]
            found.append(torch.matmul(state, x[:, t, :4].unsqueeze(-1))[..., 0])
        return torch.stack(found, -1)


class Written(nn.Module):
    """Writes its steps into one tensor, which changes it in place."""

    def forward(self, x: Tensor) -> Tensor:
        found = torch.zeros_like(x)
        state = x[:, 0]
        for t in range(x.shape[1]):
            state = torch.sin(state) + x[:, t]
            found[:, t] = state
        return found


def mamba() -> nn.Module:
    """A block of Mamba."""
    models = pytest.importorskip("transformers.models.mamba")
    config = models.MambaConfig(hidden_size=5, state_size=4, time_step_rank=2, num_hidden_layers=1)
    block: nn.Module = models.modeling_mamba.MambaMixer(config, 0)
    return block.eval()


LOOPS: list[Callable[[], nn.Module]] = [Simple, Gated, Memory, Scan, mamba]
STEPS = 12


def graph_of(make: Callable[[], nn.Module], steps: int = STEPS) -> OpGraph:
    return capture.capture(make, lambda: (torch.empty(2, steps, 5),))


def text_of(graph: OpGraph) -> str:
    """Everything but what others worked out about the graph."""
    return repr({name: value for name, value in vars(graph).items() if name in OpGraph.__dataclass_fields__})


@pytest.fixture(autouse=True)
def unrolled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops stay as they are captured, operator by operator."""
    monkeypatch.setattr(capture, "rolled", lambda graph: graph)


def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decompose programs in one piece."""
    monkeypatch.setattr(capture, "decomposed", decompose._whole)


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of kinds of every program that was decomposed by kinds."""
    counted: list[int] = []

    def counting(calls: Iterable[Any], trace: Any, real: Any = decompose_once._decompose) -> None:
        """Counts where that succeeds: whatever tracing raises sends a program to the slow way, with the same graph."""
        real(calls, trace)
        counted.append(len(list(calls)))

    monkeypatch.setattr(decompose_once, "_decompose", counting)
    return counted


@pytest.mark.parametrize("make", LOOPS)
def test_a_loop_has_the_same_graph(
    make: Callable[[], nn.Module], kinds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = text_of(graph_of(make))
    assert len(kinds) == 1
    whole(monkeypatch)
    assert text_of(graph_of(make)) == found and len(kinds) == 1


def test_the_work_does_not_grow_with_the_steps(kinds: list[int]) -> None:
    for steps in (STEPS, 3 * STEPS):
        graph_of(Gated, steps)
    assert kinds[0] == kinds[1]


def test_operators_that_stay_are_not_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.view(-1) * 2).relu().sum(-1)

    def made() -> str:
        return text_of(capture.capture(Module, lambda: (torch.empty(3, 2),)))

    with monkeypatch.context() as patch:
        whole(patch)
        found = made()
    monkeypatch.setattr(decompose, "_whole", None)  # called, it raises
    monkeypatch.setattr(decompose, "traced", None)
    assert made() == found


class Constants(nn.Module):
    """Tensors made of Python numbers, which torch.export detaches in place."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > torch.tensor(0.5), x.square() * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), x)


def test_tensors_of_numbers_are_no_change_in_place(kinds: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> str:
        return text_of(capture.capture(Constants, lambda: (torch.empty(3, 5),), values=True))

    found = made()
    assert kinds
    whole(monkeypatch)
    assert made() == found


def test_a_loop_that_writes_in_place_is_decomposed_in_one_piece(
    kinds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = text_of(graph_of(Written))
    assert not kinds
    whole(monkeypatch)
    assert text_of(graph_of(Written)) == found


def test_statistics_are_updated_where_nothing_counts_the_batches(kinds: list[int]) -> None:
    """torch.export's operator for that does not say in its schema that it changes them."""
    module = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
    module[1].num_batches_tracked = None
    graph = capture.capture(lambda: module.train(), lambda: (torch.rand(4, 5),), values=True)
    assert len(graph.mutations) == 2 and not kinds


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x.add_(1), "add_"),
        (lambda x: torch.as_strided(x, (2,), (1,)) * 2, "as_strided"),
        (lambda x: x[x > 0].sum(), "a size depends on data"),
        (lambda x: torch.view_as_complex(x).conj().abs(), "no plain tensor"),
    ],
    ids=["in place", "strided", "sizes", "conjugated"],
)
def test_what_depends_on_more_than_its_kind_is_refused_and_the_program_left_alone(
    function: Callable[[Tensor], Tensor], reason: str
) -> None:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x * 1)

    exported = torch.export.export(Module(), (torch.rand(3, 2),), strict=False)
    before = str(exported.graph)
    with pytest.raises(NotByKinds, match=reason):
        decompose_once.decompose_once(exported, decompose.traced)
    assert str(exported.graph) == before


@pytest.mark.slow
@pytest.mark.parametrize("problem", [p for p in problems() if not p.whole][::4], ids=lambda p: p.name)
def test_problems_have_the_same_graph(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fourth problem, for time's sake; each is exported once and decomposed twice."""
    spec = KernelSpec.of(problem.make(), problem.examples(), **problem.options)
    texts = []

    def text(exported: Any) -> str:
        nodes = [n for n in exported.graph.nodes if str(n.target) not in IGNORED]
        return str([(n.op, n.name, n.target, n.args, n.kwargs) for n in nodes]) + str(exported.graph_signature)

    def twice(exported: Any) -> Any:
        """Writes down what becomes of a copy in one piece, and of the program by kinds."""
        one_piece = text(decompose._whole(copy.copy(exported)))
        made = decompose.decomposed(exported)
        texts.append((one_piece, text(made)))
        return made

    monkeypatch.setattr(capture, "decomposed", twice)
    capture_spec(spec, verify=False)
    assert texts
    for one_piece, by_kinds in texts:
        assert one_piece == by_kinds
