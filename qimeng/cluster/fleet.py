"""The keepers of a cluster's GPUs, seen from a process that has work for them.

Deals in actors, calls and what became of them, in words. Knows nothing about what is worked on or what is asked again:
`qimeng.cluster.pool` asks for evaluations, `qimeng.cluster.tasks` for whole tasks.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from qimeng.cluster.connection import NAMESPACE, connect
from qimeng.cluster.cpu_tasks import CpuTasks
from qimeng.cluster.gpus import NONE, ClusterError, Gpu, chosen_generation, gpus_of
from qimeng.cluster.supervisor import LEASE_S, Reply, Supervisor
from qimeng.cluster.turns import NORMAL

RESTARTS = 3
"""Times that Ray starts a keeper anew where its process died and its node lives. Its GPU comes back with it; a node on
which it dies more often is left alone. Ray's default is 0: a GPU would be lost for the rest of the run."""
TASK_RETRIES = 0
"""Times that Ray itself repeats a call whose keeper died: never. It would do so on the same GPU, uncounted, and a
request may be what killed it; who called asks again elsewhere, a few times, and says so."""
REFRESH_S = 2.0
"""Seconds for which a list of the nodes is good."""
REST_S, SICK = 60.0, 3
"""A GPU at which so many calls in a row ended by a machine's fault is given nothing for so many seconds."""
PAUSE_S = 1.0
"""Seconds until a keeper that was lost is asked again whether it is there: Ray starts one anew in a second, and may
take a quarter of a minute to see that a node has left. Work waits for the answer, or it would be lost there as well."""
PROBE_S = 0.25
"""Seconds between two looks whether a keeper has answered, where other calls are waited for."""
PATIENCE_S = 300.0
"""Seconds that a run waits for a GPU to come back when all have left."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call in flight.

    Attributes:
        gpu: where it was sent.
        lane: of the run, on that GPU.
        reference: Ray's.
    """

    gpu: Gpu
    lane: int
    reference: Any


