"""Python loops that a capture unrolls, as one operator again; and what is no such loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from qimeng.graph.capture import capture
from qimeng.graph.loops.loop import is_loop, loop_of
from qimeng.graph.loops.roll import rolled
from qimeng.graph.opgraph import Meta, Node, OpGraph, Value
from qimeng.program.program import Program


class Cells(nn.Module):
    """A stack of cells over the steps of its input, one step after the other."""

    def __init__(self, kind: type[nn.Module], layers: int = 1):
        super().__init__()
        self.cells = nn.ModuleList([kind(5 if i == 0 else 8, 8) for i in range(layers)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        states = [torch.zeros(3, 8) for _ in self.cells]
        memory, out = list(states), []
        for value in x.unbind(1):
            for i, cell in enumerate(self.cells):
                if isinstance(cell, nn.LSTMCell):
                    states[i], memory[i] = cell(value, (states[i], memory[i]))
                else:
                    states[i] = cell(value, states[i])
                value = states[i]
            out.append(value)
        return torch.stack(out, 1), memory[-1] + states[-1]


class Selective(nn.Module):
    """The loop of a selective scan."""

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        state, out = torch.zeros(2, 6, 4), []
        for t in range(a.shape[2]):
            state = a[:, :, t, :] * state + b[:, :, t, :]
            out.append(torch.matmul(state, c[:, t, :].unsqueeze(-1))[:, :, 0])
        return torch.stack(out, -1)


class Widened(nn.Module):
    """A loop whose state begins with zeros of a narrower dtype."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        state, out = torch.zeros(2, 6, dtype=torch.bfloat16), []
        for t in range(a.shape[2]):
            state = a[:, :, t] * state + b[:, :, t]
            out.append(torch.sin(state) * 2)
        return torch.stack(out, -1)


class Simple(nn.Module):
    """A recurrent network written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(13, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        found = []
        for step in x:
            state = torch.tanh(self.into(torch.cat((step, state), 1)))
            found.append(self.out(state))
        return torch.stack(found)


class Repeated(nn.Module):
    """The same layer again and again, which no step of an input goes into."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(64):
            x = self.norm(x + torch.relu(self.linear(x)))
        return x


