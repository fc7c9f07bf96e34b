"""Programs that replay a recording: with a fake of CUDA graphs here, with real ones on a GPU."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from qimeng.actions import Context, check_action, legal_actions
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import DEVICES
from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.session import Budget
from qimeng.envs.workers.regions import one_by_one
from qimeng.errors import IllegalAction
from qimeng.graph.capture import capture
from qimeng.interfaces import Action, EvaluationRequest, Request
from qimeng.interfaces.records import PatchRecord, program_from_json, program_to_json
from qimeng.planner.greedy import GreedySearch
from qimeng.program.program import Program
from qimeng.recipe import Recipe
from qimeng.testing import FakeCoder, ScriptedPlanner, fake_task

CODER, H200 = TemplateCoder(), DEVICES["h200"]
CONTEXT = Context(H200, CODER)
RECORD = Action("launch", (), "cuda-graph")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.eval()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        z = self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))
        return {"z": z, "sum": z + y}


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, 8, 8), torch.randn(4)


def start(make: Callable[[], nn.Module] = Net, given: Callable[[], tuple[Any, ...]] = inputs) -> Program:
    return Program.start(capture(make, given))


def by(program: Program, action: Action) -> Program:
    return CODER.write(Request(program, action, H200)).apply(program)


class Recorder:
    """A fake of CUDA graphs: a replay computes again what was recorded, from the memory that was there."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def record(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.recorded += 1
        found = function()

        def replay() -> None:
            self.replayed += 1
            for a, b in zip(found, function(), strict=True):
                a.copy_(b)

        return replay, found


