"""The evaluation boundary: requests travel as JSON, many are in flight, a dead process loses only what it was at."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import qimeng
from qimeng import KernelSpec, plan_and_code
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import DEVICES
from qimeng.envs.estimate.estimator import EstimatingEvaluator
from qimeng.envs.judge.torch_compile import MODES
from qimeng.envs.steps.caching import CachingEvaluator
from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.setup import make_pool, make_task
from qimeng.envs.workers.local_pool import LocalPool
from qimeng.errors import RequestError
from qimeng.graph.capture import capture
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import (
    Action,
    Asked,
    Evaluation,
    EvaluationRequest,
    Evaluator,
    Fault,
    FinalOptions,
    Gate,
    Patch,
    Request,
    SerialEvaluator,
    Ticket,
    Timing,
)
from qimeng.planner.greedy import GreedySearch
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.store import Conditions, Store
from qimeng.testing import FakeCoder, FakeEvaluator, ScriptedPlanner, fake_kernel, fake_task, sample_graph

NOTHING = OpGraph({}, ())
RELU = """
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2


def get_inputs():
    return [torch.randn(64, 64)]


def get_init_inputs():
    return []
"""


def named(text: str) -> Program:
    """A program that is nothing but its text: no graph has to be captured where it is read."""
    return Program(NOTHING, (), {}, text)


def sweep(graph: OpGraph) -> tuple[Program, Patch]:
    program = Program.start(graph)
    region = program.regions[1]
    return program, Patch(None, region.id, tuple(fake_kernel(region, None, n) for n in (1, 2)), "two")


# ---- requests


def test_a_request_survives_json() -> None:
    graph = sample_graph()
    program, patch = sweep(graph)
    options = FinalOptions(("default",), 3.0, ("memcheck",))
    request = EvaluationRequest(program, patch, Asked.FINAL, "spec", "H200", "high", options, 9.0, 4.0)
    again = EvaluationRequest.from_json(request.to_json(), graph)
    assert replace(again, program=program) == request and again.program.source == program.source
    assert again.digest == request.digest and again.to_json() == request.to_json() and "\n" not in request.to_json()
    better = patch.apply(program, 1)
    whole = EvaluationRequest(better, Patch(regions=program.regions))
    read = EvaluationRequest.from_json(whole.to_json(), graph)
    assert read.patch == whole.patch and read.program.source == better.source != program.source
    opaque = EvaluationRequest(named("import torch\n"))
    assert EvaluationRequest.from_json(opaque.to_json(), NOTHING).program.source == "import torch\n"


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)))


def test_a_rewritten_program_is_made_again_on_the_captured_graph() -> None:
    graph = capture(Net, lambda: (torch.empty(2, 3, 8, 8),))
    start = Program.start(graph)
    fold = TemplateCoder().write(Request(start, Action("algebra", (), "fold"), DEVICES["h200"]))
    folded = fold.apply(start)
    assert folded.rewrites
    for request in (EvaluationRequest(start, fold), EvaluationRequest(folded, Patch(regions=folded.regions))):
        again = EvaluationRequest.from_json(request.to_json(), graph)
        assert again.digest == request.digest
        assert again.candidates[0].source == request.candidates[0].source == folded.source


def test_equal_questions_have_equal_digests() -> None:
    program, patch = sweep(sample_graph())
    one = EvaluationRequest(program, patch)
    assert one.digest == replace(one, seconds=5.0, library_seconds=2.0, options=FinalOptions(("default",))).digest
    others = [
        replace(one, patch=None),
        replace(one, patch=patch.only(0)),
        replace(one, asked=Asked.FINAL),
        replace(one, asked=Asked.FINAL, options=FinalOptions(("default",))),
        replace(one, spec="s"),
        replace(one, device="d"),
        replace(one, mode="high"),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 8
    assert replace(one, patch=patch.only(0)).digest == EvaluationRequest(patch.apply(program, 0)).digest


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:-9], "not a request of this version"),
        (lambda text: "[]", "not a request of this version"),
        (lambda text: text.replace('"format": 1', '"format": 7'), "has format 7, this version reads 1"),
        (
            lambda text: text.replace('"nodes": ["', '"nodes": ["no_'),
            "the graph has no node 'no_.*another computation: give the one",
        ),
        (lambda text: text.replace('"outputs": [["linear", 0]]', '"outputs": [["linear", 7]]'), "not compute result 7"),
        (
            lambda text: text.replace('"outputs": [["linear", 0]]', '"outputs": []'),
            "computes linear in no region before",
        ),
        (lambda text: text.replace('"seconds": null', '"seconds": "5"'), "'5' is no number of seconds"),
        (lambda text: text.replace('"seconds": null', '"seconds": NaN'), "nan is no number of seconds"),
        (lambda text: text.replace('"sanitize": []', '"sanitize": "memcheck"'), "'memcheck' is no list of texts"),
        (lambda text: text.replace('"device": ""', '"device": 3'), "is no list of texts"),
        (lambda text: re.sub('"target": "[^"]*"', '"target": "r0"', text), "no region r0"),
        (lambda text: text.replace('"patch": {', '"patch": {"launch": "x", '), "no launch is called 'x'"),
        (lambda text: text.replace('"body": {', '"body": {"launch": "x", '), "no launch is called 'x'"),
    ],
)
def test_what_is_no_request_is_refused_in_words(change, words) -> None:
    program, patch = sweep(sample_graph())
    text = EvaluationRequest(program, patch).to_json()
    with pytest.raises(RequestError, match=words):
        EvaluationRequest.from_json(change(text), sample_graph())


def test_seconds_for_a_library_run_from_the_submission_on() -> None:
    program = named("a")

    class Echo(SerialEvaluator):
        def answer(self, request: EvaluationRequest) -> Evaluation:
            return Evaluation(Gate.PASSED, notes=(str(request.library_seconds),))

    def left(seconds: float | None, passed: float) -> str:
        ticket = Ticket(EvaluationRequest(program, library_seconds=seconds), at=time.monotonic() - passed)
        return Echo().ask(ticket.request, ticket).notes[0]

    assert left(None, 5.0) == "None" and left(3.0, 5.0) == "0.0" and 4.0 < float(left(10.0, 5.0)) <= 5.0


def test_a_program_that_is_read_as_another_one_is_refused() -> None:
    request = EvaluationRequest(named("import torch\n"))
    with pytest.raises(RequestError, match="here it comes out"):
        EvaluationRequest.from_json(request.to_json().replace("import torch", "import triton"), NOTHING)


def test_a_request_for_something_else_is_refused() -> None:
    request = EvaluationRequest(named("a"), spec="s", device="H200", mode="high")
    request.fits("s", "H200", "high")
    replace(request, spec="", device="", mode="").fits("any", "any", "any")
    with pytest.raises(RequestError, match="the request is for device 'H200', this evaluator judges for 'A100'"):
        request.fits("s", "A100", "high")


def test_a_judge_refuses_requests_for_another_device() -> None:
    spec = KernelSpec.from_function(torch.relu, (torch.ones(8, 8),))
    judge, program = EstimatingEvaluator(spec, DEVICES["h200"]), Program.start(capture_spec(spec))
    with pytest.raises(RequestError, match="the request is for device 'a100', this evaluator judges for 'h200'"):
        judge.evaluate(program, device="a100")
    with pytest.raises(RequestError, match="for mode 'high'"):
        judge.evaluate(program, mode="high")
    judge.close()


# ---- engines in this process


def test_a_serial_engine_answers_what_is_gathered_while_there_is_time() -> None:
    judge = FakeEvaluator()
    program, patch = sweep(sample_graph())
    tickets = [judge.submit(EvaluationRequest(program, p)) for p in (None, patch)]
    assert judge.calls == []
    assert [t for t, _ in judge.gather(tickets, timeout=0.0)] == [] == judge.calls
    assert [t for t, found in judge.gather(tickets[::-1]) if found.ok] == tickets[::-1]
    assert judge.evaluate(program) == judge.ask(EvaluationRequest(program))


class Silent(SerialEvaluator):
    def answer(self, request: EvaluationRequest) -> Evaluation:
        return None  # type: ignore[return-value]


def test_an_engine_that_gives_no_evaluation_is_named() -> None:
    with pytest.raises(RequestError, match="the evaluator Silent answered with NoneType, not an Evaluation"):
        Silent().evaluate(named("a"))


class Backwards(Evaluator):
    """Many in flight; the last one submitted ends first."""

    def __init__(self) -> None:
        self.judged: list[str] = []
        self.submitted: list[Ticket] = []

    def submit(self, request: EvaluationRequest) -> Ticket:
        self.submitted.append(Ticket(request))
        return self.submitted[-1]

    def gather(self, tickets: Sequence[Ticket], timeout: float | None = None) -> Iterator[tuple[Ticket, Evaluation]]:
        for ticket in [t for t in reversed(self.submitted) if t in tickets]:
            self.judged.append(ticket.request.program.source)
            yield ticket, Evaluation(Gate.PASSED, timing=Timing(float(len(self.judged))))


def test_stored_answers_come_first_and_the_rest_in_the_order_they_end() -> None:
    engine = Backwards()
    cached = CachingEvaluator(engine, Store(), Conditions("s", "d"))
    first = cached.evaluate(named("b"))
    tickets = {text: cached.submit(EvaluationRequest(named(text))) for text in "abc"}
    found = {t.request.program.source: e for t, e in cached.gather(list(tickets.values()))}
    assert list(found) == ["b", "c", "a"] and found["b"] == first and engine.judged == ["b", "c", "a"]
    assert {text: cached.evaluate(named(text)) for text in "abc"} == found, "submitted again: the stored answers"
    assert engine.judged == ["b", "c", "a"] and cached.report.stored == 4
    with pytest.raises(RequestError, match="another evaluator"):
        list(cached.gather([Ticket(EvaluationRequest(named("a")))]))


# ---- a pool of processes


class Obedient(SerialEvaluator):
    """Does what the program's text says, in a process of a pool."""

    version, estimated = 3, True

    def answer(self, request: EvaluationRequest) -> Evaluation:
        text = request.program.fallback
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "raise":
            raise ValueError("no")
        if text.startswith("sleep"):
            time.sleep(float(text.split()[1]))
        if text.startswith("wait for "):
            while not Path(text.removeprefix("wait for ")).exists():
                time.sleep(0.01)
        return Evaluation(Gate.PASSED, timing=Timing(1.0, estimated=True), notes=(text, str(os.getpid())))


