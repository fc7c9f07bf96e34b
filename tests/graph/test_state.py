"""What is computed once for all calls: what depends on parameters alone, and tables of positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from qimeng.graph import state
from qimeng.graph.opgraph import OpGraph
from qimeng.graph.state import settled_nodes
from qimeng.program.program import Program, load_source
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec


class Biased(nn.Module):
    """Adds a bias by distance to `x`, of two features, and hides what is far."""

    def __init__(self, held: bool = True) -> None:
        super().__init__()
        if held:
            self.table = nn.Parameter(torch.arange(8.0))

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[-1], device=x.device)
        apart = place[None, :] - place[:, None]
        hidden = torch.where(apart > 3, -1e9, 0.0)
        return x + hidden + self.table[apart.clamp(-4, 3) + 4] if hasattr(self, "table") else x + hidden


def rewritten(module: nn.Module, *inputs: Tensor) -> OpGraph:
    """The graph as it is after any rewrite."""
    return replace(capture_spec(KernelSpec.from_module(module, inputs), verify=False), settles=True)


def packets(graph: OpGraph) -> set[str]:
    return {graph.nodes[name].packet.removeprefix("aten.") for name in settled_nodes(graph)}


def test_tables_of_positions_are_computed_once(tmp_path: Path) -> None:
    module, x = Biased(), torch.rand(2, 5, 5)
    graph = rewritten(module, x)
    assert {"arange", "sub", "where", "index"} <= packets(graph)
    assert [n.packet for n in graph.ops() if n.name not in settled_nodes(graph)] == ["aten.add", "aten.add"]
    program = Program.start(graph)
    model = load_source(program.source, "settled", str(tmp_path)).Model()
    model.load_state_dict(module.state_dict())
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(x), module(x))
        for it in (model, module):
            it.table.mul_(2)
        assert torch.equal(model(x), module(x))


def test_the_angles_of_a_rotary_embedding_are_computed_once() -> None:
    class Turned(nn.Module):
        speeds: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("speeds", 100.0 ** -torch.arange(0, 1, 0.25), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            place = torch.arange(x.shape[1], device=x.device)[None, None].float()
            angles = (self.speeds[None, :, None].expand(1, -1, 1) @ place).transpose(1, 2)
            angles = torch.cat((angles, angles), -1)
            return x * angles.cos() + torch.cat((-x[..., 4:], x[..., :4]), -1) * angles.sin()

    assert {"cos", "sin", "arange"} <= packets(rewritten(Turned(), torch.rand(2, 5, 8)))


def test_tables_without_a_parameter_are_made_again_where_the_module_moves(tmp_path: Path) -> None:
    class Masked(Biased):
        def __init__(self) -> None:
            super().__init__(held=False)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    module, x = Masked(), torch.rand(2, 5, 5)
    program = Program.start(rewritten(module, x))
    model = load_source(program.source, "masked", str(tmp_path)).Model()
    model.load_state_dict(module.state_dict())
    with torch.no_grad():
        assert torch.equal(model(x), module(x))
        (prepared,) = model._qimeng_prepared
        before = prepared.stamp
        model.scale.data = model.scale.data.clone()  # as `to` does
        assert torch.equal(model(x), module(x)) and prepared.stamp != before


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: x + torch.full((5,), 2.0),
        lambda m, x: x * torch.zeros(5)[None].expand(2, 5),
        lambda m, x: x + torch.arange(5),
        lambda m, x: x + torch.rand(5).sin() * m.scale,
    ],
    ids=["full", "a view of zeros", "arange", "random"],
)
def test_what_costs_nothing_or_changes_is_not(forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return forward(self, x)

    assert not settled_nodes(rewritten(Module(), torch.rand(2, 5)))


def test_large_tables_and_modules_without_state_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(2, 5, 5)
    assert not settled_nodes(rewritten(Biased(held=False), x))
    monkeypatch.setattr(state, "MOST", 24)
    assert not settled_nodes(rewritten(Biased(), x))
