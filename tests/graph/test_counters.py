"""Counters that a call raises become one operator."""

from __future__ import annotations

import torch
from torch import nn

from qimeng.graph.capture import capture
from qimeng.graph.opgraph import OpGraph
from qimeng.program.program import Program


class Normed(nn.Module):
    """Two batch norms, and a counter of its own."""

    def __init__(self, step: int = 1, returned: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.step, self.returned = nn.BatchNorm1d(4), nn.BatchNorm1d(4), step, returned
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.calls: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(self.a(x).relu())
        self.calls += self.step
        return y + self.calls if self.returned else y


def graph_of(**options: object) -> OpGraph:
    with torch.no_grad():
        return capture(lambda: Normed(**options).train(), lambda: (torch.empty(8, 4),))  # type: ignore[arg-type]


def raised(graph: OpGraph) -> list[int]:
    """How many counters each operator raises."""
    return [len(n.metas) for n in graph.ops() if n.packet == "aten._foreach_add" or n.metas[0].dtype == "int64"]  # type: ignore[union-attr]


def test_counters_of_a_step_are_one_operator() -> None:
    assert raised(graph_of()) == [3]
    assert sorted(raised(graph_of(step=2))) == [1, 2], "another number is another operator"
    assert sorted(raised(graph_of(returned=True))) == [1, 2], "what the result needs stays by itself"


def test_every_call_raises_them() -> None:
    program = Program.start(graph_of()).load().Model()
    module, x = Normed(), torch.randn(8, 4)
    program.load_state_dict(module.state_dict())
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(program(x), module(x))
    found = {k: v.item() for k, v in program.state_dict().items() if v.dtype == torch.int64}
    assert found == {"a.num_batches_tracked": 3, "b.num_batches_tracked": 3, "calls": 3}
