"""A program reads its parameters where they are, however a user changes them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

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


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: nn.RNN(5, 8, bias=False), 1),
        (lambda: nn.RNN(5, 8, nonlinearity="relu"), 0),
        (lambda: nn.LSTM(5, 8, 2, proj_size=3, bidirectional=True), 2),
        (lambda: nn.GRU(5, 8, 2, batch_first=True), 3),
    ],
)
def test_weights_of_recurrent_layers_lie_in_one_piece(
    make: Callable[[], nn.RNNBase], kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN copies others at every call: as in PyTorch's layers, a program's own are moved where they are made."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda w: True)
    monkeypatch.setattr(torch, "_use_cudnn_rnn_flatten_weight", lambda: True)
    monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", lambda *given: calls.append(given))
    layer = make()
    loaded = Program.start(capture_spec(KernelSpec.from_module(layer.eval(), (torch.randn(2, 4, 5),)))).load()
    calls.clear()
    model = loaded.Model().to("cpu")
    facts = (kind, 8, layer.proj_size, layer.num_layers, layer.batch_first, layer.bidirectional)
    for weights, each, inputs, *others in calls:
        held = dict(model.named_parameters())
        assert all(w is held[name] for w, name in zip(weights, layer._flat_weights_names, strict=True))
        assert (each, inputs, tuple(others)) == (len(layer.all_weights[0]), 5, facts)
    assert len(calls) == 2, "when it is made, and when it is moved"
    held = dict(model.named_parameters())
    model.weight_ih_l0 = nn.Parameter(held["weight_hh_l0"])
    model.to("cpu")
    assert len(calls) == 2, "weights that share memory stay"
