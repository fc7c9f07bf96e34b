"""Buffers that a call updates, in nested parts and in numbers, judged like outputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from qimeng.envs.estimate.interpret import Interpreter
from qimeng.envs.judge.reference import References
from qimeng.graph.state import updated_tables
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec


def block(inner: int, out: int, stride: int, last: Callable[[int], nn.Module]) -> nn.Sequential:
    """An inverted bottleneck as EfficientNet's, with a squeeze that leaves one number a channel."""
    wide = 4 * inner
    expand = nn.Sequential(nn.Conv2d(inner, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(inplace=True))
    depth = [nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU(inplace=True)]
    squeeze = [nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, wide // 4, 1), nn.ReLU(), nn.Conv2d(wide // 4, wide, 1)]
    return nn.Sequential(expand, *depth, *squeeze, nn.Sigmoid(), nn.Conv2d(wide, out, 1, bias=False), last(out))


class Stack(nn.Module):
    def __init__(self, last: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4))
        self.mbconv = nn.ModuleList([block(4, 4, 2, last)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for part in self.mbconv:
            x = part(x)
        return torch.flatten(x, 1)


NORMS = {
    "plain": nn.BatchNorm2d,
    "cumulative": lambda n: nn.BatchNorm2d(n, momentum=None),
    "untracked": lambda n: nn.BatchNorm2d(n, track_running_stats=False),
}


@pytest.mark.parametrize("name", ["plain", "cumulative", pytest.param("untracked", marks=pytest.mark.slow)])
def test_running_statistics_of_nested_parts_are_outputs(name: str):
    torch.manual_seed(0)
    spec = KernelSpec.from_module(Stack(NORMS[name]), (torch.rand(5, 3, 12, 12),))
    keys = list(spec.module().state_dict())
    updated = {k for k in keys if k.rsplit(".", 1)[-1] in ("running_mean", "running_var", "num_batches_tracked")}
    assert len(updated) == (12 if name != "untracked" else 9)
    if name == "cumulative":  # reads the number of batches as a Python number: stays on PyTorch
        assert set(References(spec, None, torch.device("cpu")).mutated) == updated
        return
    interpreter = Interpreter(spec)
    program = Program.start(capture_spec(spec))
    # Where all rows are the same, the variance is a matter of rounding: one check in 800 refuses an honest program.
    verdicts = [verdict for _ in range(2) if (verdict := interpreter.check(program).verdict) is not None]
    assert any(verdict.ok for verdict in verdicts), verdicts
    assert set(interpreter._reduced.references.mutated) == updated


class Moving(nn.Module):
    """Adds what it kept of the input before, in a buffer outside the state_dict."""

    def __init__(self, kept: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.register_buffer("kept", torch.zeros(7), persistent=False)
        self.what = kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2 + self.inner.kept
        self.inner.kept.copy_(self.what(x))
        return y


def test_updates_outside_the_state_dict_are_judged_too():
    right, wrong = (Moving(f) for f in (lambda x: x.mean(0), lambda x: x.amax(0)))
    inputs = (torch.randn(5, 7),)
    spec = KernelSpec.from_module(right, inputs)
    graph = capture_spec(spec)
    assert updated_tables(graph) == ("inner.kept",) and not spec.module().state_dict()
    interpreter = Interpreter(spec.with_(updated=updated_tables(graph)))
    verdict = interpreter.check(Program.start(graph)).verdict
    assert verdict is not None and verdict.ok, verdict
    assert interpreter._reduced.references.mutated == ("inner.kept",)
    other = interpreter.check(Program.start(capture_spec(KernelSpec.from_module(wrong, inputs)))).verdict
    assert other is not None and not other.ok, other


def test_a_result_of_no_dimensions_is_judged():
    spec = KernelSpec.from_function(lambda x: (x.softmax(0), x.cumsum(0)), (torch.tensor(2.5),))
    verdict = Interpreter(spec).check(Program.start(capture_spec(spec))).verdict
    assert verdict is not None and verdict.ok, verdict
