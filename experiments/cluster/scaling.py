"""How a run scales to many GPUs, SIMULATED: the real scheduling in virtual time, with measured seconds of evaluations.

``python -m experiments.cluster.scaling OUT --times benchmarks/results/h100_cluster.jsonl`` needs neither GPU nor Ray.
Real are `ClusterPool`, `Fleet` and the keepers' `Turns`, and the seconds that they compute. Simulated are the GPUs, the
nodes and Ray. An evaluation takes the seconds that one has taken on a GPU, with the same number of judges beside it;
waiting for the lock comes from the simulation. Each row says so.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from experiments.cluster.simulated_gpus import MEASURING, Service, SimulatedGpu, Spell
from experiments.cluster.simulated_ray import Asked, Node, SimulatedFleet, SimulatedRay, packed_answer
from experiments.cluster.views import ONE, cluster_scaling
from experiments.cluster.virtual_time import VirtualLoop
from experiments.trust.journal import Journal, read_journal
from qimeng.bench.environment import commit
from qimeng.bench.row import Environment
from qimeng.cluster.pool import ClusterPool
from qimeng.cluster.supervisor import Reply
from qimeng.device import Card
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Evaluation, EvaluationRequest, Evaluator, Gate, SerialEvaluator, Timing
from qimeng.program.program import Program

COUNTS = (1, 2, 8, 64)
EACH = 120
"""Requests for each GPU."""
A_NODE = 8
"""GPUs of a node."""
CALL_S = 0.01
"""Seconds of the driver for each request where the rows of times do not tell."""
OURS, OTHER = "H100", "A100"
CHECKED, MEASURED = ("check", "reference", "baselines"), ("time",)
"""Parts of an evaluation in a turn on the GPU: beside others, and alone."""


@dataclass(frozen=True)
class Times:
    """What was measured on a GPU.

    Attributes:
        services: of evaluations.
        judges: that shared the GPU.
        opening_s: seconds until a judge had given its first answer.
        call_s: seconds that a request takes beside judging.
        an_hour: evaluations an hour and a GPU that were measured; None where that was not.
        source: name of the file of rows.
    """

    services: tuple[Service, ...]
    judges: int
    opening_s: float
    call_s: float
    an_hour: float | None
    source: str


def read_times(path: Path) -> Times:
    """The times in rows of `experiments.cluster.rate` (its arm on one GPU), or of ``benchmarks.judge cost``."""
    rows = read_journal(path)
    arm = next((row for row in rows if row["what"] == "arm" and row["arm"]["name"] == ONE), None)
    found = [r for r in rows if r["what"] == "evaluation" and (arm is None or r["arm"]["name"] == ONE)]
    services = [_service(row["parts"]) for row in found if row["failure"] is None]
    random.Random(0).shuffle(services)
    if arm is None:
        opening = median(row["setup_s"] for row in rows if row["what"] == "spec")
        return Times(tuple(services), found[0].get("jobs", 1), opening, CALL_S, None, path.name)
    ways = {row["pool"]: row["median_ms"] / 1e3 for row in rows if row["what"] == "way"}
    an_hour = 3600 * arm["evaluations"] / arm["window_s"]
    return Times(tuple(services), arm["judges"], arm["opening_s"], ways.get("cluster", CALL_S), an_hour, path.name)


def _service(parts: dict[str, float]) -> Service:
    check, measure = (sum(parts.get(name, 0.0) for name in names) for names in (CHECKED, MEASURED))
    return Service(sum(parts.values()) - parts.get("wait", 0.0) - check - measure, check, measure)


@dataclass(frozen=True)
class Scenario:
    """What happens.

    Attributes:
        name: of it.
        gpus: of the cluster.
        mixed: every second node has GPUs of another generation, which the run must leave alone.
        losses: nodes that leave one after the other, each replaced half a minute later.
        throttled: GPUs that cannot be timed for a third of the run.
    """

    name: str
    gpus: int
    mixed: bool = False
    losses: int = 0
    throttled: int = 0


SCENARIOS = (
    *(Scenario("steady", gpus) for gpus in COUNTS),
    *(Scenario("two generations", gpus, mixed=True) for gpus in COUNTS[2:]),
    *(Scenario("nodes leave", gpus, losses=3) for gpus in COUNTS[2:]),
    *(Scenario("throttled", gpus, throttled=gpus // 8) for gpus in COUNTS[2:]),
)


class _Judge(SerialEvaluator):
    """Stands for the class of the judges; it is never made."""

    version, estimated = 1, False

    def answer(self, request: EvaluationRequest) -> Evaluation:
        raise NotImplementedError("the judges are simulated")


def _judge() -> tuple[Evaluator, OpGraph]:
    return _Judge(), OpGraph({}, ())


def simulate(scenario: Scenario, times: Times, each: int = EACH, seed: int = 0) -> dict[str, Any]:
    """One row: a run of `each` requests for each GPU of its own through a pool that is not pinned.

    Args:
        scenario: what happens.
        times: what was measured.
        each: requests for each GPU.
        seed: of what happens when.
    """
    loop, rng = VirtualLoop(), random.Random(seed)
    ray = SimulatedRay(loop, partial(_answered, times.services), times.call_s)
    a_node = 1 if scenario.gpus <= A_NODE and scenario.losses else min(A_NODE, max(1, scenario.gpus // 2))
    names = iter(f"node{n:04}" for n in range(10_000))

    def node(generation: str) -> Node:
        gpus = [SimulatedGpu(loop.time, times.opening_s) for _ in range(a_node)]
        return Node(next(names), generation, gpus)

    for number in range(scenario.gpus // a_node):
        ray.add(node(OTHER if scenario.mixed and number % 2 else OURS))
    ours = [gpu for one in ray.machines if one.generation == OURS for gpu in one.gpus]
    count = each * len(ours)
    length = times.opening_s + each * sum(s.check + s.measure for s in times.services) / len(times.services)
    for gpu in rng.sample(ours, scenario.throttled):
        gpu.throttled.append(Spell(length / 3, 2 * length / 3))

    def lose() -> None:
        victim = rng.choice([one for one in ray.machines if one.left is None])
        ray.kill(victim)
        loop.call_later(30.0, lambda: ray.add(node(OURS)))

    for number in range(scenario.losses):
        loop.call_later(times.opening_s + (number + rng.random()) * length / (scenario.losses + 1), lose)

    fleet = SimulatedFleet(ray, OURS)
    pool = ClusterPool(_judge, _Judge, fleet, pinned=False, lanes=times.judges)
    tickets = [pool.submit(EvaluationRequest(Program(OpGraph({}, ()), (), {}, str(n)))) for n in range(count)]
    ended, answered = [], dict[str, int]()
    for ticket, found in pool.gather(tickets):
        ended.append(loop.now)
        text = ticket.request.program.fallback
        answered[text] = answered.get(text, 0) + found.ok
        assert found.card is None or found.card.name == OURS, "a row of another generation"
    again = dict(pool.report.again)
    pool.close()
    loop.close()
    begin, end = ended[len(ended) // 5], ended[len(ended) * 4 // 5]
    locks = [g.lock.held for one in ray.machines if one.generation == OURS and one.left is None for g in one.gpus]
    locks = [held for held in locks if held and held[0][0] < begin]
    measuring = sum(_share(held, begin, end, (MEASURING,)) for held in locks) / len(locks)
    return {
        "what": "simulated",
        "simulated": True,
        "scenario": asdict(scenario),
        "times": {"source": times.source, "judges": times.judges, "call_s": times.call_s, "an_hour": times.an_hour},
        "requests": count,
        "answers": len(answered),
        "passed": sum(map(bool, answered.values())),
        "most_answers_to_one": max(answered.values()),
        "again": again,
        "lost": sum(fleet.lost.values()),
        "an_hour_a_gpu": 3600 * len(ended) * 3 / 5 / (end - begin) / len(ours),
        "measuring": measuring,
        "idle": 1 - sum(_share(held, begin, end) for held in locks) / len(locks),
        "seconds": loop.now,
    }


async def _answered(services: Sequence[Service], node: Node, gpu: SimulatedGpu, asked: Asked) -> Reply:
    number = int(json.loads(asked.task)["fallback"])
    service, card = services[number % len(services)], Card(node.generation)
    if not await gpu.judge(asked.run, asked.lane, service, asked.priority, asked.beside):
        return packed_answer(Evaluation(Gate.TIMING, "throttled", "not-timed", card=card))
    return packed_answer(Evaluation(Gate.PASSED, timing=Timing(1.0), eager=Timing(1.0), card=card))


def _share(held: Sequence[tuple[float, float, str]], begin: float, end: float, how: Sequence[str] = ()) -> float:
    """The share of the time between the two that a lock was held in these ways, overlapping holds counted once."""
    total, reached = 0.0, begin
    for first, last, what in sorted(held):
        if not how or what in how:
            total += max(0.0, min(last, end) - max(first, reached))
            reached = max(reached, min(last, end))
    return total / (end - begin)


def main(
    out: Annotated[Path, typer.Argument(help="File that rows are added to.")],
    times: Annotated[Path, typer.Option(help="Rows of experiments.cluster.rate, or of benchmarks.judge cost.")] = Path(
        "benchmarks/results/trust_cost.jsonl"
    ),
    each: Annotated[int, typer.Option(help="Requests for each GPU.")] = EACH,
) -> None:
    """Simulate runs on 1 to 64 GPUs."""
    measured = read_times(times)
    journal = Journal(out, Environment("simulated", "", "", "", "", commit()))
    for scenario in SCENARIOS:
        key = f"{scenario.name} {scenario.gpus} {times.name}"
        row = journal.add(key, **simulate(scenario, measured, each))
        print(json.dumps({k: row[k] for k in ("scenario", "an_hour_a_gpu", "idle", "again", "lost")}), flush=True)
    print(cluster_scaling(read_journal(out)))


if __name__ == "__main__":
    typer.run(main)
