"""Orders of fusions that nobody tried, as answers of a tree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from qimeng.envs.steps.caching import CachingEvaluator
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import Budget
from qimeng.interfaces import Action
from qimeng.planner.data.closure import closed
from qimeng.planner.data.generate import Bytes, Drawn, draw
from qimeng.planner.data.tree import Tree
from qimeng.planner.data.tree_store import put_drawn, trees_of
from qimeng.planner.lm.stored import stored_tasks
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.store import Conditions, Store
from qimeng.testing import FakeCoder, FakeEvaluator, fake_task


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    """One with at least four operators, each reading the one before."""
    found = (draw(11, i, Bytes(1 << 12, 1 << 14)) for i in range(40))
    return next(d for d in found if len(_fusions(Program.start(capture_spec(d.spec, verify=False)))) >= 3)


def _fusions(program: Program) -> list[Action]:
    return [Action("fusion", edge) for edge in program.fusions.digraph.edges]


@pytest.fixture(scope="module")
def tree(drawn: Drawn) -> Tree:
    """Three fusions in one order, a kernel after that."""
    store = Store()
    put_drawn(store, drawn)
    task = fake_task(capture_spec(drawn.spec, verify=False))
    conditions = Conditions(drawn.spec.digest, "h200", drawn.spec.mode, versions=(("evaluator", "fake"),))
    judge = CachingEvaluator(FakeEvaluator(), store, conditions)
    session = Session(replace(task, conditions=conditions, evaluator=judge), Budget(60.0), store)
    session.begin()
    for _ in range(3):
        legal = session.observe().actions
        assert session.step(next(a for a in legal if a.kind == "fusion" and not a.param)).accepted
    last = next(a for a in session.observe().actions if a.kind == "lowering")
    assert session.step(last).evaluation is not None
    (found,) = trees_of(store)
    return found


def test_every_order_leads_to_the_same_kernel(tree: Tree) -> None:
    start = tree.start()
    whole = closed(tree, start, FakeCoder())
    assert len(tree.answered[start.digest]) == 1 < len(whole.answered[start.digest])
    (kernel,) = (e for e in tree.edges if e.evaluation is not None)
    task, ends = whole.task(FakeCoder(), start), set[str]()
    for first in whole.answered[start.digest]:  # each order's first step, and on from there
        session = Session(task)
        session.begin()
        session.step(first)
        while session.state.program.digest != kernel.parent:
            answered = whole.answered[session.state.program.digest]
            assert session.step(answered[-1]).accepted and session.state.evaluation is not None
        step = session.step(kernel.action)
        assert step.evaluation is not None and step.evaluation.ok
        ends.add(session.state.program.digest)
    assert ends == {kernel.child}


def test_only_steps_of_the_graph_are_added(tree: Tree) -> None:
    whole = closed(tree, tree.start(), FakeCoder())
    assert whole.edges[: len(tree.edges)] == tree.edges and whole.evaluations == tree.evaluations
    added = whole.edges[len(tree.edges) :]
    assert added and all(e.accepted and e.evaluation is None and e.action.kind == "fusion" for e in added)
    assert len({(e.parent, e.action) for e in whole.edges}) == len(whole.edges)
    assert all(e.child in whole.answered for e in added)  # none is a dead end
    assert closed(whole, tree.start(), FakeCoder()) is whole


def test_no_more_programs_are_added_than_asked_for(tree: Tree) -> None:
    start = tree.start()
    assert closed(tree, start, FakeCoder(), most=0).programs == tree.programs
    assert tree.programs < closed(tree, start, FakeCoder(), most=1).programs <= tree.programs + 1


def test_training_offers_them(tree: Tree) -> None:
    (stored,) = stored_tasks([tree], FakeCoder())
    seen = stored.begin().observe()
    assert len(stored.offered(seen)) > 1 + len(tree.answered[stored.task.start.digest])
