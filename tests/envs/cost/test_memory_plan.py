"""How a reference is held: the plan's arithmetic in numbers, and that every way gives the same reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qimeng.envs.cost import memory_plan as module
from qimeng.envs.cost.memory_plan import CONTEXTS, Sizes, memory_plan, slice_rows
from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.envs.judge.reference import References
from qimeng.envs.workers.tensor_bits import weighted_sum
from qimeng.interfaces import Asked, Patch
from qimeng.program.program import Implementation, Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from tests.envs.busy_machine import settled

GIB = 1 << 30
H200, RTX4090 = 150_109_880_320, 24 * GIB
LEVEL2 = Sizes(inputs=200 << 20, state=10 << 20, outputs=400 << 20, temporaries=800 << 20)


def test_what_is_small_is_done_the_quickest_way():
    for device in (H200, RTX4090):
        plan = memory_plan(LEVEL2, device, 64 * GIB)
        assert (plan.way, plan.tidy, plan.copies, plan.fits) == ("device", False, True, True)
        assert plan.pool_bytes == device // 10
        double = 2 * (200 + 10 + 800 + 2 * 400) << 20
        worker = (2 * 200 + 2 * 10 + 2 * 400 + 800) << 20
        assert plan.peak_bytes == CONTEXTS + (410 << 20) + double + worker


def test_inputs_of_16_gib_and_an_output_as_large():
    sizes = Sizes(16 * GIB, 0, 16 * GIB, flop=0.0)
    assert sizes.double(2) == 96 * GIB and sizes.double(1) == 64 * GIB
    plan = memory_plan(sizes, H200, 100 * GIB)
    assert (plan.way, plan.tidy, plan.copies, plan.fits) == ("device", True, True, True)
    assert plan.peak_bytes == (2 + 96 + 16) * GIB < 0.92 * H200
    assert plan.pool_bytes == 0
    smaller = memory_plan(sizes, 110 * GIB, 100 * GIB)
    assert (smaller.way, smaller.copies) == ("steps", True) and smaller.peak_bytes == (2 + 64 + 16 + 16) * GIB
    small = memory_plan(sizes, RTX4090, 100 * GIB)
    assert not small.fits and "even so it may run out of memory" in str(small)


def test_inputs_of_16_gib_that_are_reduced():
    sizes = Sizes(16 * GIB, 0, GIB >> 10, flop=0.0)
    assert sizes.double(2) == 48 * GIB  # raising the inputs takes both copies of them
    plan = memory_plan(sizes, H200, 100 * GIB)
    assert (plan.way, plan.tidy) == ("device", False) and plan.pool_bytes == H200 // 10
    plan = memory_plan(sizes, RTX4090, 100 * GIB)
    assert (plan.way, plan.copies, plan.fits) == ("host", False, True)
    assert plan.peak_bytes == pytest.approx(18 * GIB, rel=1e-3)
    assert memory_plan(sizes, RTX4090, 32 * GIB).way == "none"  # 64 GiB are needed there
    assert memory_plan(replace(sizes, flop=1e15), RTX4090, 100 * GIB).way == "none"
    assert memory_plan(replace(sizes, flop=None), RTX4090, 100 * GIB).way == "none"


def test_rows_that_are_kept_apart_are_computed_in_slices():
    sizes = Sizes(4 * GIB, 0, 8 * GIB, flop=0.0, rows=16)  # a convolution of 16 images
    plan = memory_plan(sizes, 80 * GIB, 100 * GIB)
    assert (plan.way, plan.tidy) == ("device", True)
    tight = memory_plan(sizes, 50 * GIB, 100 * GIB)
    assert slice_rows(sizes) == 1 and (tight.way, tight.copies) == ("slices", True)
    making, running = 4 + 2 * 8 + sizes.double(2) / 16 / GIB + 8, 2 * 4 + 3 * 8
    assert making < running and tight.peak_bytes == (2 + running) * GIB
    assert memory_plan(sizes, 80 * GIB, 100 * GIB, free_bytes=40 * GIB).key == tight.key
    assert memory_plan(replace(sizes, rows=1), 50 * GIB, 100 * GIB).way == "steps"
    assert memory_plan(sizes, 50 * GIB, 100 * GIB, after=tight).way == "slices"  # without copies
    assert slice_rows(replace(sizes, rows=16 << 20)) == 2 * (16 << 20) // 40


def test_half_types_take_four_times_their_bytes():
    assert Sizes(16 * GIB, 0, GIB, itemsize=2).double(1) == 80 * GIB


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norm(x)
        return y, y.argmax(-1)


@pytest.mark.parametrize("way", ["steps", "host"])
def test_every_way_gives_the_same_reference(way):
    spec = KernelSpec.from_module(Net(), (torch.randn(64, 32),))
    plain = References(spec, None, torch.device("cpu"))
    other = References(spec, None, torch.device("cpu"))
    other.plan = replace(other.plan, way=way)
    trial = next(iter(plain.trials(1)))
    same = other.make(trial.draw)
    assert plain.plan.way == "device" and plain.remarks == plain.remarks and same is not None
    for a, b in zip(trial.expected, same.expected, strict=True):
        assert torch.equal(a.value, b.value)
        assert b.floor.max <= a.floor.max + torch.finfo(torch.float32).eps
    assert f"memory: {other.plan}" in other.remarks


@pytest.mark.parametrize("way", ["slices", "steps"])
def test_a_judge_short_of_memory_gives_the_same_verdicts(monkeypatch, way):
    tight = next(p for p in module._ORDER if p.way == way and not p.copies)
    monkeypatch.setattr("qimeng.envs.judge.eager_reference.memory_plan", lambda *a, **k: tight)
    monkeypatch.setattr(module, "SLICE_BYTES", 1 << 13)
    spec = KernelSpec.from_function(torch.relu, (torch.randn(64, 32),))
    graph = capture_spec(spec)
    program = Program.start(graph)
    judge = GpuEvaluator(spec, graph, torch_device="cpu", timeout_s=60.0)

    def with_text(text: str) -> Program:
        written = Implementation("torch", f"import torch\ndef entry(x):\n    {text}\n    return (y,)\n", "entry")
        return program.with_implementation(program.regions[0].id, written)

    try:
        assert judge.references.plan is tight
        right = with_text("y = x.clamp(min=0)")
        found = settled(lambda: judge.evaluate(right, asked=Asked.FINAL))
        assert found.ok and any(note.startswith("memory: ") for note in found.notes), found.error
        assert found.accuracy is not None and found.accuracy.reference == "float64"
        assert judge.references.plan is tight, "slices were possible"
        for text in ("x[0, 0] += 1; y = torch.relu(x)", "y = torch.relu(x); y[-1, -1] += 1e-3"):
            found = judge.evaluate(with_text(text), Patch())
            assert found.failure == "wrong", found
    finally:
        judge.close()


def test_a_sum_that_tells_where_things_are(monkeypatch):
    monkeypatch.setattr("qimeng.envs.errors.accuracy.BLOCK", 8)
    x = torch.arange(60.0).reshape(6, 10)
    total = weighted_sum(x, 1)
    assert total == weighted_sum(x.clone(), 1) != weighted_sum(x, 2)
    for changed in (x.flip(0), x.flip(1), x.roll(8), x + torch.eye(6, 10), x.to(torch.float64)):
        assert weighted_sum(changed, 1) != total
