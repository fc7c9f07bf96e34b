"""A program reads its parameters where they are, however a user changes them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.utils import parametrize

from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

nn = torch.nn


class Double(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


class Deep(nn.Module):
    """A layer below others."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Module()
        self.block.layers = nn.ModuleList([nn.Linear(4, 4, bias=False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block.layers[0](x)


@pytest.fixture
def model() -> nn.Module:
    spec = KernelSpec.from_module(Deep().eval(), (torch.randn(2, 4),))
    model = Program.start(capture_spec(spec)).load().Model()
    model.load_state_dict(spec.module().state_dict())
    model(torch.randn(2, 4))
    return model


def layer(model: nn.Module) -> nn.Module:
    return model.get_submodule("block.layers.0")


def expect(model: nn.Module, weight: torch.Tensor) -> None:
    x = torch.randn(2, 4)
    assert torch.equal(model(x), nn.functional.linear(x, weight))


def test_a_parameter_that_was_replaced_is_read(model):
    layer(model).weight = nn.Parameter(torch.randn(4, 4), requires_grad=False)
    expect(model, layer(model).weight)


@pytest.mark.parametrize("name", ["block", "block.layers", "block.layers.0"])
def test_a_module_that_was_replaced_is_read(model, name):
    old = layer(model).weight
    *path, last = name.split(".")
    model.get_submodule(".".join(path))._modules[last] = copy.deepcopy(model.get_submodule(name))
    layer(model).weight.data.neg_()
    expect(model, -old)


def test_a_copy_reads_its_own(model):
    twin, old = copy.deepcopy(model), layer(model).weight.clone()
    layer(model).weight.data.zero_()
    expect(twin, old)
    expect(model, torch.zeros(4, 4))


def test_a_parametrized_parameter_is_computed(model):
    old = layer(model).weight.clone()
    parametrize.register_parametrization(layer(model), "weight", Double())
    expect(model, 2 * old)
    parametrize.remove_parametrizations(layer(model), "weight")
    expect(model, 2 * old)
