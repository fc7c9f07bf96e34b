from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qimeng.bench.families import classify
from qimeng.graph.capture import capture
from qimeng.graph.opgraph import OpGraph


class Function(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(*self.layers, *args)


def graph(
    function: Callable[..., torch.Tensor], *shapes: tuple[int, ...], layers: tuple[nn.Module, ...] = ()
) -> OpGraph:
    return capture(lambda: Function(function, *layers), lambda: tuple(torch.rand(s) for s in shapes))


def linear() -> tuple[nn.Module, ...]:
    return (nn.Linear(32, 48),)


FAMILY_CASES = {
    "pointwise": partial(graph, lambda x, y: torch.relu(x) * y, (4, 8), (8,)),
    "reduction": partial(graph, lambda x: torch.softmax(x, -1).sum(0), (4, 8)),
    "gemm": partial(graph, lambda a, b: torch.relu(a @ b), (4, 8), (8, 16)),
    "convolution": partial(graph, lambda c, x: F.max_pool2d(c(x), 2), (1, 3, 8, 8), layers=(nn.Conv2d(3, 4, 3),)),
    "pooling": partial(graph, lambda a, b: F.avg_pool1d((a @ b)[None], 2), (4, 8), (8, 16)),
    "scan": partial(graph, lambda x: torch.cumsum(torch.relu(x), 0), (4, 8)),
    "attention": partial(graph, lambda q, k, v: F.scaled_dot_product_attention(q, k, v), *[(1, 2, 8, 4)] * 3),
    "other": partial(graph, lambda x: torch.flip(x, (0,)) + x, (4, 8)),
}


@pytest.mark.parametrize("family", FAMILY_CASES)
def test_family_is_the_heaviest_loop_nest(family: str) -> None:
    assert classify(FAMILY_CASES[family]()).family == family


def test_attention_written_out_is_attention() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.transpose(1, 2) * 0.5, -1) @ v

    assert classify(graph(attend, *[(2, 8, 4)] * 3)).family == "attention"


def test_a_gated_layer_is_no_attention() -> None:
    layers = (nn.Linear(32, 48), nn.Linear(48, 8))
    assert classify(graph(lambda f, g, x: g(torch.softmax(f(x), -1)), (4, 32), layers=layers)).family == "gemm"


def test_random_operators_are_marked() -> None:
    found = classify(graph(lambda f, x: F.dropout(f(x), 0.2, training=True), (4, 32), layers=linear()))
    assert (found.family, found.random) == ("gemm", True)


COLLAPSED = {
    "product read only by a linear reduction": [
        lambda f, x: f(x).sum(dim=1),
        lambda f, x: ((f(x) / 2).mean(dim=-1, keepdim=True)) * 3,
        lambda f, x: f(x).sum(),
    ],
    "triangular output": [lambda f, x: torch.tril(f(x)), lambda f, x: torch.triu(f(x), 1)],
    "a value minus itself": [
        lambda f, x: F.gelu((m := f(x).amax(1, keepdim=True)) - m.mean(dim=1, keepdim=True)),
    ],
    "softmax over one element": [lambda f, x: torch.softmax(f(x).amax(1, keepdim=True), dim=1)],
    "": [
        lambda f, x: torch.relu(f(x)).sum(dim=1),
        lambda f, x: f(x).sum(dim=0),
        lambda f, x: (y := f(x)) - y.mean(dim=1, keepdim=True),
        lambda f, x: (y := f(x)) * y.sum(dim=1, keepdim=True),
        lambda f, x: torch.tril(y := f(x)) + y,
        lambda f, x: torch.where(x.sum(1, keepdim=True) > 0, f(x), 0.0),
        lambda f, x: f(x),
    ],
}


@pytest.mark.parametrize(("reason", "function"), [(r, f) for r, fs in COLLAPSED.items() for f in fs])
def test_collapsed_products_are_counted_apart(reason: str, function: Callable[..., torch.Tensor]) -> None:
    found = classify(graph(function, (16, 32), layers=linear()))
    assert (found.family, found.collapsed) == ("gemm", reason)
