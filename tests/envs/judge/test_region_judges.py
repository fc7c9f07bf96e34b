"""A region of a network judged alone: its own specification, the same judge, what reaches it in an eager run."""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qimeng.device_lock import DeviceLock
from qimeng.envs.judge import region_judges, region_values
from qimeng.envs.judge.device_turns import DeviceTurns
from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.envs.judge.region_judges import RegionJudges
from qimeng.envs.judge.region_spec import RegionSpec, region_spec
from qimeng.envs.judge.verdicts import Verdict
from qimeng.errors import IllegalAction
from qimeng.graph.rewrites import find_rewrites
from qimeng.interfaces import Asked, Evaluation, EvaluationRequest, Gate, Patch, Scope, SerialEvaluator
from qimeng.interfaces.faults import LEFT_ASIDE
from qimeng.program.program import Implementation, Program
from qimeng.program.verify import capture_spec
from qimeng.spec import EXAMPLES, KernelSpec, perturb_parameters
from qimeng.spec.source import Source

PATIENCE_S = 60.0


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = torch.nn.Linear(32, 48), torch.nn.BatchNorm1d(48), torch.nn.Linear(48, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.relu(self.norm(self.first(x)))
        top, at = torch.max(self.second(h), -1)
        return top * 2 + h.sum(-1), at


@pytest.fixture(scope="module")
def spec() -> KernelSpec:
    torch.manual_seed(0)
    return KernelSpec.from_module(Net().eval(), (torch.randn(16, 32),))


@pytest.fixture(scope="module")
def program(spec: KernelSpec) -> Program:
    return Program.start(capture_spec(spec))


def named(program: Program, label: str) -> str:
    return next(r.id for r in program.regions if r.label() == label)


def in_torch(body: str) -> Implementation:
    return Implementation("torch", f"import torch\n\ndef entry(*a):\n    return {body}\n", "entry")


# ---- the specification


def test_a_region_computes_what_its_program_does_on_what_reaches_it(spec: KernelSpec, program: Program) -> None:
    x = spec.inputs(0, "cpu", EXAMPLES)[0]
    module = spec.module()
    h = torch.relu(module.norm(module.first(x)))
    alone = region_spec(spec, program, program.region(named(program, "sum")), "cpu")
    assert torch.equal(alone.spec.inputs(0, "cpu", EXAMPLES)[0], h)
    assert torch.equal(alone.spec.module()(h)[0], h.sum(-1))
    both = region_spec(spec, program, program.region(named(program, "max")), "cpu")
    assert [y.dtype for y in both.spec.module()(*both.spec.inputs(7))] == [torch.float32, torch.int64]
    assert both.spec.mode == spec.mode and both.spec.training is spec.training


def test_its_program_takes_the_same_parameters_under_the_same_names(spec: KernelSpec, program: Program) -> None:
    label = "_native_batch_norm_legit_no_training"
    alone = region_spec(spec, program, program.region(named(program, label)), "cpu")
    module = alone.spec.module()
    assert set(module.state_dict()) == {f"norm.{n}" for n in ("weight", "bias", "running_mean", "running_var")}
    perturb_parameters(module, 3)
    model = alone.program.load().Model().eval()
    model.load_state_dict(module.state_dict())
    inputs = alone.spec.inputs(5)
    assert torch.equal(model(*inputs)[0], module(*inputs)[0])


def test_what_depends_on_parameters_alone_is_computed_once(spec: KernelSpec, program: Program) -> None:
    rewritten = program.with_rewrites(find_rewrites(program.graph, "fold")[0])
    once = {v for r in rewritten.regions if rewritten.is_settled(r) for v in r.outputs}
    region = next(r for r in rewritten.called if once & set(r.inputs))
    alone = region_spec(spec, rewritten, region, "cpu")
    module, inputs = alone.spec.module(), alone.spec.inputs(5)
    with torch.autograd.profiler.profile() as first:
        before = module(*inputs)[0]
    with torch.autograd.profiler.profile() as second:
        assert torch.equal(module(*inputs)[0], before)
    assert len(second.function_events) < len(first.function_events)
    perturb_parameters(module, 3)
    after = module(*inputs)[0]
    assert not torch.equal(after, before)
    model = alone.program.load().Model()
    model.load_state_dict(module.state_dict())
    assert torch.allclose(model(*inputs)[0], after)


def test_it_travels_and_needs_only_torch(spec: KernelSpec, program: Program) -> None:
    alone = region_spec(spec, program, program.regions[0], "cpu").spec
    text = alone.to_bytes()
    assert KernelSpec.from_bytes(text).digest == alone.digest
    homes: set[str] = set()

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            homes.add(module.partition(".")[0])
            return super().find_class(module, name)

    Reader(io.BytesIO(text)).load()
    assert {"qimeng", "torch"} <= homes <= {"qimeng", "torch", "builtins", "collections", "copyreg", "_codecs"}


def test_large_values_travel_as_a_law_that_every_process_draws_alike(
    spec: KernelSpec, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_values, "LARGE_BYTES", 1 << 10)
    region = program.region(named(program, "relu"))
    whole, alone = region_spec(spec, program, region, "cpu").spec, KernelSpec.from_bytes
    (drawn,), (seen,) = whole.inputs(0, "cpu", EXAMPLES), region_spec(spec, program, region, "cpu").spec.inputs(0)
    assert not torch.equal(drawn, seen)
    monkeypatch.setattr(region_values, "LARGE_BYTES", 1 << 20)
    (captured,) = region_spec(spec, program, region, "cpu").spec.inputs(0, "cpu", EXAMPLES)
    assert (drawn.shape, drawn.stride(), drawn.dtype) == (captured.shape, captured.stride(), captured.dtype)
    assert float(drawn.mean()) == pytest.approx(float(captured.mean()), abs=0.2)
    assert captured.min() <= drawn.min() and drawn.max() <= captured.max()
    monkeypatch.setattr(region_values, "LARGE_BYTES", 1 << 10)
    linear = region_spec(spec, program, program.regions[0], "cpu").spec
    other = alone(linear.to_bytes())
    assert len(linear.to_bytes()) < 50_000 and other.digest == linear.digest
    state = linear.module().state_dict()
    assert state["first.weight"].shape == (48, 32)
    assert all(torch.equal(state[key], value) for key, value in other.module().state_dict().items())
    assert torch.equal(other.inputs(0, "cpu", EXAMPLES)[0], linear.inputs(0, "cpu", EXAMPLES)[0])


def test_an_index_keeps_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_values, "LARGE_BYTES", 1 << 10)
    table, at = torch.randn(64, 32), torch.randint(0, 64, (512,))
    spec = KernelSpec.from_function(lambda table, at: torch.nn.functional.embedding(at, table) * 2, (table, at))
    program = Program.start(capture_spec(spec))
    found = region_spec(spec, program, program.regions[0], "cpu").spec
    assert not found.accepts_any
    assert sorted(x.numel() for x in found.inputs(0, "cpu", EXAMPLES)) == [512, 2048]
    assert any(torch.equal(x, table) for x in found.inputs(0, "cpu", EXAMPLES))


