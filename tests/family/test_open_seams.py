"""Another package adds a family and a graph-level kind, no line of `qimeng` changed; its faults end a step at most."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

from qimeng import plugins
from qimeng.actions import GraphRewrite, legal_actions, register, unregister
from qimeng.coder.template.coder import TemplateCoder
from qimeng.envs.cost.kernel_time import cost_of
from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.result import Result
from qimeng.envs.workers.compile import job_of
from qimeng.errors import QimengError
from qimeng.family import (
    Family,
    families,
    family_field,
    is_built_in,
    register_family,
    rivals,
    schedule_from_data,
    take_faults,
    unregister_family,
)
from qimeng.graph.capture import capture
from qimeng.interfaces import Action, Patch, Request
from qimeng.planner.greedy import GreedySearch
from qimeng.program.implementation import Implementation
from qimeng.program.origin import is_printed
from qimeng.program.program import Program
from qimeng.program.schedule import Schedule
from qimeng.testing import FakeCoder, ScriptedPlanner, fake_task
from tests.family.banded import Banded, BandSchedule, Bundle, Module, Retile, inputs, whole
from tests.interpreted import ended

FUSED = ("fusion",)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    unregister_family("banded")
    unregister("bundle")


def run(*script: str) -> Result:
    return optimize(fake_task(capture(Module, inputs), coder=TemplateCoder()), GreedySearch(ScriptedPlanner(script)))


def test_its_kernels_run_in_the_interpreter() -> None:
    done = ended("-m", "tests.family.banded")
    assert done.returncode == 0, done.stderr[-2000:]
    (plain, first), (larger, second) = json.loads(done.stdout)
    assert (plain, larger) == ("banded()", "banded(block=256)")
    assert max(first, second) < 1e-5


def test_it_is_fused_lowered_and_retiled_by_the_step_loop() -> None:
    register_family(Banded())
    result = run(*FUSED, "lowering", "tiling larger", "vectorization", "tiling smaller")
    assert [str(s.action).split(" r")[0] for s in result.steps if s.accepted] == [
        "fusion", "lowering", "tiling larger", "tiling smaller", "stop",
    ]  # fmt: skip
    assert not result.notes or "fault" not in " ".join(result.notes)


def test_what_the_rest_of_the_library_learns_of_it() -> None:
    family = register_family(Banded())
    assert list(families())[0] == "banded" and not is_built_in(family)
    program, context = whole(), fake_task(capture(Module, inputs), coder=TemplateCoder()).context
    action = Action("lowering", (program.regions[0].id,))
    lowered = context.coder.write(Request(program, action, context.device)).apply(program)
    made = lowered.implementation(lowered.regions[0])
    assert isinstance(made.schedule, BandSchedule) and cost_of(lowered.regions[0], made).block_bytes == 8 * 128
    assert not is_printed(lowered.regions[0], made), "another package's text is checked like anybody's"
    assert {a.kind for a in legal_actions(lowered, context)} >= {"tiling", "unfuse"}
    assert not {a.kind for a in legal_actions(lowered, context)} & {"split", "precision", "pipeline"}
    assert schedule_from_data({"family": "banded", "block": 64}) == BandSchedule(block=64)
    sent = job_of(lowered.regions[0], made).implementation
    assert sent.schedule is None, "a worker, which is kept from the user's files, cannot import its class"
    assert pickle.loads(pickle.dumps(sent)).digest == made.digest, "it is known by the same digest there"


class Raises(Banded):
    def __init__(self, method: str):
        super().__init__()
        setattr(self, method, self.fail)

    def fail(self, *args: Any) -> Any:
        raise ZeroDivisionError("oops")


class Gives(Banded):
    def __init__(self, found: Any):
        super().__init__()
        self.found = found

    def default(self, *args: Any) -> Any:
        return self.found


class Other(Schedule):
    pass


@dataclass(frozen=True)
class WeakSchedule(Schedule):
    family: str = family_field("weak")


class BadMove(Retile):
    def schedules(self, *args: Any) -> Any:
        return (BandSchedule(block=3),)


class Moved(Banded):
    def __init__(self) -> None:
        self.moves = {"tiling": BadMove()}


FAULTS: dict[str, tuple[Banded, str, str]] = {
    "default raises": (Raises("default"), "lowering", "its default raised ZeroDivisionError: oops"),
    "print raises": (Raises("print"), "lowering", "its print raised ZeroDivisionError: oops"),
    "needs raises": (Raises("needs"), "tiling", "its needs raised ZeroDivisionError: oops"),
    "3 rows": (Gives(BandSchedule(block=3)), "lowering", "a schedule with block = 3; it must be a power of two"),
    "no schedule": (Gives(None), "lowering", "its default returned NoneType, not a schedule"),
    "wrong family": (Gives(Other()), "lowering", "its default returned a schedule of the family ''"),
    "a move of 3 rows": (Moved(), "tiling", "in its move 'tiling' its schedules returned a schedule with block = 3"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_its_step_with_one_message(name: str) -> None:
    family, kind, words = FAULTS[name]
    register_family(family)
    result = run(*FUSED, "lowering", kind, kind)
    told = [s for s in result.steps if s.evaluation is not None and s.evaluation.gate.value == "write"]
    assert told and all(s.action.kind == kind for s in told)
    error = told[0].evaluation.error if told[0].evaluation else ""
    assert error is not None and words in error and "\n" not in error
    assert error.startswith(f"the family 'banded' (tests.family.test_open_seams.{type(family).__name__}) is at fault: ")
    assert result.stopped == "stop" and [n for n in result.notes if "at fault" in n] == [error]


def test_a_family_that_cannot_match_is_passed_over_with_a_note() -> None:
    register_family(Raises("plan"))
    result = run(*FUSED, "lowering")
    assert [s.action.kind for s in result.steps if s.accepted] == ["fusion", "lowering", "stop"]
    (note,) = [n for n in result.notes if "at fault" in n]
    assert "its plan raised ZeroDivisionError: oops" in note


def test_registering_what_is_no_family_is_refused() -> None:
    for made, words in (
        (object(), "a family must extend qimeng.family.*Family, object does not"),
        (Banded, "give an object of the class, Banded\\(\\), not the class Banded"),
        (type("Two", (Banded,), {"name": "two words"})(), "must be an identifier"),
        (type("Taken", (Banded,), {"name": "gemm"})(), "'gemm' is registered already"),
        (type("Bare", (Banded,), {"schedule": dict})(), "it must be a dataclass of Schedule"),
        (type("Alias", (Banded,), {"name": "alias"})(), "says that it is of 'banded'"),
    ):
        with pytest.raises(ValueError, match=words):
            register_family(made)  # type: ignore[arg-type]
    family = Banded()
    family.moves = {"tiling": None}  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="a move 'tiling' that is no Move"):
        register_family(family)
    for found in ("tile", ("banded",), (1,)):
        with pytest.raises(ValueError, match="has the rivals .*; give a tuple of other families' names"):
            register_family(type("Rivalled", (Banded,), {"rivals": found})())


class Rivalled(Banded):
    rivals = ("tile", "nobody")


def test_the_plain_schedules_of_rivals_are_measured_beside() -> None:
    register_family(Rivalled())
    program, context = whole(), fake_task(capture(Module, inputs), coder=TemplateCoder()).context
    action = Action("lowering", (program.regions[0].id,))
    patch = context.coder.write(Request(program, action, context.device))
    found = [made.schedule.family for made in patch.alternatives if made.schedule is not None]
    assert found[0] == "banded" and found[-1] == "tile" and set(found) == {"banded", "tile"}


def test_a_rival_that_fails_is_left_out_with_a_note() -> None:
    register_family(type("Weak", (Raises,), {"name": "weak", "schedule": WeakSchedule})("plan"))
    register_family(type("Strong", (Banded,), {"rivals": ("weak",)})())
    try:
        (region,) = whole().regions
        assert rivals(region, families()["banded"]) == []
        assert "its plan raised ZeroDivisionError: oops" in take_faults()["weak"]
    finally:
        unregister_family("weak")


class Here(EntryPoint):
    """An entry point of this very file."""

    def load(self) -> type[Family[Any, Any]]:
        return Banded


def test_installed_packages_add_theirs_and_a_broken_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import qimeng.family.registry as registry

    points = [Here("banded", "here:Banded", registry.GROUP), EntryPoint("lost", "no.such:Family", registry.GROUP)]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points if group == registry.GROUP else [])
    monkeypatch.setattr(registry._installed, "_taken", set())
    monkeypatch.setattr(registry._installed, "_done", False)
    for _ in range(2):
        with pytest.raises(QimengError, match="'lost' of the installed package no.such:Family cannot be used"):
            families()
    points.pop()
    assert "banded" in families()


class Silent(FakeCoder):
    """Writes nothing: a change of the graph alone is no coder's."""

    def write(self, request: Request) -> Patch:
        raise AssertionError("asked to write")


