"""Work without a GPU as Ray's CPU tasks, on the nodes of a cluster that have no GPU: compiling and capturing.

Deals in errands (`qimeng.envs.workers.offload`) that the processes of one GPU have, and in Ray's tasks. What comes to
nothing is left to the process that asked; so is everything where each node has a GPU, since its own cores have warm
processes for such work, and a task's process takes long to start. Knows nothing about what an errand is.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import cloudpickle

from qimeng.cluster.gpus import gpus_of
from qimeng.envs.workers.offload import Errand, NotHere
from qimeng.errors import in_words

RETRIES = 2
"""Times that Ray repeats a task whose process or node was lost. That is a machine's fault, as a candidate is compiled
in a process of its own, whose end is a result; and equal errands have equal results, so that repeating is harmless.
What the task raises is never repeated (`retry_exceptions`)."""
QUEUE_S = 30.0
"""Seconds that an errand may wait for a core beside its own; then whoever has it does it."""
SHARE = 0.5
"""Part of the cores of nodes without a GPU that the errands of all GPUs may have, each GPU as much. A process that does
errands takes seconds to start, so fewer of them are warm sooner."""
KEPT = 64
"""Results that are kept for processes of this GPU that have the same errand."""
REFRESH_S = 5.0
"""Seconds for which a list of the nodes is good."""


@dataclass(frozen=True)
class Done:
    """What became of an errand.

    Attributes:
        node: id of the node that it was done on.
        result: what its work returned, pickled; None where it did not.
        failure: why not, in words.
        fit: whether the node can do such an errand.
        lasting: whether the next one who asks may have this result too; see `Errand.work`.
    """

    node: str
    result: bytes | None = None
    failure: str = ""
    fit: bool = True
    lasting: bool = True


class CpuTasks:
    """The errands of one GPU's processes.

    A node that says that it cannot do one (`NotHere`) gets no more of them.

    Attributes:
        done: errands that were done.
        left: errands that were left to the process that asked.
        why: the reason of the last one that was left.
    """

    def __init__(self) -> None:
        self.done, self.left, self.why = 0, 0, ""
        self._known: OrderedDict[str, Any] = OrderedDict()
        self._unfit: set[str] = set()
        self._listed: tuple[float, frozenset[str], int] = (-REFRESH_S, frozenset(), 1)
        self._running = 0

    @cached_property
    def _room(self) -> asyncio.Condition:
        """Made where it is used: this object travels to the keeper."""
        return asyncio.Condition()

    def described(self) -> dict[str, Any]:
        """What became of them so far, for people."""
        return {"cpu_tasks": self.done, "done_here": self.left, "why_here": self.why}

    async def run(self, errands: Sequence[Errand]) -> list[bytes | None]:
        """Do errands beside each other; the pickled result of each, None where it is left to who asked."""
        return list(await asyncio.gather(*map(self._run, errands)))

    async def _run(self, errand: Errand) -> bytes | None:
        async with self._room:
            await self._room.wait_for(lambda: errand.key in self._known or self._running < self._nodes()[1])
            self._running += 1
        result = None
        try:
            result = await self._done(errand)
        except Exception as error:  # noqa: BLE001  Ray itself may fail; whoever asked can do without
            self.why = in_words(error)
        finally:
            async with self._room:
                self._running -= 1
                self._room.notify_all()
        self.done += result is not None
        self.left += result is None
        return result

    async def _done(self, errand: Errand) -> bytes | None:
        while (task := self._task_of(errand)) is not None:
            found = await self._found(task, errand)
            if found.result is None or not found.lasting:
                self._known.pop(errand.key, None)
            if found.result is not None:
                return found.result
            self.why = found.failure
            if found.fit:
                return None
            self._unfit.add(found.node)
        return None

    async def _found(self, task: Any, errand: Errand) -> Done:
        """What became of a task; nodes that are lost, and cores that nobody has, are no reason to wait for ever."""
        import ray

        try:
            done: Done = await asyncio.wait_for(_value(task), errand.seconds + QUEUE_S)
            return done
        except TimeoutError:
            ray.cancel(task, force=False)
            return Done("", failure=f"no core was free for it within {QUEUE_S:g} s, or it took too long")
        except ray.exceptions.RayError as error:
            return Done("", failure=str(error).strip().splitlines()[-1])

    def _task_of(self, errand: Errand) -> Any:
        """The task that does an errand, or an equal one before; None where no node can do it."""
        if errand.key in self._known:
            self._known.move_to_end(errand.key)
            return self._known[errand.key]
        nodes = self._nodes()[0] - self._unfit
        if not nodes:
            self.why = self.why or "every node has a GPU"
            return None
        while len(self._known) >= KEPT:
            self._known.popitem(last=False)
        self._known[errand.key] = task = _begun(errand.work, sorted(nodes))
        return task

    def _nodes(self) -> tuple[frozenset[str], int]:
        """Ids of the nodes without a GPU, and how many errands of this GPU may run at a time."""
        import ray

        now = time.monotonic()
        if now - self._listed[0] >= REFRESH_S:
            nodes = ray.nodes()
            gpus = gpus_of(nodes)
            busy = {gpu.node for gpu in gpus}
            cores = {str(node["NodeID"]): node["Resources"].get("CPU", 0) for node in nodes if node["Alive"]}
            free = {node: count for node, count in cores.items() if count >= 1 and node not in busy}
            most = max(1, int(SHARE * sum(free.values()) / max(1, len(gpus))))
            self._listed = now, frozenset(free), most
        return self._listed[1:]


async def _value(task: Any) -> Any:
    return await task


def _begun(work: bytes, nodes: Sequence[str]) -> Any:
    """A task of Ray's that does `work` on one of those nodes."""
    import ray

    task = ray.remote(_do).options(
        num_cpus=1,
        max_retries=RETRIES,
        retry_exceptions=False,
        scheduling_strategy="SPREAD",
        label_selector={"ray.io/node-id": f"in({','.join(nodes)})"},
    )
    return task.remote(work)


def _do(work: bytes) -> Done:
    """In a process of some node."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    try:
        found = cloudpickle.loads(work)()
        return Done(node, cloudpickle.dumps(found), lasting=getattr(found, "lasting", True))
    except NotHere as error:
        return Done(node, failure=str(error), fit=False)
    except Exception as error:  # noqa: BLE001  whatever the work raises, whoever asked does it
        return Done(node, failure=in_words(error))


__all__ = ["CpuTasks", "Done"]
