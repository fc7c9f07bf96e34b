"""A backend of another package: it registers, compiles what is written in its language, and its errors name it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from qimeng import plugins
from qimeng.backend import (
    Backend,
    Capabilities,
    Compiled,
    KernelFacts,
    backend_named,
    backends,
    register_backend,
    unregister_backend,
)
from qimeng.backend import registry as module
from qimeng.device import DEVICES, Device
from qimeng.envs.estimate.interpret import Interpreter
from qimeng.envs.screening.sanitizer import unwatched
from qimeng.envs.steps.loop import optimize
from qimeng.envs.workers import preload
from qimeng.envs.workers.kernel_launches import kernel_names
from qimeng.errors import QimengError
from qimeng.graph.opgraph import Meta
from qimeng.interfaces import Evaluation, Patch, Request
from qimeng.planner.greedy import GreedySearch
from qimeng.program.program import Implementation, Program
from qimeng.testing import FakeCoder, FakeEvaluator, ScriptedPlanner, fake_task, sample_graph


class Tape(Backend):
    """A language whose kernels are lines ``kernel NAME`` of a comment."""

    language = "tape"
    title = "Tape"
    capabilities = Capabilities(frozenset({"cuda"}))
    program_needs = "\nIt needs a tape.\n"

    def compile(
        self, implementation: Implementation, inputs: Sequence[Meta | None], device: Device, folder: str | None = None
    ) -> Compiled:
        """One kernel a line."""
        kernels = [
            KernelFacts(name, False, (1, 1, 1), 1, 1, 32, 0, 0, 16, 0, 64)
            for name in self.kernel_names(implementation.source)
        ]
        return Compiled(tuple(kernels))

    def kernel_names(self, source: str) -> list[str]:
        """The names after ``# kernel``."""
        return [line.split()[2] for line in source.splitlines() if line.startswith("# kernel ")]

    def program_header(self) -> str:
        """What its runtime imports."""
        return "import math"


@pytest.fixture
def tape():
    backends()
    yield register_backend(Tape())
    unregister_backend("tape")


def test_two_backends_come_with_the_package() -> None:
    assert {"triton", "cuda"} <= backends().keys()
    triton, cuda = backend_named("triton"), backend_named("cuda")
    assert triton.capabilities.interpreter and not cuda.capabilities.interpreter
    assert triton.targets(DEVICES["mi300x"]) and not cuda.targets(DEVICES["mi300x"])
    assert all(b.capabilities.cross_compiles and b.targets(DEVICES["h200"]) for b in (triton, cuda))
    with pytest.raises(QimengError, match="no backend for the language 'tape'; known: cuda, triton"):
        backend_named("tape")


def test_a_stub_from_elsewhere_is_used(tape: Backend) -> None:
    text = "# kernel first\n# kernel second\ndef entry(*inputs):\n    return (inputs[0],)\n"
    implementation = Implementation("tape", text, "entry")
    assert implementation.generated and kernel_names(implementation) == ["first", "second"]
    found = tape.compile(implementation, (), DEVICES["h200"])
    assert [k.name for k in found.kernels] == ["first", "second"]
    start = Program.start(sample_graph())
    program = start.with_implementation(start.regions[-1].id, implementation)
    assert "import math" in program.source and "It needs a tape." in program.source.split('"""')[1]
    assert "triton" not in program.source


def test_it_compiles_where_it_says(tape: Backend) -> None:
    assert tape.refusal(DEVICES["h200"]) == "Tape is compiled only where the device is, and h200 is not in this machine"
    assert tape.refusal(replace(DEVICES["h200"], name="h200(here)")) is None
    assert "compiled for devices of the kind cuda" in str(tape.refusal(DEVICES["mi300x"]))


def test_what_the_sanitizer_does_not_watch_is_said(tape: Backend) -> None:
    start = Program.start(sample_graph())
    text = "# kernel first\ndef entry(*inputs):\n    return (inputs[0],)\n"
    assert unwatched(start) == ""
    program = start.with_implementation(start.regions[0].id, Implementation("tape", text, "entry"))
    assert unwatched(program) == "compute-sanitizer does not watch kernels in Tape"


def test_a_language_is_registered_once(tape: Backend) -> None:
    with pytest.raises(ValueError, match="the language 'tape' has a backend already"):
        register_backend(Tape())
    for language in ("torch", "two words"):
        other = Tape()
        other.language = language
        with pytest.raises(ValueError, match="language"):
            register_backend(other)


def test_registering_what_is_no_backend_is_refused() -> None:
    for made, words in (
        (object(), "a backend must extend qimeng.backend.base.Backend, object does not"),
        (type("Bare", (Tape,), {"capabilities": None})(), "the backend for 'tape' needs a title"),
        (type("Untitled", (Tape,), {"title": 3})(), "the backend for 'tape' needs a title"),
    ):
        with pytest.raises(ValueError, match=words):
            register_backend(made)
    try:
        assert register_backend(type("Silent", (Tape,), {"__doc__": None})()).title == "Tape", "no docstring is needed"
    finally:
        unregister_backend("tape")


