"""Searches and planners that need no training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import Budget
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Action, Evaluation, Observation, Patch, Planner
from qimeng.planner import PLANNERS, SEARCHES, WITH_FOLDER, make_planner, make_search
from qimeng.planner.beam import BeamSearch
from qimeng.planner.climb import HillClimb
from qimeng.planner.greedy import GreedySearch
from qimeng.planner.random import RandomPlanner
from qimeng.planner.search import ScoringPlanner, top_actions
from qimeng.program.program import Program
from qimeng.testing import FakeEvaluator, ScriptedPlanner, fake_task


class Longest(ScoringPlanner):
    """Likes actions with long texts; never stops while there is another."""

    def scores(self, observation: Observation) -> Sequence[float]:
        return [float(len(str(a))) if a.kind != "stop" else -1.0 for a in observation.actions]


def observation(graph: OpGraph) -> Observation:
    session = Session(fake_task(graph))
    session.begin()
    return session.observe()


# ---- planners


def test_the_random_planner_is_decided_by_its_seed(graph: OpGraph) -> None:
    seen = observation(graph)
    one, two, other = RandomPlanner(1), RandomPlanner(1), RandomPlanner(2)
    first = [one.choose(seen) for _ in range(20)]
    assert first == [two.choose(seen) for _ in range(20)]
    assert first != [other.choose(seen) for _ in range(20)]
    assert set(first) <= set(seen.actions) - {Action("stop")}
    assert len(set(first)) > 5


def test_the_random_planner_stops_where_nothing_else_is_legal(graph: OpGraph) -> None:
    assert RandomPlanner().choose(replace(observation(graph), actions=(Action("stop"),))) == Action("stop")


def test_a_scoring_planner_chooses_the_highest(graph: OpGraph) -> None:
    seen = observation(graph)
    assert len(str(Longest().choose(seen))) == max(len(str(a)) for a in seen.actions)


@pytest.mark.parametrize("planner", [Longest(), RandomPlanner(3)], ids=lambda p: type(p).__name__)
def test_several_good_actions_are_different_ones(graph: OpGraph, planner: Planner) -> None:
    seen = observation(graph)
    found = top_actions(planner, seen, 4)
    assert len(set(found)) == 4 and set(found) <= set(seen.actions)
    assert len(top_actions(planner, seen, 99)) == len(seen.actions)


def test_a_planners_stop_ends_its_list(graph: OpGraph) -> None:
    found = top_actions(ScriptedPlanner(["lowering"]), observation(graph), 5)
    assert [a.kind for a in found] == ["lowering", "stop"]


# ---- names


def test_every_name_makes_its_class() -> None:
    for name in sorted(set(PLANNERS) - WITH_FOLDER):
        assert isinstance(make_planner(name), Planner)
        for search in SEARCHES:
            assert hasattr(make_search(search, name), "run")
    planner = RandomPlanner(9)
    assert make_planner(planner) is planner
    search = GreedySearch(planner)
    assert make_search(search, "heuristic") is search


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="unknown planner 'oracle'; known: heuristic, lm, lower-only, random, roofline, sweep"
    ):
        make_planner("oracle")
    with pytest.raises(ValueError, match="'lm:' names no folder: add one, or leave the colon out"):
        make_planner("lm:")
    with pytest.raises(ValueError, match="only lm may be named with a folder, not 'random:3'"):
        make_planner("random:3")
    with pytest.raises(ValueError, match="unknown search 'best'; known: archive, beam, best-of-n, climb, greedy, mcts"):
        make_search("best", "random")


# ---- searches


@pytest.mark.parametrize(
    "name", sorted(set(PLANNERS) - WITH_FOLDER - {"lower-only", "roofline", "sweep"})
)  # the fake gains by fusion only
@pytest.mark.parametrize("search", sorted(SEARCHES))
def test_every_search_over_every_planner_improves_the_program(graph: OpGraph, search: str, name: str) -> None:
    result = optimize(fake_task(graph), make_search(search, name), Budget(evaluations=60, steps=60))
    assert result.speedup is not None and result.speedup > 1.05
    assert result.recipe.replay(graph).source == result.source


@pytest.mark.parametrize("search", sorted(SEARCHES))
def test_searches_are_deterministic(graph: OpGraph, search: str) -> None:
    results = [optimize(fake_task(graph), make_search(search, RandomPlanner(4)), Budget(steps=20)) for _ in range(2)]
    assert results[0].recipe == results[1].recipe
    assert [s.action for s in results[0].steps] == [s.action for s in results[1].steps]


def test_a_wider_beam_finds_what_greed_misses(graph: OpGraph) -> None:
    """The planner's first choice, a kernel for the relu alone, costs the step in which the fused kernel would come."""

    class Hasty(ScoringPlanner):
        def scores(self, observation: Observation) -> Sequence[float]:
            return [self.score(observation, a) for a in observation.actions]

        def score(self, observation: Observation, action: Action) -> float:
            if action.kind == "lowering":
                label = observation.program.region(action.regions[0]).label()
                return 3.0 if label.startswith("relu ") or label == "relu" else 1.0
            return {"fusion": 2.0, "stop": -9.0}.get(action.kind, 0.0)

    budget = Budget(evaluations=40, steps=5)
    greedy = optimize(fake_task(graph), GreedySearch(Hasty()), budget)
    beam = optimize(fake_task(graph), BeamSearch(Hasty(), width=3, branch=3), budget)
    assert beam.evaluation.ms is not None and greedy.evaluation.ms is not None
    assert beam.evaluation.ms < greedy.evaluation.ms


