"""Strides that a graph records are those of an eager run, whatever operators decide on layouts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qimeng import KernelSpec
from qimeng.graph.on_device import for_device
from qimeng.graph.opgraph import OpGraph, Value
from qimeng.program.verify import capture_spec
from tests.graph.other_layouts import OtherLayouts
from tests.suite.run import evaluate


class Layouts(torch.nn.Module):
    """Operators whose results lie as their kernel likes, on operands that do not lie as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(8, 8, 3, padding=1)
        self.deeper = torch.nn.Conv2d(8, 8, 3, groups=8, padding=1)
        self.groups = torch.nn.GroupNorm(2, 8)
        self.batch = torch.nn.BatchNorm2d(8).eval()

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        last = x.contiguous(memory_format=torch.channels_last)
        heads = [t.transpose(1, 2) for t in (q, k, v)]
        found = [
            self.convolution(last), self.deeper(last), self.groups(last), self.batch(last), self.groups(x.mT),
            functional.max_pool2d(last, 2), functional.avg_pool2d(last, 2), functional.interpolate(last, (9, 9)),
            functional.layer_norm(x.mT, (8,)), x.mT.softmax(1), x.permute(3, 1, 0, 2).cumsum(1), x.mT.sort(1).values,
            x.mT.sum(1), x.mT @ x, functional.scaled_dot_product_attention(q, k, v),
            functional.scaled_dot_product_attention(*heads), torch.fft.rfft(x.mT).real,
            torch.cat([last, last], 1), x.mT.flip(1), last.roll(1, 2), functional.pad(last, (1, 1)),
        ]  # fmt: skip
        return tuple(y.exp() for y in found)


X = torch.randn(2, 8, 8, 8)


def wrong(device: str, graph: OpGraph, spec: KernelSpec) -> list[str]:
    """Operators with results that lie otherwise in an eager run."""
    values = evaluate(graph, spec, device)
    found = []
    for node in graph.ops():
        value = values.get(Value(node.name))
        if isinstance(value, Tensor) and any(
            n > 1 and s != t
            for n, s, t in zip(value.shape, graph.meta(Value(node.name)).stride, value.stride(), strict=True)
        ):
            found.append(node.target)
    return found


@pytest.mark.parametrize(
    ("device", "layouts"),
    [("cpu:0", nullcontext), ("cpu:0", OtherLayouts), pytest.param("cuda", nullcontext, marks=pytest.mark.gpu)],
)
def test_a_graph_has_the_strides_of_an_eager_run(device: str, layouts: Callable[[], Any]) -> None:
    spec = KernelSpec.from_module(Layouts(), (X, X, X, X))
    captured = capture_spec(spec, verify=False)
    with layouts(), torch.device(device):
        assert wrong(device, for_device(spec, device, captured), spec) == []
        if layouts is OtherLayouts:
            with pytest.raises(RuntimeError, match="contiguous operand"):
                wrong(device, captured, spec)
