"""The recurrent layers of PyTorch: what a step of each kind computes, and the parameters of a call.

The equations are those of `torch.nn.LSTM`, `torch.nn.GRU` and `torch.nn.RNN`. Deals in gates and states. Knows nothing
about how a loop is written from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qimeng.graph.loops.build import LoopBuilder
from qimeng.graph.loops.loop import Name
from qimeng.graph.opgraph import Node, Value
from qimeng.graph.rewrites.base import Edit, NoRewrite

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
    """(1 - z) n + z h, as cuDNN has it: a state stays as it is where z is 1, for however many steps."""
    r, z = (b.op("aten.sigmoid.default", b.op("aten.add.Tensor", x[i], h[i])) for i in (0, 1))
    n = b.op("aten.tanh.default", b.op("aten.add.Tensor", x[2], b.op("aten.mul.Tensor", r, h[2])))
    new = b.op("aten.mul.Tensor", b.op("aten.rsub.Scalar", z, 1), n)
    return [b.op("aten.add.Tensor", new, b.op("aten.mul.Tensor", z, states[0]))]


def _rnn(function: str) -> Cell:
    def cell(b: LoopBuilder, x: Parts, h: Parts, states: Parts) -> list[Name]:
        return [b.op(function, b.op("aten.add.Tensor", x[0], h[0]))]

    return cell


@dataclass(frozen=True)
class Kind:
    """A kind of layer.

    Attributes:
        cell: a step.
        gates: their number.
        states: their number.
        apart: gates whose product with the state is not simply added to that with the input.
    """

    cell: Cell
    gates: int
    states: int
    apart: tuple[int, ...] = ()


KINDS = {
    "aten.lstm.input": Kind(_lstm, 4, 2),
    "aten.gru.input": Kind(_gru, 3, 1, apart=(2,)),
    "aten.rnn_tanh.input": Kind(_rnn("aten.tanh.default"), 1, 1),
    "aten.rnn_relu.input": Kind(_rnn("aten.relu.default"), 1, 1),
}


@dataclass(frozen=True)
class Weights:
    """The parameters of one direction of a layer."""

    input: Value
    state: Value
    input_bias: Value | None = None
    state_bias: Value | None = None


@dataclass(frozen=True)
class Call:
    """A call of recurrent layers.

    Attributes:
        kind: of layer.
        x: the input of the first layer.
        starts: the first value of each state, for all layers and directions in one.
        layers: the weights of each layer, one or two directions.
        batch_first: whether the batch is the first dimension of input and result, the steps the second.
    """

    kind: Kind
    x: Value
    starts: tuple[Value, ...]
    layers: tuple[tuple[Weights, ...], ...]
    batch_first: bool

    @property
    def directions(self) -> int:
        """One or two."""
        return len(self.layers[0])

    def finish(self, edit: Edit, node: Node, y: Value, ends: Sequence[Value]) -> None:
        """Put the result `y`, steps first, and the last value of each state in the place of those of `node`."""
        edit.instead(Value(node.name), edit.op("aten.transpose.int", y, 0, 1) if self.batch_first else y)
        for port, end in enumerate(ends, 1):
            if node.metas[port] is not None:
                edit.instead(Value(node.name, port), end)


def call_of(edit: Edit, node: Node) -> Call:
    """The call that `node` is.

    Raises:
        NoRewrite: with dropout, projections or packed sequences.
    """
    kind = KINDS.get(node.target)
    if kind is None or node.kwargs or len(node.args) != 9:
        raise NoRewrite(f"{node.name} has sequences of different lengths")
    x, given, parameters, biased, count, dropout, train, both, batch_first = node.args
    if dropout and train and count > 1:
        raise NoRewrite(f"{node.name} has dropout {dropout} between its layers")
    directions, each = 2 if both else 1, 4 if biased else 2
    if len(parameters) != count * directions * each:
        raise NoRewrite(f"{node.name} projects its states")
    if len(edit.meta(x).shape) != 3 or 0 in edit.meta(x).shape:
        raise NoRewrite(f"{node.name} has an input of shape {edit.meta(x).shape}")
    every = [Weights(*parameters[i * each : (i + 1) * each]) for i in range(count * directions)]
    layers = tuple(tuple(every[i : i + directions]) for i in range(0, len(every), directions))
    return Call(kind, x, tuple(given) if kind.states == 2 else (given,), layers, bool(batch_first))


def gates_of(edit: Edit, value: Value, dim: int, gates: int) -> list[Value]:
    """The part of each gate along `dim`."""
    size = edit.meta(value).shape[dim] // gates
    if gates == 1:
        return [value]
    return [edit.op("aten.slice.Tensor", value, dim, g * size, (g + 1) * size) for g in range(gates)]


def steps_first(edit: Edit, x: Value, weight: Value, bias: Value | None, batch_first: bool) -> Value:
    """The product of a layer's input with a weight for all steps, which are its first dimension."""
    product = edit.op("aten.linear.default", x, weight, bias)
    return edit.op("aten.transpose.int", product, 0, 1) if batch_first else product


__all__ = ["KINDS", "Call", "Kind", "Parts", "Weights", "call_of", "gates_of", "steps_first"]