def test_climbing_takes_slower_schedules_back(graph: OpGraph) -> None:
    seen: list[float | None] = []

    class Watching(ScriptedPlanner):
        def choose(self, observation: Observation) -> Action:
            seen.append(observation.evaluation.ms if observation.evaluation else None)
            return super().choose(observation)

    script = ["fusion", "fusion", "fusion", "lowering", "lowering", *["tiling", "pipeline", "reordering"] * 4]
    optimize(fake_task(graph), HillClimb(Watching(script)), Budget(evaluations=99, steps=99))
    tuned = [ms for ms in seen[5:] if ms is not None]
    assert len(tuned) > 4 and tuned == sorted(tuned, reverse=True)


def test_climbing_lets_a_slow_lowering_stand(graph: OpGraph) -> None:
    class Slow(FakeEvaluator):
        def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
            found = super().judge(program, patch)
            timing = found.timing
            return found if patch is None or timing is None else replace(found, timing=replace(timing, device_ms=9.0))

    session = Session(fake_task(graph, Slow()))
    HillClimb(ScriptedPlanner(["lowering", "fusion"])).run(session)
    assert len(session.state.recipe()) == 2


def test_a_beam_keeps_different_programs_only(graph: OpGraph) -> None:
    widths = []

    class Counting(BeamSearch):
        def _fastest(self, sessions: list[Session]) -> list[Session]:
            kept = super()._fastest(sessions)
            widths.append(len(kept))
            assert len({s.state.program.digest for s in kept}) == len(kept)
            return kept

    optimize(fake_task(graph), Counting(RandomPlanner(0), width=3, branch=3), Budget(steps=6, evaluations=60))
    assert max(widths) == 3 and widths[-1] == 0


def test_a_beam_spends_no_more_than_the_budget(graph: OpGraph) -> None:
    result = optimize(fake_task(graph), BeamSearch(RandomPlanner(0), 4, 4), Budget(evaluations=17, steps=99))
    assert result.evaluations == 17 and result.stopped == "evaluations"


def test_a_beam_needs_room() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BeamSearch(RandomPlanner(), width=0)


def test_an_interrupted_beam_keeps_the_best(graph: OpGraph) -> None:
    class Interrupted(FakeEvaluator):
        def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
            if len(self.calls) == 12:
                self.calls.append("interrupted")
                raise KeyboardInterrupt
            return super().judge(program, patch)

    result = optimize(fake_task(graph, Interrupted()), BeamSearch(RandomPlanner(1), 2, 2))
    assert result.stopped == "interrupted" and result.evaluation.ok
