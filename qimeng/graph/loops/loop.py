"""A loop over steps with carried states, as one operator of a graph.

Its text is the Python loop itself, so that PyTorch runs it as it is; the same text is read back by whoever writes a
kernel for it. Deals in the loop's parts and in their text. Knows nothing about where loops come from or about kernels.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from qimeng.graph.opgraph import Meta, Node, OpGraph, Value
from qimeng.graph.ops import LAYER_LOOP
from qimeng.spec.fake import fake_tensors

PACKET = "torch.recurrence"
"""The operator of a graph that is a loop (`Node.packet`), but for those that were recurrent layers (`LAYER_LOOP`)."""


@dataclass(frozen=True)
class Name:
    """A value inside the loop: ``x0`` (input), ``s0`` (state) or ``v0`` (computed in the step)."""

    text: str


@dataclass(frozen=True)
class At:
    """The integer ``step * t + first``, where ``t`` counts the steps from 0."""

    step: int
    first: int

    def at(self, t: int) -> int:
        """Its value in step `t`."""
        return self.step * t + self.first

    def text(self) -> str:
        """As Python text.

        >>> At(1, 0).text(), At(-1, 9).text(), At(2, 1).text()
        ('t', '9 - t', '2 * t + 1')
        """
        if self.step == -1:
            return f"{self.first} - t"
        scaled = "t" if self.step == 1 else f"{self.step} * t"
        return f"{scaled} + {self.first}" if self.first else scaled


@dataclass(frozen=True)
class Line:
    """One operator of a step.

    Attributes:
        name: of its result.
        target: the ATen overload (``"aten.add.Tensor"``).
        args: positional arguments: `Name`, `At`, plain values, and tuples of these.
        kwargs: keyword arguments, likewise.
    """

    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    def names(self) -> tuple[str, ...]:
        """The values that it reads, in order."""
        return tuple(_names((self.args, tuple(v for _, v in self.kwargs))))


@dataclass(frozen=True)
class Loop:
    """The loop.

    Its results are the stacked values, each with the steps as first dimension, then the last states.

    Attributes:
        count: number of steps.
        inputs: number of tensors that go in: ``x0``, ``x1`` …
        starts: for each state the input that it begins with.
        body: the operators of a step, in order.
        following: for each state its value for the next step.
        stacked: values of each step that are returned; True where the last step comes first.
    """

    count: int
    inputs: int
    starts: tuple[str, ...]
    body: tuple[Line, ...]
    following: tuple[str, ...]
    stacked: tuple[tuple[str, bool], ...]

    @property
    def text(self) -> str:
        """A Python function ``part`` of the inputs that returns a tuple of the results."""
        states = [f"s{i}" for i in range(len(self.starts))]
        lists = [f"y{i}" for i in range(len(self.stacked))]
        lines = [f"def part({', '.join(f'x{i}' for i in range(self.inputs))}):"]
        lines.append(f"    {_joined(states)} = {_joined(self.starts)}")
        lines += [f"    {name} = []" for name in lists]
        lines.append(f"    for t in range({self.count}):")
        lines += [f"        {_line(line)}" for line in self.body]
        lines += [f"        {to}.append({name})" for to, (name, _) in zip(lists, self.stacked, strict=True)]
        lines.append(f"        {_joined(states)} = {_joined(self.following)}")
        turned = ["[::-1]" if back else "" for _, back in self.stacked]
        found = [f"torch.stack({name}{turn})" for name, turn in zip(lists, turned, strict=True)]
        return "\n".join([*lines, f"    return ({_joined([*found, *states])})"]) + "\n"

    def node(self, name: str, values: Sequence[Value], metas: Sequence[Meta], packet: str = PACKET) -> Node:
        """The loop as an operator of a graph.

        Args:
            name: of the operator.
            values: the inputs.
            metas: of the inputs.
            packet: which kind of loop.
        """
        digest = hashlib.blake2b(self.text.encode(), digest_size=4).hexdigest()
        return Node(name, "op", f"{packet}.{digest}", tuple(values), metas=result_metas(self, metas), literal=self.text)


def is_loop(node: Node) -> bool:
    """Whether `node` is a loop."""
    return node.packet in (PACKET, LAYER_LOOP)


def loop_of(node: Node) -> Loop:
    """The loop that `node` is."""
    return parsed(node.literal)


def step_graph(loop: Loop, metas: Sequence[Meta]) -> OpGraph:
    """The operators of a step as a graph of its own; inputs and states are its inputs, what is kept is its outputs.

    Args:
        loop: the loop.
        metas: of the loop's inputs.
    """
    return _step_graph(loop, tuple(metas))


def result_metas(loop: Loop, metas: Sequence[Meta]) -> tuple[Meta, ...]:
    """Shape, stride and dtype of each result."""
    graph = step_graph(loop, metas)
    kept = [graph.meta(Value(name)) for name, _ in loop.stacked]
    with fake_tensors():
        stacked = [_meta(torch.stack([_fake(m)] * loop.count)) for m in kept]
    return *stacked, *(graph.meta(Value(name)) for name in loop.following)


@lru_cache(256)
def _step_graph(loop: Loop, metas: tuple[Meta, ...]) -> OpGraph:
    given = {f"x{i}": m for i, m in enumerate(metas)}
    given |= {f"s{i}": given[start] for i, start in enumerate(loop.starts)}
    nodes = {name: Node(name, "input", str(i), metas=(m,)) for i, (name, m) in enumerate(given.items())}
    with fake_tensors(), torch.no_grad():
        held = {name: _fake(m) for name, m in given.items()}
        for line in loop.body:
            first = _mapped(line.args, lambda n: n, lambda at: at.at(0))
            kwargs = tuple((k, _mapped(v, lambda n: n, lambda at: at.at(0))) for k, v in line.kwargs)
            packet, overload = line.target.removeprefix("aten.").rsplit(".", 1)
            function = getattr(getattr(torch.ops.aten, packet), overload)
            tensors = _mapped(first, lambda n: held[n.text], lambda at: at)
            found = function(*tensors, **{k: _mapped(v, lambda n: held[n.text], lambda at: at) for k, v in kwargs})
            held[line.name] = found
            values = _mapped(first, lambda n: Value(n.text), lambda at: at)
            named = tuple((k, _mapped(v, lambda n: Value(n.text), lambda at: at)) for k, v in kwargs)
            nodes[line.name] = Node(line.name, "op", line.target, values, named, (_meta(found),))
    outputs = tuple(dict.fromkeys(Value(n) for n in (*loop.following, *(name for name, _ in loop.stacked))))
    return OpGraph(nodes, outputs, n_inputs=len(given))


@lru_cache(256)
def parsed(text: str) -> Loop:
    """The loop whose text this is.

    >>> loop = Loop(3, 2, ("x1",), (Line("v0", "aten.add.Tensor", (Name("s0"), 2.5)),), ("v0",), (("v0", False),))
    >>> parsed(loop.text) == loop
    True
    """
    tree = ast.parse(text).body[0]
    assert isinstance(tree, ast.FunctionDef)
    start, *_ = tree.body
    walk = next(s for s in tree.body if isinstance(s, ast.For))
    assert isinstance(start, ast.Assign) and isinstance(walk.iter, ast.Call)
    *steps, following = walk.body
    assert isinstance(following, ast.Assign)
    body = tuple(_parsed_line(s) for s in steps if isinstance(s, ast.Assign))
    kept = [s.value for s in steps if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)]
    result = tree.body[-1]
    assert isinstance(result, ast.Return) and isinstance(result.value, ast.Tuple)
    turned = [isinstance(e.args[0], ast.Subscript) for e in result.value.elts if isinstance(e, ast.Call)]
    stacked = tuple((ast.unparse(call.args[0]), back) for call, back in zip(kept, turned, strict=True))
    count = ast.literal_eval(walk.iter.args[0])
    return Loop(count, len(tree.args.args), _parsed_names(start), body, _parsed_names(following), stacked)


def _parsed_names(assign: ast.Assign) -> tuple[str, ...]:
    assert isinstance(assign.value, ast.Tuple)
    return tuple(ast.unparse(e) for e in assign.value.elts)


def _parsed_line(assign: ast.Assign) -> Line:
    call = assign.value
    assert isinstance(call, ast.Call)
    target = ast.unparse(call.func).removeprefix("torch.ops.")
    kwargs = tuple((k.arg or "", _parsed(k.value)) for k in call.keywords)
    return Line(ast.unparse(assign.targets[0]), target, tuple(_parsed(a) for a in call.args), kwargs)


def _parsed(item: ast.expr) -> Any:
    text = ast.unparse(item)
    if isinstance(item, ast.List):
        return tuple(_parsed(e) for e in item.elts)
    if isinstance(item, ast.Call):  # float("inf")
        return float(ast.literal_eval(item.args[0]))
    if isinstance(item, ast.Attribute):
        return getattr(torch, item.attr)
    names = {n.id for n in ast.walk(item) if isinstance(n, ast.Name)}
    if names == {"t"}:
        place = eval(compile(ast.Expression(ast.parse(f"lambda t: {text}", mode="eval").body), "", "eval"))
        return At(place(1) - place(0), place(0))
    return Name(text) if names else ast.literal_eval(item)


def _line(line: Line) -> str:
    args = [_text(a) for a in line.args] + [f"{k}={_text(v)}" for k, v in line.kwargs]
    return f"{line.name} = torch.ops.{line.target}({', '.join(args)})"


def _text(item: Any) -> str:
    from qimeng.graph.region import literal

    if isinstance(item, Name):
        return item.text
    if isinstance(item, At):
        return item.text()
    if isinstance(item, (tuple, list)):
        return f"[{', '.join(_text(i) for i in item)}]"
    return literal(item)


def _joined(names: Sequence[str]) -> str:
    """Names as a tuple without parentheses."""
    return ", ".join(names) + ("," if len(names) == 1 else "")


def _names(tree: Any) -> list[str]:
    if isinstance(tree, Name):
        return [tree.text]
    return [n for item in tree for n in _names(item)] if isinstance(tree, (tuple, list)) else []


def _mapped(tree: Any, name: Callable[[Name], Any], at: Callable[[At], Any]) -> Any:
    if isinstance(tree, Name):
        return name(tree)
    if isinstance(tree, At):
        return at(tree)
    return tuple(_mapped(i, name, at) for i in tree) if isinstance(tree, (tuple, list)) else tree


def _fake(meta: Meta) -> torch.Tensor:
    return torch.empty_strided(meta.shape, meta.stride, dtype=getattr(torch, meta.dtype))


def _meta(tensor: torch.Tensor) -> Meta:
    return Meta(tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch."))


__all__ = [
    "PACKET",
    "At",
    "Line",
    "Loop",
    "Name",
    "is_loop",
    "loop_of",
    "parsed",
    "result_metas",
    "step_graph",
]
