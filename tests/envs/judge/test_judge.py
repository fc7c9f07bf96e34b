"""The whole judge on the CPU: every way to be wrong is a typed failure, and the next candidate is judged as ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby

import pytest
import torch

from qimeng.device_lock import DeviceLock
from qimeng.envs.judge import judge_clock as outer_clock
from qimeng.envs.judge.clock_rule import ROUNDS, Readings, Ruling
from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.envs.judge.judge_clock import NOT_TIMED
from qimeng.envs.judge.verdicts import Verdict
from qimeng.envs.judge.worker_supply import WorkerSupply
from qimeng.envs.workers.forkserver import Process
from qimeng.envs.workers.outputs import Leaf
from qimeng.envs.workers.shared_buffers import ALIGNED, Layout
from qimeng.envs.workers.shared_server import shared_server
from qimeng.envs.workers.stopwatch import Effort, Samples
from qimeng.interfaces import Asked, Evaluation, Gate, Patch
from qimeng.program.program import Implementation, Program, torch_implementation
from qimeng.program.schedule import Schedule
from qimeng.program.verify import capture_spec
from qimeng.spec import DISTRIBUTIONS, KernelSpec
from qimeng.spec.distributions import SECRET_SIZE
from tests.envs.busy_machine import settled

PATIENCE_S = 60.0
"""What a call may take where tests load the machine; what really hangs is given less."""


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


@pytest.fixture(scope="module")
def evaluator() -> Iterator[GpuEvaluator]:
    torch.manual_seed(0)
    spec = KernelSpec.from_module(Net(), (torch.randn(128, 64),))
    made = GpuEvaluator(spec, capture_spec(spec), torch_device="cpu", timeout_s=PATIENCE_S, any_text=True)
    yield made
    made.close()


@pytest.fixture(scope="module")
def program(evaluator: GpuEvaluator) -> Program:
    assert evaluator.graph is not None
    return Program.start(evaluator.graph)


def in_torch(body: str, name: str = "entry", before: str = "") -> Implementation:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return Implementation("torch", f"import os, sys, time, signal\n{before}\ndef {name}(*a):\n{lines}\n", name)


RIGHT = in_torch("return (a[0].clamp(min=0),)")

WRONG = {
    "wrong values": ("return (a[0].clamp(min=0.1),)", "wrong", "elements are out of bounds"),
    "zeros": ("return (torch.zeros_like(a[0]),)", "wrong", "all zero"),
    "unwritten": ("o = torch.empty_like(a[0]); o[:64] = a[0][:64].clamp(min=0); return (o,)", "wrong", "out of bounds"),
    "read beyond the end": (
        "x = a[0].as_strided((128, 96), (97, 1)); return (torch.where(x == x, a[0], x).clamp(min=0),)",
        "wrong",
        "NaN",
    ),
    "input changed": ("return (a[0].clamp_(min=0).clone(),)", "wrong", "changed its inputs"),
    "input returned": ("a[0].clamp_(min=0); return (a[0],)", "wrong", "changed its inputs"),
    "dtype": ("return (a[0].clamp(min=0).double(),)", "wrong", "dtype is float64, expected float32"),
    "shape": ("return (a[0].clamp(min=0).mean().view(1),)", "wrong", "shape is (1,), expected (128, 96)"),
    "stride": ("return (a[0].clamp(min=0).t().contiguous().t(),)", "wrong", "stride is (1, 128), expected (96, 1)"),
    "half precision": ("return (a[0].half().clamp(min=0).float(),)", "wrong", "maximum, allowed"),
    "crash": ("os.kill(os.getpid(), signal.SIGSEGV)", "crash", "SIGSEGV"),
    "hang": ("time.sleep(60)", "timeout", "killed"),
    "exit": ("sys.exit(0)", "exit", "SystemExit"),
    "hard exit": ("os._exit(0)", "exit", "exit status 0"),
    "exception": ("return a[0].no_such_thing()", "error", "no_such_thing"),
    "memory": ("return (torch.empty(1 << 60),)", "memory", "memory"),
    "no tensor": ("return (1.0,)", "wrong", "kind is float"),
    "more outputs": ("return (a[0].clamp(min=0), a[0])", "wrong", "structure"),
}


def relu(program: Program) -> str:
    return program.regions[-1].id


def passes(evaluator: GpuEvaluator, program: Program) -> None:
    found = evaluator.evaluate(program, Patch(target=relu(program), alternatives=(RIGHT,)))
    assert found.ok, found.error


@pytest.mark.parametrize("name", WRONG)
def test_an_alternative_that_is_wrong_is_a_typed_failure_and_the_next_is_judged_as_ever(
    evaluator, program, name, calm, monkeypatch
):
    body, failure, words = WRONG[name]
    with monkeypatch.context() as limited:
        if failure == "timeout":
            limited.setattr(evaluator, "timeout_s", 2.0)
        found = evaluator.evaluate(program, Patch(target=relu(program), alternatives=(in_torch(body),)))
    assert (found.gate, found.failure) == (Gate.REGION, failure), found
    assert words in (found.error or "")
    assert found.timing is None
    passes(evaluator, program)


STATE = {
    "stale packed weights": (
        0,
        in_torch("w = K.setdefault('w', a[1].t().contiguous()); return (torch.addmm(a[2], a[0], w),)", before="K = {}"),
        "parameters changed by load_state_dict",
    ),
    "output memory used again": (
        1,
        in_torch(
            "o = K.setdefault('o', torch.empty_like(a[0])); return (torch.clamp(a[0], min=0, out=o),)", before="K = {}"
        ),
        "a later call changed what the first one returned",
    ),
    "parameter changed": (
        0,
        in_torch("o = torch.addmm(a[2], a[0], a[1].t()); a[2].add_(1); return (o,)"),
        "parameter linear.bias",
    ),
    "right once": (
        1,
        in_torch("K.append(1); return (a[0].clamp(min=0) * (1 if len(K) < 3 else 1.5),)", before="K = []"),
        "out of bounds",
    ),
    "crash later": (
        1,
        in_torch("K.append(1)\nif len(K) > 1: os.abort()\nreturn (a[0].clamp(min=0),)", before="K = []"),
        "SIGABRT",
    ),
}


@pytest.mark.parametrize("name", STATE)
def test_what_only_shows_in_several_calls_of_the_whole_program(evaluator, program, name, calm):
    position, implementation, words = STATE[name]
    bad = program.with_implementation(program.regions[position].id, implementation)
    found = evaluator.evaluate(bad)
    assert found.gate is Gate.PROGRAM and not found.ok
    assert words in (found.error or "")
    passes(evaluator, program)


def test_an_output_may_not_share_memory_with_an_input(evaluator, program):
    whole = torch_implementation(program.regions[0])
    assert whole.entry
    bad = in_torch("return (a[0],)")
    found = evaluator.evaluate(program, Patch(target=relu(program), alternatives=(bad,)))
    assert "shares memory with input 0" in (found.error or "")


def test_a_sweep_keeps_the_fastest_of_those_that_are_right(evaluator, program, calm):
    slow = in_torch("time.sleep(0.02); return (a[0].clamp(min=0),)")
    crash = in_torch("os.abort()")
    wrong = in_torch("return (a[0] + 1,)")
    patch = Patch(target=relu(program), alternatives=(slow, crash, wrong, RIGHT))
    found = evaluator.evaluate(program, patch)
    assert found.ok and found.chosen == 3 and found.configurations == 4, found.error
    refused = evaluator.evaluate(program, Patch(target=relu(program), alternatives=(crash, wrong)))
    assert refused.gate is Gate.REGION and "2 alternatives" in (refused.error or "")


def test_alternatives_that_no_template_printed_share_no_process(evaluator, program, calm):
    """What one of them does to its process reaches none of the others: the second is wrong where the first was."""
    first = in_torch("sys.met = True; time.sleep(0.02); return (a[0].clamp(min=0),)")
    second = in_torch("return (a[0].clamp(min=0) * (not hasattr(sys, 'met')),)")
    found = evaluator.evaluate(program, Patch(target=relu(program), alternatives=(first, second)))
    assert found.ok and found.chosen == 1, found.error


def test_the_start_program_passes_with_figures(evaluator, program):
    found = evaluator.evaluate(program)
    assert found.ok, found.error
    assert found.timing is not None and found.eager is not None and found.timing.calls >= 10
    assert found.accuracy is not None and found.accuracy.kernelbench and found.accuracy.reference == "float64"
    assert 0 < found.accuracy.max_error <= found.accuracy.max_budget < 1e-4
    assert {"compile", "start", "check", "time"} <= set(found.seconds)


def test_a_time_above_the_tensor_cores_peak_is_flagged_and_not_refused(evaluator, program, monkeypatch):
    assert evaluator.evaluate(program).notes == ()
    fast = Samples((1e-9,) * 10, (1e-9,) * 10)  # 1.6 MFLOP in a picosecond
    monkeypatch.setattr(evaluator.times, "search", lambda worker, clock, resets: (fast, fast))
    found = evaluator.evaluate(program)
    assert found.ok and len(found.notes) == 1 and "above the tensor cores' peak" in found.notes[0]
    assert Evaluation.from_json(found.to_json()) == found


def test_final_uses_every_distribution_and_takes_turns_with_eager(evaluator, program, calm):
    found = evaluator.evaluate(program.with_implementation(relu(program), RIGHT), asked=Asked.FINAL)
    assert (
        found.ok and found.accuracy is not None and found.accuracy.trials == len(DISTRIBUTIONS) + len(SECRET_SIZE) + 1
    ), found.error
    assert set(evaluator.times.turns) == {"candidate", "eager"}
    assert evaluator.times.turns["eager"].calls >= 25


def test_what_stays_as_it_was_written_is_tried_once_in_the_end(evaluator, program, calm):
    found = evaluator.evaluate(program, asked=Asked.FINAL)
    assert found.ok and found.timing is not None and found.accuracy is not None and found.accuracy.trials == 1


def test_what_is_only_checked_has_no_time(evaluator, program):
    found = evaluator.evaluate(program, asked=Asked.CHECK)
    assert found.ok and found.timing is None and found.accuracy is not None and "time" not in found.seconds
    whole = Program(program.graph, program.regions).with_implementation(relu(program), in_torch(WRONG["zeros"][0]))
    refused = evaluator.evaluate(whole, asked=Asked.CHECK)
    assert (refused.gate, refused.failure) == (Gate.PROGRAM, "wrong")


def test_three_runs_on_the_same_inputs_are_right_or_refused_and_said_where_they_differ(evaluator, program, calm):
    rounding = in_torch("K.append(1); return (a[0].clamp(min=0) * (1 + 2e-7 * (len(K) % 2)),)", before="K = []")
    found = evaluator.evaluate(program.with_implementation(relu(program), rounding))
    assert found.ok and any("not repeatable bit for bit" in note for note in found.notes), found
    third = in_torch("K.append(1); return (a[0].clamp(min=0) * (1 + (len(K) == 3)),)", before="K = []")
    found = evaluator.evaluate(program.with_implementation(relu(program), third))
    assert found.failure == "wrong" and "run 3 of 3" in (found.error or ""), found


def test_a_program_refuses_inputs_that_it_was_not_made_for(evaluator, program):
    lax = in_torch("globals()['_check'] = lambda *a: None; return (a[0].clamp(min=0),)")
    open_to_all = program.with_implementation(relu(program), lax)
    found = evaluator.evaluate(open_to_all, asked=Asked.FINAL)
    assert found.failure == "wrong" and "raise no ValueError: a shorter tensor" in (found.error or ""), found


def test_a_wrong_call_among_many_is_seen_in_the_end(evaluator, program, monkeypatch, calm):
    monkeypatch.setattr("qimeng.envs.judge.verdicts.REPEATS_S", 20.0)
    rare = in_torch("calls.append(1); return (a[0].clamp(min=0) + (len(calls) == 50),)", before="calls = []")
    found = evaluator.evaluate(program.with_implementation(relu(program), rare), asked=Asked.FINAL)
    assert found.failure == "wrong" and "call" in (found.error or "") and "of the same program" in (found.error or "")
    monkeypatch.setattr("qimeng.envs.judge.verdicts.REPEATS", 60)
    assert evaluator.evaluate(program.with_implementation(relu(program), RIGHT), asked=Asked.FINAL).ok


def test_prepared_buffers_are_made_anew_when_parameters_change(evaluator, program, calm):
    packed = Implementation(
        "torch",
        "def pack(w):\n    return (w.t().contiguous(),)\ndef entry(x, w, b, p):\n    return (torch.addmm(b, x, p),)\n",
        "entry",
        "pack",
        (1,),
    )
    patch = Patch(target=program.regions[0].id, alternatives=(packed,))
    found = evaluator.evaluate(program, patch)
    assert found.ok and found.prepare_ms is not None, found.error


def test_a_call_may_not_change_what_was_prepared(evaluator, program):
    """The first call after a preparation is right, and every later one would be wrong."""
    spoiling = Implementation(
        "torch",
        "def pack(w):\n    return (w.t().contiguous(), w.sum())\ndef entry(x, w, b, p, s):\n"
        "    out = torch.addmm(b, x, p)\n    p.mul_(2)\n    return (out,)\n",
        "entry",
        "pack",
        (1,),
    )
    found = evaluator.evaluate(program.with_implementation(program.regions[0].id, spoiling))
    assert found.failure == "wrong" and "the call changed prepared buffer 0.0" in (found.error or "")
    assert "0.1" not in (found.error or "")


def test_printed_programs_share_a_worker_and_others_never_do(evaluator, program, monkeypatch, calm):
    served = []
    take = WorkerSupply.take
    monkeypatch.setattr(WorkerSupply, "take", lambda self, share: served.append(take(self, share)) or served[-1])
    region = program.regions[-1].id

    def judged(*alternatives: Implementation) -> bool:
        patch = Patch(target=region, alternatives=alternatives) if alternatives else None
        return evaluator.evaluate(program, patch).ok

    assert judged() and judged()
    assert served[0] is served[1] and served[0].alive
    assert judged(RIGHT), "written by somebody"
    assert served[2] is not served[0] and not served[0].alive
    assert judged() and served[3] not in served[:3] and not served[2].alive
    assert judged() and served[4] is served[3]
    assert evaluator.evaluate(program, asked=Asked.FINAL).ok and served[5] not in served[:5]
    assert judged() and served[6] not in served[:6] and not served[5].alive
    assert not judged(replace(in_torch(WRONG["zeros"][0]), schedule=Schedule()))
    assert served[7] not in served[:7], "what it says of itself counts for nothing"
    assert judged() and served[8] not in served[:8]


def test_source_that_does_not_load_is_refused(evaluator, program):
    bad = Implementation("torch", "def entry(:\n", "entry")
    found = evaluator.evaluate(program, Patch(target=relu(program), alternatives=(bad,)))
    assert found.failure == "error" and "SyntaxError" in (found.error or "")


def test_a_patch_of_the_graph_alone_is_judged_as_a_whole(evaluator, program, calm):
    from qimeng.graph.region import merge

    merged = merge(program.regions, [r.id for r in program.regions])
    found = evaluator.evaluate(program, Patch(regions=merged))
    assert found.ok, found.error


def test_evaluations_survive_json(evaluator, program):
    found = evaluator.evaluate(program)
    assert Evaluation.from_json(found.to_json()) == found


def loaded(evaluator: GpuEvaluator, source: str) -> Process:
    worker = evaluator.workers.start(evaluator.folder.as_posix())
    worker.await_ready()
    worker.call("load", PATIENCE_S, source=source)
    return worker


@contextmanager
def running(evaluator: GpuEvaluator, program: Program, body: str, before: str = "") -> Iterator[Process]:
    worker = loaded(evaluator, program.with_implementation(relu(program), in_torch(body, before=before)).source)
    try:
        yield worker
    finally:
        worker.kill()


BUSY = "x = a[0].clamp(min=0)\nfor _ in range(160): a[0].exp()\nreturn (x,)"
"""Some two milliseconds of work."""


def milliseconds(evaluator: GpuEvaluator, worker: Process) -> float:
    data, _ = worker.call("time", PATIENCE_S, seed=5, effort=Effort(min_calls=3, max_calls=3))
    return min(data["device_ms"])


def eager_now(evaluator: GpuEvaluator) -> float:
    return evaluator.baselines_process.time(Effort()).timing().device_ms


def test_told_times_are_held_against_the_judges_own_clock(evaluator, program):
    eager_ms = eager_now(evaluator)
    clock = evaluator.outer_clock
    with running(evaluator, program, BUSY) as worker:
        ms = milliseconds(evaluator, worker)
        assert ms > 5 * eager_ms

        def honest() -> Verdict:
            return clock.check(worker, milliseconds(evaluator, worker), eager_now(evaluator))

        assert settled(honest).ok
        told = settled(lambda: clock.check(worker, eager_ms, eager_now(evaluator)), (NOT_TIMED,))
        assert told.failure == "clock" and "the worker reports" in (told.error or ""), told
        assert settled(honest).ok, "a refusal leaves no trace"


@pytest.mark.parametrize(
    ("first", "later", "failure", "rounds"),
    [(True, True, None, 1), (False, True, None, 2), (None, True, None, 2), (False, False, "clock", ROUNDS)],
)
def test_a_time_is_refuted_by_all_rounds_and_confirmed_by_one(
    evaluator, program, monkeypatch, first, later, failure, rounds, few_calls
):
    """A busy machine may delay the first batch of a candidate and not that of eager."""
    clock = evaluator.outer_clock
    seen: list[int] = []

    def decide(found: Readings, *unused: object) -> Ruling:
        seen.append(len(found.candidate))
        return Ruling(first if seen[-1] == 1 else later, "as told")

    monkeypatch.setattr(outer_clock, "decide", decide)
    monkeypatch.setattr(evaluator.references, "distributions", ["given"])
    with running(evaluator, program, RIGHT.source.splitlines()[-1].strip()) as worker:
        verdict = clock.check(worker, 0.2, 0.2)
    assert verdict.failure == failure and max(seen) == rounds, verdict


def test_a_round_whose_way_to_measure_changed_is_made_up_for(evaluator, program, monkeypatch, few_calls):
    """Its times are dropped; there are still as many as a refutation needs."""
    clock, seen = evaluator.outer_clock, []
    measured = clock._measured

    def dropped(worker: Process, batch: object, layout: Layout, before: dict[str, Readings]) -> object:
        times, *rest = measured(worker, batch, layout, before)
        seen.append(len(seen))
        return ({name: Readings(found.calls) for name, found in times.items()} if len(seen) == 1 else times), *rest

    monkeypatch.setattr(clock, "_measured", dropped)
    monkeypatch.setattr(outer_clock, "decide", lambda *a: Ruling(False, "too long"))
    with running(evaluator, program, RIGHT.source.splitlines()[-1].strip()) as worker:
        assert clock.check(worker, 0.2, 0.2).failure == "clock"
    assert len(seen) == ROUNDS + 1


TIMED = {
    "wrong in one call of a batch": (1, "K.append(1); return (a[0].clamp(min=0) * (len(K) != 9),)", "out of bounds"),
    "the first result again": (1, "K.append(a[0].clamp(min=0)); return (K[0].clone(),)", "out of bounds"),
    "inputs changed": (0, "y = torch.addmm(a[2], a[0], a[1].t()); a[0].neg_(); return (y,)", "changed its inputs"),
    "a subclass": (1, "return (a[0].clamp(min=0).as_subclass(type('Tensor', (torch.Tensor,), {})),)", "kind is"),
    "an attribute": (1, "x = a[0].clamp(min=0); x.note = 1; return (x,)", "kind is Tensor with note"),
}


@pytest.mark.parametrize("name", TIMED)
def test_what_is_timed_is_checked(evaluator, program, name, monkeypatch, few_calls):
    """By the judge alone: nothing of it is kept in the worker."""
    monkeypatch.setattr(evaluator.references, "distributions", ["given"])  # of some others PyTorch makes no numbers
    position, body, words = TIMED[name]
    implementation = in_torch(body, before="K = []")
    worker = loaded(evaluator, program.with_implementation(program.regions[position].id, implementation).source)
    try:
        found = evaluator.outer_clock.check(worker, 0.2, 0.2)
    finally:
        worker.kill()
    assert found.failure == "wrong" and words in (found.error or ""), found
    assert "in a call that was timed" in (found.error or "")


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30, float("inf")])
def test_a_first_look_at_a_timed_call_tells_zeros_from_results_of_any_size(scale, monkeypatch):
    eager = torch.tensor([1.0, -2.0, 3.0]) * scale
    eager[1] = 5.0 if scale == float("inf") else eager[1]
    layout = Layout.of([[]], [Leaf("Tensor", (3,), (1,), "float32", "cpu")])

    def alike(x: torch.Tensor) -> bool:
        memory = [torch.zeros(ALIGNED, dtype=torch.uint8) for _ in range(2)]
        for part, values in zip(memory, (x, eager), strict=True):
            part[:12].view(torch.float32).copy_(values)
        return outer_clock._alike(layout, 0, *memory)

    assert not alike(torch.full((3,), float("nan")))
    monkeypatch.setattr(outer_clock, "_norm", outer_clock._norm if scale != 1.0 else None)  # float32 tells at once
    assert alike(eager) and not alike(torch.zeros(3))


def test_a_clock_that_cannot_tell_leaves_a_program_without_a_time(evaluator, program, monkeypatch, few_calls):
    monkeypatch.setattr(outer_clock, "decide", lambda *a: Ruling(None, "too busy to tell"))
    found = evaluator.evaluate(program, Patch(target=relu(program), alternatives=(RIGHT,)))
    assert (found.gate, found.failure, found.timing) == (Gate.TIMING, NOT_TIMED, None)
    assert found.error == "not timed: too busy to tell" and not found.lasting
    assert found.speedup is None


def test_a_timed_call_never_has_the_inputs_of_another_and_some_are_of_other_distributions(evaluator, monkeypatch):
    clock = evaluator.outer_clock
    seen = [clock._prepared(8, None) for _ in range(8)]
    contents = [bytes(part.numpy().data) for batch, layout in seen for part in (layout.inputs[0][0].of(batch.content),)]
    assert len(set(contents)) == len(contents)
    names = [draw.distribution for batch, _ in seen for draw in batch.draws]
    assert {"given"} < set(names) and names.count("given") > len(names) / 2
    assert len({draw.seed for batch, _ in seen for draw in batch.draws}) == 64


def test_random_operators_are_judged_with_their_seed():
    spec = KernelSpec.from_module(
        torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.5)), (torch.rand(8, 16),)
    )
    graph = capture_spec(spec.with_(training=True))
    judge = GpuEvaluator(spec.with_(training=True), graph, torch_device="cpu", timeout_s=PATIENCE_S, any_text=True)
    try:
        start = Program.start(graph)
        found = judge.evaluate(start)
        assert found.ok and found.accuracy is not None and found.accuracy.reference == "float64", found.error
        assert found.notes == ("random operators (aten.bernoulli_): checked against float64 with eager's draws",)
        assert judge.outer_clock.check(loaded(judge, start.source), 50.0, 50.0).failure == NOT_TIMED
        worker, eager_ms = loaded(judge, start.source), eager_now(judge)
        verdict = settled(lambda: judge.outer_clock.check(worker, eager_ms, eager_ms))
        assert verdict.ok, verdict
    finally:
        judge.close()


def memory_holds(pid: int, patterns: dict[str, bytes]) -> set[str]:
    """Which byte patterns are somewhere in the writable memory of a process."""
    found = set()
    try:
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
            for line in maps:
                span, rights = line.split()[:2]
                if "w" not in rights or "[v" in line:
                    continue
                start, end = (int(x, 16) for x in span.split("-"))
                memory.seek(start)
                content = memory.read(end - start)
                found |= {name for name, pattern in patterns.items() if pattern in content}
    except PermissionError:
        pytest.skip("this system forbids reading another process's memory")
    return found


def test_a_worker_knows_neither_reference_values_nor_seeds_of_other_trials(evaluator, program):
    trials = list(evaluator.references.trials(3))
    later = trials[2]
    patterns = {
        "values": later.outputs[0].value.numpy().tobytes()[4096:4160],
        "seed": later.draw.seed.to_bytes(8, "little"),
        "seed as text": str(later.draw.seed).encode(),
    }
    worker = evaluator.workers.start(evaluator.folder.as_posix())
    try:
        pid = worker.await_ready()["pid"]
        worker.call("load", PATIENCE_S, source=program.source)
        assert evaluator.judge.check(worker, trials[:2]).ok
        assert memory_holds(pid, patterns) == set()
        assert evaluator.judge.check(worker, trials[2:]).ok
        assert "seed" in memory_holds(pid, patterns), "once the trial is done, the worker was told"
    finally:
        worker.kill()


def test_what_cannot_be_referenced_leaves_no_process_behind(monkeypatch):
    spec = KernelSpec.from_module(Net(), (torch.randn(128, 64),))
    started = []
    start = shared_server().start
    monkeypatch.setattr(shared_server(), "start", lambda *a, **k: started.append(start(*a, **k)) or started[-1])

    def fails(*arguments, **options):
        raise MemoryError("too large")

    monkeypatch.setattr("qimeng.envs.judge.gpu_evaluator.References", fails)
    with pytest.raises(MemoryError):
        GpuEvaluator(spec, None, torch_device="cpu")
    assert len(started) == 2 and not any(process.alive for process in started)


def test_in_a_search_the_judges_clock_is_asked_of_what_no_template_printed(evaluator, program, monkeypatch):
    asked: list[str] = []
    plain = evaluator.judge.check_timed
    monkeypatch.setattr(evaluator.outer_clock, "check", lambda *a: asked.append("clock") or Verdict())
    monkeypatch.setattr(evaluator.judge, "check_timed", lambda w, d: asked.append("kept") or plain(w, d))
    assert evaluator.evaluate(program).ok and asked == ["kept"]
    asked.clear()
    assert evaluator.evaluate(program, Patch(target=relu(program), alternatives=(RIGHT,))).ok
    assert asked == ["clock"]
    asked.clear()
    assert evaluator.evaluate(program, asked=Asked.FINAL).ok and asked == ["clock"]


def test_in_a_search_eager_is_timed_once_for_each_program_beside_its_last_round(evaluator, program, monkeypatch):
    timed: list[Samples] = []
    rounds = (Samples((t,) * 8, (t,) * 8) for t in (1.0, 2.0, 3.0, 9.0, 4.0, 5.0))
    monkeypatch.setattr(evaluator.baselines_process, "time", lambda effort: timed.append(next(rounds)) or timed[-1])
    evaluator.times.forget_eager()  # other tests have the same evaluator
    assert [evaluator.evaluate(program).eager.device_ms for _ in range(2)] == [1.5, 2.5] and len(timed) == 3
    evaluator.times.forget_eager()
    assert evaluator.evaluate(program).eager.device_ms == 6.5 and len(timed) == 5
    evaluator.times.forget_eager()


def test_checks_share_the_device_and_times_are_taken_alone(evaluator, program, tmp_path, monkeypatch, calm):
    turns = []

    class Watched(DeviceLock):
        def alone(self):
            turns.append("alone")
            return super().alone()

        def beside(self):
            turns.append("beside")
            return super().beside()

    lock = Watched(str(tmp_path / "lock"))
    monkeypatch.setattr(evaluator.turns, "lock", lock)
    found = evaluator.evaluate(
        program, Patch(target=relu(program), alternatives=(RIGHT, in_torch("return (a[0].relu(),)")))
    )
    assert found.ok and found.seconds["wait"] >= 0, found.error
    kinds = [kind for kind, _ in groupby(turns)]
    assert kinds[:4] == ["beside", "alone", "beside", "alone"]  # alternatives, then the whole program
    other = DeviceLock(str(tmp_path / "lock"))
    checking = threading.Thread(target=evaluator.evaluate, args=(program,), kwargs={"asked": Asked.FINAL})
    with other.alone():
        checking.start()
        checking.join(1.0)
        assert checking.is_alive()
    checking.join(10 * PATIENCE_S)
    assert not checking.is_alive() and evaluator.times.turns["candidate"].calls >= 25
    lock.close()
