"""Kinds, planners and coders of other packages that fail: one clear message that names them, and the run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from qimeng.actions import ScheduleKind, register, unregister
from qimeng.cli import main
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.families.tile.schedule import TileSchedule
from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.session import Session
from qimeng.errors import KindFault
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Action, Observation, Patch, Request
from qimeng.planner.greedy import GreedySearch
from qimeng.testing import FakeCoder, FakeEvaluator, ScriptedPlanner, fake_task, sample_graph


class Plug(ScheduleKind):
    name = "plug"

    def __init__(self, found: Any):
        self.found = found

    def rewrite(self, schedule: Any, plan: Any, device: Any, param: str) -> Any:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found(schedule)


class Proposes(Plug):
    def proposals(self, program: Any, context: Any) -> Iterator[Action]:
        yield Action("plug")
        raise KeyError("nothing")


OTHER = {"tile": GemmSchedule, "gemm": TileSchedule}
FAULTS = {
    "raises": (Plug(ZeroDivisionError("oops")), "its rewrite raised ZeroDivisionError: oops"),
    "block of 0 rows": (Plug(lambda s: (s.but(block_m=0),)), "a schedule with block_m = 0; it must be a power of two"),
    "block of 3 rows": (Plug(lambda s: (s, s.but(block_m=3))), "block_m = 3; it must be a power of two"),
    "warps": (Plug(lambda s: (s.but(warps=2.0),)), "warps = 2.0"),
    "stages": (Plug(lambda s: [s.but(stages=0)]), "stages = 0; it must be a positive integer"),
    "family": (Plug(lambda s: (OTHER[s.family](),)), "returned a schedule of the family"),
    "no family": (Plug(lambda s: (s.but(family="reduction"),)), "its rewrite raised ValueError"),
    "no tuple": (Plug(lambda s: s), "Schedule, not a tuple of schedules"),
    "no schedule": (Plug(lambda s: (None,)), "returned NoneType, not a schedule"),
}


@pytest.fixture
def graph() -> OpGraph:
    return sample_graph()


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    unregister("plug")


@pytest.mark.parametrize("name", FAULTS)
def test_a_step_with_a_faulty_kind_ends_with_one_message(name: str, graph: OpGraph):
    kind, words = FAULTS[name]
    register(kind)
    result = optimize(fake_task(graph), GreedySearch(ScriptedPlanner(["lowering", "plug", "plug", "lowering"])))
    told = [s for s in result.steps if s.action.kind == "plug"]
    assert len(told) == 1 and not told[0].accepted, "told once, then not offered again"
    error = told[0].evaluation.error
    assert error is not None and words in error and "\n" not in error
    assert error.startswith(f"the kind of action 'plug' ({__name__}.Plug) is at fault: its rewrite ")
    assert [s.action.kind for s in result.steps if s.accepted] == ["lowering", "lowering", "stop"]
    assert [n for n in result.notes if "plug" in n] == [error] and "Traceback" not in result.report()
    with pytest.raises(KindFault):
        kind.rewrite(TileSchedule(), None, None, "")


def test_a_kind_whose_proposals_raise_is_left_out_with_a_note(graph: OpGraph):
    register(Proposes(lambda s: (s,)))
    result = optimize(fake_task(graph), GreedySearch(ScriptedPlanner(["plug", "lowering"])))
    assert [s.action.kind for s in result.steps] == ["lowering", "stop"]
    assert "its proposals raised KeyError: 'nothing'" in " ".join(result.notes)


def test_a_fault_of_one_run_is_not_held_against_the_next(graph: OpGraph):
    register(Plug(ZeroDivisionError("oops")))
    task = fake_task(graph)
    for _ in range(2):
        session = Session(task)
        session.begin()
        session.step(next(a for a in session.observe().actions if a.kind == "lowering"))
        assert any(a.kind == "plug" for a in session.observe().actions)
        session.step(next(a for a in session.observe().actions if a.kind == "plug"))
        assert not any(a.kind == "plug" for a in session.observe().actions) and list(session.ledger.faults) == ["plug"]


def test_registering_what_is_no_kind_is_refused(capsys: pytest.CaptureFixture[str]):
    def made(**attributes: Any) -> ScheduleKind:
        return type("Made", (Plug,), attributes)(lambda s: (s,))

    for attributes, words in (
        (
            {"family": "reduction"},
            "the kind 'plug' is for the family 'reduction'; known: .*gemm, attention, scan, tile",
        ),
        ({"name": "tiling"}, "a kind called 'tiling' is registered already"),
        ({"name": None}, "must be an identifier, Made has None"),
        ({"name": "two words"}, "must be an identifier, Made has 'two words'"),
        ({"options": "wide"}, "the kind 'plug' has options 'wide'"),
        ({"options": ()}, "options \\(\\); they must be a tuple of texts"),
    ):
        with pytest.raises(ValueError, match=words):
            register(made(**attributes))
    for thing, words in ((Plug, "an object of the class, Plug\\(\\), not the class Plug"), (3, "Kind, int does not")):
        with pytest.raises(ValueError, match=words):
            register(thing)  # type: ignore[arg-type]
    assert register(made(__doc__=None)).name == "plug", "a kind without a docstring works"
    with pytest.raises(SystemExit):
        main(["actions", "--json"])
    (listed,) = (kind for kind in json.loads(capsys.readouterr().out) if kind["kind"] == "plug")
    assert listed["summary"] == listed["rewrite"] == ""


class Raising(ScriptedPlanner):
    def __init__(self, script: list[str], last: Any):
        super().__init__(script)
        self.last = last

    def choose(self, observation: Observation) -> Any:
        action = super().choose(observation)
        if action.kind != "stop":
            return action
        if isinstance(self.last, Exception):
            raise self.last
        return self.last


@pytest.mark.parametrize(
    ("last", "words"),
    [(RuntimeError("out of ideas"), "RuntimeError: out of ideas"), ("fusion", "it chose str, which is not an action")],
)
def test_a_planner_that_fails_ends_the_search_not_the_run(last: Any, words: str, graph: OpGraph):
    result = optimize(fake_task(graph), GreedySearch(Raising([*["fusion"] * 4, "lowering"], last)))
    assert result.stopped == "failed" and len(result.recipe) == 5 and result.speedup and result.speedup > 1
    named = f"the search ended early: the planner {__name__}.Raising failed: "
    assert [n for n in result.notes if n.startswith("the search")] == [named + words]


def test_what_a_judge_raises_is_not_taken_for_a_planners(graph: OpGraph):
    class Broken(FakeEvaluator):
        def judge(self, program: Any, patch: Patch | None = None) -> Any:
            if patch is not None:
                raise RuntimeError("a bug of the judge")
            return super().judge(program, patch)

    result = optimize(fake_task(graph, Broken()), GreedySearch(ScriptedPlanner(["lowering"])))
    (told,) = [s.evaluation for s in result.steps if s.action.kind == "lowering"]
    assert told is not None and (told.error or "").startswith(
        "the evaluator Broken raised RuntimeError: a bug of the judge (test_guard.py, line "
    )
    assert result.stopped == "stop" and not [n for n in result.notes if n.startswith("the search ended early")]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (RuntimeError("no idea"), "the coder Own raised RuntimeError: no idea"),
        (None, "the coder Own wrote NoneType, not a patch"),
        ("elsewhere", 'the coder Own raised KeyError: "no region elsewhere'),
    ],
)
def test_a_coder_that_fails_ends_its_step(answer: Any, words: str, graph: OpGraph):
    class Own(FakeCoder):
        def write(self, request: Request) -> Any:
            if isinstance(answer, Exception):
                raise answer
            patch = super().write(request)
            return Patch(patch.regions, answer, patch.alternatives) if answer else None

    result = optimize(fake_task(graph, coder=Own()), GreedySearch(ScriptedPlanner(["lowering", "lowering"])))
    refused = [s.evaluation for s in result.steps if s.action.kind == "lowering"]
    assert len(refused) == 2 and all(e is not None and words in (e.error or "") for e in refused)
    assert result.on_pytorch and result.speedup == 1.0
