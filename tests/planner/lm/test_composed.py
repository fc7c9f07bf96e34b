"""Networks whose regions others explored need no device: they are drawn, and their programs are sums."""

from __future__ import annotations

from pathlib import Path

import pytest

from qimeng.errors import QimengError
from qimeng.planner.data.composed import Composition, compositions
from qimeng.planner.data.generate import Bytes, draw
from qimeng.planner.data.parts import COMPOSED, Captured
from qimeng.planner.data.tree_file import put_trees, read_trees
from qimeng.planner.lm.networks import captured_networks, is_network, network_tasks
from qimeng.testing import FakeCoder

LITTLE = Bytes(1 << 12, 1 << 14)


@pytest.fixture(scope="module")
def known(trees_file: Path) -> list[Captured]:
    return captured_networks(read_trees(trees_file))


@pytest.fixture(scope="module")
def composed(known: list[Captured]) -> list[Composition]:
    return list(compositions(known, [draw(11, index, LITTLE) for index in (0, 3, 4, 6, 7)], FakeCoder()))


def test_a_network_of_known_regions_is_their_sum(known: list[Captured], composed: list[Composition]) -> None:
    explored = {tree.conditions.spec for tree, _ in known}
    found = [c.tree for c in composed if c.tree is not None]
    assert {c.tree is not None for c in composed if c.drawn.spec.digest in explored} == {True}
    for tree in found:
        ((purpose, subject, evaluation),) = tree.evaluations
        assert purpose == COMPOSED and is_network(tree) and subject == tree.start().digest
        assert evaluation.timing is not None and evaluation.timing.device_ms == evaluation.eager.device_ms > 0
        assert tree.conditions.device == known[0][0].conditions.device


def test_what_nobody_timed_is_not_known(composed: list[Composition]) -> None:
    *_, other = composed
    assert other.tree is None and other.share == 0.0
    assert any(0.0 < c.share <= 1.0 for c in composed)


def test_it_is_planned_like_one_that_was_explored(
    known: list[Captured], composed: list[Composition], tmp_path: Path
) -> None:
    put_trees([c.tree for c in composed if c.tree is not None], tmp_path / "composed.xz")
    again = captured_networks(read_trees(tmp_path / "composed.xz"))
    explored = {task.tree.conditions.spec: task for task in network_tasks(known, FakeCoder())}
    tasks = list(network_tasks(again, FakeCoder(), known))
    assert len(tasks) == len(again) == 4
    for task in tasks:
        assert task.best_ms == pytest.approx(explored[task.tree.conditions.spec].best_ms, rel=1e-4)


def test_trees_that_cannot_be_used_are_named(tmp_path: Path, trees_file: Path) -> None:
    from qimeng.cli_collect import compose

    with pytest.raises(QimengError, match="explore more regions"):
        compose([trees_file], tmp_path / "out.xz", specs=1, seed=5, families="mixer", least_mib=0.01, most_mib=0.02)
