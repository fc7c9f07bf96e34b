"""The hybrid coder: who writes what, and who takes over."""

from __future__ import annotations

import pytest
import torch

from qimeng.actions import check_action
from qimeng.coder.hybrid import HybridCoder
from qimeng.coder.llm.chat import ChatError
from qimeng.coder.named import FORMS, coder_named
from qimeng.coder.template.coder import TemplateCoder
from qimeng.envs.screening.origin import is_sweep
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import Budget, State
from qimeng.errors import CoderError, IllegalAction
from qimeng.graph.capture import capture
from qimeng.graph.opgraph import OpGraph
from qimeng.graph.region import Region
from qimeng.interfaces import Action, Coder, Evaluation, Gate, Memory, Patch, Request, Step, Timing
from qimeng.program.program import Implementation, Program
from qimeng.store import Store
from qimeng.testing import fake_task, sample_graph


class Writer(Coder, Memory):
    """Writes a kernel without a schedule for everything, or fails."""

    free_hand = True

    def __init__(self, error: CoderError | None = None):
        self.error = error
        self.requests: list[Request] = []
        self.store: Store | None = None
        self.memory = self

    def write(self, request: Request) -> Patch:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        region = request.program.region(request.action.regions[0])
        entry = f"m{region.signature[:8]}_region"
        text = f"# text {len(self.requests)}\n{region.function(entry)}"
        return Patch(None, region.id, (Implementation("triton", text, entry),), "text")

    def use_store(self, store: Store, spec: str) -> None:
        self.store = store

    def remarks(self) -> tuple[str, ...]:
        return ("a remark",)


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return sample_graph()


def begun(graph: OpGraph, writer: Coder, patience: int = 3) -> Session:
    session = Session(fake_task(graph, coder=HybridCoder(writer, patience=patience)), Budget(1e9, 1000, 1000))
    session.begin()
    return session


def region(program: Program, label: str) -> Region:
    return next(r for r in program.regions if r.label() == label)


def lowered(graph: OpGraph, coder: Coder) -> tuple[Program, Region]:
    program = Program.start(graph)
    softmax = region(program, "_softmax")
    request = Request(program, Action("lowering", (softmax.id,)), fake_task(graph).context.device)
    return coder.write(request).apply(program), softmax


def test_the_template_writes_where_it_can(graph: OpGraph) -> None:
    writer = Writer()
    session = begun(graph, writer)
    softmax = region(session.state.program, "_softmax")
    assert session.step(Action("lowering", (softmax.id,))).accepted
    assert session.state.program.schedule(softmax) is not None
    assert session.step(next(a for a in session.observe().actions if a.kind == "fusion")).accepted
    assert not writer.requests


