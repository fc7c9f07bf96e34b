"""Recurrent layers (LSTM, GRU, RNN) as products over all steps and a loop over what is left.

The products with a layer's inputs need no state, so that one product computes them for all steps (Appleyard, Kociský
and Blunsom, "Optimizing Performance of Recurrent Neural Networks on GPUs", 2016). Both directions of a layer are one
loop. The equations are those of `torch.nn.LSTM`, `torch.nn.GRU` and `torch.nn.RNN`. Knows nothing about kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from qimeng.graph.loops.build import LoopBuilder
from qimeng.graph.loops.loop import Name
from qimeng.graph.opgraph import Node, Value
from qimeng.graph.rewrites.base import Edit, NoRewrite, Rule

Parts = Sequence[Name]
Cell = Callable[[LoopBuilder, Parts, Parts, Parts], list[Name]]
"""From the products with the input, those with the state, one of each a gate, and the states: the next states."""


def _lstm(b: LoopBuilder, x: Parts, h: Parts, states: Parts) -> list[Name]:
    i, f, g, o = (b.op("aten.add.Tensor", here, there) for here, there in zip(x, h, strict=True))
    i, f, o = (b.op("aten.sigmoid.default", gate) for gate in (i, f, o))
    kept = b.op("aten.mul.Tensor", f, states[1])
    new = b.op("aten.mul.Tensor", i, b.op("aten.tanh.default", g))
    c = b.op("aten.add.Tensor", kept, new)
    return [b.op("aten.mul.Tensor", o, b.op("aten.tanh.default", c)), c]


def _gru(b: LoopBuilder, x: Parts, h: Parts, states: Parts) -> list[Name]:
    r, z = (b.op("aten.sigmoid.default", b.op("aten.add.Tensor", x[i], h[i])) for i in (0, 1))
    n = b.op("aten.tanh.default", b.op("aten.add.Tensor", x[2], b.op("aten.mul.Tensor", r, h[2])))
    change = b.op("aten.mul.Tensor", b.op("aten.sub.Tensor", states[0], n), z)
    return [b.op("aten.add.Tensor", change, n)]


def _rnn(function: str) -> Cell:
    def cell(b: LoopBuilder, x: Parts, h: Parts, states: Parts) -> list[Name]:
        return [b.op(function, b.op("aten.add.Tensor", x[0], h[0]))]

    return cell


@dataclass(frozen=True)
class Kind:
    """A kind of layer: its cell, with its number of gates and of states."""

    cell: Cell
    gates: int
    states: int


KINDS = {
    "aten.lstm.input": Kind(_lstm, 4, 2),
    "aten.gru.input": Kind(_gru, 3, 1),
    "aten.rnn_tanh.input": Kind(_rnn("aten.tanh.default"), 1, 1),
    "aten.rnn_relu.input": Kind(_rnn("aten.relu.default"), 1, 1),
}


@dataclass(frozen=True)
class Weights:
    """The parameters of one direction of a layer."""

    input: Value
    state: Value
    input_bias: Value | None
    state_bias: Value | None


class Layers(Rule):
    """``lstm(x, h, w)`` as ``u = linear(x, w_ih)`` and ``for t: h = cell(u[t], linear(h, w_hh))`` for each layer."""

    name = "layers"
    option = "layers"
    packets = ("aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu")

    def rewrite(self, edit: Edit, node: Node) -> None:
        """Legal without dropout, projections and packed sequences."""
        kind = KINDS.get(node.target)
        if kind is None or node.kwargs or len(node.args) != 9:
            raise NoRewrite(f"{node.name} has sequences of different lengths")
        x, given, parameters, biased, count, dropout, train, both, batch_first = node.args
        starts = given if kind.states == 2 else (given,)
        if dropout and train and count > 1:
            raise NoRewrite(f"{node.name} has dropout {dropout} between its layers")
        directions, each = 2 if both else 1, 4 if biased else 2
        if len(parameters) != count * directions * each:
            raise NoRewrite(f"{node.name} projects its states")
        if len(edit.meta(x).shape) != 3 or 0 in edit.meta(x).shape:
            raise NoRewrite(f"{node.name} has an input of shape {edit.meta(x).shape}")
        every = [_weights(parameters[i * each : (i + 1) * each]) for i in range(count * directions)]
        ends: list[list[Value]] = [[] for _ in starts]
        for layer in range(count):
            turn = batch_first and layer == 0
            weights = every[layer * directions : (layer + 1) * directions]
            begin = [
                [edit.op("aten.select.int", s, 0, layer * directions + i) for s in starts] for i in range(directions)
            ]
            x, found = _layer(edit, kind, x, turn, weights, begin)
            for states in found:
                for end, state in zip(ends, states, strict=True):
                    end.append(edit.op("aten.unsqueeze.default", state, 0))
        edit.instead(Value(node.name), edit.op("aten.transpose.int", x, 0, 1) if batch_first else x)
        for port, end in enumerate(ends, 1):
            if node.metas[port] is not None:
                last = edit.op("aten.cat.default", tuple(end), 0) if len(end) > 1 else end[0]
                edit.instead(Value(node.name, port), last)


def _weights(given: Sequence[Any]) -> Weights:
    return Weights(*given) if len(given) == 4 else Weights(given[0], given[1], None, None)


def _layer(
    edit: Edit, kind: Kind, x: Value, turn: bool, weights: Sequence[Weights], begin: Sequence[Sequence[Value]]
) -> tuple[Value, list[list[Value]]]:
    """One layer: its values of all steps, and the last states of each direction.

    Args:
        edit: the graph.
        kind: of layer.
        x: inputs, steps first, or the batch first where `turn` says so.
        turn: whether the batch comes first.
        weights: of each direction.
        begin: the first states of each direction.
    """
    products = [edit.op("aten.linear.default", x, w.input, w.input_bias) for w in weights]
    products = [edit.op("aten.transpose.int", p, 0, 1) for p in products] if turn else products
    b = LoopBuilder(edit.meta(products[0]).shape[0])
    states = [[b.state(s) for s in own] for own in begin]
    for back, (w, product, own) in enumerate(zip(weights, products, states, strict=True)):
        here = [b.step(gate, bool(back)) for gate in _gates(edit, product, 2, kind.gates)]
        rows = _gates(edit, w.state, 0, kind.gates)
        bias = [None] * kind.gates if w.state_bias is None else _gates(edit, w.state_bias, 0, kind.gates)
        there = [
            b.op("aten.linear.default", own[0], b.input(m), *([] if v is None else [b.input(v)]))
            for m, v in zip(rows, bias, strict=True)
        ]
        following = kind.cell(b, here, there, own)
        for state, value in zip(own, following, strict=True):
            b.follow(state, value)
        b.keep(following[0], bool(back))
    found = edit.loop(b.done(), b.values)
    values, last = found[: len(weights)], found[len(weights) :]
    y = edit.op("aten.cat.default", tuple(values), 2) if len(values) > 1 else values[0]
    return y, [list(last[i * kind.states : (i + 1) * kind.states]) for i in range(len(weights))]


def _gates(edit: Edit, value: Value, dim: int, gates: int) -> list[Value]:
    """The part of each gate along `dim`."""
    size = edit.meta(value).shape[dim] // gates
    if gates == 1:
        return [value]
    return [edit.op("aten.slice.Tensor", value, dim, g * size, (g + 1) * size) for g in range(gates)]


__all__ = ["KINDS", "Kind", "Layers", "Weights"]
