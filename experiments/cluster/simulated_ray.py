"""What `qimeng.cluster.fleet` uses of Ray, in virtual time: nodes that come and leave, their GPUs, calls in flight.

Deals in the few calls of Ray that the fleet makes. What the driver computes between two of them goes by in virtual time
as well, as long as it takes this machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import cloudpickle

from experiments.cluster.simulated_gpus import SimulatedGpu
from experiments.cluster.virtual_time import VirtualLoop
from qimeng.cluster.fleet import Fleet
from qimeng.cluster.gpus import LABEL, Gpu, gpus_of
from qimeng.cluster.supervisor import Reply
from qimeng.interfaces import EngineReport, Evaluation

DETECTION_S = 15.0
"""Seconds until Ray says that a node has left, by its own defaults: three to five checks, three seconds apart."""


class Gone(Exception):
    """Ray's error for a call whose actor or node is gone."""


class Node:
    """One machine.

    Args:
        name: its id.
        generation: label of its GPUs.
        gpus: of it.

    Attributes:
        left: when it left, in virtual time; None while it lives.
    """

    def __init__(self, name: str, generation: str, gpus: Sequence[SimulatedGpu]):
        self.name, self.generation, self.gpus = name, generation, tuple(gpus)
        self.left: float | None = None
        self.calls: set[asyncio.Future[Any]] = set()


@dataclass(frozen=True)
class Asked:
    """One call of a keeper's `work`: see `qimeng.cluster.supervisor.Supervisor.work`."""

    run: str
    lane: int
    work: bytes
    task: Any
    priority: int
    beside: int
    limit_s: float | None


Answer = Callable[[Node, SimulatedGpu, Asked], Awaitable[Reply]]
"""What a GPU of a node answers to a call."""


class SimulatedRay:
    """Stands for the module `ray`.

    Args:
        loop: has the time.
        answer: what the GPUs say.
        call_s: seconds that the driver spends on sending a request and getting its answer.
    """

    def __init__(self, loop: VirtualLoop, answer: Answer, call_s: float = 0.0):
        self.loop, self.call_s, self._answer = loop, call_s, answer
        self.machines: list[Node] = []
        self.exceptions = SimpleNamespace(RayError=Gone, RayTaskError=type("RayTaskError", (Gone,), {}))
        self._computed = time.process_time()

    # -- nodes

    def add(self, node: Node) -> None:
        """A node joins."""
        self.machines.append(node)

    def kill(self, node: Node) -> None:
        """A node leaves; what is in flight there fails when Ray has seen it."""
        node.left = self.loop.now
        self.loop.call_later(DETECTION_S, self._end_calls, node)

    def _end_calls(self, node: Node) -> None:
        for call in list(node.calls):
            call.cancel()

    def lives(self, node: Node) -> bool:
        """Whether Ray takes it to live."""
        return node.left is None or self.loop.now < node.left + DETECTION_S

    # -- of the module

    def is_initialized(self) -> bool:
        """It is."""
        return True

    def nodes(self) -> list[dict[str, Any]]:
        """The list of nodes."""
        return [
            {
                "NodeID": node.name,
                "Alive": self.lives(node),
                "Resources": {"GPU": float(len(node.gpus)), "CPU": 1.0},
                "Labels": {LABEL: node.generation},
            }
            for node in self.machines
        ]

    def wait(
        self, calls: Sequence[asyncio.Future[Any]], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Any], list[Any]]:
        """Let time go by until so many calls have ended, at most `timeout` seconds."""
        self._charge()
        if timeout == 0:
            self.loop.run_until_complete(asyncio.sleep(0))
        elif sum(call.done() for call in calls) < num_returns:
            first = asyncio.FIRST_COMPLETED if num_returns == 1 else asyncio.ALL_COMPLETED
            self.loop.run_until_complete(asyncio.wait(calls, timeout=timeout, return_when=first))
        self._computed = time.process_time()
        done = [call for call in calls if call.done()][:num_returns]
        return done, [call for call in calls if call not in done]

    def get(self, call: asyncio.Future[Any]) -> Any:
        """What a call returned.

        Raises:
            Gone: its node has left.
        """
        if call.cancelled():
            raise Gone("the node has left")
        return call.result()

    def pause(self, seconds: float) -> None:
        """Let time go by."""
        self._charge()
        self.loop.run_until_complete(asyncio.sleep(seconds))
        self._computed = time.process_time()

    def _charge(self) -> None:
        self.loop.now += time.process_time() - self._computed

    # -- calls

    def keeper(self, gpu: Gpu) -> Keeper:
        """The actor of a GPU."""
        node = next(node for node in self.machines if node.name == gpu.node)
        return Keeper(self, node, node.gpus[gpu.number])

    def get_actor(self, name: str, namespace: str) -> Keeper:
        """The actor of a name, as other processes find it."""
        return next(self.keeper(gpu) for gpu in gpus_of(self.nodes()) if gpu.name == name)

    def begin(self, node: Node, work: Any) -> asyncio.Future[Any]:
        """Have something done at a node."""
        call = self.loop.create_task(work)
        node.calls.add(call)
        call.add_done_callback(node.calls.discard)
        if not self.lives(node):
            call.cancel()
        return call

    async def answered(self, node: Node, gpu: SimulatedGpu, asked: Asked) -> Reply:
        """A call's answer, which does not come where its node leaves meanwhile."""
        reply = await self._answer(node, gpu, asked)
        if node.left is not None:
            await asyncio.sleep(10 * DETECTION_S)  # nobody has noticed yet
        return reply