def obedient() -> tuple[Evaluator, OpGraph]:
    return Obedient(), NOTHING


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    made = LocalPool(obedient, Obedient)
    list(made.gather([made.submit(EvaluationRequest(named(text))) for text in ("warm", "up")]))
    yield made
    made.close()


def test_answers_come_in_the_order_they_end(pool: LocalPool, tmp_path: Path) -> None:
    texts = [f"wait for {tmp_path / 'others'}", "quick", "quicker", "quickest"]
    tickets = [pool.submit(EvaluationRequest(named(text))) for text in texts]
    assert list(pool.gather(tickets, timeout=0.0)) == []
    found = []
    for ticket, answer in pool.gather(tickets):
        found.append((ticket.request.program.source, answer.notes))
        if len(found) == 3:
            (tmp_path / "others").touch()
    assert [text for text, _ in found] == [*texts[1:], texts[0]] and all(text == n[0] for text, n in found)
    assert len({n[1] for _, n in found}) == 2, "two processes"
    assert (pool.name, pool.version, pool.estimated) == ("Obedient", 3, True)
    with pytest.raises(RequestError, match="answered before"):
        list(pool.gather(tickets))


def test_a_process_that_dies_loses_nothing_and_what_it_was_at_is_asked_again(pool: LocalPool) -> None:
    before = pool.report.again.get("machine", 0)
    tickets = [pool.submit(EvaluationRequest(named(text))) for text in ("die", "a", "raise", "b", "c")]
    found = {t.request.program.source: e for t, e in pool.gather(tickets)}
    assert [text for text, e in found.items() if not e.ok] in (["die", "raise"], ["raise", "die"])
    died, raised = found["die"], found["raise"]
    assert (died.fault, raised.fault) == (Fault.MACHINE, Fault.JUDGE) and not died.lasting, "no verdict on the program"
    assert "SIGKILL" in (died.error or "") and (died.error or "").endswith("(tried 3 times)")
    assert "ValueError: no" in (raised.error or ""), "it would raise again, and was not asked again"
    assert pool.report.again == {"machine": before + 2} and "SIGKILL" in pool.report.reason
    assert pool.evaluate(named("later")).ok