class Faulty(Tape):
    """Fails in one method, by raising or by what it returns."""

    def __init__(self, method: str, found: object):
        def call(*args: object) -> object:
            if isinstance(found, Exception):
                raise found
            return found

        setattr(self, method, call)


class Writes(FakeCoder):
    """Lowers into a language."""

    def __init__(self, language: str):
        self.languages = (language,)

    def write(self, request: Request) -> Patch:
        region = request.action.regions[0]
        text = f"# kernel k_{region}\ndef run_{region}(*inputs):\n    return (inputs[0],)\n"
        return Patch(None, region, (Implementation(self.languages[0], text, f"run_{region}"),))


FAULTS = {
    "header": ("program_header", ZeroDivisionError("oops"), "its program_header raised ZeroDivisionError: oops"),
    "no header": ("program_header", None, "its program_header returned NoneType, not str"),
    "names": ("kernel_names", "k", "its kernel_names returned 'k', not a list of names"),
    "compile": ("compile", None, "its compile returned NoneType, not Compiled"),
    "targets": ("targets", ZeroDivisionError("oops"), "its targets raised ZeroDivisionError: oops"),
}


class Asks(FakeEvaluator):
    """Asks the backends what the real ones do."""

    def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
        after = program if patch is None else patch.apply(program)
        assert after.source
        for made in after.implementations.values():
            if made.generated:
                backend = backend_named(made.language)
                backend.refusal(DEVICES["h200"]), kernel_names(made), backend.compile(made, (), DEVICES["h200"])
        return super().judge(program, patch)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_its_step_with_one_message(name: str) -> None:
    method, found, words = FAULTS[name]
    backends()
    register_backend(Faulty(method, found))
    try:
        task = fake_task(sample_graph(), Asks(), coder=Writes("tape"))
        result = optimize(task, GreedySearch(ScriptedPlanner(["lowering", "lowering"])))
    finally:
        unregister_backend("tape")
    told = [s for s in result.steps if s.action.kind == "lowering"]
    assert len(told) == 2 and result.stopped == "stop" and result.evaluation.ok
    for step in told:
        assert not step.accepted and step.evaluation is not None
        start = f"the backend for 'tape' ({__name__}.Faulty) is at fault: "
        assert step.evaluation.error == start + words


def test_a_language_that_nobody_has_ends_its_step() -> None:
    task = fake_task(sample_graph(), Asks(), coder=Writes("runes"))
    result = optimize(task, GreedySearch(ScriptedPlanner(["lowering"])))
    (step,) = [s for s in result.steps if s.action.kind == "lowering"]
    assert not step.accepted and step.evaluation is not None
    assert step.evaluation.error == "no backend for the language 'runes'; known: cuda, triton"


def test_a_backend_that_cannot_warm_up_harms_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    warmed = list[str]()
    backends()
    register_backend(Faulty("warm_up", OSError("no disk")))
    try:
        with monkeypatch.context() as patched:
            patched.setattr(preload, "_shared", [])
            patched.chdir(tmp_path)
            for language in ("triton", "cuda"):
                own = backend_named(language)
                patched.setattr(type(own), "missing", lambda self: None)
                patched.setattr(type(own), "warm_up", lambda self, folder: warmed.append(self.language))
            preload.warm_up()
    finally:
        unregister_backend("tape")
    assert set(warmed) == {"triton", "cuda"}


def test_an_entry_point_registers_and_a_broken_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    backends()
    points = [EntryPoint("tape", f"{__name__}:Tape", module.GROUP)]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points if group == module.GROUP else [])
    monkeypatch.setattr(EntryPoint, "load", lambda self: Tape if self.name == "tape" else 1 / 0)
    monkeypatch.setattr(module._installed, "_done", False)
    try:
        assert isinstance(backends()["tape"], Tape)
        points.append(EntryPoint("broken", "nowhere:Broken", module.GROUP))
        module._installed._done = False
        with pytest.raises(QimengError, match="the backend 'broken' of the installed package nowhere:Broken cannot"):
            backends()
    finally:
        unregister_backend("tape")


def test_what_no_interpreter_runs_is_said_to_be_unchecked(tape: Backend) -> None:
    graph = sample_graph()
    start = Program.start(graph)
    text = "# kernel first\ndef entry(*inputs):\n    return (inputs[0],)\n"
    program = start.with_implementation(start.regions[0].id, Implementation("tape", text, "entry"))
    checked = object.__new__(Interpreter).check(program)
    assert checked.verdict is None
    assert checked.unchecked == "1 of 1 kernels are Tape, which runs on a GPU only: they were not checked"
