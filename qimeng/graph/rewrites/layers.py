"""Recurrent layers (LSTM, GRU, RNN) as products over all steps and a loop over what is left.

The products with a layer's inputs need no state, so that one product computes them for all steps (Appleyard, Kociský
and Blunsom, "Optimizing Performance of Recurrent Neural Networks on GPUs", 2016). Both directions of a layer are one
loop. Knows nothing about kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from qimeng.graph.loops.build import LoopBuilder
from qimeng.graph.opgraph import Node, Value
from qimeng.graph.ops import LAYER_LOOP
from qimeng.graph.rewrites.base import Edit, NoRewrite, Rule
from qimeng.graph.rewrites.cells import Call, Kind, Weights, call_of, gates_of, steps_first
from qimeng.graph.rewrites.grouped import Grouped

MOST, SEQUENCES = 1 << 22, 32
"""Values of all weights of a stack whose layers are computed at the same time, once for each so many sequences: half of
what the shared memory of an H100 holds. Where they do not fit, programs read them again in every step."""

LAYERS = 32
"""Layers of such a stack: each has programs of its own, and all of these run at the same time."""


class Wavefront(Rule):
    """The layers of a stack in one loop, each a step behind the one before it."""

    name = "wavefront"
    option = "layers"
    packets = ("aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu")

    def rewrite(self, edit: Edit, node: Node) -> None:
        """Legal for several layers of one direction whose weights are few."""
        call = call_of(edit, node)
        layers, kind = call.layers, call.kind
        if len(layers) == 1 or call.directions == 2:
            raise NoRewrite("")
        rows, units = edit.meta(layers[0][0].state).shape
        sequences = edit.meta(call.x).shape[0 if call.batch_first else 1]
        size = len(layers) * rows * 2 * units * -(-sequences // SEQUENCES)
        if len(layers) > LAYERS:
            raise NoRewrite(f"{node.name} has {len(layers)} layers, a wavefront at most {LAYERS}")
        if size > MOST:
            raise NoRewrite(f"{node.name} has {size} weights for {sequences} sequences, a wavefront at most {MOST}")
        loop = Grouped(edit, kind, [w for (w,) in layers], call.starts)
        product = steps_first(edit, call.x, layers[0][0].input, loop.bias(0), call.batch_first)
        call.finish(edit, node, *loop.wavefront(product))


class Layers(Rule):
    """``lstm(x, h, w)`` as ``u = linear(x, w_ih)`` and ``for t: h = cell(u[t], linear(h, w_hh))`` for each layer."""

    name = "layers"
    option = "layers"
    packets = ("aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu")

    def rewrite(self, edit: Edit, node: Node) -> None:
        """Legal without dropout, projections and packed sequences."""
        call, x = call_of(edit, node), Value("")
        ends: list[list[Value]] = [[] for _ in call.starts]
        for layer in range(len(call.layers)):
            x, last = _layer(edit, call, layer, x)
            for end, state in zip(ends, last, strict=True):
                end.append(state)
        joined = [edit.op("aten.cat.default", tuple(end), 0) if len(end) > 1 else end[0] for end in ends]
        call.finish(edit, node, x, joined)


def _layer(edit: Edit, call: Call, layer: int, x: Value) -> tuple[Value, list[Value]]:
    """One layer: its values of all steps, and the last states, directions first.

    Args:
        edit: the graph.
        call: of the layers.
        layer: its number.
        x: values of the layer before, steps first.
    """
    weights, count = call.layers[layer], call.directions
    given, turn = (x, False) if layer else (call.x, call.batch_first)
    if count == 2:
        begin = [edit.op("aten.slice.Tensor", s, 0, 2 * layer, 2 * layer + 2) for s in call.starts]
        loop = Grouped(edit, call.kind, weights, begin)
        return loop.both_ways([steps_first(edit, given, w.input, loop.bias(i), turn) for i, w in enumerate(weights)])
    begin = [edit.op("aten.select.int", s, 0, layer) for s in call.starts]
    product = steps_first(edit, given, weights[0].input, weights[0].input_bias, turn)
    y, *last = _one_way(edit, call.kind, product, weights[0], begin)
    return y, [edit.op("aten.unsqueeze.default", state, 0) for state in last]


def _one_way(edit: Edit, kind: Kind, product: Value, w: Weights, begin: Sequence[Value]) -> tuple[Value, ...]:
    """The loop of a layer of one direction: its values of all steps, and the last states."""
    b = LoopBuilder(edit.meta(product).shape[0])
    states = [b.state(s) for s in begin]
    here = [b.step(gate) for gate in gates_of(edit, product, 2, kind.gates)]
    rows = gates_of(edit, w.state, 0, kind.gates)
    bias = [None] * kind.gates if w.state_bias is None else gates_of(edit, w.state_bias, 0, kind.gates)
    there = [
        b.op("aten.linear.default", states[0], b.input(m), *([] if v is None else [b.input(v)]))
        for m, v in zip(rows, bias, strict=True)
    ]
    following = kind.cell(b, here, there, states)
    for state, value in zip(states, following, strict=True):
        b.follow(state, value)
    b.keep(following[0])
    return edit.loop(b.done(), b.values, LAYER_LOOP)


__all__ = ["LAYERS", "MOST", "SEQUENCES", "Layers", "Wavefront"]