def test_experts_that_a_row_chooses_stay_all_different() -> None:
    def shares(logits: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.topk(torch.softmax(logits, -1), 2)
        return torch.zeros_like(logits).scatter(1, chosen, weights)

    spec = KernelSpec.from_function(shares, (torch.randn(64, 8),))
    program = Program.start(capture_spec(spec))
    alone = region_spec(spec, program, program.region(named(program, "scatter")), "cpu").spec
    own, other = (next(x for x in alone.inputs(3, "cpu", d) if x.dtype == torch.int64) for d in (EXAMPLES, "given"))
    assert not torch.equal(own, other) and bool((other[:, 0] != other[:, 1]).all())
    assert {*other.flatten().tolist()} <= set(range(8))


# ---- the judges


class Fake(SerialEvaluator):
    def __init__(self, name: str, log: list[str]):
        self.label, self.log = name, log

    def answer(self, request: EvaluationRequest) -> Evaluation:
        most = "" if request.library_seconds is None else f" within {request.library_seconds:.0f} s"
        self.log.append(f"{self.label} {request.asked.value}{most}")
        return Evaluation(Gate.PASSED)

    def close(self) -> None:
        self.log.append(f"close {self.label}")


def test_requests_go_to_the_region_or_to_the_whole(
    spec: KernelSpec, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_judges, "OPEN", 2)
    log: list[str] = []

    def make(alone: RegionSpec) -> Fake:
        return Fake(alone.region.label(), log)

    judges = RegionJudges(Fake("whole", log), spec, make, "cpu")

    def ask(label: str, asked: Asked) -> Evaluation:
        patch = Patch(target=named(program, label), alternatives=(in_torch("a"),))
        return judges.ask(EvaluationRequest(program, patch, asked, library_seconds=9.0))

    assert ask("relu", Asked.REGION).scope is Scope.REGION
    assert ask("relu", Asked.TIMING).scope is Scope.PROGRAM
    for label in ("relu", "mul", "sum", "relu"):
        ask(label, Asked.REGION)
    assert log == [
        "relu timing within 9 s", "whole timing within 9 s", "relu timing within 9 s", "mul timing within 9 s",
        "close relu", "sum timing within 9 s", "close mul", "relu timing within 9 s",
    ]  # fmt: skip
    judges.close()
    assert log[-1] == "close whole" and {"close sum", "close relu"} <= set(log[8:])


def test_waiting_for_the_device_and_opening_a_judge_are_counted(
    spec: KernelSpec, program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A benchmark's clock stops while others hold the GPU: a wait that is not counted is taken from the budget."""

    def slow(alone: RegionSpec) -> Fake:
        time.sleep(0.03)
        return Fake("region", [])

    lock = DeviceLock(str(tmp_path / "lock"))
    monkeypatch.setattr(DeviceLock, "_join", lambda lock: time.sleep(0.05))
    judges = RegionJudges(Fake("whole", []), spec, slow, "cpu", DeviceTurns(lock))
    patch, began = Patch(target=named(program, "relu"), alternatives=(in_torch("a"),)), time.perf_counter()
    judges.ask(EvaluationRequest(program, patch, Asked.REGION))
    took, seconds = time.perf_counter() - began, judges.report.seconds
    assert seconds["wait"] >= 0.05 and seconds["start"] >= 0.03 and seconds["reference"] > 0
    assert sum(seconds.values()) <= took
    judges.close()


def test_no_judge_is_opened_for_what_a_library_has_not_compiled(spec: KernelSpec, program: Program) -> None:
    class Waiting(Fake):
        def left_aside(self, request: EvaluationRequest) -> Evaluation | None:
            return None if request.library_seconds else Evaluation(Gate.COMPILE, "left aside", LEFT_ASIDE)

    opened: list[str] = []

    def make(alone: RegionSpec) -> Fake:
        opened.append(alone.region.label())
        return Fake("region", [])

    judges = RegionJudges(Waiting("whole", []), spec, make, "cpu")
    patch = Patch(target=named(program, "relu"), alternatives=(in_torch("a"),))
    found = judges.ask(EvaluationRequest(program, patch, Asked.REGION, library_seconds=0.0))
    assert found.failure == LEFT_ASIDE and found.scope is Scope.REGION and not opened
    assert judges.ask(EvaluationRequest(program, patch, Asked.REGION, library_seconds=9.0)).ok and opened == ["relu"]
    judges.close()


def test_a_region_that_cannot_be_judged_alone_is_judged_in_its_program(spec: KernelSpec, program: Program) -> None:
    log: list[str] = []
    tries: list[int] = []

    def refuse(alone: RegionSpec) -> Fake:
        tries.append(1)
        raise IllegalAction("no such luck")

    judges = RegionJudges(Fake("whole", log), spec, refuse, "cpu")
    patch = Patch(target=named(program, "relu"), alternatives=(in_torch("a"),))
    for _ in range(2):
        found = judges.ask(EvaluationRequest(program, patch, Asked.REGION))
        assert found.scope is Scope.PROGRAM and "no such luck" in found.notes[0]
    assert log == ["whole timing"] * 2 and len(tries) == 1


@pytest.fixture(scope="module")
def judges(spec: KernelSpec, program: Program) -> Iterator[RegionJudges]:
    def cpu(of: KernelSpec, start: Program) -> GpuEvaluator:
        return GpuEvaluator(of, start.graph, torch_device="cpu", timeout_s=PATIENCE_S, any_text=True)

    made = RegionJudges(cpu(spec, program), spec, lambda alone: cpu(alone.spec, alone.program), "cpu")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        ("(a[0].clamp(min=0),)", None),
        ("(a[0].clamp(min=0.1),)", "wrong"),
        ("(a[0].clamp_(min=0).clone(),)", "wrong"),
    ],
)
@pytest.mark.parametrize("large", [1 << 23, 1 << 10])
def test_the_same_judge_judges_a_region(
    judges: RegionJudges,
    program: Program,
    body: str,
    failure: str | None,
    large: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(region_values, "LARGE_BYTES", large)
    while judges._open:
        judges._close_oldest()
    patch = Patch(target=named(program, "relu"), alternatives=(in_torch(body),))
    _, judge = judges._judge_of(program, program.region(named(program, "relu")))
    assert isinstance(judge, GpuEvaluator)
    monkeypatch.setattr(judge.outer_clock, "check", lambda *unused: Verdict())
    found = judges.ask(EvaluationRequest(program, patch, Asked.REGION))
    assert found.failure == failure, found.error
    assert found.scope is Scope.REGION
    if failure is None:
        assert found.timing is not None and found.eager is not None and found.accuracy is not None
        assert len(judge.references.distributions) > 3


def test_judges_beside_each_other_share_the_memory_for_trials(spec: KernelSpec, program: Program) -> None:
    rooms = []
    for beside in (1, 4):
        judge = GpuEvaluator(spec, program.graph, torch_device="cpu", beside=beside)
        rooms.append(judge.references.plan.pool_bytes)
        judge.close()
    assert rooms[0] / 4 == pytest.approx(rooms[1], rel=0.05)


def test_a_recurrent_region_has_its_weights_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own module is eager, which must not copy them at every call."""
    calls: list[list[torch.Tensor]] = []
    spec = KernelSpec.from_module(torch.nn.GRU(4, 8).eval(), (torch.randn(3, 2, 4),))
    program = Program.start(capture_spec(spec))
    alone = region_spec(spec, program, next(r for r in program.regions if "gru" in r.label()), "cpu").spec
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda w: True)
    monkeypatch.setattr(torch, "_use_cudnn_rnn_flatten_weight", lambda: True)
    monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", lambda weights, *_: calls.append(weights))
    module = alone.module()
    held = dict(module.named_parameters())
    assert len(calls) == 1 and {id(w) for w in calls[0]} == {id(w) for w in held.values()}
    assert len(held) == 4


@pytest.mark.gpu
@pytest.mark.parametrize(
    "seen",
    [
        torch.rand(300, 70) * torch.logspace(-3, 3, 70) + 1,
        torch.randn(64, 500).relu(),
        torch.randn(9, 4096).where(torch.rand(9, 4096) > 0.001, 1e6),
        torch.randint(0, 90, (40, 40)),
        torch.rand(80, 80).round(),
        torch.randn(30, 31, dtype=torch.bfloat16).softmax(-1),
        torch.randn(5, 6, 7, 8).to(memory_format=torch.channels_last),
    ],
    ids=["scales", "zeros", "outliers", "whole", "two values", "rows", "strides"],
)
def test_values_on_a_gpu_show_the_law_that_they_show_on_a_cpu(seen: torch.Tensor) -> None:
    here, there = region_values.leaf_of(seen, may_draw=False), region_values.leaf_of(seen.cuda(), may_draw=False)
    assert here.domain == there.domain and torch.equal(here.value, there.value)
    assert [type(w) for w in here.ways] == [type(w) for w in there.ways]
    for way in range(len(here.ways)):
        drawn, other = here.draw(Source(3, "cpu"), way), there.draw(Source(3, "cpu"), way)
        assert drawn.stride() == other.stride() and drawn.device == other.device
        torch.testing.assert_close(drawn, other)
