"""A cluster of simulated GPUs in virtual time, whose processes do what tests want."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import cloudpickle

from experiments.cluster.simulated_gpus import Service, SimulatedGpu
from experiments.cluster.simulated_ray import Asked, Node, SimulatedFleet, SimulatedRay, packed_answer
from experiments.cluster.virtual_time import VirtualLoop
from qimeng.cluster.pool import ClusterPool
from qimeng.cluster.supervisor import Reply
from qimeng.device import Card
from qimeng.interfaces import Evaluation, Evaluator
from tests.cluster.fakes import Measuring, measuring, request
from tests.cluster.light import verdict

A_SECOND = Service(0.7, 0.2, 0.1)


class Machines:
    """Nodes that come and leave; requests are judged by the rules of `fakes`, and tasks are called."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.ray = SimulatedRay(self.loop, self.answer)
        self.ended: list[str] = []

    def add(self, gpus: int = 1, generation: str = "H100") -> Node:
        made = [SimulatedGpu(self.loop.time, opening=2.0) for _ in range(gpus)]
        node = Node(f"node{len(self.ray.machines):03}", generation, made)
        self.ray.add(node)
        return node

    def fleet(self, generation: str = "H100", **options: Any) -> SimulatedFleet:
        return SimulatedFleet(self.ray, generation, **options)

    def pool(self, generation: str = "H100", **options: Any) -> ClusterPool:
        return ClusterPool(measuring, Measuring, self.fleet(generation), **options)

    async def answer(self, node: Node, gpu: SimulatedGpu, asked: Asked) -> Reply:
        await gpu.judge(asked.run, asked.lane, A_SECOND, asked.priority, asked.beside)
        if not isinstance(asked.task, bytes):
            return packed_answer(verdict(asked.task, Card(f"gpu {node.gpus.index(gpu)} of {node.name}")))
        task = cloudpickle.loads(asked.task)
        if task == "die":
            return Reply(failure="the worker process died", alive=False)
        if task == "hang":
            assert asked.limit_s is not None
            await asyncio.sleep(asked.limit_s)
            return Reply(failure="", alive=False, late=True)
        try:
            return Reply(cloudpickle.dumps(cloudpickle.loads(asked.work)(task)), files={f"{task}": b""})
        except ValueError as error:
            return Reply(failure=f"ValueError: {error}")


def judged(engine: Evaluator, texts: list[str]) -> dict[str, Evaluation]:
    """The answers by text, without the cards."""
    tickets = [engine.submit(request(text)) for text in texts]
    return {t.request.program.fallback: replace(e, card=None) for t, e in engine.gather(tickets)}
