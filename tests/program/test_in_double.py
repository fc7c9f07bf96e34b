"""Graphs whose buffers are all rounding are taken, and wrong ones are refused beside the same noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from qimeng.graph.opgraph import Node, OpGraph, Value
from qimeng.program import verify
from qimeng.program.in_double import InDouble
from qimeng.program.verify import CaptureError, capture_spec, verify_graph
from qimeng.spec import KernelSpec
from qimeng.spec.dispatch import DispatchMode

X = torch.rand(4, 3, 3, 3, generator=torch.Generator().manual_seed(0))
NORM = "_native_batch_norm_legit_functional_1"
DRAWS = torch.Generator().manual_seed(1)


class OtherOrder(DispatchMode):
    """Each call of a convolution or normalization in fp32 rounds otherwise, as on a GPU."""

    def call(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if ("convolution" in str(func) or "batch_norm" in str(func)) and args[0].dtype is torch.float32:
            args = (args[0] + 2e-7 * float(torch.randn((), generator=DRAWS)) * args[0].abs(), *args[1:])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = verify._run

    def run(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        with OtherOrder():
            return quiet(module, inputs)

    monkeypatch.setattr(verify, "_run", run)


def spec() -> KernelSpec:
    """What the second normalization gets has no mean: the first one took it, and no bias came between."""
    torch.manual_seed(0)
    parts = [nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16)]
    return KernelSpec.of(nn.Sequential(*parts), (X,))


@pytest.mark.usefixtures("noisy")
def test_a_running_mean_of_nothing_but_rounding_is_captured() -> None:
    assert {key for key, _ in capture_spec(spec()).mutations} >= {"3.running_mean", "3.running_var"}


def _with(graph: OpGraph, *nodes: Node, **updates: Value) -> OpGraph:
    mutations = tuple(
        (key, updates.get(key.rpartition(".")[2], v) if key[0] == "3" else v) for key, v in graph.mutations
    )
    return replace(graph, nodes=graph.nodes | {n.name: n for n in nodes}, mutations=mutations)


def _momentum(graph: OpGraph) -> OpGraph:
    node = graph.nodes[NORM]
    return _with(graph, replace(node, args=(*node.args[:6], 0.2, node.args[7])))


def _twice(graph: OpGraph) -> OpGraph:
    node = graph.nodes[NORM]
    again = replace(node, name="again", args=(*node.args[:3], Value(NORM, 3), Value(NORM, 4), *node.args[5:]))
    return _with(graph, again, running_mean=Value("again", 3), running_var=Value("again", 4))


def _biased(graph: OpGraph) -> OpGraph:
    count, metas = X[:, 0].numel(), graph.nodes["b_3_running_var"].metas
    made = (
        ("fresh", "aten.mul.Tensor", (Value(NORM, 4), (count - 1) / count)),
        ("old", "aten.mul.Tensor", (Value("b_3_running_var"), 0.9 / count)),
        ("biased", "aten.add.Tensor", (Value("fresh"), Value("old"))),
    )
    nodes = [Node(name, "op", target, args, metas=metas) for name, target, args in made]
    return _with(graph, *nodes, running_var=Value("biased"))


WRONG: dict[str, Callable[[OpGraph], OpGraph]] = {
    "momentum": _momentum,
    "twice": _twice,
    "biased": _biased,
    "mean_forgotten": lambda graph: _with(graph, running_mean=Value("b_3_running_mean")),
    "variance_forgotten": lambda graph: _with(graph, running_var=Value("b_3_running_var")),
    "mean_of_another": lambda graph: _with(graph, running_mean=Value(NORM, 1)),
}


@pytest.mark.usefixtures("noisy")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_update_is_refused_beside_noise(name: str) -> None:
    made = spec()
    graph = capture_spec(made, verify=False)
    with pytest.raises(CaptureError, match="buffer 3.running_(mean|var) differs by up to"):
        verify_graph(made, WRONG[name](graph))


CALLS = [0]


class Counting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS[0] += 1
        return x * CALLS[0]


def test_float64_tells_nothing_of_another_call_or_other_random_numbers() -> None:
    x = torch.randn(64)
    for module in (Counting(), nn.Dropout()):
        given = verify._run(module, (x,))
        exact = InDouble(module, (x,), {}, verify._run)
        assert not exact.is_rounding(0, given, given + 0.5)


def test_a_result_that_is_not_finite_is_no_rounding() -> None:
    x = torch.tensor([1.0, torch.nan])
    assert not InDouble(nn.Identity(), (x,), {}, verify._run).is_rounding(0, x, torch.zeros(2))