def test_one_that_takes_too_long_is_ended(pool: LocalPool) -> None:
    slow = pool.submit(EvaluationRequest(named("sleep 60"), seconds=0.3))
    other = pool.submit(EvaluationRequest(named("other")))
    found = dict(pool.gather([slow, other]))
    assert found[other].ok and found[slow].failure == "late"
    assert found[slow].error == "the judge took longer than 0.3 s" and not found[slow].lasting


def test_equal_requests_in_flight_are_judged_once(pool: LocalPool) -> None:
    tickets = [pool.submit(EvaluationRequest(named("sleep 0.1"))) for _ in range(3)]
    assert len({tuple(e.notes) for _, e in pool.gather(tickets)}) == 1
    assert len(set(tickets)) == 3


@pytest.mark.slow
def test_judges_in_processes_of_a_pool_answer_as_one_in_this_process() -> None:
    spec = KernelSpec.from_source(RELU, "relu")
    task = make_task(spec, device="h200")
    start = task.start
    region = start.regions[0]
    patch = TemplateCoder().write(Request(start, Action("lowering", (region.id,)), DEVICES["h200"]))
    made = make_pool(spec, device="h200", environments=({},))
    try:
        tickets = [made.submit(task.request(start)), made.submit(task.request(start, patch))]
        found = [answer for _, answer in made.gather(tickets)]
        alone = [task.evaluator.ask(ticket.request) for ticket in tickets]
        assert [replace(e, seconds={}) for e in found] == [replace(e, seconds={}) for e in alone]
        assert all(e.ok and e.timing is not None and e.timing.estimated for e in found)
        assert (made.name, made.version) == (task.evaluator.name, task.evaluator.version)
    finally:
        made.close()
        task.evaluator.close()