def recording(program: Program, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Recorder]:
    """The program's model, recorded by a fake."""
    module, recorder = program.load(), Recorder()
    monkeypatch.setattr(module, "_record", recorder.record)
    monkeypatch.setattr(module, "_may_record", lambda device: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    stream = SimpleNamespace()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    return module.Model(), recorder


@pytest.mark.parametrize("folded", [False, True])
def test_a_replay_follows_inputs_parameters_and_buffers(folded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    program = by(start(), Action("algebra", (), "fold")) if folded else start()
    model, recorder = recording(by(program, RECORD), monkeypatch)
    module, kept = Net(), []
    model.load_state_dict(module.state_dict())

    def agree(times: int) -> None:
        for _ in range(2):
            given = inputs()
            with torch.no_grad():
                want, got = module(*given), model(*given)
            kept.append((want, got))
            for w, g in kept:  # of earlier calls too: results are the caller's own
                assert all(torch.allclose(w[k], g[k], atol=1e-5) and w[k].stride() == g[k].stride() for k in w)
        assert recorder.recorded == times

    agree(1)
    for m in (module, model):
        m.conv.weight.detach().mul_(2)  # in place, seen by the version
    agree(2)
    for m in (module, model):
        m.head.weight = nn.Parameter(m.head.weight.detach() + 1)
    agree(3)
    other = {k: v + 1 if v.is_floating_point() else v for k, v in module.state_dict().items()}
    for m in (module, model):
        m.load_state_dict(other)
    agree(4)
    assert recorder.replayed == 8
    twin = copy.deepcopy(model)
    assert vars(twin)["_qimeng_launch"].replay is None


class Statistics(nn.Module):
    """Norms that update their statistics, one of them returned as it was before the call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(8), nn.BatchNorm1d(8, momentum=0.3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = self.first.get_buffer("running_mean") * 2
        return self.second(torch.relu(self.first(x))), before


def statistics() -> tuple[torch.Tensor]:
    return (torch.randn(16, 8) * 3 + 1,)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_replay_updates_buffers_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = by(start(Statistics, statistics), RECORD)
    if device == "cuda":
        model, recorder = program.load().Model().cuda(), None
    else:
        model, recorder = recording(program, monkeypatch)
        record = recorder.record  # as PyTorch does it: calls that count before the one that is recorded
        made: Callable[..., Any] = lambda function: (function(), record(function))[1]  # noqa: E731
        monkeypatch.setitem(type(model).forward.__globals__, "_record", made)
    module = Statistics().to(device)
    model.load_state_dict(module.state_dict())

    def agree() -> None:
        given = [x.to(device) for x in statistics()]
        with torch.no_grad():
            for want, got in zip(module(*given), model(*given), strict=True):
                assert torch.allclose(want, got, atol=1e-5)
        for key, value in model.state_dict().items():
            assert torch.allclose(value, module.state_dict()[key], atol=1e-5), key

    for _ in range(3):
        agree()
    for m in (module, model):
        m.first.get_buffer("running_mean").fill_(2.0)  # read where it is
    agree()
    assert recorder is None or recorder.recorded == 1
    for m in (module, model):
        m.first.running_mean = torch.ones(8, device=device)
    agree()
    assert recorder is None or recorder.recorded == 2


def test_a_recording_that_fails_leaves_buffers_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = recording(by(start(Statistics, statistics), RECORD), monkeypatch)

    def failing(function: Callable[[], Any]) -> Any:
        function()
        raise RuntimeError("no recording")

    monkeypatch.setitem(type(model).forward.__globals__, "_record", failing)
    model.load_state_dict(Statistics().state_dict())
    with torch.no_grad(), pytest.raises(RuntimeError, match="no recording"):
        model(*statistics())
    assert all(torch.equal(value, Statistics().state_dict()[key]) for key, value in model.named_buffers())


def test_guards_stay_and_other_shapes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, recorder = recording(by(start(), RECORD), monkeypatch)
    with torch.no_grad(), pytest.raises(ValueError, match="made for shape"):
        model(torch.randn(3, 3, 8, 8), torch.randn(4))
    with torch.no_grad(), pytest.raises(ValueError, match="made for 2 inputs"):
        model(torch.randn(2, 3, 8, 8))
    assert recorder.recorded == 0


def test_a_stream_waits_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = recording(by(start(), RECORD), monkeypatch)
    waited: list[Any] = []
    streams = [SimpleNamespace(number=i, wait_stream=waited.append) for i in range(2)]
    for turn in (0, 0, 1):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda turn=turn: streams[turn])
        with torch.no_grad():
            model(*inputs())
    assert waited == [streams[0]]


def test_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    model, recorder = recording(by(start(), RECORD), monkeypatch)
    module, record = Net(), recorder.record
    model.load_state_dict(module.state_dict())

    def slow(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        replay, found = record(function)
        return lambda: (time.sleep(0.01), replay())[1], found  # time for the other thread to write its inputs

    monkeypatch.setitem(type(model).forward.__globals__, "_record", slow)

    def agree(number: int) -> bool:
        given = inputs()
        with torch.no_grad():
            return torch.allclose(model(*given)["z"], module(*given)["z"], atol=1e-5)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(agree, range(12)))


def test_what_was_prepared_lives_as_long_as_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = recording(by(by(start(), Action("algebra", (), "fold")), RECORD), monkeypatch)
    with torch.no_grad():
        model(*inputs())
    (prepared,) = vars(model)["_qimeng_prepared"]
    held = weakref.ref(prepared.buffers[0])
    prepared.buffers = ()  # as a call outside of the recording leaves it, with other parameters
    assert held() is not None


def test_it_runs_kernel_by_kernel_where_nothing_can_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    program = by(start(), RECORD)
    model, given = program.load().Model(), inputs()
    with torch.no_grad():
        assert model(*given)["z"].shape == (2, 4)
    model, recorder = recording(program, monkeypatch)
    with torch.no_grad():
        one_by_one(model, given)
        assert recorder.recorded == 0
        model(*given)
        assert recorder.recorded == 1


class Two(nn.Module):
    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function, self.norm = function, nn.BatchNorm1d(4)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


X = (8, 4)
REFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "random": (lambda m, x: torch.dropout(x, 0.5, True) * 2, (torch.empty(X),), "random numbers"),
    "mask": (
        lambda m, x: torch.index_put(x * 2, (x[:, 0] > 0, torch.tensor(1)), x.sum()),
        (torch.empty(X),),
        "wait for the GPU",
    ),
    "an input": (lambda m, x: (x * 2, x.t()), (torch.empty(X),), "the memory of"),
    "bits of an input": (lambda m, x: x.view(torch.int32), (torch.empty(X),), "the memory of"),
    "two views": (lambda m, x: (lambda y: (y, y.t()))(x * 2), (torch.empty(X),), "views of the same memory"),
    "a number": (lambda m, x, a: x * a, (torch.empty(X), 2.0), "Python number"),
    "large": (
        lambda m, x: torch.tanh(x),
        (torch.empty(1 << 16, 4096),),
        "copying inputs and results moves 4294967296 B",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name: str) -> None:
    function, given, reason = REFUSED[name]
    program = start(
        lambda: Two(function), lambda: tuple(torch.empty_like(x) if isinstance(x, torch.Tensor) else x for x in given)
    )
    with pytest.raises(IllegalAction, match=reason):
        check_action(program, RECORD, CONTEXT)
    if name != "large":  # slow, but right
        with pytest.raises(IllegalAction, match=reason):  # so that no stored patch gets past it
            PatchRecord(launch="cuda-graph").patch(program.graph).apply(program)


def test_indices_that_are_numbers_wait_for_nothing() -> None:
    program = start(lambda: Two(lambda m, x: (x * 2)[torch.arange(3)]), lambda: (torch.empty(X),))
    assert RECORD in legal_actions(program, CONTEXT)


def test_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    program = start()
    assert RECORD in legal_actions(program, CONTEXT)
    after = by(program, RECORD)
    assert after.launch == "cuda-graph" and after.digest != program.digest and not after.on_pytorch
    back = Action("launch", (), "one-by-one")
    assert back in legal_actions(after, CONTEXT) and RECORD not in legal_actions(after, CONTEXT)
    assert by(after, back).digest == program.digest and by(after, back).source == program.source
    with pytest.raises(IllegalAction, match="needs CUDA"):
        check_action(program, RECORD, Context(DEVICES["h200"].__class__(**{**vars(H200), "kind": "cpu"}), CODER))


def test_it_is_judged_stored_and_replayed() -> None:
    program = start()
    task = fake_task(program.graph)
    result = optimize(task, GreedySearch(ScriptedPlanner(["lowering", "launch cuda-graph", "fusion"])), Budget(9, 9))
    step = next(s for s in result.steps if s.action == RECORD)
    assert step.accepted and step.evaluation is not None
    after = by(program, RECORD)
    assert program_from_json(program_to_json(after), program.graph).digest == after.digest
    patch = FakeCoder().write(Request(program, RECORD, H200))
    record = PatchRecord.from_json(PatchRecord.of(patch).to_json())
    assert record.patch(program.graph) == patch and record.launch == "cuda-graph"
    assert EvaluationRequest.from_json(EvaluationRequest(program, patch).to_json(), program.graph).patch == patch
    assert Recipe.from_json(result.recipe.to_json()) == result.recipe


@pytest.mark.gpu
@pytest.mark.parametrize("folded", [False, True])
def test_a_recording_on_the_gpu(folded: bool) -> None:
    program = by(start(), Action("algebra", (), "fold")) if folded else start()
    model, module = by(program, RECORD).load().Model().cuda(), Net().cuda()
    model.load_state_dict(module.state_dict())
    kept = []
    with torch.no_grad():
        for number in range(6):
            given = [x.cuda() for x in inputs()]
            kept.append((module(*given), model(*given)))
            if number == 1:
                for m in (module, model):
                    m.conv.weight.mul_(2)
            if number == 3:
                for m in (module, model):
                    m.head.weight = nn.Parameter(m.head.weight + 1)
    for want, got in kept:
        assert all(torch.allclose(want[k], got[k], atol=1e-3) for k in want)
    assert vars(model)["_qimeng_launch"].replay is not None
