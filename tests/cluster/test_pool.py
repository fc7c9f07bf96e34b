"""Evaluations on a cluster are those of one process, whoever dies meanwhile."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from qimeng.cluster.fleet import Fleet
from qimeng.cluster.pool import ClusterPool
from qimeng.envs.workers.local_pool import LocalPool
from qimeng.interfaces import Evaluation, Evaluator
from tests.cluster.conftest import Nodes
from tests.cluster.fakes import Measuring, measuring, request


@pytest.fixture
def one(nodes: Nodes) -> Iterator[ClusterPool]:
    node = nodes.add(1)
    pool = ClusterPool(measuring, Measuring, Fleet(nodes.address))
    yield pool
    pool.close()
    nodes.remove(node)


def judged(engine: Evaluator, texts: list[str]) -> dict[str, Evaluation]:
    tickets = [engine.submit(request(text)) for text in texts]
    return {t.request.program.fallback: replace(e, card=None) for t, e in engine.gather(tickets)}


def test_a_cluster_answers_as_a_pool_of_this_machine(one: ClusterPool) -> None:
    texts = ["a", "wrong b", "c", "busy d", "a"]
    local = LocalPool(measuring, Measuring, ({},))
    try:
        alone = judged(local, texts)
    finally:
        local.close()
    assert judged(one, texts) == alone
    assert (one.name, one.version, one.estimated, one.at_once) == ("Measuring", 7, False, 2)
    assert one.report.again == {"measurement": 2} and one.report.reason == "too busy"


def killed_meanwhile(nodes: Nodes, kills: int, seed: int) -> tuple[dict[str, Evaluation], ClusterPool]:
    """All answers of a pool whose nodes are killed at random, one after another, and replaced."""
    rng = random.Random(seed)
    alive = [nodes.add(1), nodes.add(1)]
    pool = ClusterPool(measuring, Measuring, Fleet(nodes.address), pinned=False, lanes=1)
    tickets = [pool.submit(request(text)) for text in texts_of(kills)]
    found: dict[str, Evaluation] = {}
    try:
        at = sorted(rng.sample(range(1, len(tickets) - 5), kills))
        for ticket, answer in pool.gather(tickets):
            text = ticket.request.program.fallback
            assert text not in found, "an answer counts once"
            found[text] = replace(answer, card=None)
            if at and len(found) >= at[0]:
                at.pop(0)
                nodes.remove(alive.pop(rng.randrange(len(alive))))
                alive.append(nodes.add(1))
    finally:
        pool.close()
        for node in alive:
            nodes.remove(node)
    return found, pool


def texts_of(kills: int) -> list[str]:
    return [f"{'wrong ' if i % 7 == 3 else 'sleep 0.02 '}{i}" for i in range(12 * kills)]


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_nodes_that_are_killed_lose_nothing_and_count_nothing_twice(nodes: Nodes, kills: int) -> None:
    found, pool = killed_meanwhile(nodes, kills, seed=7)
    alone = Measuring()
    expected = {text: replace(alone.answer(request(text)), card=None) for text in texts_of(kills)}
    assert found == expected
    report = pool.report
    assert report.again.get("machine", 0) > kills // 2 and "was lost" in report.reason
