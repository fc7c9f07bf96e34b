"""`qimeng.optimize` on whole models, with the fakes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qimeng
from qimeng.errors import SpecError
from qimeng.integration import PartReport, Record, optimize
from qimeng.integration.dispatch import FallbackWarning
from qimeng.program.program import Program
from qimeng.testing import FakeEvaluator
from tests.integration.small_models import Block, Stack, fakes

X = torch.randn(4, 8)
LAYERS = ["layers.*"]


def record_of(model: nn.Module) -> Record:
    found = vars(model)["qimeng"]
    assert isinstance(found, Record)
    return found


@torch.no_grad()
def test_equal_layers_are_optimized_once_and_all_run_the_program() -> None:
    model, seen = Stack(3).eval(), list[PartReport]()
    fast = optimize(model, (X,), parts=LAYERS, seconds=40, on_part=seen.append, **fakes())
    assert [(part.names, part.kind) for part in seen] == [(("layers.0", "layers.1", "layers.2"), "Block")]
    assert torch.allclose(fast(X), model(X), atol=1e-5)
    assert record_of(fast).calls == {f"layers.{i}": {"program": 1} for i in range(3)}
    report = record_of(fast).report()
    assert "| layers.0 (Block) | 3 |" in report and "optimized in evaluation mode" in report


@torch.no_grad()
def test_the_original_is_left_as_it_was_and_shares_its_tensors() -> None:
    model = Stack(2).eval()
    fast = optimize(model, (X,), parts=LAYERS, seconds=40, **fakes())
    assert type(fast) is Stack and fast is not model
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert list(fast.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(fast.parameters(), model.parameters(), strict=True))
    model.layers[0].linear.weight.mul_(2)  # type: ignore[union-attr, operator]
    assert torch.allclose(fast(X), model(X), atol=1e-5)


@torch.no_grad()
def test_in_place_and_back() -> None:
    model = Stack(2).eval()
    wanted = model(X)
    assert optimize(model, (X,), seconds=40, inplace=True, **fakes()) is model
    assert torch.allclose(model(X), wanted, atol=1e-5) and record_of(model).calls == {"": {"program": 1}}
    record_of(model).restore()
    assert not any("forward" in m.__dict__ for m in model.modules())
    assert torch.equal(model(X), wanted)


@torch.no_grad()
def test_layers_that_differ_get_programs_of_their_own() -> None:
    model = Stack(3).eval()
    model.layers[1].norm.eps = 0.5  # type: ignore[union-attr]
    fast = optimize(model, (X,), parts=LAYERS, seconds=60, **fakes())
    assert sorted(p.names for p in record_of(fast).parts) == [("layers.0", "layers.2"), ("layers.1",)]
    assert torch.allclose(fast(X), model(X), atol=1e-5)


@torch.no_grad()
def test_several_kinds_of_calls_and_a_fallback_for_others() -> None:
    model = Stack(2).eval()
    fast = optimize(model, [(X,), (X[:2],)], parts=LAYERS, seconds=60, **fakes())
    for x in (X, X[:2]):
        assert torch.allclose(fast(x), model(x), atol=1e-5)
    assert record_of(fast).calls == {f"layers.{i}": {"program": 2} for i in range(2)}
    with pytest.warns(FallbackWarning):
        assert torch.equal(fast(X[:3]), model(X[:3]))


def test_training_code_works_and_calls_leave_no_trace() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
    before = copy.deepcopy(model.state_dict())
    fast = optimize(model, (X,), seconds=40, **fakes())
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    fast(X).sum().backward()
    assert model[0].weight.grad is not None  # type: ignore[union-attr]


@torch.no_grad()
def test_programs_that_are_wrong_together_are_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qimeng.integration.whole.HALF", -1.0)
    model = Stack(2).eval().bfloat16()
    fast = optimize(model, (X.bfloat16(),), parts=LAYERS, seconds=40, **fakes())
    assert not record_of(fast).calls and any("taken out" in note for note in record_of(fast).notes)


@torch.no_grad()
def test_what_cannot_be_optimized_stays_and_says_why() -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if float(x.sum()) > 0 else x

    fast = optimize(Branching(), (X,), seconds=20, **fakes())
    (part,) = record_of(fast).parts
    assert part.variant is None and "depends on the values of a tensor" in part.reason
    assert torch.equal(fast(X), Branching()(X))

    def wrong(program: Program) -> str | None:
        return "wrong on purpose"

    fast = optimize(Block().eval(), (X,), seconds=20, **(fakes() | {"evaluator": FakeEvaluator(wrong=wrong)}))
    (part,) = record_of(fast).parts
    assert part.variant is None and part.reason


@torch.no_grad()
def test_a_second_process_takes_programs_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = lambda spec, start, context, **unused: FakeEvaluator(context.device, estimated=True)  # noqa: E731
    monkeypatch.setattr("qimeng.envs.steps.setup.make_evaluator", fake)
    options: dict[str, Any] = {"planner": "heuristic", "search": "greedy", "cache": tmp_path / "cache"}
    first = optimize(Stack(2).eval(), (X,), seconds=60, device="h100", **options)
    monkeypatch.setattr("qimeng.integration.models.plan_and_code", None)  # any search would fail
    second = optimize(Stack(2).eval(), (X * 2,), seconds=60, device="h100", **options)
    (a,), (b,) = record_of(first).parts, record_of(second).parts
    assert not a.cached and b.cached and a.headline == b.headline
    assert [p.name for p in (tmp_path / "cache").iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"example_inputs": ()}, "example inputs are needed"),
        ({"example_inputs": X}, "must be a tuple, a dict, or a list of those; got Tensor"),
        ({"example_inputs": (object(),)}, "must be tensors and plain data"),
        ({"example_inputs": [(X,)], "kwargs": {"mask": X}}, "kwargs go with one call"),
        ({"example_inputs": (X,), "seconds": float("nan")}, "seconds must be a number from 0 on, got nan"),
        ({"example_inputs": (X,), "parts": ["nothing"]}, "fits no submodule"),
        ({"example_inputs": (X,), "seconds": 1, "planner": "x"}, "unknown planner 'x'"),
        ({"example_inputs": (X,), "seconds": 1, "search": "x"}, "unknown search 'x'"),
        ({"example_inputs": (X,), "seconds": 1, "coder": "x"}, "unknown coder 'x'"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((SpecError, ValueError), match=message):
        optimize(Stack(1).eval(), **arguments)


def test_a_function_is_refused_with_what_takes_it() -> None:
    with pytest.raises(SpecError, match="for a function: plan_and_code"):
        qimeng.optimize(torch.relu, (X,))  # type: ignore[arg-type]


def test_a_model_that_cannot_be_copied_says_what_to_do() -> None:
    model = Stack(1).eval()
    model.lock = (i for i in ())  # type: ignore[assignment]
    with pytest.raises(SpecError, match="inplace=True"):
        optimize(model, (X,), **fakes())


@torch.no_grad()
def test_a_model_that_cannot_be_copied_is_optimized_in_place() -> None:
    model = Stack(2).eval()
    model.lock = (i for i in ())  # type: ignore[assignment]
    wanted = model(X)
    optimize(model, (X,), parts=LAYERS, seconds=40, inplace=True, **fakes())
    assert torch.allclose(model(X), wanted, atol=1e-5)
    assert record_of(model).calls and any("not timed: it cannot be copied" in note for note in record_of(model).notes)


@torch.no_grad()
def test_a_module_that_updates_what_is_not_in_its_state_keeps_its_own_code() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return torch.relu(x * 2) + 1

    model = Counting().eval()
    fast = optimize(model, (X,), seconds=20, **fakes())
    (part,) = record_of(fast).parts
    assert part.variant is None and part.reason
    assert float(fast.calls) == 0  # type: ignore[arg-type]
    fast(X)
    assert float(fast.calls) == 1  # type: ignore[arg-type]


@torch.no_grad()
def test_programs_that_were_taken_out_are_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qimeng.integration.whole.HALF", -1.0)
    fast = optimize(Stack(2).eval().bfloat16(), (X.bfloat16(),), parts=LAYERS, seconds=40, **fakes())
    assert all(part.variant is None and part.reason for part in record_of(fast).parts)
