"""Odd operators become parts of PyTorch code, and what is around them is captured."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from qimeng.graph.capture import CaptureError
from qimeng.graph.opgraph import OpGraph
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

X = torch.rand(8, 6)


def captured(thing: Callable[..., Any], *inputs: Any) -> OpGraph:
    """The graph of `thing`, whose program gives what `thing` gives."""
    graph = capture_spec(KernelSpec.of(thing, inputs))
    model = Program.start(graph).load().Model()
    with torch.no_grad():
        for sign in (1, -1):
            given = [x * sign if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
            expected, found = thing(*given), model(*given)
            assert type(found) is type(expected)
            torch.testing.assert_close(found, expected, equal_nan=True)
    return graph


def names(graph: OpGraph) -> tuple[list[str], list[str]]:
    """ATen operators, and the labels of parts."""
    packets = [n.packet for n in graph.ops()]
    return [p.removeprefix("aten.") for p in packets if p.startswith("aten.")], [
        p.removeprefix("torch.") for p in packets if p.startswith("torch.")
    ]


def experts(x: torch.Tensor, gate: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    chosen = (x @ gate).argmax(-1)
    y = torch.zeros_like(x)
    for k in range(len(weights)):
        at = torch.nonzero(chosen == k).squeeze(-1)
        y.index_add_(0, at, torch.nn.functional.gelu(x[at] @ weights[k]))
    return y


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[str], list[str]]] = {
    "mask": (
        lambda x: torch.relu(x * 2 + 1)[x > 0.5].sigmoid().sum() + x.sum(-1),
        (X,),
        ["mul", "add", "relu", "gt", "sum", "add"],
        ["index_sigmoid_sum"],
    ),
    "item": (
        lambda x: torch.relu(x * 2 + 1) * x.max().item() + 1,
        (X,),
        ["mul", "add", "relu", "max", "add"],
        ["_local_scalar_dense_mul"],
    ),
    "nonzero_and_arithmetic_on_its_size": (
        lambda x: x.exp() / (torch.nonzero(x > 0.5).shape[0] + 1),
        (X,),
        ["exp", "gt"],
        ["nonzero_sym_size_add_div"],
    ),
    "masked_select": (lambda x: torch.masked_select(x.sin(), x > 0).mean() + x, (X,), ["sin", "gt", "add"], []),
    "unique": (lambda x: torch.unique((x * 3).int()).sum() + x.sin(), (X,), ["mul", "_to_copy", "sin", "add"], []),
    "repeat_interleave": (
        lambda x, n: torch.repeat_interleave(x.sin(), n, 0).sum(0) + 1,
        (X, torch.arange(8)),
        ["sin", "add"],
        [],
    ),
    "experts": (
        experts,
        (X, torch.rand(6, 3), torch.rand(3, 6, 6)),
        ["mm", "argmax", "full_like", "eq", "eq", "eq"],
        ["nonzero_squeeze_index_mm_gelu_index_put"] * 3,
    ),
    "cond": (
        lambda x: torch.relu(torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos() * t, (x,))) + 1,
        (X,),
        ["sum", "gt", "relu", "add"],
        ["cond"],
    ),
    "while_loop": (
        lambda x: while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), x))[1].relu() + 1,
        (X,),
        ["relu", "add"],
        ["while_loop"],
    ),
    "scan": (
        lambda x: scan(lambda c, y: (c + y, c * 2), torch.zeros(6), x)[1].relu() + 1,
        (X,),
        ["full", "relu", "add"],
        ["scan"],
    ),
    "vmap": (torch.vmap(lambda a: (a * a).sum() / a.norm()), (X,), ["mul", "sum", "linalg_vector_norm", "div"], []),
    "error_check": (
        lambda x: torch.linalg.inv(x @ x.T + torch.eye(8)).exp() + 1,
        (X,),
        ["mm", "exp", "add"],
        ["linalg_inv_ex_with_effects"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_captured_around(name: str) -> None:
    thing, inputs, around, parts = CASES[name]
    operators, odd = names(captured(thing, *inputs))
    assert set(around) <= set(operators) | {"full_like"} and len(operators) >= len(around)
    assert odd and (not parts or odd == parts) if name != "vmap" else not odd


def test_a_check_for_errors_still_raises() -> None:
    graph = captured(lambda x: torch.linalg.inv(x @ x.T + torch.eye(8)) + 1, X)
    model = Program.start(graph).load().Model()
    with pytest.raises(torch.linalg.LinAlgError, match="singular"), torch.no_grad():
        model(torch.full((8, 6), 1e8))  # beside x x', the identity is lost


def test_parts_that_need_each_other_are_one() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        some = x[x > 0.5]
        return some * some.mean().sin()

    with pytest.raises(CaptureError, match="it returns a number, or a tensor of a size"):
        captured(f, X)
    operators, odd = names(captured(lambda x: (f(x).sum() + x).cos(), X))
    assert len(odd) == 1 and re.search("index.*mean.*sin.*mul.*sum", odd[0]) and operators == ["gt", "add", "cos"]


def test_a_part_reads_as_a_function() -> None:
    graph = captured(lambda x: x.exp() * x.max().item(), X)
    part = next(r for r in Program.start(graph).regions if r.label().startswith("torch."))
    name = f"part_{part.ops[0].target.rsplit('.', 1)[1]}"
    assert part.function("f") == (
        f"def {name}(x0, x1):\n"
        "    v2 = torch.ops.aten._local_scalar_dense.default(x0)\n"
        "    v3 = torch.ops.aten.mul.Tensor(x1, v2)\n"
        "    return (v3, )\n\n\n"
        "def f(x0, x1):\n"
        f"    v0 = {name}(x0, x1)\n"
        "    return (v0[0],)\n"
    )


def test_bits_taken_for_another_dtype_are_no_view_of_numbers() -> None:
    x = torch.randn(6, 8)
    spec = KernelSpec.of(lambda x: (x * 2).view(torch.int32) + 1, (x,))
    assert [r.label() for r in Program.start(capture_spec(spec)).regions] == ["mul", "view.dtype", "add"]


class Sparse(torch.nn.Module):
    def __init__(self, table: torch.Tensor, held: str) -> None:
        super().__init__()
        if held == "buffer":
            self.register_buffer("table", table)
        else:
            self.table = torch.nn.Parameter(table, requires_grad=False) if held == "parameter" else table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.table @ x).relu()


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("held", ["buffer", "parameter", "attribute"])
def test_a_sparse_tensor_is_named_with_what_to_do(held: str) -> None:
    eye = torch.eye(16)
    tables: dict[str, torch.Tensor] = {
        "COO": eye.to_sparse(),
        "CSR": eye.to_sparse_csr(),
        "CSC": eye.to_sparse_csc(),
        "BSR": eye.to_sparse_bsr((4, 4)),
    }
    for kind, table in tables.items():
        declared = "bsr:32:10" if kind == "BSR" else "csr:5"
        text = rf"its tensor table is sparse \({kind}\), .* keep the dense weight .* declare weights='{declared}'"
        with pytest.raises(CaptureError, match=text):
            capture_spec(KernelSpec.of(Sparse(table, held), (torch.ones(16, 4),)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_nested_tensor_is_named_with_what_to_do(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)], layout=layout)
    with pytest.raises(
        CaptureError, match="its tensor table is nested, .* keep its values and offsets as dense buffers"
    ):
        capture_spec(KernelSpec.of(Sparse(nested, "attribute"), (torch.ones(16, 4),)))


class Inside(torch.nn.Module):
    def __init__(self, made: Callable[..., torch.Tensor]):
        super().__init__()
        self.made = made

    def forward(self, rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return self.made(rows, columns, values)


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda r, c, v: torch.sparse_csr_tensor(r, c, v[:, 0], (3, 4)) @ v, "makes a sparse tensor inside of forward"),
        (lambda r, c, v: v.to_sparse_csr().to_dense(), "makes a sparse tensor inside of forward"),
        (lambda r, c, v: torch.nested.nested_tensor_from_jagged(v, r).sum(1), "uses a nested tensor inside of forward"),
        (lambda r, c, v: torch.nested.nested_tensor_from_jagged(v, r) * 2, "uses a nested tensor inside of forward"),
    ],
)
def test_a_sparse_or_nested_tensor_that_forward_makes_is_named(made: Any, words: str) -> None:
    inputs = (torch.tensor([0, 1, 1, 4]), torch.tensor([0, 1, 2, 3]), torch.ones(4, 4))
    with pytest.raises(CaptureError, match=rf"{words}( \(.*\))?\. To have it optimized, keep .* dense"):
        capture_spec(KernelSpec.of(Inside(made), inputs))
