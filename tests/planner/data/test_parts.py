"""Programs put together from what was found of their regions, beside what was judged (estimates, which add up)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path

import pytest

from qimeng.actions import Context
from qimeng.device import device_named
from qimeng.envs.steps.caching import UNKNOWN
from qimeng.envs.steps.setup import make_coder
from qimeng.envs.steps.state import STOP, Budget
from qimeng.errors import CoderError
from qimeng.interfaces import Action, Evaluation, Request, Timing
from qimeng.planner import make_search
from qimeng.planner.data.oracle import OraclePlanner
from qimeng.planner.data.parts import Parts, parts_of
from qimeng.planner.data.programs import programs_of
from qimeng.planner.data.put_together import PartsSession, parts_task
from qimeng.planner.data.tree import Tree
from qimeng.planner.data.tree_file import read_trees
from qimeng.planner.greedy import GreedySearch
from qimeng.planner.heuristic import HeuristicPlanner
from qimeng.program.program import Program
from qimeng.testing import fake_kernel

KEPT = Path(__file__).parent / "h200_estimated.jsonl.xz"
H200 = device_named("h200")


@cache
def walked() -> tuple[tuple[Tree, Program], ...]:
    """A few trees, and the programs that they begin with."""
    trees = islice(read_trees(KEPT), 8, 12)
    return tuple((tree.today(start), start) for tree in trees for start in [tree.start()])


@cache
def parts() -> Parts:
    return parts_of(walked())


def judged(tree: Tree) -> dict[str, Evaluation]:
    return {s: e for purpose, s, e in tree.evaluations if purpose == "step"}


def session(tree: Tree, start: Program, evaluations: int = 40) -> PartsSession:
    context = Context(H200, make_coder("template"), tree.mode)
    task = parts_task(parts(), start, judged(tree)[start.digest], context, tree.conditions, tree.name)
    return PartsSession(task, Budget(float("inf"), evaluations))


@pytest.mark.parametrize("number", range(4))
def test_a_program_takes_the_sum_of_its_regions(number: int) -> None:
    tree, start = walked()[number]
    found = judged(tree)
    known = {d: p for d, p in programs_of(tree, start).items() if d in found and found[d].ok}
    assert len(known) > 5
    for digest, program in known.items():
        made = parts().evaluation(program, found[start.digest])
        assert made is not None and made.ms == pytest.approx(found[digest].ms, rel=0.02)
        assert set(made.region_ms) == {r.id for r in program.called}
        assert made.generated_share == pytest.approx(found[digest].generated_share, abs=0.01)


def test_nothing_is_guessed_of_a_region_that_nobody_timed() -> None:
    tree, start = walked()[0]
    first = judged(tree)[start.digest]
    region = start.called[0]
    assert parts().evaluation(start.with_implementation(region.id, fake_kernel(region, None)), first) is None
    none = replace(parts(), units={})
    assert none.on_torch(region) is None and none.evaluation(start, first) is None


@pytest.mark.parametrize("planner", ["heuristic", "random"])
def test_a_planner_walks_where_nobody_measured(planner: str) -> None:
    tree, start = walked()[2]
    here = session(tree, start)
    make_search("greedy", planner).run(here)
    assert here.ledger.evaluations >= 2 and here.ledger.best is not None
    assert all(e.failure != UNKNOWN for e in here.ledger.known.values())
    assert here.ledger.best.ms is not None and here.ledger.best.ms <= 1.001 * (judged(tree)[start.digest].ms or 0.0)
    assert 0 < max(here.covered.values()) <= 1


def test_who_knows_all_finds_more_with_fewer_evaluations() -> None:
    tree, start = walked()[1]
    gains = {}
    for name in ("oracle", "heuristic"):
        here = session(tree, start, 12)
        planner = OraclePlanner(here.known) if name == "oracle" else HeuristicPlanner()
        GreedySearch(planner).run(here)
        assert here.ledger.best is not None and here.ledger.best.ms is not None
        gains[name] = here.ledger.best.ms, here.ledger.evaluations
    assert gains["oracle"][0] <= gains["heuristic"][0]
    best = min(e.ms for e in judged(tree).values() if e.ok and e.ms)
    assert gains["oracle"][0] <= 1.02 * best, "what the tree knows is not missed"


def test_only_what_was_tried_is_offered_and_written() -> None:
    tree, start = walked()[0]
    here = session(tree, start)
    here.begin()
    offered, legal = here.offered()[0], here.legal()
    assert STOP in offered and set(offered) < set(legal)
    left_out = next(a for a in legal if a not in offered and len(a.regions) == 1)
    with pytest.raises(CoderError, match="nothing is known"):
        here.task.context.coder.write(Request(start, left_out, H200, tree.mode))


def test_what_was_refused_is_refused_again() -> None:
    for tree, start in walked():
        for (signature, made), moves in parts().moves.items():
            for (kind, param), outcome in moves.items():
                region = next((r for r in start.called if r.signature == signature), None)
                if region is None or outcome.evaluation.ok or start.implementation(region).digest != made:
                    continue
                here = session(tree, start)
                here.begin()
                step = here.step(Action(kind, (region.id,), param))
                assert not step.accepted and step.evaluation is not None
                assert step.evaluation.failure == outcome.evaluation.failure != UNKNOWN


def test_a_tree_of_one_program_tells_of_its_operators_alone() -> None:
    tree, start = walked()[0]
    first = judged(tree)[start.digest]
    bare = replace(tree, edges=(), patches={}, evaluations=(("step", start.digest, first),))
    found = parts_of([(bare, start)])
    assert not found.moves and not found.ratios
    assert set(found.units) == {r.signature for r in start.called}
    made = found.evaluation(start, first)
    assert made is not None and made.timing == Timing(pytest.approx(first.ms), **_rest(first))


def _rest(evaluation: Evaluation) -> dict[str, object]:
    assert evaluation.timing is not None
    t = evaluation.timing
    return {"spread": t.spread, "calls": t.calls, "estimated": t.estimated}


def test_a_cluster_at_one_place_is_taken_at_once() -> None:
    tree, start = walked()[0]
    here = session(tree, start)
    here.begin()
    seen = here.observe()
    one = Action("cluster", (seen.program.called[0].id,))
    assert OraclePlanner(here.known).choose(replace(seen, actions=(one, STOP))) == one
