"""Another package adds a planner and a search by entry points; what is broken in them is told in one message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qimeng.cli_names import check_names
from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.session import Session
from qimeng.errors import QimengError
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Action, Observation, Planner
from qimeng.planner import draws, make_planner, make_search
from qimeng.planner.search import ScoringPlanner, Search
from qimeng.testing import fake_task
from tests.planner.steady import Rounds, Steady, installed

HERE, THERE = __name__, "tests.planner.steady"


def test_they_are_found_by_name_and_run(graph: OpGraph, tmp_path: Path) -> None:
    with installed(tmp_path, f"steady = {THERE}:Steady", f"rounds = {THERE}:Rounds"):
        check_names("steady", "template", "rounds:2", "default", "float32")
        search = make_search("rounds:2", "steady")
        assert isinstance(search, Rounds) and isinstance(search.planner, Steady) and search.rounds == 2
        assert make_search("greedy", "steady") and make_search("rounds", "heuristic")
        assert not draws("rounds", "steady") and draws("rounds", "random")
        with pytest.raises(ValueError, match="unknown planner 'oracle'; known: heuristic, lm, .*, steady, sweep"):
            make_planner("oracle")
        with pytest.raises(ValueError, match="rounds takes numbers by these names .their defaults.: rounds=1"):
            make_search("rounds:height=3", "steady")
        result = optimize(fake_task(graph), search)
    kinds = [s.action.kind for s in result.steps]
    assert result.stopped == "stop" and kinds.count("stop") == 2 and kinds[-1] == "stop"
    assert {"fusion", "lowering"} <= set(kinds) and result.speedup and result.speedup > 1


# ---- what is broken before it runs


class NoPlanner:
    """No planner at all."""


class Unmade(Planner):
    def __init__(self) -> None:
        raise OSError("no weights on this disk")

    def choose(self, observation: Observation) -> Action:
        raise NotImplementedError


class Abstract(Planner):
    pass


class UnmadeSearch(Rounds):
    def __init__(self, planner: Planner):
        raise OSError("no disk")


@pytest.mark.parametrize(
    ("planner", "words"),
    [
        ("no.such.module:Steady", r"the planner 'bad' of the installed package steady cannot be used .*No module"),
        (f"{HERE}:Lost", r"the planner 'bad' of the installed package steady cannot be used .*Lost"),
        (f"{HERE}:HERE", "the planner 'bad' is a str; it must be a class or a function"),
        (f"{HERE}:NoPlanner", "the planner 'bad' is a NoPlanner; it must extend qimeng.interfaces.roles.Planner"),
        ("builtins:dict", "the planner 'bad' is a dict; it must extend"),
        (f"{HERE}:Unmade", r"the planner 'bad' cannot be made \(OSError: no weights on this disk\)"),
        (f"{HERE}:Abstract", r"the planner 'bad' cannot be made \(TypeError: .*abstract"),
    ],
)
def test_a_planner_that_cannot_be_made_is_named(planner: str, words: str, tmp_path: Path) -> None:
    with installed(tmp_path, f"bad = {planner}"):
        with pytest.raises(QimengError, match=words):
            make_planner("bad")
        assert make_planner("heuristic"), "nothing else is touched by it"


@pytest.mark.parametrize(
    ("search", "words"),
    [
        ("no.such.module:Rounds", r"the search 'bad' of the installed package steady cannot be used"),
        (f"{HERE}:NoPlanner", r"the search 'bad' cannot be made \(TypeError"),
        ("builtins:list", r"the search 'bad' cannot be made \(TypeError: "),
        (f"{THERE}:Steady", r"the search 'bad' cannot be made \(TypeError: "),
        (f"{HERE}:UnmadeSearch", r"the search 'bad' cannot be made \(OSError: no disk\)"),
    ],
)
def test_a_search_that_cannot_be_made_is_named(search: str, words: str, tmp_path: Path) -> None:
    with installed(tmp_path, searches=f"bad = {search}"), pytest.raises(QimengError, match=words):
        make_search("bad", "heuristic")


# ---- what breaks in a run


class Raises(Steady):
    """Raises once there is a kernel."""

    def choose(self, observation: Observation) -> Action:
        if observation.program.on_pytorch:
            return super().choose(observation)
        raise ZeroDivisionError("oops")


class Illegal(Steady):
    """Chooses an action that nobody offered, once; it has no docstring of its own in `choose`."""

    __doc__ = None
    done = False

    def choose(self, observation: Observation) -> Action:
        if self.done:
            return super().choose(observation)
        self.done = True
        return Action("levitation", ("r00000000",))


class TooMany(ScoringPlanner):
    def scores(self, observation: Observation) -> Any:
        return [1.0] * (len(observation.actions) + 3)


class RaisesItself(Search):
    def __init__(self, planner: Planner):
        self.planner = planner

    def run(self, session: Session) -> str:
        while session.state.program.on_pytorch:
            session.step(self.planner.choose(session.observe()))
        raise KeyError("lost")


class ChoosesText(Steady):
    def choose(self, observation: Observation) -> Any:
        return str(super().choose(observation))


@pytest.mark.parametrize(
    ("planner", "search", "words"),
    [
        ("Raises", "greedy", f"the planner {HERE}.Raises failed: ZeroDivisionError: oops"),
        ("Raises", "beam", f"the planner {HERE}.Raises failed: ZeroDivisionError: oops"),
        ("TooMany", "mcts", f"the planner {HERE}.TooMany failed: it gave "),
        ("TooMany", "greedy", f"the planner {HERE}.TooMany failed: it gave "),
        ("Steady", "RaisesItself", f"the search {HERE}.RaisesItself failed: KeyError: 'lost'"),
        ("ChoosesText", "rounds", f"the planner {HERE}.ChoosesText failed: it chose str, which is not an action"),
    ],
)
def test_what_fails_in_a_run_ends_the_search_and_is_named(
    planner: str, search: str, words: str, graph: OpGraph, tmp_path: Path
) -> None:
    with installed(tmp_path, f"bad = {HERE}:{planner}", f"rounds = {THERE}:Rounds\nRaisesItself = {HERE}:RaisesItself"):
        result = optimize(fake_task(graph), make_search(search, "bad"))
    (note,) = [n for n in result.notes if n.startswith("the search ended early: ")]
    assert words in note and "\n" not in note
    assert result.stopped == "failed" and result.evaluation.ok and "Traceback" not in result.report()


def test_an_action_that_nobody_offered_ends_its_step(graph: OpGraph, tmp_path: Path) -> None:
    with installed(tmp_path, f"bad = {HERE}:Illegal"):
        result = optimize(fake_task(graph), make_search("greedy", "bad"))
    first = result.steps[0]
    assert not first.accepted and first.evaluation is not None and result.stopped == "stop"
    assert "unknown kind of action 'levitation'; known: " in (first.evaluation.error or "")
    assert result.speedup and result.speedup > 1
