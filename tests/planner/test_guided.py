"""Searches that are guided by a planner's policy: sampling, tree search, archive; the options behind their names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import mean

import pytest
import torch

from qimeng.envs.steps.loop import optimize
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import Budget
from qimeng.graph.capture import capture
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Action, Evaluation, Observation, Patch, Planner
from qimeng.planner import make_planner, make_search, sampling
from qimeng.planner.archive import ArchiveSearch, Island, cell_of
from qimeng.planner.heuristic import HeuristicPlanner
from qimeng.planner.mcts import TreeSearch
from qimeng.planner.random import RandomPlanner
from qimeng.planner.sampling import BestOfN
from qimeng.planner.search import FLOOR, ValuingPlanner, policy, prior, trajectory
from qimeng.program.program import Program
from qimeng.testing import FakeClock, FakeEvaluator, ScriptedPlanner, fake_task

GUIDED = ("archive", "beam", "best-of-n", "mcts")


class Fuser(ValuingPlanner):
    """Likes fusions, then lowerings, and stops after them; a state is worth the less the more regions it has."""

    weights = {"fusion": 2.0, "lowering": 1.0, "stop": 0.0}

    def look(self, observation: Observation) -> tuple[Sequence[float], float]:
        return [self.weights.get(a.kind, -1.0) for a in observation.actions], -float(len(observation.program.regions))


@pytest.fixture(scope="module")
def seen(graph: OpGraph) -> Observation:
    session = Session(fake_task(graph))
    session.begin()
    return session.observe()


def judged(graph: OpGraph, search: str, planner: Planner, evaluations: int) -> list[str]:
    evaluator = FakeEvaluator()
    budget = Budget(evaluations=evaluations, steps=40)
    make_search(search, planner).run(Session(fake_task(graph, evaluator), budget))
    return evaluator.calls


# ---- policies and priors


@pytest.mark.parametrize("planner", [Fuser(), HeuristicPlanner(), RandomPlanner(2)], ids=lambda p: type(p).__name__)
def test_policies_and_priors_are_probabilities(seen: Observation, planner: Planner) -> None:
    found, (moves, value) = policy(planner, seen), prior(planner, seen)
    assert math.isclose(sum(found), 1) and len(found) == len(seen.actions) and min(found) >= 0
    assert math.isclose(sum(moves.values()), 1) and set(moves) == set(seen.actions) - {Action("stop")}
    assert min(moves.values()) >= FLOOR / len(moves)
    assert value == (-len(seen.program.regions) if isinstance(planner, Fuser) else 0)


def test_a_planner_without_scores_has_half_the_prior_on_its_choice(seen: Observation) -> None:
    found = dict(zip(seen.actions, policy(HeuristicPlanner(), seen), strict=True))
    chosen = HeuristicPlanner().choose(seen)
    assert found.pop(chosen) == 0.5 and found.pop(Action("stop")) == 0
    assert len(set(found.values())) == 1


def test_where_the_planner_would_stop_the_prior_is_uniform_and_the_policy_is_not(seen: Observation) -> None:
    stops = ScriptedPlanner([])
    assert max(zip(policy(stops, seen), seen.actions, strict=True))[1] == Action("stop")
    assert len(set(prior(stops, seen)[0].values())) == 1
    only = replace(seen, actions=(Action("stop"),))
    assert policy(stops, only) == (1.0,) and prior(stops, only) == ({}, 0.0)


# ---- what all of them have in common


@pytest.mark.parametrize("search", GUIDED)
@pytest.mark.parametrize("planner", ["heuristic", "fuser", "random"])
def test_a_search_begins_as_its_planner_alone_would(graph: OpGraph, search: str, planner: str) -> None:
    def made() -> Planner:
        return Fuser() if planner == "fuser" else make_planner(planner, 5)

    alone = judged(graph, "greedy", made(), 9)
    guided = judged(graph, search, made(), 25)
    assert guided[: len(alone)] == alone and len(set(guided)) > len(set(alone))


@pytest.mark.parametrize("search", GUIDED)
def test_budgets_are_kept(graph: OpGraph, search: str) -> None:
    result = optimize(fake_task(graph), make_search(search, Fuser()), Budget(evaluations=7))
    assert (result.evaluations, result.stopped) == (7, "evaluations")
    clock = FakeClock(0.25)
    result = optimize(fake_task(graph), make_search(search, Fuser()), Budget(seconds=20, evaluations=999), clock=clock)
    assert result.stopped == "seconds" and 5 < result.seconds < 23


class Apart(FakeEvaluator):
    """A judge for whom many small kernels are better than one."""

    def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
        found = super().judge(program, patch)
        made = program if patch is None else patch.apply(program, found.chosen)
        kernels = sum(made.implementation(r).generated for r in made.regions)
        assert found.timing is not None and found.eager is not None
        return replace(found, timing=replace(found.timing, device_ms=found.eager.device_ms * 0.9**kernels))


@pytest.mark.parametrize("search", GUIDED)
def test_what_is_found_only_off_the_own_trajectory(graph: OpGraph, search: str) -> None:
    alone = optimize(fake_task(graph, Apart()), make_search("greedy", Fuser()), Budget(evaluations=30))
    guided = optimize(fake_task(graph, Apart()), make_search(search, Fuser()), Budget(evaluations=30))
    assert alone.speedup is not None and guided.speedup is not None
    assert guided.speedup > 1.05 * alone.speedup
    assert guided.recipe.replay(graph).source == guided.source


@pytest.mark.parametrize("search", ["archive", "best-of-n", "mcts"])
def test_the_seed_decides_what_is_drawn(graph: OpGraph, search: str) -> None:
    found = [judged(graph, f"{search}:seed={seed}", Fuser(), 20) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("search", ["archive", "best-of-n", "mcts"])
def test_a_small_tree_is_searched_whole(search: str) -> None:
    class Add(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    def wrong(program: Program) -> str | None:
        return "not today" if program.digest != start else None

    graph = capture(Add, lambda: (torch.empty(64, 64),))
    start = Program.start(graph).digest
    task = fake_task(graph, FakeEvaluator(wrong=wrong))
    session = Session(task, Budget(evaluations=99))
    assert make_search(search, "random").run(session) == "stop"
    session.return_to(session.state)
    assert session.offered()[0] == (Action("stop"),)  # all else was tried, and refused


# ---- each of them


def test_a_trajectory_is_left_when_it_finds_nothing(graph: OpGraph) -> None:
    def wrong(program: Program) -> str | None:
        return "wrong" if program.digest != start else None

    start = Program.start(graph).digest
    session = Session(fake_task(graph, FakeEvaluator(wrong=wrong)), Budget(evaluations=99))
    list(trajectory(session, RandomPlanner().choose, patience=3))
    assert session.ledger.evaluations == 4
    list(trajectory(session, RandomPlanner(1).choose, patience=0))
    assert session.ledger.evaluations > 8


def test_one_sample_is_the_planner_alone(graph: OpGraph) -> None:
    results = [optimize(fake_task(graph), s, Budget(evaluations=30)) for s in (BestOfN(Fuser(), n=1),)]
    alone = optimize(fake_task(graph), make_search("greedy", Fuser()), Budget(evaluations=30))
    assert [s.action for s in results[0].steps] == [s.action for s in alone.steps]
    assert results[0].stopped == "stop"


class Sure(Fuser):
    """A policy that leaves hardly anything but its first choice."""

    weights = {"fusion": 40.0, "lowering": 20.0, "stop": 0.0}


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_no_trajectory_is_drawn_twice_however_sure_the_planner_is(graph: OpGraph, floor: float) -> None:
    session = Session(fake_task(graph), Budget(evaluations=60, steps=8))
    search = BestOfN(Sure(), n=40, patience=0, floor=floor)
    taken: list[tuple[str, ...]] = []

    class Left(sampling._Left):
        def take_out(self, steps: Iterator[Session]) -> None:
            branches = list(steps)
            taken.append(tuple(b.state.program.digest for b in branches))
            super().take_out(iter(branches))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_Left", Left)
        search.run(session)
    assert len(taken) > 10 and len(set(taken)) == len(taken)


def test_a_trajectory_that_ends_where_it_began_is_not_the_end_of_the_search(graph: OpGraph) -> None:
    class Around(Fuser):
        """Fuses, and takes it back."""

        weights = {"fusion": 40.0, "unfuse": 80.0, "stop": 0.0}

    session = Session(fake_task(graph), Budget(evaluations=30, steps=2))
    BestOfN(Around(), n=20, patience=0).run(session)
    start = session.state.program.digest
    first = [a.action.kind for a in session.ledger.attempts[:2]]
    assert first == ["fusion", "unfuse"] and start == session.task.start.digest
    assert len(session.ledger.attempts) > 20


def test_tree_search_tries_what_the_value_promises(graph: OpGraph) -> None:
    class Counts(Fuser):
        """Has no preference among actions; likes programs of many regions, or of few."""

        def __init__(self, sign: float):
            self.sign, self.regions = sign, list[int]()

        def look(self, observation: Observation) -> tuple[Sequence[float], float]:
            self.regions.append(len(observation.program.regions))
            return [0.0] * len(observation.actions), self.sign * self.regions[-1]

    def regions(sign: float, value: float) -> float:
        planner = Counts(sign)
        TreeSearch(planner, value=value, noise=0.0, patience=1).run(Session(fake_task(graph), Budget(evaluations=160)))
        return mean(planner.regions)

    assert regions(-1.0, value=1.0) < regions(1.0, value=1.0) - 0.3
    assert regions(-1.0, value=0.0) == regions(1.0, value=0.0)


def test_cells_tell_programs_apart(graph: OpGraph) -> None:
    session = Session(fake_task(graph))
    session.begin()
    cells = [cell_of(session)]
    for kind in ("fusion", "fusion", "lowering", "lowering", "lowering"):
        session.step(next(a for a in session.offered()[0] if a.kind == kind))
        cells.append(cell_of(session))
    assert cells[0][0] == 0 and cells[-1][0] == 3
    assert cells[0][1] > cells[-1][1] and {c[2] for c in cells} <= {"gemm", "reduction", "pointwise"}


def test_a_cell_keeps_its_fastest_program(graph: OpGraph) -> None:
    session = Session(fake_task(graph))
    session.begin()
    session.step(next(a for a in session.offered()[0] if a.kind == "lowering"))
    evaluation = session.state.evaluation
    assert evaluation is not None and evaluation.timing is not None
    slow, fast = session.fork(), session.fork()
    slow.state = replace(
        slow.state, evaluation=replace(evaluation, timing=replace(evaluation.timing, device_ms=9.0, spread=0.0))
    )
    island = Island()
    for branch in (slow, fast, slow):
        island.add(branch)
    assert list(island.elites.values()) == [fast] and island.best() is fast


def test_islands_meet_by_migration(graph: OpGraph) -> None:
    """An island whose own planner never fuses gets fused programs from its neighbour."""
    found: list[list[Island]] = []

    class Watched(ArchiveSearch):
        def _pick(self, island: Island, untried: object) -> Session | None:
            if not found or island not in found[-1]:
                found.append([*(found[-1] if found else []), island])
            return super()._pick(island, untried)  # type: ignore[arg-type]

    Watched(Fuser(), islands=3, migrate=1, greedy=1.0).run(Session(fake_task(graph), Budget(evaluations=40)))
    islands = found[-1]
    assert len(islands) == 3
    digests = [{b.state.program.digest for b in i.elites.values()} for i in islands]
    best = [i.best().state.program.digest for i in islands]
    assert any(best[i] in digests[(i + 1) % 3] for i in range(3))


# ---- options


def test_options_stand_behind_the_name() -> None:
    assert vars(make_search("beam:8", "heuristic"))["width"] == 8
    found = vars(make_search("mcts:c=2, patience=4", "heuristic"))
    assert (found["c"], found["patience"], found["value"]) == (2.0, 4, 0.25)
    assert vars(make_search("archive:islands=3", RandomPlanner()))["islands"] == 3


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ("beam:wide", r"cannot read 'wide' in the search 'beam:wide': beam takes numbers .* width=4, branch=2"),
        ("beam:8,9", "cannot read '9'"),
        ("beam:1.5", "cannot read '1.5'"),
        ("mcts:d=1", "cannot read 'd=1' .* c=1.5, value=0.25, noise=0.5, seed=0, patience=10"),
        ("mcts:c=1,c=2", "cannot read 'c=2'"),
        ("best-of-n:", "cannot read ''"),
        ("greedy:3", "cannot read '3' in the search 'greedy:3': greedy takes no options"),
        ("best-of-n:0", "n must be at least 1"),
        ("mcts:c=nan", "c must be above 0"),
        ("mcts:noise=2", "value and noise shares"),
        ("archive:greedy=2", "greedy a probability"),
    ],
)
def test_options_that_cannot_be_read_are_refused(search: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_search(search, "random")


def test_seeds_reach_named_planners_and_searches(seen: Observation) -> None:
    assert make_planner("random", 7).choose(seen) == RandomPlanner(7).choose(seen)
    draws = [make_planner("random", seed).choose(seen) for seed in range(8)]
    assert len(set(draws)) > 1
    make_planner("heuristic", 7)  # draws nothing, so a seed changes nothing
