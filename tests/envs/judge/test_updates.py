"""Buffers that a call updates, in nested parts and in numbers, judged like outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qimeng.envs.errors import error_budget
from qimeng.envs.estimate.interpret import Interpreter
from qimeng.envs.judge.reference import References
from qimeng.envs.judge.region_reference import RegionReference
from qimeng.envs.judge.region_spec import region_spec
from qimeng.envs.workers.worker import Worker
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


def exactly(x: torch.Tensor) -> torch.Tensor:
    return x.double().mean(0).to(x.dtype)


def in_blocks(x: torch.Tensor) -> torch.Tensor:
    parts = x.view(1024, -1, x.shape[1])
    return sum(sum(parts.unbind(0)).unbind(0)) / len(x)


class Statistics(nn.Module):
    """Keeps the mean of what has none, since a normalization comes before it.

    Args:
        mean: adds all rows.
        update: makes the next running mean of the last one, of the rows and of their mean.
    """

    def __init__(self, mean: Callable[[torch.Tensor], torch.Tensor], update: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.mean, self.update = mean, update
        self.mix = nn.Linear(8, 16, bias=False)
        self.register_buffer("running_mean", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - self.mean(x)
        y = self.mix(x * torch.rsqrt(self.mean(x * x) + 1e-5))
        self.running_mean.copy_(self.update(self.running_mean, y, self.mean(y)))
        return y.relu()


UPDATES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "right": lambda kept, y, mean: 0.9 * kept + 0.1 * mean,
    "momentum": lambda kept, y, mean: 0.8 * kept + 0.2 * mean,
    "forgotten": lambda kept, y, mean: kept.clone(),
    "twice": lambda kept, y, mean: 0.81 * kept + 0.19 * mean,
    "a_row_missing": lambda kept, y, mean: 0.9 * kept + 0.1 * y[1:].sum(0) / len(y),
    "of_magnitudes": lambda kept, y, mean: 0.9 * kept + 0.1 * y.abs().mean(0),
}


@pytest.mark.parametrize("name", UPDATES)
def test_a_mean_that_is_all_rounding_may_be_added_in_any_order_and_not_be_wrong(name: str) -> None:
    torch.manual_seed(0)
    module = Statistics(exactly, UPDATES["right"])
    spec = KernelSpec.from_module(module, (torch.rand(2048, 8),), training=True).with_(accepts_any=True)
    refs, candidate = References(spec, None, torch.device("cpu")), Statistics(in_blocks, UPDATES[name])
    at_once, looked = [], []
    for trial in refs.trials(2):
        candidate.load_state_dict(refs.state(trial.draw))
        with torch.no_grad():
            candidate(*refs.inputs(trial.draw))
        error, text = error_budget.check(candidate.running_mean, trial.expected[1])
        at_once.append(text is None)
        looked.append(text is None or refs.look_again(trial, 1, candidate.running_mean, error) is not None)
    assert not all(at_once)
    assert all(looked) == (name == "right")


def test_a_region_that_makes_what_a_buffer_gets_may_add_in_any_order_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    parts = [nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16)]
    spec = KernelSpec.from_module(nn.Sequential(*parts), (torch.rand(256, 8),), training=True).with_(accepts_any=True)
    graph, cpu = capture_spec(spec), torch.device("cpu")
    program = Program.start(graph)
    mean = dict(graph.mutations)["3.running_mean"]
    region = next(r for r in program.regions if mean in r.outputs)
    number, output = region.outputs.index(mean), next(i for i, v in enumerate(region.outputs) if v.port == 0)
    whole, alone = References(spec, graph, cpu), region_spec(spec, program, region, "cpu")
    monkeypatch.setattr(whole, "timed_parameter_seed", lambda: None)
    part = RegionReference(whole, program, region, str(tmp_path))
    refs = References(alone.spec, alone.program.graph, cpu)
    trial = next(iter(refs.trials(1)))

    def allowed(expected: error_budget.Expected, look: Callable[..., object], number: int, off: float) -> bool:
        error, text = error_budget.check(actual := expected.value + off, expected)
        return text is None or look(number, actual, error) is not None

    for expected, look in (
        (part.expected, part.look_again),
        (trial.outputs, lambda *found: refs.look_again(trial, *found)),
    ):
        assert expected[number].value.abs().max() < 1e-7, "the last output has no mean"
        assert allowed(expected[number], look, number, 4e-8)
        assert not allowed(expected[number], look, number, 1e-4)
        assert not allowed(expected[output], look, output, 1e-2)


def test_the_state_is_walked_a_few_times_however_many_buffers_a_call_updates(monkeypatch: pytest.MonkeyPatch):
    """A walk takes as long as there are tensors: one for each buffer took seconds in each trial of a DenseNet."""
    spec = KernelSpec.from_module(nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(30))), (torch.randn(8, 4),))
    refs = References(spec, None, torch.device("cpu"))
    worker = Worker(spec, torch.device("cpu"))
    worker.load("")
    walks: list[nn.Module] = []

    def walked(module: nn.Module, *arguments: Any, **named: Any) -> Any:
        walks.append(module)
        return whole(module, *arguments, **named)

    whole = nn.Sequential.state_dict
    monkeypatch.setattr(nn.Sequential, "state_dict", walked)
    trial = next(iter(refs.trials(1)))
    assert len(refs.mutated) == 90 and len(walks) < 20
    walks.clear()
    monkeypatch.setattr(worker, "_check_seal", lambda: None)  # a method was replaced, by this test
    worker.trial(0, trial.draw, refs.mutated, refs.output_bytes)
    assert len(walks) < 20