class Fleet:
    """The GPUs of one generation of a cluster, for one run. Close it when done.

    Args:
        address: see `qimeng.cluster.connection.connect`.
        generation: of the GPUs to use; by default the one with the most.
        priority: of the run's turns (`qimeng.cluster.turns`).
        patience: seconds to wait for a GPU where there is none left.

    Attributes:
        run: names it to the keepers.
        lost: calls that ended with their keeper or node, by the name of the GPU.

    Raises:
        ClusterError: there is no cluster there, or no such GPU.
    """

    def __init__(
        self, address: str = "local", generation: str = "", priority: int = NORMAL, patience: float = PATIENCE_S
    ):
        self._ray, self._address = self._connect(address), address
        self.run = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.priority, self._patience = priority, patience
        self._known: dict[Gpu, Gpu] = {}
        self._listed: tuple[float, tuple[Gpu, ...]] = (self.clock(), self._all())
        self.generation = chosen_generation(self._listed[1], generation)
        self._keepers: dict[Gpu, Any] = {}
        self._calls: dict[Any, Call] = {}
        self._in_a_row: Counter[Gpu] = Counter()
        self._resting: dict[Gpu, float] = {}
        self._said: tuple[float, dict[Gpu, tuple[int, int]]] = (0.0, {})
        self._there: dict[Gpu, bool] = {}
        self._probes: dict[Gpu, Any] = {}
        self._probed_next: dict[Gpu, float] = {}
        self.lost: Counter[str] = Counter()
        self._closed = threading.Event()
        self._pulse = threading.Thread(target=self._say_it_lives, daemon=True, name="qimeng-cluster")
        self._pulse.start()

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Those that live now, without the ones that rest."""
        now = self.clock()
        if now - self._listed[0] >= REFRESH_S:
            self.look()
        of_ours = [gpu for gpu in self._listed[1] if gpu.generation == self.generation]
        return tuple(gpu for gpu in of_ours if self._resting.get(gpu, 0.0) <= now)

    def another(self) -> Fleet:
        """One for another run on the same GPUs, which knows already which keepers have answered."""
        made = Fleet(self._address, self.generation, self.priority, self._patience)
        made._there = {gpu: True for gpu in made._listed[1] if self._there.get(gpu, False)}
        return made

    def ready(self, gpu: Gpu) -> bool:
        """Whether its keeper has answered, since it was last lost if it was; does not wait for that.

        Where it has not, it is asked: a GPU that another program of the cluster holds has no keeper, and is not ready.
        """
        if self._there.get(gpu, False):
            return True
        now = self.clock()
        if gpu not in self._probes:
            if self._probed_next.get(gpu, 0.0) <= now:
                self._probes[gpu] = self._keeper(gpu).describe.remote()
            return False
        if not self._ray.wait([self._probes[gpu]], timeout=0)[0]:
            return False
        try:
            self._ray.get(self._probes.pop(gpu))
        except self._ray.exceptions.RayError:
            self._keepers.pop(gpu, None)
            self._probed_next[gpu] = now + PAUSE_S
            return False
        self._there[gpu] = True
        return True

    def by_use(self, gpus: Sequence[Gpu]) -> list[Gpu]:
        """The GPUs with the least work of all runs first, as their keepers said in the last moments; else by chance."""
        if len(gpus) < 2:
            return list(gpus)
        now = self.clock()
        if now - self._said[0] >= REFRESH_S or any(gpu not in self._said[1] for gpu in gpus):
            said = described(self._ray, gpus, seconds=REFRESH_S / 4)
            self._said = (now, {gpu: _use_of(said.get(gpu)) for gpu in gpus})
        return sorted(random.sample(gpus, len(gpus)), key=lambda gpu: self._said[1][gpu])

    def look(self) -> None:
        """List the nodes anew."""
        self._listed = (self.clock(), self._all())
        for known in (self._keepers, self._there, self._probes, self._probed_next, self._resting, self._in_a_row):
            for gpu in [gpu for gpu in known if gpu not in self._listed[1]]:
                del known[gpu]

    def await_gpu(self) -> None:
        """Wait until there is a GPU whose keeper answers.

        Raises:
            ClusterError: there is none for longer than the run's patience.
        """
        until = self.clock() + self._patience
        while not any([self.ready(gpu) for gpu in self.gpus]):
            if self.clock() >= until:
                raise ClusterError(
                    f"no GPU of generation {self.generation!r} is left in the cluster, or free for this, and none came "
                    f"within {self._patience:g} s; what was measured is kept: run the same command again to go on"
                )
            self.pause(min(0.05, self._patience))

    def begin(self, gpu: Gpu, lane: int, work: bytes, task: Any, beside: int = 1, limit_s: float | None = None) -> Call:
        """Have a GPU work on a task: see `Supervisor.work`."""
        keeper = self._keeper(gpu)
        reference = keeper.work.remote(self.run, lane, work, task, self.priority, beside, limit_s)
        call = self._calls[reference] = Call(gpu, lane, reference)
        return call

    def ended(self, seconds: float | None) -> list[tuple[Call, Reply]]:
        """Wait for a call to end, at most so long, and take those that have."""
        if not self._calls:
            return []
        limit = min(LEASE_S if seconds is None else seconds, PROBE_S if self._probes else LEASE_S)
        ready, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=limit)
        if ready:  # and all others that have ended meanwhile
            ready, _ = self._ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        return [(call, self._reply(call)) for call in map(self._calls.pop, ready)]

    def told(self, call: Call, since: int) -> list[Any] | None:
        """What the task of a call has told from note number `since` on; None while it waits for its turn."""
        try:
            found = self._ray.get(self._keeper(call.gpu).notes.remote(self.run, call.lane, since), timeout=PROBE_S)
        except self._ray.exceptions.RayError:  # a keeper that is lost, or busy: later
            return []
        return None if found is None else [cloudpickle.loads(data) for data in found]

    def stop(self, call: Call) -> None:
        """End a call; its answer is not waited for."""
        self._calls.pop(call.reference, None)
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._keeper(call.gpu).stop.remote(self.run, call.lane)

    def stopped(self, calls: Sequence[Call], seconds: float) -> list[Reply]:
        """End these calls, and wait so long for what they leave behind."""
        for call in calls:
            self.stop(call)
        if not calls or not self._ray.is_initialized():
            return []
        references = {call.reference: call for call in calls}
        ready, _ = self._ray.wait(list(references), num_returns=len(references), timeout=seconds)
        return [self._reply(references[reference]) for reference in ready]

    def rest(self, gpu: Gpu, machine: bool) -> None:
        """Count how a call at a GPU ended: by a machine's fault or not; after several such, it rests for a while."""
        self._in_a_row[gpu] = self._in_a_row[gpu] + 1 if machine else 0
        if self._in_a_row[gpu] >= SICK:
            self._in_a_row[gpu] = 0
            self._resting[gpu] = self.clock() + REST_S

    def close(self) -> None:
        """End all that the run has on the cluster; harmless where it was closed before."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._calls.clear()
        if not self._ray.is_initialized():
            return
        left = []
        for keeper in self._keepers.values():
            with contextlib.suppress(self._ray.exceptions.RayError):
                left.append(keeper.end.remote(self.run))
        if left:  # long enough for processes to be ended, short enough for Ctrl-C
            self._ray.wait(left, num_returns=len(left), timeout=3.0)

    def clock(self) -> float:
        """Seconds that only move forward."""
        return time.monotonic()

    def pause(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    # -- parts

    def _connect(self, address: str) -> Any:
        return connect(address)

    def _make_keeper(self, gpu: Gpu, beside: int) -> Any:
        return _keeper_of(self._ray, gpu, beside)

    def _all(self) -> tuple[Gpu, ...]:
        """Those that are known already are the same objects, which are compared quickest."""
        return tuple(self._known.setdefault(gpu, gpu) for gpu in gpus_of(self._ray.nodes()))

    def _keeper(self, gpu: Gpu) -> Any:
        if gpu not in self._keepers:
            self._keepers[gpu] = self._make_keeper(gpu, sum(g.node == gpu.node for g in self._listed[1]))
        return self._keepers[gpu]

    def _reply(self, call: Call) -> Reply:
        errors = self._ray.exceptions
        try:
            found: Reply = self._ray.get(call.reference)
        except errors.RayTaskError as error:  # its own code raised: it would again
            return Reply(failure=f"the keeper of {call.gpu.name} raised: {str(error).strip().splitlines()[-1]}")
        except errors.RayError as error:
            self.lost[call.gpu.name] += 1
            self._keepers.pop(call.gpu, None)
            self._there.pop(call.gpu, None)
            self._probed_next[call.gpu] = self.clock() + PAUSE_S
            self.look()
            why = str(error).strip().splitlines()[0]
            return Reply(failure=f"{call.gpu.name} was lost ({type(error).__name__}: {why})", alive=False, gone=True)
        return found

    def _say_it_lives(self) -> None:
        while not self._closed.wait(LEASE_S / 4):
            for keeper in list(self._keepers.values()):
                with contextlib.suppress(Exception):
                    keeper.see.remote(self.run)


def _keeper_of(ray: Any, gpu: Gpu, beside: int) -> Any:
    """The actor that keeps a GPU, one of `beside` of its node; made where there is none, it outlives its maker."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    kind = ray.remote(Supervisor).options(
        name=gpu.name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_gpus=0 if gpu.generation == NONE else 1,  # Ray sets CUDA_VISIBLE_DEVICES from it
        num_cpus=0,
        max_restarts=RESTARTS,
        max_task_retries=TASK_RETRIES,
        scheduling_strategy=NodeAffinitySchedulingStrategy(gpu.node, soft=False),
    )
    return kind.remote(gpu.name, gpu.generation, beside, CpuTasks())


def described(ray: Any, gpus: Iterable[Gpu], seconds: float = 5.0) -> dict[Gpu, dict[str, Any]]:
    """What the keepers of these GPUs say of themselves; those that were never needed or do not answer are left out."""
    asked = {}
    for gpu in gpus:
        with contextlib.suppress(ValueError):
            asked[ray.get_actor(gpu.name, namespace=NAMESPACE).describe.remote()] = gpu
    ready: Sequence[Any] = ray.wait(list(asked), num_returns=len(asked), timeout=seconds)[0] if asked else ()
    found = {}
    for reference in ready:
        with contextlib.suppress(ray.exceptions.RayError):
            found[asked[reference]] = ray.get(reference)
    return found


def _use_of(said: dict[str, Any] | None) -> tuple[int, int]:
    return (said["running"] + said["waiting"], said["runs"]) if said else (0, 0)


def packed(work: Any) -> bytes:
    """A function as bytes, for `Fleet.begin`."""
    data: bytes = cloudpickle.dumps(work)
    return data


__all__ = ["PROBE_S", "Call", "Fleet", "described", "packed"]
