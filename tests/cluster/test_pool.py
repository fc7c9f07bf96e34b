"""Evaluations on a cluster are those of one process, whoever dies meanwhile."""

from __future__ import annotations

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
