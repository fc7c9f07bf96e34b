"""Recurrent layers as products over all steps and loops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.graph.rewriting import Rewritten

Shapes = tuple[tuple[int, ...], ...]
X = (4, 3, 5)
LOOP = ["linear", "torch.recurrence_layer"]
BOTH = ["linear", "linear", "torch.recurrence_layer", "flip", "cat"]
STACK = ["linear", "constant_pad_nd", "torch.recurrence_layer", "clone"]
CASES: dict[str, tuple[Callable[[], nn.Module], Shapes, list[str]]] = {
    "lstm": (lambda: nn.LSTM(5, 8), (X,), LOOP),
    "both ways, two layers, batch first": (
        lambda: nn.LSTM(5, 8, 2, batch_first=True, bidirectional=True),
        (X,),
        [*BOTH, *BOTH, "cat", "cat"],
    ),
    "gru both ways": (lambda: nn.GRU(5, 8, 2, bidirectional=True), (X,), [*BOTH, *BOTH, "cat"]),
    "rnn both ways": (lambda: nn.RNN(5, 8, bidirectional=True), (X,), BOTH),
    "a stack of lstm": (lambda: nn.LSTM(5, 8, 3, batch_first=True), (X,), STACK),
    "a stack of gru with its first state": (lambda: nn.GRU(5, 8, 4), (X, (4, 3, 8)), STACK),
    "a stack without biases": (lambda: nn.GRU(5, 8, 2, bias=False), (X,), STACK),
    "a stack of rnn": (lambda: nn.RNN(5, 8, 2), (X,), STACK),
    "rnn with relu": (lambda: nn.RNN(5, 8, nonlinearity="relu", batch_first=True), (X,), LOOP),
    "dropout of one layer": (lambda: nn.GRU(5, 8), (X,), LOOP),
    "a stack with many weights": (lambda: nn.LSTM(5, 520, 2), (X,), [*LOOP, *LOOP, "cat", "cat"]),
    "a stack of many layers": (lambda: nn.RNN(5, 4, 33), (X,), [*LOOP * 33, "cat"]),
    "a stack for many sequences": (lambda: nn.GRU(2, 64, 2), ((2, 2800, 2),), [*LOOP, *LOOP, "cat"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_a_product_and_a_loop(name: str) -> None:
    make, shapes, labels = CASES[name]
    found = Rewritten(make, lambda: tuple(torch.empty(s) for s in shapes), "layers")
    assert found.rules == ["wavefront" if labels == STACK else "layers"]
    assert [label for label in found.labels if label != "full"] == labels
    if name != "rnn with relu":  # it overflows with changed parameters
        assert max(found.errors()) < 1e-4  # PyTorch's own fp32 result is off by as much
    module, program = found.on(*(torch.randn(s) for s in shapes))
    torch.testing.assert_close(program, module, rtol=1e-5, atol=1e-6)


REFUSED = {
    "projects": lambda: nn.LSTM(5, 8, proj_size=3),
    "dropout 0.5": lambda: nn.GRU(5, 8, 2, dropout=0.5),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_stays_whole_says_why(reason: str) -> None:
    found = Rewritten(REFUSED[reason], lambda: (torch.empty(X),), "layers")
    assert found.rules == [] and reason in "; ".join(found.reasons)


def test_a_gru_keeps_its_state_where_its_gate_is_one() -> None:
    """For however many steps: not a bit changes."""

    def make() -> nn.GRU:
        layer = nn.GRU(5, 8)
        with torch.no_grad():
            layer.bias_ih_l0[8:16] = 100.0
        return layer

    found = Rewritten(make, lambda: (torch.empty(300, 3, 5), torch.empty(1, 3, 8)), "layers")
    state = torch.randn(1, 3, 8)
    _, states = found.on(torch.randn(300, 3, 5), state)
    assert torch.equal(states, state.expand(300, 3, 8))
