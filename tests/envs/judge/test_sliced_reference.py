"""A reference made of some rows at a time says what one made as a whole says, and holds less."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils import _pytree
from torch.utils.weak import WeakIdKeyDictionary

from qimeng.envs.cost import memory_plan as plans
from qimeng.envs.errors import column_errors, error_budget
from qimeng.envs.judge.reference import References
from qimeng.envs.workers import tensor_bits
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from qimeng.spec.dispatch import DispatchMode

CPU = torch.device("cpu")


class Product(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b


class Sums(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sum(-1), x.softmax(-1)


SPECS: dict[str, Callable[[], KernelSpec]] = {
    "pointwise": lambda: KernelSpec.from_module(nn.GELU(), (torch.randn(64, 256),)),
    "convolution": lambda: KernelSpec.from_module(nn.Conv2d(8, 16, 1), (torch.randn(16, 8, 12, 12),)),
    "product": lambda: KernelSpec.from_module(Product(), (torch.randn(128, 64), torch.randn(64, 96))),
    "sums": lambda: KernelSpec.from_module(Sums(), (torch.randn(64, 512),)),
    "square": lambda: KernelSpec.from_module(Product(), (torch.randn(96, 96), torch.randn(96, 96))),
}


def made(spec: KernelSpec, way: str, monkeypatch: pytest.MonkeyPatch, slice_bytes: int = 1 << 16) -> References:
    monkeypatch.setattr(plans, "SLICE_BYTES", slice_bytes)
    found = References(spec, capture_spec(spec), CPU)
    found.plan = replace(found.plan, way=way, tidy=way != "device")
    return found


@pytest.mark.parametrize("name", SPECS)
def test_slices_give_the_values_and_budgets_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS[name]()
    whole, sliced = made(spec, "device", monkeypatch), made(spec, "slices", monkeypatch)
    monkeypatch.setattr("qimeng.envs.errors.float64._signs", lambda shape, like: torch.ones_like(like.new_empty(shape)))
    for trial in whole.trials(4):
        same = sliced.make(trial.draw)
        assert same is not None and sliced.plan.way == "slices" and sliced.kind == "float64"
        for a, b in zip(trial.expected, same.expected, strict=True):
            assert torch.allclose(a.value, b.value, rtol=3e-7, atol=1e-30, equal_nan=True)
            assert b.budget.figures == pytest.approx(a.budget.figures, rel=1e-6)


def test_a_module_that_mixes_rows_is_computed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KernelSpec.from_function(lambda x: x - x.mean(0), (torch.randn(64, 64),))
    refs = made(spec, "slices", monkeypatch)
    (trial,) = refs.trials(1)
    assert refs.plan.way == "steps" and refs.kind == "float64"
    x = refs.inputs(trial.draw)[0].double()
    assert torch.allclose(trial.outputs[0].value, (x - x.mean(0)).float())


def test_code_that_asks_for_the_number_of_rows_is_run_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KernelSpec.from_function(lambda x: x / x.shape[0], (torch.randn(64, 512),))
    refs = made(spec, "slices", monkeypatch)
    (trial,) = refs.trials(1)
    assert refs.plan.way == "steps"
    assert torch.equal(trial.outputs[0].value, (refs.inputs(trial.draw)[0].double() / 64).float())


def test_what_is_refused_for_one_slice_passes_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    refs = made(SPECS["convolution"](), "slices", monkeypatch)
    for trial in refs.trials(4):
        (expected,) = trial.outputs
        wrong = expected.value.clone()
        wrong[-1, -1, -1, -1] += 1 + wrong[-1, -1, -1, -1].abs()
        assert error_budget.check(expected.value, expected)[1] is None
        assert error_budget.check(wrong, expected)[1] is not None


class Held(DispatchMode):
    """The most bytes of tensors that were alive at a time; memory that several share is counted once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.most = WeakIdKeyDictionary(), 0

    def call(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for x in _pytree.tree_leaves(found):
            if isinstance(x, torch.Tensor):
                self.alive[x] = True
        held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in self.alive}
        self.most = max(self.most, sum(held.values()))
        return found


def most_held(refs: References) -> float:
    """Bytes at the peak of making a trial, over those of inputs and outputs."""
    watch = Held()
    draw = refs._new_draw("given", None)
    with watch:
        refs.make(draw)
    return watch.most / (refs.input_bytes + sum(refs.output_bytes))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is a block of a large output is one of a small output here."""
    monkeypatch.setattr(tensor_bits.blocks, "__defaults__", (1 << 14,))
    for name in ("accuracy", "error_in_parts", "float64.accuracy"):
        monkeypatch.setattr(f"qimeng.envs.errors.{name}.BLOCK", 1 << 14)
    monkeypatch.setattr("qimeng.spec.law._BLOCK", 1 << 14)
    monkeypatch.setattr(column_errors, "SAMPLE", 1 << 10)
    column_errors._kept.cache_clear()
    yield
    column_errors._kept.cache_clear()


LARGE = {
    "pointwise": lambda: KernelSpec.from_module(nn.GELU(), (torch.randn(256, 4096),)),
    "convolution": lambda: KernelSpec.from_module(nn.Conv2d(8, 16, 1), (torch.randn(16, 8, 64, 64),)),
    "product": lambda: KernelSpec.from_module(Product(), (torch.randn(2048, 64), torch.randn(64, 512))),
}


@pytest.mark.parametrize("name", LARGE)
def test_slices_hold_less_than_the_whole(name: str, monkeypatch: pytest.MonkeyPatch, small_blocks: None) -> None:
    spec = LARGE[name]()
    most = {way: most_held(made(spec, way, monkeypatch, 1 << 19)) for way in ("device", "steps", "slices")}
    assert most["slices"] < 0.75 * most["steps"] < 0.75 * most["device"], most
    assert most["slices"] < 2.3, most
