"""Modules made without memory: which tables keep their values."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from qimeng import KernelSpec
from qimeng.graph.capture import ValuesNeeded, capture
from qimeng.spec import fake
from qimeng.spec.fake import fake_tensors, made_fake


class Network(torch.nn.Module):
    """What constructors of networks do: numbers from a tensor, a table, weights drawn until all are within bounds."""

    def __init__(self, size: int = 8):
        super().__init__()
        self.rates = torch.linspace(0, 1, 4).tolist()
        self.register_buffer("table", torch.arange(size) * 2.0, persistent=False)
        self.linear = torch.nn.Linear(size, size)
        torch.nn.init.trunc_normal_(self.linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + self.table) * self.rates[3]


class Noise(torch.nn.Module):
    """A table outside the state_dict that is drawn in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(8), persistent=False)
        self.table.normal_()
        self.table = self.table + 1
        self.scale = torch.nn.Parameter(torch.zeros(8))
        self.scale.data.normal_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table * self.scale


def test_tables_have_values_and_weights_have_none() -> None:
    with fake_tensors(), torch.no_grad():
        module = made_fake(Network)
        assert isinstance(module.linear.weight, FakeTensor) and not isinstance(module.table, FakeTensor)
    assert module.table.tolist() == [0, 2, 4, 6, 8, 10, 12, 14] and module.rates[0] == 0.0


def test_a_copy_of_a_live_module_takes_no_memory_for_its_parameters() -> None:
    held = Network()
    held.tied = held.linear.weight
    spec = KernelSpec.from_module(held, (torch.zeros(2, 8),))
    with fake_tensors(), torch.no_grad():
        copy = made_fake(spec.module)
        assert isinstance(copy.linear.weight, FakeTensor) and copy.tied is copy.linear.weight
    assert copy.table.tolist() == held.table.tolist()


def test_a_network_with_tables_is_captured_without_its_weights() -> None:
    graph = capture(Network, lambda: (torch.empty(2, 8),))
    assert [n.target for n in graph.ops()] == ["aten.add.Tensor", "aten.linear.default", "aten.mul.Tensor"]
    assert any(n.kind == "buffer" and n.literal for n in graph.nodes.values())


def test_values_that_were_drawn_are_not_taken_for_known() -> None:
    with fake_tensors(), torch.no_grad():
        assert isinstance(made_fake(Noise).table, FakeTensor)
    with pytest.raises(ValuesNeeded, match="not in the state_dict"):
        capture(Noise, lambda: (torch.empty(2, 8),))


def test_what_tables_take_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "MOST_KNOWN", 4)
    with fake_tensors(), torch.no_grad():
        assert isinstance(made_fake(lambda: torch.nn.BatchNorm1d(64)).running_mean, FakeTensor)
