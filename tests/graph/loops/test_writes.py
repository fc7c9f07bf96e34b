"""Steps of a loop that write into one tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from qimeng.graph.loops.loop import is_loop, loop_of
from qimeng.graph.opgraph import OpGraph
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

STEPS, WIDTH = 36, 6
Step = Callable[[Tensor, Tensor], Tensor]


class Writing(nn.Module):
    """A cell whose results `write` puts into a tensor."""

    def __init__(self, write: Callable[[Step, Tensor], Tensor]):
        super().__init__()
        self.into, self.back, self.write = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), write

    def step(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.into(x) + self.back(h))

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self.step, x)


def by_index(step: Step, x: Tensor) -> Tensor:
    h, out = torch.zeros(len(x), WIDTH), torch.empty(len(x), STEPS, WIDTH)
    for t in range(STEPS):
        h = step(x[:, t], h)
        out[:, t] = h
    return out


def by_slice(step: Step, x: Tensor) -> Tensor:
    h, out = torch.zeros(len(x), WIDTH), torch.zeros(len(x), STEPS, WIDTH)
    for t in range(STEPS):
        h = step(x[:, t], h)
        out[:, t : t + 1] = h[:, None]
    return out


def steps_first(step: Step, x: Tensor) -> Tensor:
    h, out = torch.zeros(len(x), WIDTH), torch.empty(STEPS, len(x), WIDTH)
    for t in range(STEPS):
        h = step(x[:, t], h)
        out[t] = h
    return out


def steps_last(step: Step, x: Tensor) -> Tensor:
    h, out = torch.zeros(len(x), WIDTH), torch.empty(len(x), WIDTH, STEPS)
    for t in range(STEPS):
        h = step(x[:, t], h)
        out[..., t] = h
    return out


def backwards(step: Step, x: Tensor) -> Tensor:
    h, out = torch.zeros(len(x), WIDTH), torch.empty(len(x), STEPS, WIDTH)
    for t in reversed(range(STEPS)):
        h = step(x[:, t], h)
        out[:, t] = h
    return out


def state_read_back(step: Step, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), STEPS, WIDTH)
    out[:, 0] = step(x[:, 0], torch.zeros(len(x), WIDTH))
    for t in range(1, STEPS):
        out[:, t] = step(x[:, t], out[:, t - 1])
    return out


def all_but_one(step: Step, x: Tensor) -> Tensor:
    h, out = torch.zeros(len(x), WIDTH), torch.ones(len(x), 4, WIDTH)
    for t in range(3):
        h = step(x[:, t], h)
        out[:, t] = h
    return out


def read_between(step: Step, x: Tensor) -> Tensor:
    h, out, total = torch.zeros(len(x), WIDTH), torch.zeros(len(x), 4, WIDTH), torch.zeros(len(x), WIDTH)
    for t in range(4):
        h = step(x[:, t], h)
        out[:, t] = h
        total = total + out.sum(1)
    return out + total[:, None]


def written_twice(step: Step, x: Tensor) -> Tensor:
    out = torch.zeros(len(x), 2, WIDTH)
    out[:, 0] = x[:, 0]
    out[:, 1] = x[:, 1]
    out[:, 0] = step(x[:, 2], out[:, 1])
    return out


def captured(write: Callable[[Step, Tensor], Tensor]) -> OpGraph:
    """The graph, verified against the module."""
    spec = KernelSpec.from_module(Writing(write), (torch.randn(3, STEPS, WIDTH),))
    return capture_spec(spec)


@pytest.mark.parametrize("write", [by_index, by_slice, steps_first, steps_last, backwards, state_read_back])
def test_steps_that_fill_a_tensor_are_one_loop(write: Callable[[Step, Tensor], Tensor]) -> None:
    graph = captured(write)
    (loop,) = (loop_of(n) for n in graph.ops() if is_loop(n))
    assert loop.count in (STEPS, STEPS - 1)
    assert not any("scatter" in n.target for n in graph.ops())


@pytest.mark.parametrize(("write", "scatters"), [(all_but_one, 3), (read_between, 4)])
def test_other_writes_stay_and_are_slices(write: Callable[[Step, Tensor], Tensor], scatters: int) -> None:
    found = Counter(n.target for n in captured(write).ops() if "scatter" in n.target)
    assert found == {"aten.slice_scatter.default": scatters}


def test_what_is_written_again_is_left_out() -> None:
    assert not any("scatter" in n.target for n in captured(written_twice).ops())
