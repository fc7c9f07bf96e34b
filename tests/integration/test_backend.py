"""`torch.compile(model, backend="qimeng")`; what Dynamo compiles runs in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
from torch import nn

from qimeng.integration.backend import INSTANCES, CompiledGraph, compile_graph
from qimeng.integration.dispatch import Dispatch, FallbackWarning
from tests.integration.conftest import Elsewhere
from tests.integration.small_models import Block, fakes

X = torch.randn(4, 8)


class Backend:
    """The backend, with what it returned."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        self.made.append(compile_graph(graph, inputs, **kwargs))
        return self.made[-1]

    def calls(self, which: int = -1) -> dict[str, int]:
        graph = self.made[which]
        assert isinstance(graph, CompiledGraph)
        found: dict[str, int] = {}
        for module in graph.modules.values():
            dispatch = module.__dict__["forward"]
            assert isinstance(dispatch, Dispatch)
            for reason, count in dispatch.calls.items():
                found[reason] = found.get(reason, 0) + count
        return found


def compiled(function: Any, backend: Backend, **options: Any) -> Any:
    return torch.compile(function, backend=backend, options={"seconds": 20.0, **fakes(), **options})


@torch.no_grad()
def a_graph_runs_a_program() -> None:
    block, backend = Block().eval(), Backend()
    fast = compiled(block, backend)
    assert torch.allclose(fast(X), block(X), atol=1e-6)
    block.linear.weight.mul_(2)
    assert torch.allclose(fast(X), block(X), atol=1e-6)
    assert backend.calls() == {"program": 2} and len(backend.made) == 1


@torch.no_grad()
def equal_layers_share_one_graph_and_its_program() -> None:
    layers, backend = [nn.Linear(8, 8) for _ in range(3)], Backend()
    fast = compiled(lambda layer, x: torch.relu(layer(x)) + 1, backend)
    for layer in layers:
        assert torch.allclose(fast(layer, X), torch.relu(layer(X)) + 1, atol=1e-6)
    assert len(backend.made) == 1 and len(backend.made[0].modules) == 3 < INSTANCES
    assert set(backend.calls()) == {"program"}


def gradients_are_pytorch_s() -> None:
    block, backend = Block(), Backend()
    compiled(block, backend)(X).square().sum().backward()
    found = [p.grad.clone() for p in block.parameters() if p.grad is not None]
    block.zero_grad()
    block(X).square().sum().backward()
    assert len(found) == 4
    assert all(torch.allclose(a, p.grad) for a, p in zip(found, block.parameters(), strict=True) if p.grad is not None)


@torch.no_grad()
def graphs_with_sizes_that_change_stay_on_pytorch() -> None:
    backend = Backend()
    fast = torch.compile(lambda x: x * 2 + 1, backend=backend, dynamic=True)
    with pytest.warns(FallbackWarning, match="sizes that may change"):
        assert torch.equal(fast(X), X * 2 + 1)


@pytest.mark.parametrize(
    "body",
    [
        a_graph_runs_a_program,
        equal_layers_share_one_graph_and_its_program,
        gradients_are_pytorch_s,
        graphs_with_sizes_that_change_stay_on_pytorch,
    ],
)
def test_in_a_process_of_its_own(elsewhere: Elsewhere, body: Callable[[], None]) -> None:
    elsewhere(body)


def test_a_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="no mode 'max-autotune'"):
        compile_graph(torch.fx.symbolic_trace(nn.ReLU()), [X], mode="max-autotune")
    with pytest.raises(TypeError, match="no option secnds"):
        compile_graph(torch.fx.symbolic_trace(nn.ReLU()), [], options={"secnds": 12, "seconds": 12})


def test_pytorch_finds_it_by_name() -> None:
    (point,) = entry_points(group="torch_dynamo_backends", name="qimeng")
    assert point.load() is compile_graph
