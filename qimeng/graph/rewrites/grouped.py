"""Recurrent layers of equal sizes that take their steps at the same time, as one loop.

They are the two directions of a layer, or the layers of a stack, each one step behind the one before it (the wavefront
of Appleyard, Kociský and Blunsom, "Optimizing Performance of Recurrent Neural Networks on GPUs", 2016). Such a loop's
states have a first dimension for them, the groups, and one product for all. Knows nothing about kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qimeng.graph.loops.build import LoopBuilder
from qimeng.graph.loops.loop import Name
from qimeng.graph.opgraph import Value
from qimeng.graph.ops import LAYER_LOOP
from qimeng.graph.rewrites.base import Edit
from qimeng.graph.rewrites.cells import Kind, Parts, Weights, gates_of

BMM = "aten.bmm.default"


@dataclass(frozen=True)
class Grouped:
    """The loop that is being written.

    Attributes:
        edit: the graph.
        kind: of layer.
        weights: of each group.
        starts: the first value of each state, groups first.
    """

    edit: Edit
    kind: Kind
    weights: Sequence[Weights]
    starts: Sequence[Value]

    @property
    def units(self) -> int:
        """Of a state."""
        return self.edit.meta(self.starts[0]).shape[-1]

    def both_ways(self, products: Sequence[Value]) -> tuple[Value, list[Value]]:
        """The directions of a layer; its values of all steps, and the last states, directions first.

        Args:
            products: of each direction with the input, steps first.
        """
        edit, gates = self.edit, self.kind.gates
        b = LoopBuilder(edit.meta(products[0]).shape[0])
        states = [b.state(s) for s in self.starts]
        forward = b.input(self._of_first(1))
        there, back = (gates_of(edit, p, 2, gates) for p in products)
        here = [b.op("aten.where.self", forward, b.step(a), b.step(z, True)) for a, z in zip(there, back, strict=True)]
        weight = gates_of(edit, edit.op("aten.stack.default", tuple(w.state for w in self.weights)), 1, gates)
        own = [b.op(BMM, states[0], b.input(self._turned(w))) for w in weight]
        following = self.kind.cell(b, here, self._biased(b, own), states)
        values, *ends = self._loop(b, states, following)
        ways = [edit.op("aten.select.int", values, 1, i) for i in range(2)]
        ways[1] = edit.op("aten.flip.default", ways[1], (0,))
        return edit.op("aten.cat.default", tuple(ways), 2), ends

    def wavefront(self, product: Value) -> tuple[Value, list[Value]]:
        """A stack of layers; the values of the last one, steps first, and the last states, layers first.

        Args:
            product: of the first layer with its input, steps first.
        """
        edit, kind, count = self.edit, self.kind, len(self.weights)
        steps = edit.meta(product).shape[0]
        late = edit.op("aten.constant_pad_nd.default", product, (0, 0, 0, 0, 0, count - 1), 0.0)
        b = LoopBuilder(steps + count - 1)
        states = [b.state(s) for s in self.starts]
        first = b.input(self._of_first(count - 1))
        below = b.op("aten.slice.Tensor", states[0], 0, 0, count - 1)
        below = b.op("aten.constant_pad_nd.default", below, (0, 0, 0, 0, 1, 0), 0.0)
        both = b.op("aten.cat.default", (below, states[0]), 2)
        here, own = list[Name](), list[Name]()
        weights, biases = gates_of(edit, self._both_weights(), 1, kind.gates), self._input_biases()
        for gate, part in enumerate(gates_of(edit, late, 2, kind.gates)):
            given = b.op("aten.where.self", first, b.step(part), b.input(biases[gate]))
            if gate in kind.apart:
                lower, upper = (edit.op("aten.slice.Tensor", weights[gate], 2, *ends) for ends in self._halves())
                given = b.op("aten.add.Tensor", given, b.op(BMM, below, b.input(self._turned(lower))))
                own.append(b.op(BMM, states[0], b.input(self._turned(upper))))
            else:
                own.append(b.op(BMM, both, b.input(self._turned(weights[gate]))))
            here.append(given)
        following = kind.cell(b, here, self._biased(b, own), states)
        runs = b.step(self._running(steps, count))
        following = [b.op("aten.where.self", runs, new, old) for new, old in zip(following, states, strict=True)]
        values, *ends = self._loop(b, states, following)
        y = edit.op("aten.select.int", values, 1, count - 1)
        return edit.op("aten.slice.Tensor", y, 0, count - 1, count - 1 + steps), ends

    def bias(self, group: int) -> Value | None:
        """The bias of a group's product with its input; those of the state are in it where they are simply added."""
        w = self.weights[group]
        if w.input_bias is None or w.state_bias is None:
            return None
        added = w.state_bias
        if self.kind.apart:
            kept = gates_of(self.edit, added, 0, self.kind.gates)
            kept = [
                self.edit.op("aten.zeros_like.default", v) if g in self.kind.apart else v for g, v in enumerate(kept)
            ]
            added = self.edit.op("aten.cat.default", tuple(kept), 0)
        return self.edit.op("aten.add.Tensor", w.input_bias, added)

    # -- parts of the loop

    def _loop(self, b: LoopBuilder, states: Parts, following: Parts) -> tuple[Value, ...]:
        for state, value in zip(states, following, strict=True):
            b.follow(state, value)
        b.keep(following[0])
        return self.edit.loop(b.done(), b.values, LAYER_LOOP)

    def _biased(self, b: LoopBuilder, own: Parts) -> list[Name]:
        """Products with the state, with the biases that are in no product with the input."""
        found, biases = list(own), [w.state_bias for w in self.weights]
        for gate in self.kind.apart if None not in biases else ():
            parts = [gates_of(self.edit, v, 0, self.kind.gates)[gate] for v in biases if v is not None]
            bias = self.edit.op("aten.unsqueeze.default", self.edit.op("aten.stack.default", tuple(parts)), 1)
            found[gate] = b.op("aten.add.Tensor", found[gate], b.input(bias))
        return found

    def _turned(self, weight: Value) -> Value:
        """From [groups, units, depth] to [groups, depth, units]."""
        return self.edit.op("aten.transpose.int", weight, 1, 2)

    def _halves(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return (0, self.units), (self.units, 2 * self.units)

    def _both_weights(self) -> Value:
        """Weights of the state below, or zeros, and of the own state, [layers, gates x units, 2 x units]."""
        edit, rows = self.edit, list[Value]()
        for i, w in enumerate(self.weights):
            below = w.input if i else edit.op("aten.zeros_like.default", w.state)
            rows.append(edit.op("aten.cat.default", (below, w.state), 1))
        return edit.op("aten.stack.default", tuple(rows))

    def _input_biases(self) -> list[Value]:
        """For each gate [layers, 1, units]."""
        given = [self.bias(i) for i in range(len(self.weights))]
        if None in given:
            zero = self.edit.op("aten.select.int", self.weights[0].state, 1, 0)
            given = [self.edit.op("aten.zeros_like.default", zero)] * len(given)
        stack = self.edit.op("aten.unsqueeze.default", self.edit.op("aten.stack.default", tuple(given)), 1)
        return gates_of(self.edit, stack, 2, self.kind.gates)

    def _of_first(self, others: int) -> Value:
        """True for the first group and False for `others` more, [groups, 1, 1]."""
        parts = (self._full((1, 1, 1), True), self._full((others, 1, 1), False))
        return self.edit.op("aten.cat.default", parts, 0)

    def _running(self, steps: int, count: int) -> Value:
        """Whether a layer has a step of its own at a step of the loop, [steps, layers, 1, 1]."""
        columns = []
        for i in range(count):
            before, after = (self._full((n, 1, 1), False) for n in (i, count - 1 - i))
            columns.append(self.edit.op("aten.cat.default", (before, self._full((steps, 1, 1), True), after), 0))
        return self.edit.op("aten.stack.default", tuple(columns), 1)

    def _full(self, shape: tuple[int, ...], value: bool) -> Value:
        like: dict[str, Any] = {"layout": torch.strided, "device": torch.device("cpu"), "pin_memory": False}
        return self.edit.op("aten.full.default", shape, value, dtype=torch.bool, **like)


__all__ = ["Grouped"]
