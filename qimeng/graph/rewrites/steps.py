"""Values of a loop's steps for all steps at once, with the steps as first dimension.

Deals in operators that can be computed so. Knows nothing about which values should be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qimeng.graph.loops.loop import At, Line, Loop, Name
from qimeng.graph.opgraph import Node, OpGraph, Value
from qimeng.graph.ops import category
from qimeng.graph.rewrites.base import Edit, NoRewrite

RESHAPED = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
PRODUCTS = ("aten.bmm.default", "aten.matmul.default", "aten.mm.default")


class AllSteps:
    """What the steps of a loop compute without its states, or from states that are known for all steps.

    Args:
        edit: the graph.
        loop: the loop.
        values: its inputs.
        step: its step as a graph, for shapes.
    """

    def __init__(self, edit: Edit, loop: Loop, values: Sequence[Value], step: OpGraph):
        self._edit, self._loop, self._values, self._step = edit, loop, values, step
        self._lines = {line.name: line for line in loop.body}
        self.known: dict[str, Value] = {}
        self._fixed: dict[str, Value] = {}

    def is_fixed(self, name: str) -> bool:
        """Whether the value is the same in every step."""
        if name[0] == "x":
            return True
        line = self._lines.get(name)
        if line is None or name in self.known or any(isinstance(a, At) for a in line.args):
            return False
        return all(self.is_fixed(n) for n in line.names())

    def fixed(self, name: str) -> Value:
        """A value that is the same in every step."""
        if name[0] == "x":
            return self._values[int(name[1:])]
        if name not in self._fixed:
            line = self._lines[name]
            args = _mapped(line.args, lambda n: self.fixed(n.text))
            kwargs = {k: _mapped(v, lambda n: self.fixed(n.text)) for k, v in line.kwargs}
            self._fixed[name] = self._edit.op(line.target, *args, **kwargs)
        return self._fixed[name]

    def shifted(self, state: str, following: str, start: Value) -> None:
        """Make a state, as steps read it, known from what they leave of it and what it begins with."""
        first = self._edit.op("aten.unsqueeze.default", start, 0)
        rest = self._edit.op("aten.slice.Tensor", self.known[following], 0, 0, self._loop.count - 1)
        self.known[state] = self._edit.op("aten.cat.default", (first, rest), 0)

    def varying(self, name: str) -> Value:
        """A value for all steps.

        Raises:
            NoRewrite: an operator on the way cannot be computed so.
        """
        if name not in self.known:
            self.known[name] = self._made(name)
        return self.known[name]

    def _made(self, name: str) -> Value:
        line = self._lines.get(name)
        if self.is_fixed(name):
            value = self._edit.op("aten.unsqueeze.default", self.fixed(name), 0)
            return self._edit.op("aten.expand.default", value, (self._loop.count, *self._shape(name)))
        if line is None:
            raise NoRewrite(f"a step reads the state {name} before it is known")
        if any(isinstance(a, At) for a in line.args):
            return self._place(line)
        shape, target = self._shape(name), line.target
        first = line.args[0]
        if target in RESHAPED:
            return self._edit.op("aten.reshape.default", self.varying(first.text), (self._loop.count, *shape))
        if target == "aten.expand.default":
            lead = len(shape) - len(self._shape(first.text))
            return self._edit.op("aten.expand.default", self._deeper(first.text, lead), (self._loop.count, *shape))
        if target in ("aten.unsqueeze.default", "aten.select.int", "aten.slice.Tensor"):
            rank = len(self._shape(first.text)) + (target == "aten.unsqueeze.default")
            return self._edit.op(target, self.varying(first.text), line.args[1] % rank + 1, *line.args[2:])
        if target in ("aten.squeeze.dims", "aten.permute.default"):
            rank = len(self._shape(first.text))
            dims = tuple(d % rank + 1 for d in line.args[1])
            dims = (0, *dims) if target == "aten.permute.default" else dims
            return self._edit.op(target, self.varying(first.text), dims)
        if target == "aten.transpose.int":
            rank = len(shape)
            return self._edit.op(target, self.varying(first.text), *(d % rank + 1 for d in line.args[1:]))
        if target == "aten.linear.default" and all(self.is_fixed(n) for n in line.names()[1:]):
            return self._edit.op(
                target, self.varying(first.text), *_mapped(line.args[1:], lambda n: self.fixed(n.text))
            )
        if target in PRODUCTS and all(len(self._shape(n)) == len(shape) for n in line.names()):
            return self._edit.op("aten.matmul.default", *(self._either(n) for n in line.names()))
        if target == "aten.cat.default":
            dim = (line.args[1] if len(line.args) > 1 else 0) % len(shape)
            return self._edit.op(target, tuple(self.varying(n.text) for n in first), dim + 1)
        if category(Node("", "op", target)) == "pointwise":
            args = _mapped(line.args, lambda n: self._aligned(n.text, len(shape)))
            return self._edit.op(target, *args, **dict(line.kwargs))
        raise NoRewrite(f"{target} is not computed for all steps at once")

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._step.meta(Value(name)).shape

    def _either(self, name: str) -> Value:
        return self.fixed(name) if self.is_fixed(name) else self.varying(name)

    def _deeper(self, name: str, lead: int) -> Value:
        """The value with `lead` more dimensions of one element after the steps."""
        value = self.varying(name)
        for _ in range(lead):
            value = self._edit.op("aten.unsqueeze.default", value, 1)
        return value

    def _aligned(self, name: str, rank: int) -> Value:
        """The value with as many dimensions as a result of `rank` dimensions needs."""
        return self.fixed(name) if self.is_fixed(name) else self._deeper(name, rank - len(self._shape(name)))

    def _place(self, line: Line) -> Value:
        """A part of an input, or of a value for all steps, that moves along one dimension."""
        count, dim = self._loop.count, line.args[1]
        place = line.args[2]
        single = line.target == "aten.slice.Tensor" and line.args[3:] == (At(place.step, place.first + 1),)
        if not self.is_fixed(line.args[0].text) or not (line.target == "aten.select.int" or single):
            raise NoRewrite(f"{line.target} at places that change from step to step")
        if place.step != 1 or place.first < 0:
            raise NoRewrite(f"steps that read every {place.step} elements")
        whole = self.fixed(line.args[0].text)
        shape = self._edit.meta(whole).shape
        dim %= len(shape)
        if place.first or shape[dim] != count:
            whole = self._edit.op("aten.slice.Tensor", whole, dim, place.first, place.first + count)
        if dim:
            order = (dim, *(d for d in range(len(shape)) if d != dim))
            whole = self._edit.op("aten.permute.default", whole, order)
        return self._edit.op("aten.unsqueeze.default", whole, dim + 1) if single else whole


def _mapped(tree: Any, function: Any) -> Any:
    if isinstance(tree, Name):
        return function(tree)
    return tuple(_mapped(i, function) for i in tree) if isinstance(tree, (tuple, list)) else tree


__all__ = ["AllSteps"]
