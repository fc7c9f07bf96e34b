"""Recordings of whole calls, with a recorder for the CPU that runs the call again into the same memory."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree

from qimeng.integration import Record, settle
from qimeng.integration.calls import key_of
from qimeng.integration.dispatch import Dispatch, FallbackWarning, detach, dispatch_of, take_out
from qimeng.integration.record import PartReport
from qimeng.integration.recording import Recording
from qimeng.integration.whole import Compared
from tests.integration.small_models import Stack, variant

X = torch.randn(4, 8)
recorded: list[int] = []


class OnCpu(Recording):
    kernels = False


def again(function: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
    """Stands for a recording: a replay computes anew and writes into the results of the first time."""
    recorded.append(1)
    returned = function()

    def replay() -> None:
        for old, new in zip(_pytree.tree_leaves(returned), _pytree.tree_leaves(function()), strict=True):
            if isinstance(old, torch.Tensor):
                old.copy_(new)

    return replay, returned


def with_recording(model: nn.Module, *args: Any, **kwargs: Any) -> Recording:
    recorded.clear()
    key = key_of(args, kwargs)
    assert key is not None
    dispatch = dispatch_of(model)
    recording = OnCpu(key, dispatch.original, again)
    dispatch.add(recording)
    return recording


def calls_of(model: nn.Module) -> dict[str, int]:
    dispatch = model.__dict__["forward"]
    assert isinstance(dispatch, Dispatch)
    return dict(dispatch.calls)


@torch.no_grad()
def test_calls_replay_and_results_are_the_callers_own() -> None:
    model = Stack(2).eval()
    wanted = [model(X), model(2 * X)]
    recording = with_recording(model, X)
    first = model(X)
    second = model(2 * X)
    assert torch.equal(first, wanted[0]) and torch.equal(second, wanted[1])
    assert recorded == [1] and recording.refused == "" and calls_of(model) == {"program": 2}
    with pytest.warns(FallbackWarning, match="shapes"):
        assert model(X[:2]).shape == (2, 5)


@torch.no_grad()
def test_new_values_and_new_tensors_are_recorded_anew() -> None:
    model, other = Stack(2).eval(), Stack(2).eval()
    with_recording(model, X)
    model(X)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(X), other(X)) and recorded == [1, 1]
    model.head = copy.deepcopy(other.head)
    detach(model)
    with_recording(model, X)
    assert torch.equal(model(X), other(X)) and recorded == [1]
    assert torch.equal(model(X), other(X)) and recorded == [1]


@torch.no_grad()
def test_memory_that_is_swapped_below_a_parameter_is_recorded_anew() -> None:
    model, other = Stack(2).eval(), Stack(2).eval()
    with_recording(model, X)
    model(X)
    for mine, new in zip(model.parameters(), other.parameters(), strict=True):
        mine.data = new.data.clone()  # which no version counts
    assert torch.equal(model(X), other(X)) and recorded == [1, 1]


@torch.no_grad()
def test_programs_of_parts_are_recorded_with_the_rest() -> None:
    model = Stack(2).eval()
    wanted = model(X)
    layer = model.layers[0]
    program = bound(layer, variant(layer, X, mask=X > 0))
    dispatch_of(layer).add(program)
    with_recording(model, X)
    assert torch.allclose(model(X), wanted, atol=1e-5)
    ran = calls_of(layer)["program"]
    model(X)
    assert ran >= 2 and calls_of(model) == {"program": 2}


def bound(module: nn.Module, found: Any) -> Any:
    assert found.bind(module)
    return found


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1  # type: ignore[operator]
        return x + self.calls


class Wide(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], Any]):
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Counts(), "changes inputs, parameters or buffers"),
        (Wide(lambda x: x.add_(1)), "changes inputs, parameters or buffers"),
        (Wide(lambda x: x + torch.rand(4, 8)), "draws random numbers"),
        (Wide(lambda x: x.t()), "share memory"),
        (Wide(lambda x: (x + 1).split(2)), "share memory"),
        (Wide(lambda x: (x + 1, slice(3))), "returns a slice"),
    ],
)
@torch.no_grad()
def test_what_a_replay_cannot_stand_for_runs_the_modules_own_code(model: nn.Module, why: str) -> None:
    wanted = copy.deepcopy(model)
    recording = with_recording(model, X)
    torch.manual_seed(3)
    model(X.clone())
    assert why in recording.refused and recorded == []
    if "random" not in why and not isinstance(model, Counts):
        found, right = (_pytree.tree_leaves(m(X.clone())) for m in (model, wanted))
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True) if isinstance(a, torch.Tensor))
    model(X.clone())
    assert recorded == []


@torch.no_grad()
def test_where_recording_fails_the_modules_own_code_answers() -> None:
    model = Stack(1).eval()
    wanted, recording = model(X), with_recording(model, X)

    def fails(function: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        raise RuntimeError("CUDA error: operation not permitted")

    recording.recorder = fails
    assert torch.equal(model(X), wanted) and torch.equal(model(X), wanted)
    assert "recording failed (CUDA error" in recording.refused


@torch.no_grad()
def test_copies_and_pickles_record_for_themselves() -> None:
    model = Stack(1).eval()
    wanted = model(X)
    with_recording(model, X)
    model(X)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        recorded.clear()
        assert torch.equal(other(X), wanted) and recorded == [1]
        other.head.weight.zero_()
        assert not torch.equal(other(X), wanted) and torch.equal(model(X), wanted)


@torch.no_grad()
def test_taken_out_it_leaves_what_was_there() -> None:
    model = Stack(1).eval()
    program = bound(model, variant(model, X[:2]))
    key = with_recording(model, X).key
    take_out(model, key)
    assert "forward" not in model.__dict__
    dispatch_of(model).add(program)
    with_recording(model, X)
    take_out(model, key)
    assert list(model.__dict__["forward"].variants) == [key_of((X[:2],), {})]


GOOD, SLOW = Compared(0.0, 0.01, True, 2.0, 1.0), Compared(0.001, 0.01, True, 1.0, 2.0)


@pytest.mark.parametrize(
    ("compared", "kept", "speedup", "note"),
    [
        ([GOOD, Compared(0.0, 0.01, True, 2.0, 0.5)], True, 4.0, "recorded as a CUDA graph and replayed"),
        ([GOOD, Compared(0.0, 0.01, True, 2.0, 0.99)], True, 2.0, ""),
        ([SLOW, SLOW, SLOW], False, 1.0, "slower with the programs (0.50 x eager), so that all were taken out"),
        ([SLOW, SLOW, Compared(0.0, 0.01, True, 1.0, 0.5)], False, 2.0, "recorded as a CUDA graph and replayed"),
        ([SLOW, Compared(0.0, 0.01, True, 1.0, 0.5)], True, 2.0, "recorded as a CUDA graph and replayed"),
        ([Compared(0.5, 0.01, False)], False, None, "differ from the model by 0.5"),
    ],
)
def test_what_is_right_and_fastest_stays(
    compared: list[Compared], kept: bool, speedup: float | None, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, original, left = Stack(1).eval(), Stack(1).eval(), list(compared)
    layer = model.layers[0]
    found = bound(layer, variant(layer, X, mask=X > 0))
    dispatch_of(layer).add(found)
    record = Record(
        model, "h100", [PartReport(("layers.0",), "Block", found.key, 1.0, "", 2.0, False, False, 1.0, "", found)]
    )
    monkeypatch.setattr(settle, "_compared", lambda *_: left.pop(0))
    monkeypatch.setattr(settle, "all", lambda _: True, raising=False)
    settle.settle(record, original, (X,), {})
    assert left == []
    assert ("forward" in layer.__dict__) == kept and (record.parts[0].variant is not None) == kept
    assert record.speedup == speedup
    replayed = record.recorded
    assert replayed == ("replayed" in note) and (note in " ".join(record.notes))
