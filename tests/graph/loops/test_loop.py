"""Loops over steps as operators of a graph: their text, and what is read back from it."""

from __future__ import annotations

import pytest
import torch

from qimeng.graph.loops.build import LoopBuilder
from qimeng.graph.loops.loop import At, Loop, is_loop, loop_of, parsed, step_graph
from qimeng.graph.opgraph import Meta, Node, OpGraph, Value
from qimeng.program.launch import obstacle


def decayed(count: int = 4, reverse: bool = False) -> tuple[Loop, list[Value]]:
    """h = clamp(a * h + x[t], max=2.5), and the h of all steps."""
    b = LoopBuilder(count)
    h = b.state(Value("h"))
    new = b.op("aten.add.Tensor", b.op("aten.mul.Tensor", b.input(Value("a")), h), b.step(Value("x"), reverse))
    new = b.op("aten.clamp.default", new, float("-inf"), 2.5)
    b.follow(h, new)
    b.keep(new, reverse)
    return b.done(), b.values


METAS = [Meta((2, 3), (3, 1), "float32"), Meta((3,), (1,), "float32"), Meta((4, 2, 3), (6, 3, 1), "float32")]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_loop_is_its_text(reverse: bool) -> None:
    loop, values = decayed(reverse=reverse)
    assert parsed(loop.text) == loop and values == [Value("h"), Value("a"), Value("x")]
    space: dict[str, object] = {"torch": torch}
    exec(loop.text, space)
    h, a, x = (torch.randn(m.shape) for m in METAS)
    stacked, last = space["part"](h, a, x)  # type: ignore[operator]
    states = []
    for t in reversed(range(4)) if reverse else range(4):
        h = (a * h + x[t]).clamp(max=2.5)
        states.append(h)
    assert torch.equal(stacked, torch.stack(states[::-1] if reverse else states)) and torch.equal(last, h)


def test_an_operator_of_a_graph_knows_its_results() -> None:
    loop, values = decayed()
    node = loop.node("loop", values, METAS)
    assert is_loop(node) and loop_of(node) == loop and node.operands() == tuple(values)
    assert node.metas == (Meta((4, 2, 3), (6, 3, 1), "float32"), METAS[0])


def test_a_step_is_a_graph_of_its_own() -> None:
    loop, _ = decayed()
    step = step_graph(loop, METAS)
    assert [n.packet for n in step.ops()] == ["aten.mul", "aten.select", "aten.add", "aten.clamp"]
    assert step.meta(Value("v1")) == Meta((2, 3), (3, 1), "float32")


def test_a_place_is_read_back() -> None:
    for place in (At(1, 0), At(1, 5), At(-1, 7), At(3, 2), At(2, -1)):
        assert [eval(place.text(), {"t": t}) for t in range(3)] == [place.at(t) for t in range(3)]


def test_a_loop_may_be_recorded_as_a_cuda_graph() -> None:
    loop, values = decayed()
    nodes = {v.node: Node(v.node, "input", str(i), metas=(METAS[i],)) for i, v in enumerate(values)}
    graph = OpGraph(nodes | {"loop": loop.node("loop", values, METAS)}, (Value("loop"),), n_inputs=3)
    assert obstacle(graph) == ""
