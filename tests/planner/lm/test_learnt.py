"""A trained planner leaves to the planner by rule what it has not learnt to choose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qimeng import KernelSpec
from qimeng.actions.large import MANY, is_large
from qimeng.coder.template.coder import TemplateCoder
from qimeng.envs.steps.session import Session
from qimeng.envs.steps.state import STOP
from qimeng.interfaces import Action, Observation
from qimeng.planner.data.tree_file import read_trees
from qimeng.planner.heuristic import HeuristicPlanner
from qimeng.planner.lm.learnt import Learnt, action_name
from qimeng.planner.lm.planner import LanguageModelPlanner
from qimeng.program.verify import capture_spec
from qimeng.testing import FakeEvaluator, fake_task

TREES = Path(__file__).parents[3] / "benchmarks" / "trees" / "h200.xz"


def seen(module: torch.nn.Module, *inputs: torch.Tensor) -> Observation:
    graph = capture_spec(KernelSpec.from_module(module.eval(), inputs), verify=False)
    session = Session(fake_task(graph, FakeEvaluator(), TemplateCoder()))
    session.begin()
    return session.observe()


@pytest.fixture(scope="module")
def planner() -> LanguageModelPlanner:
    return LanguageModelPlanner()


def learnt(planner: LanguageModelPlanner) -> Learnt:
    assert planner.model.learnt is not None
    return planner.model.learnt


@pytest.fixture(scope="module")
def folds() -> Observation:
    layers = torch.nn.Conv2d(4, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()
    return seen(torch.nn.Sequential(*layers), torch.rand(2, 4, 16, 16))


def test_the_shipped_weights_say_what_their_trees_have_steps_of(planner: LanguageModelPlanner) -> None:
    assert planner.model.learnt == Learnt.of(read_trees(TREES)) and planner.model.learnt.regions == 4


def test_what_a_planner_knows_grows_with_its_trees() -> None:
    assert Learnt(("fusion", "tiling taller"), 3) | Learnt(("fusion", "lowering"), 2) == Learnt(
        ("fusion", "lowering", "tiling taller"), 3
    )
    assert Learnt.from_json(Learnt(("fusion",), 2).to_json()) == Learnt(("fusion",), 2)


def test_a_kind_that_was_not_learnt_is_chosen_by_rule(planner: LanguageModelPlanner, folds: Observation) -> None:
    choice = HeuristicPlanner().choose(folds)
    assert choice.kind == "algebra" and action_name(choice) not in learnt(planner).actions
    assert planner.choose(folds) == choice
    scores = dict(zip(folds.actions, planner.scores(folds), strict=True))
    assert max(scores, key=scores.__getitem__) == choice
    unknown = [a for a in folds.actions if action_name(a) not in learnt(planner).actions and a != choice]
    assert unknown and all(scores[a] == float("-inf") for a in unknown)


def test_what_was_learnt_is_chosen_by_the_model(planner: LanguageModelPlanner, folds: Observation) -> None:
    moves = replace(folds, actions=tuple(a for a in folds.actions if a.kind != "algebra"))
    assert action_name(HeuristicPlanner().choose(moves)) in learnt(planner).actions
    raw = [-2.0, *(-1.0 - i / 100 for i in range(len(moves.actions) - 1))]
    found = learnt(planner).scored(moves, raw)
    known = [i for i, a in enumerate(moves.actions) if action_name(a) in learnt(planner).actions]
    assert known and all(found[i] == raw[i] for i in known)
    assert planner.choose(moves) in [moves.actions[i] for i in known]


def test_programs_of_more_regions_are_planned_by_rule_once_they_are_fused(planner: LanguageModelPlanner) -> None:
    layers = [torch.nn.Linear(16, 16) for _ in range(learnt(planner).regions + 1)]
    several = seen(torch.nn.Sequential(*layers), torch.rand(8, 16))
    fusions = [a for a in several.actions if a.kind == "fusion"]
    several = replace(several, actions=tuple(a for a in several.actions if a.kind not in ("fusion", "algebra")))
    choice = HeuristicPlanner().choose(several)
    assert not is_large(several.program) and choice.kind == "lowering" and fusions
    assert learnt(planner).ruled(several) == planner.choose(several) == choice
    assert replace(learnt(planner), regions=99).ruled(several) is None


def test_a_large_program_is_planned_by_rule(planner: LanguageModelPlanner) -> None:
    many = seen(torch.nn.Sequential(*[torch.nn.LayerNorm(16) for _ in range(MANY)]), torch.rand(8, 16))
    assert is_large(many.program) and planner.choose(many) == HeuristicPlanner().choose(many)


def test_it_stops_where_nothing_is_left_that_it_has_learnt(planner: LanguageModelPlanner, folds: Observation) -> None:
    tuned = Action("library", (folds.program.regions[0].id,), "inductor-tuned")
    left = replace(folds, actions=(STOP, tuned))
    assert HeuristicPlanner().choose(left) == STOP == planner.choose(left)


def test_regions_that_were_judged_alone_do_not_count_as_programs() -> None:
    """The fastest of what a network's tree holds is one of its regions."""
    tree = next(iter(read_trees(TREES)))
    _, subject, one = next(e for e in tree.evaluations if e[2].ok and e[2].timing is not None)
    assert one.timing is not None
    many = replace(one, region_ms={f"r{i:08x}": 0.1 for i in range(MANY)})
    alone = replace(one, timing=replace(one.timing, device_ms=1e-6), region_ms={"r00000000": 1e-6})
    network = replace(tree, evaluations=(("step", subject, many), ("region", "of a region", alone)))
    found = Learnt.of([network])
    assert (found.regions, found.large) == (MANY, True)
    assert Learnt.from_json(found.to_json()) == found and (found | Learnt(("fusion",), 2)).large
    assert set(network.times) == {subject}
