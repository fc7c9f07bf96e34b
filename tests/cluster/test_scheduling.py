"""Who judges what, and what is judged again: the real pools and the real fleet, on GPUs in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from experiments.cluster.simulated_ray import DETECTION_S
from qimeng.bench.pool import Outcome
from qimeng.cluster.fleet import REST_S
from qimeng.cluster.gpus import ClusterError
from qimeng.cluster.pool import GpuLeft
from qimeng.cluster.tasks import ClusterTasks
from qimeng.envs.workers.queueing import TRIES
from qimeng.interfaces import Evaluation
from tests.cluster.fakes import Measuring, request
from tests.cluster.virtual import Machines, judged

SEEDS = range(3)


@pytest.fixture
def machines() -> Iterator[Machines]:
    made = Machines()
    yield made
    made.loop.close()


def texts_of(count: int) -> list[str]:
    return [f"{'wrong ' if i % 7 == 3 else ''}{i}" for i in range(count)]


def alone(texts: list[str]) -> dict[str, Evaluation]:
    return {text: replace(Measuring().answer(request(text)), card=None) for text in texts}


def some_leave(machines: Machines, rng: random.Random, kills: int, done: list[int], total: int) -> Callable[[], None]:
    """Called at every answer: at `kills` moments by chance a node is killed, and another one joins."""
    at = sorted(rng.sample(range(1, total - 5), kills))

    def look() -> None:
        while at and done[0] >= at[0]:
            at.pop(0)
            alive = [node for node in machines.ray.machines if node.left is None]
            busy = [node for node in alive if node.calls]
            machines.ray.kill(rng.choice(busy or alive))
            machines.add(2)

    return look


@pytest.mark.parametrize("seed", SEEDS)
def test_nodes_that_are_killed_lose_no_evaluation_and_count_none_twice(machines: Machines, seed: int) -> None:
    machines.add(2), machines.add(2)
    texts, done, found = texts_of(400), [0], dict[str, Evaluation]()
    leave = some_leave(machines, random.Random(seed), 20, done, len(texts))
    pool = machines.pool(pinned=False)
    for ticket, answer in pool.gather([pool.submit(request(text)) for text in texts]):
        text = ticket.request.program.fallback
        assert text not in found, "an answer counts once"
        found[text] = replace(answer, card=None)
        done[0] += 1
        leave()
    assert found == alone(texts), "the same as one process says"
    assert pool.report.again["machine"] >= 10 and "was lost" in pool.report.reason
    pool.close()


def results(outcomes: Iterator[Outcome[Any, Any]], each: Callable[[], None] = lambda: None) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for outcome in outcomes:
        assert outcome.task not in found, "counted twice"
        found[outcome.task] = outcome.failure or outcome.result
        each()
    return found


def square(n: Any) -> Any:
    if n == "raise":
        raise ValueError("no")
    return n if isinstance(n, str) else n * n


@pytest.mark.parametrize("seed", SEEDS)
def test_tasks_of_nodes_that_are_killed_are_done_elsewhere(machines: Machines, seed: int) -> None:
    machines.add(2), machines.add(2)
    done, files = [0], list[str]()
    leave = some_leave(machines, random.Random(seed), 20, done, 300)

    def each() -> None:
        done[0] += 1
        leave()

    with ClusterTasks(machines.fleet(), slots=2, on_files=files.extend, clock=machines.loop.time) as pool:
        assert results(pool.run(range(300), square, 60.0), each) == {n: n * n for n in range(300)}
        assert sum(pool.again.values()) >= 10
    assert sorted(map(int, files)) == list(range(300)), "what a lost task left is not counted"


def test_what_a_task_does_is_its_outcome_and_a_death_is_tried_elsewhere(machines: Machines) -> None:
    machines.add(2)
    with ClusterTasks(machines.fleet(), clock=machines.loop.time) as pool:
        found = results(pool.run(["raise", "die", "hang", "fine"], square, 5.0))
        assert found["fine"] == "fine" and found["raise"] == "ValueError: no"
        assert found["hang"] == "took longer than 5 s"
        assert found["die"] == f"the worker process died (tried {TRIES} times)"
        assert len(pool.again) == 2 and sum(pool.again.values()) == 2, "each GPU once before the last try"


def test_tasks_wait_for_a_gpu_and_give_up_after_a_while(machines: Machines) -> None:
    node, fleet = machines.add(1), machines.fleet(patience=60.0)
    machines.ray.kill(node)
    machines.loop.call_later(40.0, machines.add)
    with ClusterTasks(fleet, clock=machines.loop.time) as pool:
        assert results(pool.run([3], square, 60.0)) == {3: 9}
        machines.ray.kill(machines.ray.machines[-1])
        with pytest.raises(ClusterError, match="no GPU of generation 'H100' is left"):
            list(pool.run([1], square, 60.0))


def test_the_end_of_a_run_cuts_tasks_off(machines: Machines) -> None:
    machines.add(2)
    with ClusterTasks(machines.fleet(), clock=machines.loop.time) as pool:
        cut = list(pool.run(["hang"] * 3, square, 60.0, stop_at=machines.loop.now + 10.0))
        assert [o.interrupted for o in cut] == [True] * 2, "the third was not begun"


def test_a_pinned_pool_stays_on_one_gpu_and_another_search_gets_another(machines: Machines) -> None:
    machines.add(2)
    one, other = machines.pool(), machines.pool()
    found = [e for _, e in one.gather([one.submit(request(f"{i}")) for i in range(8)])]
    assert len({e.card for e in found}) == 1 and all(e.eager is not None for e in found)
    other.submit(request("a"))
    assert other.home is not None and other.home != one.home
    one.close(), other.close()


def test_generations_are_never_mixed(machines: Machines) -> None:
    for generation in ("H100", "A100", "H100", "A100"):
        machines.add(2, generation)
    cards = {}
    for generation in ("H100", "A100"):
        pool = machines.pool(generation, pinned=False, lanes=1)
        assert pool.at_once == 4
        cards[generation] = {e.card for _, e in pool.gather([pool.submit(request(f"{i}")) for i in range(12)])}
        assert len(cards[generation]) == 4, "every GPU of the generation is used"
        pool.close()
    assert not cards["H100"] & cards["A100"]


def test_a_gpu_that_is_broken_gets_no_more_work_for_a_while(machines: Machines) -> None:
    machines.add(2)
    pool = machines.pool(lanes=1)
    ticket = pool.submit(request("broken"))
    first, broken = pool.home, pool.ask(ticket.request, ticket)
    assert broken.failure == "machine" and (broken.error or "").endswith(f"(tried {TRIES} times)")
    assert pool.evaluate(request("a").program).ok and pool.home != first, "nothing was measured there: no matter"
    assert pool.report.again == {"machine": TRIES - 1}
    assert len(pool._fleet.gpus) == 1, "three faults in a row: it rests"
    machines.ray.pause(REST_S)
    assert len(pool._fleet.gpus) == 2
    pool.close()


def test_a_kernels_fault_is_never_asked_again_and_a_measurements_is(machines: Machines) -> None:
    machines.add(3)
    pool = machines.pool(pinned=False)
    found = judged(pool, ["wrong a", "busy b"])
    assert found["wrong a"].error == "other values" and found["busy b"].error == f"too busy (tried {TRIES} times)"
    assert pool.report.again == {"measurement": TRIES - 1} and pool.report.reason == "too busy"
    pool.close()


def test_when_the_gpu_of_a_search_leaves_the_search_begins_again(machines: Machines) -> None:
    machines.add(1), machines.add(1)
    pool, texts = machines.pool(lanes=1), ["a", "b", "wrong c", "d"]
    before = judged(pool, texts[:2])
    home = pool.home
    assert home is not None
    machines.ray.kill(next(node for node in machines.ray.machines if node.name == home.node))
    with pytest.raises(GpuLeft, match="2 answers of it do not compare with another GPU's"):
        judged(pool, ["c"])
    assert machines.loop.now >= DETECTION_S
    pool.begin_again()
    found = [e for _, e in pool.gather([pool.submit(request(text)) for text in texts])]
    assert pool.home is not None and pool.home != home
    assert len({e.card for e in found if e.ok}) == 1, "all of one card again, the first two as well"
    again = judged(pool, texts)
    assert {text: again[text] for text in before} == before
    pool.close()