class Method:
    """A method of an actor, as Ray has it."""

    def __init__(self, call: Callable[..., Any]):
        self.remote = call


class Keeper:
    """The methods of a GPU's keeper that a fleet calls (`qimeng.cluster.supervisor.Supervisor`)."""

    def __init__(self, ray: SimulatedRay, node: Node, gpu: SimulatedGpu):
        self.work = Method(lambda *asked: ray.begin(node, ray.answered(node, gpu, Asked(*asked))))
        self.describe = Method(lambda: ray.begin(node, self._described(gpu)))
        self.stop = self.end = self.see = Method(lambda *_: ray.begin(node, asyncio.sleep(0)))

    async def _described(self, gpu: SimulatedGpu) -> Mapping[str, Any]:
        return {"running": gpu.turns.running, "waiting": gpu.turns.waiting, "runs": len(gpu.turns.used)}


class SimulatedFleet(Fleet):
    """The real fleet, on GPUs in virtual time.

    Args:
        ray: has the GPUs.
        generation: see `Fleet`.
        options: see `Fleet`.
    """

    def __init__(self, ray: SimulatedRay, generation: str, **options: Any):
        self._simulated = ray
        super().__init__("simulated", generation, **options)

    def _connect(self, address: str) -> Any:
        return self._simulated

    def _make_keeper(self, gpu: Gpu, beside: int) -> Any:
        return self._simulated.keeper(gpu)

    def clock(self) -> float:
        """The virtual time."""
        return self._simulated.loop.now

    def pause(self, seconds: float) -> None:
        """Let virtual time go by."""
        self._simulated.pause(seconds)

    def begin(self, *arguments: Any, **options: Any) -> Any:
        """See `Fleet.begin`; it costs the driver what a call of Ray costs."""
        self._simulated.loop.now += self._simulated.call_s
        return super().begin(*arguments, **options)

    def _say_it_lives(self) -> None:
        pass  # nobody ends the work of a run that is not heard of


def packed_answer(found: Evaluation) -> Reply:
    """An evaluation as a process of a GPU sends it."""
    return Reply(cloudpickle.dumps((found.to_json(), EngineReport())))


__all__ = ["DETECTION_S", "Asked", "Node", "SimulatedFleet", "SimulatedRay", "packed_answer"]