def test_the_writer_writes_where_the_template_cannot() -> None:
    class Second(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.kthvalue(x, 2)[0]

    writer = Writer()
    session = begun(capture(Second, lambda: (torch.empty(8, 8),)), writer)
    (second,) = session.state.program.regions
    assert TemplateCoder().can_implement(second) is not None
    assert session.step(Action("lowering", (second.id,))).accepted and len(writer.requests) == 1
    assert "# text 1" in session.state.program.source
    with pytest.raises(IllegalAction, match="already"):  # nothing but the writer could, and it has
        check_action(session.state.program, Action("lowering", (second.id,)), session.task.context)


def test_a_written_region_is_the_writers_until_it_is_lowered_again(graph: OpGraph) -> None:
    writer = Writer()
    session = begun(graph, writer)
    program, softmax = lowered(graph, writer)
    session.state = State(program)
    assert session.step(Action("tiling", (softmax.id,), "taller")).accepted and len(writer.requests) == 2
    assert "# text 2" in session.state.program.source
    assert session.step(Action("lowering", (softmax.id,))).accepted and len(writer.requests) == 2
    assert session.state.program.schedule(softmax) is not None and "# text" not in session.state.program.source


def history(target: Region, *moves: tuple[str, float | None]) -> tuple[Step, ...]:
    """Steps on `target`: kind, and milliseconds of the program after it, or None for a refused one."""
    steps = []
    for kind, ms in moves:
        passed = (
            Evaluation(Gate.PASSED, timing=Timing(ms)) if ms is not None else Evaluation(Gate.REGION, "no", "wrong")
        )
        steps.append(Step(Action(kind, (target.id,), ""), passed, ms is not None))
    return tuple(steps)


@pytest.mark.parametrize(
    "moves, who",
    [
        ((), "template"),
        ((("lowering", 1.0), ("tiling", 0.99), ("tiling", 0.99)), "template"),
        ((("lowering", 1.0), ("tiling", 0.99), ("tiling", None), ("pipeline", 1.2)), "writer"),
        ((("lowering", 1.0), ("tiling", 0.99), ("tiling", None), ("pipeline", 0.9)), "template"),
        ((("tiling", 0.9), ("tiling", 1.0), ("tiling", 1.0), ("tiling", 1.0), ("lowering", 1.0)), "template"),
    ],
)
def test_a_sweep_stalls(moves: tuple[tuple[str, float | None], ...], who: str, graph: OpGraph) -> None:
    writer = Writer()
    coder = HybridCoder(writer)
    program, softmax = lowered(graph, coder)
    device = fake_task(graph).context.device
    action = Action("tiling", (softmax.id,), "taller")
    coder.write(Request(program, action, device, history=history(softmax, *moves)))
    assert ("writer" if writer.requests else "template") == who


def test_a_stalled_sweep_elsewhere_does_not_count(graph: OpGraph) -> None:
    writer = Writer()
    coder = HybridCoder(writer)
    program, softmax = lowered(graph, coder)
    other = history(region(program, "relu"), *[("tiling", 1.0)] * 5)
    device = fake_task(graph).context.device
    coder.write(Request(program, Action("tiling", (softmax.id,), "taller"), device, history=other))
    assert not writer.requests


def test_who_repairs(graph: OpGraph) -> None:
    """Who wrote it; the writer too where the template has nothing left to try."""
    writer = Writer()
    coder = HybridCoder(writer)
    program, softmax = lowered(graph, coder)
    device = fake_task(graph).context.device
    action = Action("tiling", (softmax.id,), "taller")
    swept = coder.write(Request(program, action, device))
    repaired = coder.write(Request(program, action, device, failed=swept, reason="wrong"))
    assert len(writer.requests) == 1 and not is_sweep(program, repaired)
    coder.write(Request(program, action, device, failed=repaired, reason="wrong"))
    assert len(writer.requests) == 2


def test_the_template_stands_in_for_a_writer_that_has_no_answer(graph: OpGraph) -> None:
    writer = Writer(ChatError("no", "budget"))
    coder = HybridCoder(writer, patience=0)
    program, softmax = lowered(graph, HybridCoder(Writer()))
    device = fake_task(graph).context.device
    request = Request(program, Action("tiling", (softmax.id,), "taller"), device)
    assert is_sweep(program, coder.write(request)) and len(writer.requests) == 1
    text, _ = lowered(graph, Writer())
    with pytest.raises(ChatError):  # a kernel without a schedule is nobody else's
        coder.write(Request(text, request.action, device))


def test_it_speaks_for_both(graph: OpGraph) -> None:
    writer, store = Writer(), Store()
    coder = HybridCoder(writer)
    assert coder.memory is not None
    coder.memory.use_store(store, "s")
    assert writer.store is store and coder.memory.remarks() == ("a remark",) and coder.free_hand and coder.schedules
    assert repr(coder).startswith("HybridCoder(") and coder.chat is None


@pytest.mark.parametrize("name", ["openai", "openai:", "hybrid:template", "hybrid:hybrid:openai:m", "model"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ValueError, match=FORMS[0]):
        coder_named(name)


def test_names(tmp_path: object) -> None:
    assert repr(coder_named(f"hybrid:transformers:{tmp_path}")) == f"HybridCoder(LLMCoder('transformers:{tmp_path}'))"
    with pytest.raises(ChatError, match="no folder /no/such"):
        coder_named("transformers:/no/such/place")