class Twice(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(x), torch.tanh(x)


def bundled(kind: Bundle) -> tuple[Result, Program]:
    register(kind)
    graph = capture(Twice, lambda: (torch.empty(64, 64),))
    result = optimize(fake_task(graph, coder=Silent()), GreedySearch(ScriptedPlanner(["bundle", "bundle"])))
    assert result.program is not None
    return result, result.program


def test_a_graph_kind_of_another_package_rewrites_without_a_coder() -> None:
    result, _ = bundled(Bundle())
    assert [(s.action.kind, s.accepted) for s in result.steps] == [("bundle", True), ("stop", True)]


def rewrites_of(program: Program) -> dict[str, Any]:
    """What no kind may return."""
    first, second = program.regions
    return {
        "nothing": None,
        "a number": 1 / 3,
        "no region": GraphRewrite(()),
        "a region lost": GraphRewrite((first,)),
        "a region twice": GraphRewrite((first, second, first)),
        "texts": GraphRewrite((first.id, second.id)),  # type: ignore[arg-type]
        "another graph": GraphRewrite((*whole().regions, second)),
        "another target": GraphRewrite(None, whole().regions[0], Implementation("torch", "", "f")),
    }


REFUSED = {
    "nothing": "NoneType, not GraphRewrite",
    "a number": "float, not GraphRewrite",
    "no region": "a partition that computes relu, a result, in no region",
    "a region lost": "a partition that computes tanh, a result, in no region",
    "a region twice": "(relu) twice",
    "texts": "a partition that holds a str, which is no region",
    "another graph": "a region of another graph",
    "another target": "which the partition does not have",
}


class Wrong(Bundle):
    def __init__(self, name: str):
        self.found = name

    def apply(self, program: Program, *args: Any) -> Any:
        return rewrites_of(program)[self.found]


@pytest.mark.parametrize("name", REFUSED)
def test_a_graph_kind_that_returns_no_rewrite_is_named(name: str) -> None:
    result, _ = bundled(Wrong(name))
    told = [s for s in result.steps if s.action.kind == "bundle"]
    assert len(told) == 1 and not told[0].accepted and told[0].evaluation is not None
    error = told[0].evaluation.error or ""
    assert error.startswith(f"the kind of action 'bundle' ({__name__}.Wrong) is at fault: its apply returned ")
    assert REFUSED[name] in error and "\n" not in error and result.stopped == "stop"


def test_a_graph_kind_that_changes_nothing_is_named() -> None:
    result, _ = bundled(type("Idle", (Bundle,), {"apply": lambda *args: GraphRewrite()})())
    (step,) = [s for s in result.steps if s.action.kind == "bundle"]
    assert not step.accepted and step.evaluation is not None
    assert step.evaluation.error == "the kind of action 'bundle' changed nothing"


@pytest.mark.parametrize("method", ["apply", "check", "proposals"])
def test_a_graph_kind_that_raises_is_named(method: str) -> None:
    def fail(self: Any, *args: Any) -> Any:
        raise KeyError("lost")

    result, _ = bundled(type("Fails", (Bundle,), {method: fail, "__doc__": None})())
    text = f"Fails) is at fault: its {method} raised KeyError: 'lost'"
    assert [n for n in result.notes if text in n] and result.stopped == "stop"
    told = [s.evaluation.error or "" for s in result.steps if s.action.kind == "bundle" and s.evaluation is not None]
    assert len(told) == (method != "proposals") and all(text in error for error in told)
