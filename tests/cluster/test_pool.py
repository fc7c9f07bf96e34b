"""Evaluations on a cluster are those of one process, whoever dies meanwhile."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from qimeng.cluster.fleet import Fleet, described
from qimeng.cluster.pool import ClusterPool, GpuLeft
from qimeng.envs.workers.local_pool import LocalPool
from qimeng.errors import RequestError
from qimeng.interfaces import Evaluation, Evaluator, Ticket
from tests.cluster.conftest import Nodes
from tests.cluster.fakes import Measuring, measuring, request


@pytest.fixture(scope="module")
def one(mixed: str) -> Iterator[ClusterPool]:
    pool = ClusterPool(measuring, Measuring, Fleet(mixed, "B200"))
    yield pool
    pool.close()


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
    with pytest.raises(RequestError, match="answered before"):
        list(one.gather([Ticket(request("a"))]))
    late = one.submit(request("sleep 60", seconds=1.0))
    (found,) = dict(one.gather([late])).values()
    assert (found.failure, found.error) == ("late", "the judge took longer than 1 s")
    assert one.evaluate(request("later").program).ok, "its lane is free again"


def test_all_times_of_a_search_are_of_one_card(one: ClusterPool) -> None:
    found = [e for _, e in one.gather([one.submit(request(f"sleep 0.05 {i}")) for i in range(8)])]
    assert len({e.card for e in found}) == 1 and all(e.eager is not None for e in found)
    assert one.home is not None and one.home.generation == "B200"


def test_another_search_gets_another_gpu(one: ClusterPool, mixed: str) -> None:
    assert one.home is not None or one.evaluate(request("a").program).ok
    other = ClusterPool(measuring, Measuring, Fleet(mixed, "B200"))
    try:
        other.submit(request("a"))
        assert other.home is not None and other.home != one.home
    finally:
        other.close()


def test_generations_are_never_mixed(mixed: str) -> None:
    cards = {}
    for generation, gpus in (("B200", 2), ("A100", 1)):
        pool = ClusterPool(measuring, Measuring, Fleet(mixed, generation), pinned=False, lanes=1)
        try:
            assert pool.at_once == gpus
            tickets = [pool.submit(request(f"sleep 0.3 {i}")) for i in range(6)]
            cards[generation] = {e.card for _, e in pool.gather(tickets)}
            assert len(cards[generation]) == gpus, "every GPU of the generation is used"
        finally:
            pool.close()
    assert not cards["B200"] & cards["A100"]


def test_a_gpu_that_is_broken_gets_no_more_work_for_a_while(mixed: str) -> None:
    fleet = Fleet(mixed, "B200")
    pool = ClusterPool(measuring, Measuring, fleet, lanes=1)
    try:
        ticket = pool.submit(request("broken"))
        first, broken = pool.home, pool.ask(ticket.request, ticket)
        assert broken.failure == "machine" and (broken.error or "").endswith("(tried 3 times)")
        assert len(fleet.gpus) == 1, "three faults in a row: it rests"
        assert pool.evaluate(request("a").program).ok and pool.home != first, "nothing was measured there: no matter"
        assert pool.report.again == {"machine": 2}
    finally:
        pool.close()


def test_when_the_gpu_of_a_search_leaves_the_search_begins_again(nodes: Nodes) -> None:
    homes = [nodes.add(1, "L40"), nodes.add(1, "L40")]
    pool = ClusterPool(measuring, Measuring, Fleet(nodes.address, "L40"), lanes=1)
    texts = ["a", "b", "wrong c", "d"]
    try:
        before = judged(pool, texts[:2])
        home = pool.home
        assert home is not None
        at_home = next(node for node in homes if node.node_id == home.node)
        nodes.remove(at_home)
        homes.remove(at_home)
        with pytest.raises(GpuLeft, match=r"\d+ answers of it do not compare with another GPU's"):
            while True:  # until Ray has seen it
                judged(pool, ["c"])
                time.sleep(0.2)
        pool.begin_again()
        found = [e for _, e in pool.gather([pool.submit(request(text)) for text in texts])]
        assert pool.home is not None and pool.home != home
        assert len({e.card for e in found if e.ok}) == 1, "all of one card again, the first two as well"
        again = judged(pool, texts)
        assert {text: again[text] for text in before} == before
    finally:
        pool.close()
        for node in homes:
            nodes.remove(node)


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_many_requests_take_no_more_memory_than_few(mixed: str, count: int) -> None:
    fleet = Fleet(mixed, "A100" if count < 1000 else "B200")
    pool = ClusterPool(measuring, Measuring, fleet, pinned=False, lanes=1)

    def several(first: int, number: int) -> int:
        tickets = [pool.submit(request(f"{i}")) for i in range(first, first + number)]
        return sum(found.ok for _, found in pool.gather(tickets))

    def resident() -> list[int]:
        said = described(ray, fleet.gpus)
        pids = [os.getpid(), *(row["pid"] for row in said.values())]
        return [psutil.Process(pid).memory_info().rss for pid in pids]

    import ray

    try:
        assert several(0, 200) == 200
        before, began = resident(), time.monotonic()
        assert several(200, count) == count
        each = (time.monotonic() - began) / count
        grown = [after - was for was, after in zip(before, resident(), strict=True)]
        assert max(grown) < 24 << 20, f"{[g >> 20 for g in grown]} MiB more after {count} requests"
        assert each < 0.1, "what a cluster costs an evaluation is milliseconds"
        print(f"{1e3 * each:.1f} ms a request, {[g >> 10 for g in grown]} KiB more")
    finally:
        pool.close()


def killed_meanwhile(nodes: Nodes, kills: int, seed: int) -> tuple[dict[str, Evaluation], ClusterPool]:
    """All answers of a pool whose nodes are killed at random, one after another, and replaced."""
    rng = random.Random(seed)
    alive = [nodes.add(1), nodes.add(1)]
    pool = ClusterPool(measuring, Measuring, Fleet(nodes.address, "H100"), pinned=False, lanes=1)
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
                busy = {call.gpu.node for call in pool._calls}
                victims = [node for node in alive if node.node_id in busy] or alive
                alive.remove(victim := rng.choice(victims))
                nodes.remove(victim)
                alive.append(nodes.add(1))
    finally:
        pool.close()
        for node in alive:
            nodes.remove(node)
    return found, pool


def texts_of(kills: int) -> list[str]:
    return [f"{'wrong ' if i % 7 == 3 else 'sleep 0.1 '}{i}" for i in range(12 * kills)]


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_nodes_that_are_killed_lose_nothing_and_count_nothing_twice(nodes: Nodes, kills: int) -> None:
    found, pool = killed_meanwhile(nodes, kills, seed=7)
    alone = Measuring()
    expected = {text: replace(alone.answer(request(text)), card=None) for text in texts_of(kills)}
    assert found == expected
    report = pool.report
    assert report.again.get("machine", 0) > kills // 2 and "was lost" in report.reason
