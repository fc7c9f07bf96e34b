"""The rule by which specs are held out, and how their trees are explored."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from experiments.planners import explore as replay_explore
from experiments.planners.explore import Plan, explore_all, explore_one, read_order
from experiments.planners.heldout import (
    KERNELBENCH,
    SEEN,
    UNSEEN,
    best_known,
    check_untrained,
    chosen,
    explorers_of,
    generated,
    kernelbench,
)
from experiments.planners.replay import Method
from qimeng.bench.collect import LOG, STORE, read_log
from qimeng.bench.pool import Outcome
from qimeng.errors import QimengError, SpecError
from qimeng.interfaces import Action, Evaluation, Gate, Timing
from qimeng.planner.data.generate import FAMILIES, Bytes, Drawn, draw
from qimeng.planner.data.overlap import reserved, signatures_of
from qimeng.planner.data.tree import Tree
from qimeng.planner.data.tree_store import trees_of
from qimeng.program.verify import capture_spec
from qimeng.store import Conditions, Store, StoredStep
from qimeng.testing import FakeEvaluator, fake_task
from tests.bench.inline import Inline

PROBLEM = """import torch
import torch.nn as nn


class Model(nn.Module):
    def forward(self, x):
        return {body}


def get_inputs():
    return [torch.rand(64, 64)]


def get_init_inputs():
    return []
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernelbench")
    bodies = {
        1: ["torch.relu(x)", "torch.dropout(x, 0.5, True)", "x.sum(-1)"],
        2: ["torch.sigmoid(x) * x", "torch.relu(x)", "x if x.sum() > 0 else -x"],
    }
    for level, texts in bodies.items():
        (folder / f"level{level}").mkdir()
        for number, body in enumerate(texts, 1):
            (folder / f"level{level}" / f"{number}_problem.py").write_text(PROBLEM.format(body=body))
    return folder


def tree(spec: str, family: str, gain: float, programs: int = 120) -> Tree:
    found = Evaluation(Gate.PASSED, timing=Timing(1.0 / gain), eager=Timing(1.0))
    edges = tuple(StoredStep("a", Action("lowering", (str(i),)), None, str(i), True, "b") for i in range(programs - 1))
    return Tree(
        spec, "", "float32", "default", family, 0, 0, Conditions(spec, "h200"), (("step", "x", found),), {}, edges
    )


def test_unseen_families_are_not_trained_on() -> None:
    assert set(UNSEEN) | set(SEEN) == set(FAMILIES) and not set(UNSEEN) & set(SEEN)


def test_the_generated_half_is_of_unseen_families_and_new_structures() -> None:
    found = list(generated(3))
    assert [d.spec for d in found[:1]] == [d.spec for d in islice(generated(9), 1)]
    structures = [signatures_of(d.spec).structure for d in found]
    assert len(set(structures)) == 3 and not set(structures) & reserved()
    assert {d.family for d in found} <= set(UNSEEN)


def test_problems_come_by_turns_and_without_those_that_say_nothing(root: Path) -> None:
    found = list(kernelbench(root))
    assert {(d.seed, d.index) for d in found} <= {(1, 1), (1, 3), (2, 1), (2, 2)}
    assert len(found) == 3  # relu once, no random operator, nothing that was not captured
    assert [d.seed for d in found][:2] == [1, 2] and {d.family for d in found} == {KERNELBENCH}
    for path in list((root / "level1").glob("*.py")):  # names and numbers decide nothing
        path.rename(path.with_name(f"{99 - int(path.name[0])}_renamed.py"))
    assert [d.spec.source for d in kernelbench(root, 2)] == [d.spec.source for d in found[:2]]


def test_the_first_of_each_half_that_are_worth_it_count() -> None:
    trees = [tree(f"g{i}", "loss", 1.05 if i == 1 else 2.0, 50 if i == 2 else 120) for i in range(6)]
    trees += [tree(f"k{i}", KERNELBENCH, 1.2) for i in range(3)] + [tree("other", "loss", 9.0)]
    order = ["k2", "g5", "k0", *(f"g{i}" for i in range(5)), "k1", "unexplored"]
    assert [t.name for t in chosen(trees, order, half=3)] == ["g5", "g0", "g3", "k2", "k0", "k1"]
    assert best_known(trees[1]) == pytest.approx(1.05)


def test_training_data_with_held_out_specs_is_refused() -> None:
    def of(drawn: Drawn) -> Tree:
        spec = drawn.spec
        return replace(tree(drawn.spec.digest, drawn.family, 2.0), source=spec.source, dtype=spec.dtype, mode=spec.mode)

    small = Bytes(1 << 12, 1 << 14)
    products = [of(draw(3, i, small, ("product",))) for i in range(2)]
    held = [of(draw(3, 0, small, UNSEEN))]
    check_untrained(products, held)
    with pytest.raises(QimengError, match="which planners are judged on"):
        check_untrained(held, products)
    with pytest.raises(QimengError, match="which planners are judged on"):
        check_untrained(products, products[:1])


def test_every_method_explores_then_chance() -> None:
    methods = [Method.parse("heuristic"), Method.parse("random")]
    found = list(islice(explorers_of(methods), 7))
    assert [name for name, *_ in found] == ["heuristic", *["random"] * 3, "mixture", "mixture", "random"]
    assert sum(share for _, share, _, _ in found[:4]) == pytest.approx(2 / 3)


class Hanging(Inline):
    """One task hangs."""

    def run(self, tasks: Any, work: Any, *unused: Any, **limits: Any) -> Any:
        for task in tasks:
            yield from super().run([task], work) if task.index != 7 else [Outcome(task, failure="it hung")]


def test_candidates_are_explored_once_and_their_order_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(spec: Any, device: object, store: Store, by_region: bool = False) -> Any:
        task = fake_task(capture_spec(spec, verify=False), FakeEvaluator(estimated=True))
        return replace(task, conditions=Conditions(spec.digest, "h200", estimated=True))

    monkeypatch.setattr("qimeng.envs.steps.setup.make_task", fake)
    monkeypatch.setattr(replay_explore, "Pool", Hanging)
    candidates = [draw(11, i, Bytes(1 << 12, 1 << 14)) for i in (3, 0, 7)]
    plan, seen = Plan((Method.parse("heuristic"),), evaluations=12, device="h200"), list[str]()
    for _ in range(2):
        explore_all(candidates, plan, tmp_path, "h200", lambda row: seen.append(row.name))
    assert seen == [d.spec.name for d in candidates] and read_order(tmp_path) == tuple(
        d.spec.digest for d in candidates
    )
    rows = read_log(tmp_path / LOG)
    assert [(r.evaluations, r.error) for r in rows] == [(12, None), (12, None), (0, "it hung")]
    with Store(tmp_path / STORE) as store:
        trees = {t.name: t for t in trees_of(store)}
    assert set(trees) == set(seen[:2]) and all(t.conditions.estimated for t in trees.values())
    with pytest.raises(QimengError, match="holds no exploration"):
        read_order(tmp_path / "elsewhere")


def test_a_candidate_that_no_task_can_be_made_of_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(spec: Any, **unused: Any) -> Any:
        raise SpecError("its inputs are secret")

    monkeypatch.setattr("qimeng.envs.steps.setup.make_task", fails)
    row = explore_one(draw(11, 0, Bytes(1 << 12, 1 << 14)), Plan((), device="h200"), tmp_path / "store.sqlite")
    assert row.error == "SpecError: its inputs are secret" and row.evaluations == 0 and row.device == "h200"
