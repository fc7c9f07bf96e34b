"""Layouts of attentions on a GPU, imitated on the CPU: what is computed from them lies as PyTorch lays it out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qimeng import KernelSpec
from qimeng.device import device_named
from qimeng.family import covering
from qimeng.graph.capture import capture
from qimeng.graph.device_strides import Refused, heads_inside, seen_on, with_strides
from qimeng.graph.on_device import for_device
from qimeng.graph.opgraph import Node, OpGraph, Value, row_major
from qimeng.graph.region import make_region
from qimeng.program.implementation import Implementation
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec.origin import FunctionModule
from tests.graph.other_layouts import OtherLayouts
from tests.suite.run import function_of

SHAPE = (2, 4, 6, 8)
attend = functional.scaled_dot_product_attention


def graph_of(function: Callable[..., Any], dtype: torch.dtype = torch.float32) -> OpGraph:
    return capture(lambda: FunctionModule(function), lambda: tuple(torch.empty(SHAPE, dtype=dtype) for _ in range(3)))


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
        if "attention" in node.target:
            return tuple(type(m)(m.shape, (192, 48, 8, 1), m.dtype) for m in node.metas)
        return None

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


def test_a_copy_that_the_device_does_not_make_is_left_out() -> None:
    def joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v).transpose(1, 2).reshape(2, 6, 32) + 1

    graph = graph_of(joined)
    found = with_strides(graph, heads_inside)
    assert "aten.clone.default" in [n.target for n in graph.ops()]
    assert "aten.clone.default" not in [n.target for n in found.ops()]
    inputs = [torch.randn(SHAPE) for _ in range(3)]
    with OtherLayouts():
        torch.testing.assert_close(run(Program.start(found), *inputs), joined(*inputs))


def test_an_operator_that_does_not_run_on_the_other_layout_reads_a_copy() -> None:
    def rows_inside(graph: OpGraph, node: Any) -> Any:
        if "attention" in node.target:
            return tuple(type(m)(m.shape, (192, 48, 1, 6), m.dtype) for m in node.metas)
        return None

    graph = graph_of(lambda q, k, v: attend(q, k, v).view(torch.int16))
    found = with_strides(graph, rows_inside)
    assert [n.target for n in found.ops()][1:3] == ["aten.clone.default", "aten.view.dtype"]
    assert strides(found)[1:3] == [(192, 48, 8, 1), (384, 96, 16, 1)]


class Patches(torch.nn.Module):
    """A convolution whose result is read as rows, as a network for images begins."""

    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.convolution, self.last = torch.nn.Conv2d(3, 4, 2, 2), last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.convolution(x))


X = torch.randn(2, 3, 8, 8)
ROWS = Patches(lambda x: x.view(2, -1).exp())


def run(program: Program, *inputs: Tensor, state: dict[str, Tensor] | None = None) -> Tensor:
    model = program.load("other_layouts").Model()
    model.load_state_dict(state or {})
    with torch.no_grad():
        found = model(*inputs)
    assert isinstance(found, Tensor)
    return found


def test_an_operator_that_a_device_runs_on_contiguous_operands_alone_reads_copies() -> None:
    def of_a_gpu(graph: OpGraph, node: Node) -> Any:
        if node.packet != "aten.native_group_norm":
            return None
        if not graph.meta(node.operands()[0]).is_contiguous:
            raise Refused(node.target)
        return tuple(replace(m, stride=row_major(m.shape)) for m in node.metas if m is not None)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.group_norm(q.contiguous(memory_format=torch.channels_last), 2).exp() + k

    captured = graph_of(forward)
    found = with_strides(captured, of_a_gpu)
    copied = [n.target for n in found.ops()].index("aten.native_group_norm.default") - 1
    assert [n.target for n in found.ops()][copied] == "aten.clone.default"
    assert strides(found)[-2] == row_major(SHAPE) != strides(captured)[-2]
    x, other = torch.randn(SHAPE), torch.randn(SHAPE)
    torch.testing.assert_close(run(Program.start(found), x, other, x), forward(x, other, x))


def test_an_operator_that_never_runs_there_stays() -> None:
    def never(graph: OpGraph, node: Node) -> Any:
        raise Refused(node.target)

    captured = graph_of(lambda q, k, v: (q.mT.softmax(-1), k.mT @ v))
    assert with_strides(captured, never) == captured


def test_a_graph_captured_elsewhere_runs_where_a_view_cannot_be_had() -> None:
    spec = KernelSpec.from_module(ROWS, (X,))
    graph = capture_spec(spec, verify=False)
    assert "aten.view.default" in [n.target for n in graph.ops()]
    with torch.no_grad(), OtherLayouts():
        with pytest.raises(RuntimeError, match="view size"):
            ROWS(X)
        found = run(Program.start(graph), X, state=ROWS.state_dict())
    torch.testing.assert_close(found, ROWS.convolution(X).flatten(1).exp().detach())


def test_a_kernel_reads_the_strides_that_it_was_made_for() -> None:
    """It stands in for a kernel: it reads memory with the strides that were captured."""
    spec = KernelSpec.from_module(ROWS, (X,))
    program = Program.start(capture_spec(spec, verify=False))
    last = program.regions[-1]
    (read,) = (program.graph.meta(v) for v in last.inputs)
    source = f"def kernel(x):\n    return (x.as_strided({read.shape}, {read.stride}).reshape(2, -1).exp(),)\n"
    assert "_with_strides" not in program.source
    program = program.with_implementation(last.id, Implementation("triton", source, "kernel"))
    for layouts in (torch.no_grad(), OtherLayouts()):
        with layouts:
            found = run(program, X, state=ROWS.state_dict())
        torch.testing.assert_close(found, ROWS.convolution(X).flatten(1).exp().detach())


def test_strides_of_any_operator_are_learnt_from_the_device() -> None:
    spec = KernelSpec.from_module(Patches(lambda x: x.relu()), (X,))
    graph = capture_spec(spec, verify=False)
    with OtherLayouts():
        found = for_device(spec, "cpu:0", graph)
    assert strides(graph) == [(64, 16, 4, 1)] * 2
    assert strides(found) == [(64, 1, 16, 4)] * 2


def test_outputs_lie_as_the_module_lays_them_out_there() -> None:
    module = Patches(lambda x: x.contiguous())
    spec = KernelSpec.from_module(module, (X,))
    graph = capture_spec(spec, verify=False)
    with OtherLayouts():
        found = for_device(spec, "cpu:0", graph)
        output = run(Program.start(found), X, state=module.state_dict())
    assert found.meta(found.outputs[0]).is_contiguous and output.is_contiguous()
    torch.testing.assert_close(output, module(X).detach())


@pytest.mark.gpu
def test_the_rule_of_a_gpu_is_what_eager_returns() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        graph = with_strides(graph_of(lambda q, k, v: attend(q, k, v), dtype), seen_on("cuda"))
        inputs = [torch.randn(SHAPE, dtype=dtype, device="cuda") for _ in range(3)]
        assert strides(graph) == [attend(*inputs).stride()]
