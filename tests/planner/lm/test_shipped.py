"""The planner that comes with the package, on trees of families that it was not trained on, measured on an H200."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean

import pytest

from experiments.planners.replay import Method, Stage
from qimeng.bench.row import Environment
from qimeng.planner.data.tree_file import read_trees
from qimeng.planner.lm.planner import SHIPPED, LanguageModelPlanner
from qimeng.planner.lm.weights import Card, new_mini, save

UNSEEN = Path(__file__).parent / "unseen_h200.xz"
TRAINED_ON = Path(__file__).parents[3] / "benchmarks" / "trees" / "h200.xz"
CHANCE_SEEDS = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def stages() -> list[Stage]:
    return [Stage(tree) for tree in read_trees(UNSEEN)]


def shares(stages: list[Stage], method: str, seeds: tuple[int, ...], at: tuple[int, ...] = (5, 10)) -> list[float]:
    """Mean share of the best-known log-gain after so many evaluations."""
    rows = [s.play(Method.parse(method), seed, Environment("test"), max(at)) for s in stages for seed in seeds]
    return [mean(row.share(n) for row in rows) for n in at]


def test_no_tree_here_was_trained_on() -> None:
    seen = {(t.conditions.spec, t.family) for t in read_trees(TRAINED_ON)}
    here = {(t.conditions.spec, t.family) for t in read_trees(UNSEEN)}
    assert len(here) == 3 == len({family for _, family in here})
    assert not {spec for spec, _ in here} & {spec for spec, _ in seen}
    assert not {family for _, family in here} & {family for _, family in seen}


def test_it_finds_sooner_than_its_untrained_twin_and_than_chance(stages: list[Stage], tmp_path: Path) -> None:
    save(new_mini(LanguageModelPlanner().model.reader.tokenizer), tmp_path / "twin", Card("none", "none", "none", {}))
    soon, late = shares(stages, "lm", (0,))
    twin_soon, twin_late = shares(stages, f"lm:{tmp_path / 'twin'}", (0,))
    assert soon > twin_soon + 0.2 and late > twin_late + 0.2
    chance_soon, _ = shares(stages, "random+best-of-n", CHANCE_SEEDS)
    assert soon > chance_soon + 0.2


def test_the_card_says_what_it_learnt_from() -> None:
    card = (SHIPPED / "README.md").read_text()
    evaluations = re.search(r"(\d+) stored trees with \d+ programs and (\d+) evaluations, from h200.xz", card)
    assert evaluations is not None and int(evaluations[1]) > 300 and int(evaluations[2]) > 6000
    assert "h200" in card and "measured" in card
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 12 * 2**20
