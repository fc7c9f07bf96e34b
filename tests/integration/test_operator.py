"""Optimized modules under torch.compile and torch.export; Dynamo runs in a process of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from qimeng.integration.dispatch import Dispatch, attach
from qimeng.integration.operator import Outputs
from tests.integration.conftest import Elsewhere
from tests.integration.small_models import Block, variant

X = torch.randn(4, 8)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block().eval()
        assert attach(self.block, variant(self.block, X))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x * 2) + 1

    def calls(self) -> dict[str, int]:
        dispatch = self.block.__dict__["forward"]
        assert isinstance(dispatch, Dispatch)
        return dict(dispatch.calls)


def compiled_code_around_a_module_runs_its_program() -> None:
    outer = Outer()
    compiled = torch.compile(outer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found = compiled(X)
        assert outer.calls() == {"program": 1}
        assert torch.allclose(found, outer(X))


def where_gradients_are_needed_the_module_s_own_code_is_compiled() -> None:
    outer = Outer()
    compiled = torch.compile(outer, fullgraph=True, backend="aot_eager")
    compiled(X).sum().backward()
    found = outer.block.linear.weight.grad
    assert found is not None and outer.calls() == {}
    outer.zero_grad()
    outer(X).sum().backward()
    assert torch.allclose(found, outer.block.linear.weight.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "body",
    [compiled_code_around_a_module_runs_its_program, where_gradients_are_needed_the_module_s_own_code_is_compiled],
)
def test_in_a_process_of_its_own(elsewhere: Elsewhere, body: Callable[[], None]) -> None:
    elsewhere(body)


def test_an_exported_program_has_pytorch_s_operators() -> None:
    outer = Outer()
    with torch.no_grad():
        exported = torch.export.export(outer, (X,))
        assert torch.allclose(exported.module()(X), outer(X), atol=1e-6)
    assert not any("qimeng" in str(node.target) for node in exported.graph.nodes)


def test_outputs_that_share_memory_are_no_operator_s() -> None:
    x = torch.rand(3)
    assert Outputs.of((x + 1, x + 2), [x]) is not None
    for returned in (x, x[1:], (x.clone(),) * 2, None, object(), {"a": object(), "b": x + 1}):
        assert Outputs.of(returned, [x]) is None