class Uneven(nn.Module):
    """Steps that read places further and further apart."""

    def forward(self, x: Tensor) -> Tensor:
        state = x[0]
        for t in range(60):
            state = torch.tanh(state * x[t * (t + 1) // 2] + 1) - 0.5
        return state


Make = Callable[[], nn.Module]
LOOPS: dict[str, tuple[Make, tuple[tuple[int, ...], ...], int, int]] = {
    "lstm": (lambda: Cells(nn.LSTMCell), ((3, 14, 5),), 14, 2),
    "two layers of gru": (lambda: Cells(nn.GRUCell, 2), ((3, 10, 5),), 10, 2),
    "selective scan": (Selective, ((2, 6, 24, 4), (2, 6, 24, 4), (2, 24, 4)), 24, 1),
    "by hand": (Simple, ((30, 3, 5), (3, 8)), 30, 1),
    "zeros of another dtype": (Widened, ((2, 6, 80), (2, 6, 80)), 80, 1),
}
"""Module, shapes of its inputs, steps, states."""


@cache
def captured(name: str) -> OpGraph:
    """The graph of a loop of `LOOPS`; capturing the longest takes two seconds."""
    make, shapes, *_ = LOOPS[name]
    return capture(make, lambda: tuple(torch.empty(s) for s in shapes))


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_one_operator_and_computes_the_same(name: str) -> None:
    make, shapes, steps, states = LOOPS[name]
    graph = captured(name)
    (node,) = [n for n in graph.ops() if is_loop(n)]
    loop = loop_of(node)
    assert (loop.count, len(loop.starts)) == (steps, states) and sum(1 for _ in graph.ops()) < 12
    torch.manual_seed(0)
    module, inputs = make(), [torch.randn(s) / 2 for s in shapes]
    program = Program.start(graph).load().Model()
    program.load_state_dict(module.state_dict())
    with torch.no_grad():
        wanted, found = module(*inputs), program(*inputs)
    pairs = list(zip(wanted, found, strict=True)) if isinstance(wanted, tuple) else [(wanted, found)]
    for a, b in pairs:  # to an ulp of 1: some CPUs round a GRU's gates otherwise in one piece than one by one
        torch.testing.assert_close(b, a, rtol=0, atol=torch.finfo(torch.float32).eps)
        assert a.stride() == b.stride()


class Some(nn.Module):
    """Returns some steps beside all of them."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        state, found = x[0], []
        for t in range(60):
            state = torch.tanh(state * x[t]) - 0.5
            found.append(state)
        return torch.stack(found), state, found[7], found[9].unsqueeze(0), found[11] * 2


def test_results_have_memory_of_their_own() -> None:
    graph = capture(Some, lambda: (torch.empty(60, 4),))
    assert sum(is_loop(n) for n in graph.ops()) == 1
    x = torch.randn(60, 4)
    wanted, found = Some()(x), Program.start(graph).load().Model()(x)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert len({t.untyped_storage().data_ptr() for t in found}) == 5


class FirstApart(nn.Module):
    """A loop whose first step has no state; its results are stacked in the order of the steps and the other way."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        state, found = torch.cos(x[0]), []
        found.append(state)
        for row in x[1:]:
            state = torch.tanh(state * 0.5 + row)
            found.append(state)
        back = found[:0:-1]
        return torch.stack(found), torch.stack(found, 1), torch.cat([*found, x[0]], 1), torch.stack(back, 2)


@pytest.mark.parametrize("steps", [50, 150])
def test_steps_beside_others_and_backwards_are_read_at_once(steps: int) -> None:
    graph = capture(FirstApart, lambda: (torch.empty(steps, 3, 4),))
    assert sum(is_loop(n) for n in graph.ops()) == 1 and sum(1 for _ in graph.ops()) < 25
    x = torch.randn(steps, 3, 4)
    for a, b in zip(FirstApart()(x), Program.start(graph).load().Model()(x), strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()


class Apart(nn.Module):
    """Returns every step by itself."""

    def forward(self, x: Tensor) -> list[Tensor]:
        state, found = x[0], []
        for row in x:
            state = torch.tanh(state * 0.5 + row)
            found.append(state)
        return found


def test_steps_that_are_only_read_are_no_loop() -> None:
    graph = capture(Apart, lambda: (torch.empty(150, 4),))
    assert [loop_of(n).count for n in graph.ops() if is_loop(n)] == [150]


@pytest.mark.parametrize(("make", "shape"), [(Repeated, (3, 8)), (Uneven, (1800, 4))])
def test_what_is_no_loop_over_steps_stays_as_it_is(make: Make, shape: tuple[int, ...]) -> None:
    graph = capture(make, lambda: (torch.empty(shape),))
    assert not any(is_loop(n) for n in graph.ops())


def chain(count: int, odd: int = -1) -> OpGraph:
    """``h = x[t] * h + 1`` by hand, `count` times; step `odd` reads another place."""
    row = Meta((4,), (1,), "float32")
    nodes = {"x": Node("x", "input", "0", metas=(Meta((count, 4), (4, 1), "float32"),))}
    nodes["h"] = Node("h", "input", "1", metas=(row,))
    last = Value("h")
    for t in range(count):
        place = t if t != odd else 0
        nodes[f"s{t}"] = Node(f"s{t}", "op", "aten.select.int", (Value("x"), 0, place), metas=(row,))
        nodes[f"m{t}"] = Node(f"m{t}", "op", "aten.mul.Tensor", (Value(f"s{t}"), last), metas=(row,))
        nodes[f"a{t}"] = Node(f"a{t}", "op", "aten.add.Tensor", (Value(f"m{t}"), 1), metas=(row,))
        last = Value(f"a{t}")
    return OpGraph(nodes, (last,), n_inputs=2)


def test_one_step_that_differs_is_no_step_of_the_loop() -> None:
    assert sum(1 for _ in rolled(chain(60)).ops()) == 1
    assert not any(is_loop(n) for n in rolled(chain(60, odd=30)).ops())


def test_thousands_of_operators_take_a_second() -> None:
    graph, began = chain(3000), time.perf_counter()
    assert sum(1 for _ in rolled(graph).ops()) == 1
    assert time.perf_counter() - began < 10