# ---- an engine of another package


class Outsider(Evaluator):
    """Knows nothing but the interface."""

    def __init__(self) -> None:
        self.requests: list[EvaluationRequest] = []

    def submit(self, request: EvaluationRequest) -> Ticket:
        self.requests.append(request)
        return Ticket(request)

    def gather(self, tickets: Sequence[Ticket], timeout: float | None = None) -> Iterator[tuple[Ticket, Evaluation]]:
        for ticket in tickets:
            kernels = sum(i.generated for i in ticket.request.candidates[0].implementations.values())
            yield ticket, Evaluation(Gate.PASSED, timing=Timing(1.0 / (1 + kernels)), eager=Timing(1.0))


def test_an_engine_written_outside_serves_by_the_interface_alone() -> None:
    engine = Outsider()
    spec = KernelSpec.from_function(lambda x: torch.relu(x) * 2, (torch.ones(8, 8),))
    result = plan_and_code(
        spec, evaluator=engine, coder=FakeCoder(), planner="heuristic", search="greedy", evaluations=4, seconds=60.0
    )
    assert result.evaluations > 1 and result.speedup is not None and result.speedup > 1
    assert {r.asked for r in engine.requests} == {Asked.TIMING, Asked.FINAL}
    assert {(r.spec, r.device, r.mode) for r in engine.requests} == {(spec.digest, "h200", "default")}
    waits = {r.library_seconds for r in engine.requests if r.patch is not None}
    assert all(s is not None and 0 < s < 30.0 for s in waits), "half of what is left"
    assert all(EvaluationRequest.from_json(r.to_json(), r.program.graph).digest == r.digest for r in engine.requests)


@pytest.mark.parametrize(("modes", "each"), [((), 20.0), (("default",), 20.0), (MODES, 10.0)])
def test_all_modes_of_torch_compile_fit_the_budget(modes: Sequence[str], each: float) -> None:
    engine = Outsider()
    plan_and_code(torch.relu, (torch.ones(8),), evaluator=engine, coder=FakeCoder(), planner=ScriptedPlanner(("stop",)),
                  search="greedy", seconds=40.0, compile_modes=modes)  # fmt: skip
    assert {r.options.compile_seconds for r in engine.requests} == {each}


class Broken(Outsider):
    """Fails by itself at every generated kernel."""

    def gather(self, tickets: Sequence[Ticket], timeout: float | None = None) -> Iterator[tuple[Ticket, Evaluation]]:
        for ticket, found in super().gather(tickets, timeout):
            if found.timing is not None and found.timing.device_ms < 1:
                raise KeyError("lost")
            yield ticket, found


def test_an_engine_that_fails_by_itself_is_named_and_the_run_goes_on() -> None:
    graph = sample_graph()
    result = optimize(fake_task(graph, Broken()), GreedySearch(ScriptedPlanner(["lowering", "lowering", "stop"])))
    errors = [step.evaluation.error for step in result.steps if step.evaluation is not None]
    assert all(e.startswith("the evaluator Broken raised KeyError: 'lost' (") for e in errors[:2])
    assert not any(step.accepted and step.evaluation for step in result.steps) and result.on_pytorch


def test_programs_are_judged_at_one_place() -> None:
    root = Path(qimeng.__file__).parent
    asking = re.compile(r"evaluator\.(ask|submit|gather|evaluate)\(|(judge|stored|engine)\.(ask|evaluate)\(")
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if asking.search(path.read_text())}
    engines = {
        "envs/judge/region_judges.py",
        "envs/steps/ahead.py",
        "envs/steps/caching.py",
        "envs/workers/answering.py",
        "planner/lm/live.py",
    }
    assert found - engines == {"envs/steps/task.py", "exploits/suite.py"}, "ask through the task (`Task.judged`)"


def test_a_task_asks_for_its_own_conditions() -> None:
    task = replace(fake_task(sample_graph()), options=FinalOptions(("default",), 1.0))
    request = task.request(task.start, asked=Asked.FINAL)
    assert (request.spec, request.device, request.mode) == ("sample", task.context.device.name, "default")
    assert request.options.compile_modes == ("default",) and task.evaluator.ask(request).ok
