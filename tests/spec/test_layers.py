"""Shapes of recurrent layers without running their steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree

from qimeng.graph.capture import capture
from qimeng.spec import KernelSpec
from qimeng.spec.fake import fake_tensors
from qimeng.spec.layers import flatten_parameters, whole_layers

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(5, 8, 2),
    "projected": lambda: nn.LSTM(5, 8, 2, proj_size=3, bidirectional=True),
    "gru": lambda: nn.GRU(5, 8, 2, batch_first=True, bidirectional=True),
    "rnn": lambda: nn.RNN(5, 8, bias=False),
    "relu": lambda: nn.RNN(5, 8, nonlinearity="relu", batch_first=True),
}


def facts(module: nn.Module, x: torch.Tensor) -> list[object]:
    with torch.no_grad():
        return [(t.shape, t.stride(), t.dtype) for t in _pytree.tree_leaves(module(x))]


@pytest.mark.parametrize("name", LAYERS)
def test_shapes_and_strides_are_those_of_the_layer(name: str) -> None:
    expected = facts(LAYERS[name](), torch.randn(4, 3, 5))
    with fake_tensors():
        assert facts(LAYERS[name](), torch.empty(4, 3, 5)) == expected
    assert facts(LAYERS[name](), torch.randn(4, 3, 5)) == expected


def test_a_long_layer_is_captured_at_once() -> None:
    graph = capture(lambda: nn.LSTM(5, 8, 4), lambda: (torch.empty(100_000, 3, 5),))  # minutes, step by step
    assert [n.target for n in graph.ops() if n.packet != "aten.full"] == ["aten.lstm.input"]


def test_packed_sequences_are_left_alone() -> None:
    layer, x = nn.GRU(5, 8), torch.randn(6, 5)
    packed = nn.utils.rnn.PackedSequence(x, torch.tensor([3, 2, 1]))
    with whole_layers(), torch.no_grad():
        assert layer(packed)[0].data.shape == (6, 8)
        assert layer(x[None])[0].shape == (1, 6, 8)


def test_layers_are_as_they_were_afterwards() -> None:
    before = torch._VF.lstm
    with whole_layers():
        with fake_tensors():
            assert torch._VF.lstm is not before
        assert torch._VF.lstm is not before
    assert torch._VF.lstm is before or torch._VF.lstm == before


class Layers(nn.Module):
    """A layer below another module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(5, 8), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x)[0])


def test_the_module_that_is_timed_has_its_weights_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied or cast one by one, they would be copied at every call of eager."""
    flattened: list[list[torch.Tensor]] = []
    monkeypatch.setattr(nn.LSTM, "flatten_parameters", lambda layer: flattened.append(list(layer._flat_weights)))
    spec = KernelSpec.from_module(Layers(), (torch.randn(4, 3, 5),), dtype="float16")
    flattened.clear()
    module: Any = spec.module()
    weights = [*module.layers[0].parameters()]
    assert all(a is b for a, b in zip(flattened[-1], weights, strict=True))


def test_layers_without_values_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    with fake_tensors():
        layer = nn.GRU(5, 8)
        monkeypatch.setattr(nn.GRU, "flatten_parameters", lambda layer: calls.append(1))
        flatten_parameters(layer)
    assert not calls
