"""Layouts of attentions on a GPU, imitated on the CPU: what is computed from them lies as PyTorch lays it out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qimeng.device import device_named
from qimeng.family import covering
from qimeng.graph.capture import capture
from qimeng.graph.device_strides import heads_inside, seen_on, with_strides
from qimeng.graph.opgraph import OpGraph, Value
from qimeng.graph.region import make_region
from tests.suite.run import function_of

SHAPE = (2, 4, 6, 8)
attend = functional.scaled_dot_product_attention


class Call(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def graph_of(function: Callable[..., Any], dtype: torch.dtype = torch.float32) -> OpGraph:
    return capture(lambda: Call(function), lambda: tuple(torch.empty(SHAPE, dtype=dtype) for _ in range(3)))


def strides(graph: OpGraph) -> list[tuple[int, ...]]:
    return [graph.meta(Value(n.name)).stride for n in graph.ops()]


def on_the_gpu(graph: OpGraph) -> list[tuple[int, ...]]:
    """Strides of each operator's result in a run where attention puts the heads of a position side by side."""
    values: dict[Value, Tensor] = {}
    for node in graph.nodes.values():
        if node.kind == "input":
            values[Value(node.name)] = torch.randn(SHAPE)
        elif node.kind == "op":
            region = make_region(graph, [node.name])
            made = function_of(region)(*(values[v] for v in region.inputs))[0]
            if "attention" in node.target:
                made = made.transpose(1, 2).contiguous().transpose(1, 2)
            values[Value(node.name)] = made
    return [values[Value(n.name)].stride() for n in graph.ops()]


def test_what_follows_an_attention_is_laid_out_as_pytorch_does() -> None:
    graph = graph_of(lambda q, k, v: (attend(q, k, v) * 2 + v).transpose(1, 2).relu())
    found = with_strides(graph, heads_inside)
    assert strides(found) == on_the_gpu(graph) != strides(graph)
    assert [n.target for n in found.ops()] == [n.target for n in graph.ops()]


def test_a_generated_attention_writes_the_layout_of_the_device() -> None:
    graph = with_strides(graph_of(lambda q, k, v: attend(q, k, v)), heads_inside)
    family, plan = covering(make_region(graph, [n.name for n in graph.ops()]))
    source = family.print(plan, family.default(plan, device_named("h200"), "default"), "k").source
    assert "torch.empty_strided((2, 4, 6, 8), (192, 8, 32, 1)" in source


def test_a_view_that_cannot_be_had_copies() -> None:
    """Queries of heads side by side give the CPU's result that layout, a GPU's another kernel the other one."""

    def contiguous(graph: OpGraph, node: Any) -> Any:
        return tuple(type(m)(m.shape, (192, 48, 8, 1), m.dtype) for m in node.metas)

    def joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = lambda x: x.reshape(2, 6, 4, 8).transpose(1, 2)  # noqa: E731
        return attend(heads(q), heads(k), heads(v)).transpose(1, 2).reshape(2, 6, 32)

    graph = graph_of(joined)
    assert "aten.reshape.default" not in [n.target for n in graph.ops()]
    found = with_strides(graph, contiguous)
    last = list(found.ops())[-1]
    assert last.target == "aten.reshape.default" and found.meta(found.outputs[0]).is_contiguous


def test_a_graph_that_lies_the_same_stays() -> None:
    half = graph_of(lambda q, k, v: attend(q, k, v) + v, torch.bfloat16)
    assert with_strides(half, heads_inside) is half
    assert with_strides(half, seen_on("cpu")) is half


@pytest.mark.gpu
def test_the_rule_of_a_gpu_is_what_eager_returns() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        graph = with_strides(graph_of(lambda q, k, v: attend(q, k, v), dtype), seen_on("cuda"))
        inputs = [torch.randn(SHAPE, dtype=dtype, device="cuda") for _ in range(3)]
        assert strides(graph) == [attend(*inputs).stride()]
