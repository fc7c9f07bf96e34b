"""Workers for one evaluation after the other: the next one is started ahead, one that served well may serve again.

Deals in processes and their caches. Knows nothing about what they are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from qimeng.envs.workers.forkserver import FEW_QUEUES, ForkServer, Process, WorkerFailed, readable_within
from qimeng.envs.workers.worker_setup import Setup

SERVES = 32
"""Evaluations that one worker serves where templates printed all that it runs. With a CUDA context for each, 20
evaluators on four H200s came to 1.2 evaluations a second together, and each took ten times as long as alone: a machine
opens and closes contexts one at a time. (The fork server read all processes for each that ended, which was slow too.)
"""
SETTLE_S = 5.0
"""Seconds after which a worker that does not become ready is waited for no longer."""


class WorkerSupply:
    """Workers for one specification.

    Args:
        server: starts the processes.
        setup: the specification, the mode and the device.
        sandbox: level of the sandbox that they enter before candidates run in them.
        cache: Triton's cache folder of searches.
        limit: tells how many seconds a command may take.
        readable: folders that workers may read in a full sandbox, besides the usual ones.

    Attributes:
        layers: of the sandbox, that the worker taken last was in.
    """

    def __init__(
        self,
        server: ForkServer,
        setup: Setup,
        sandbox: str,
        cache: str,
        limit: Callable[[], float],
        readable: Sequence[str] = (),
    ):
        self._readable = tuple(readable)
        self._server, self._setup, self._sandbox, self._cache, self._limit = server, setup, sandbox, cache, limit
        self.layers: tuple[str, ...] = ()
        self._spare: Process | None = None
        self._spare_cache = ""
        self._kept: Process | None = None
        self._served = 0
        self._ending: list[Process] = []

    def start(self, cache: str) -> Process:
        """A fresh worker, with Triton's cache in folder `cache`, that answers once it is ready.

        It opens the device while others may be timed: for a few milliseconds, which medians do not see. That of the
        next evaluation is ready before anything is timed (`settle`). In a search it has few queues on the device; a
        final verification, which has a cache of its own, gets what PyTorch gets.
        """
        environment = FEW_QUEUES if cache == self._cache else {}
        main = "qimeng.envs.workers.worker:main"
        if self._sandbox == "full":
            setup = replace(self._setup, compiled=cache)
            worker = self._server.start(
                main, setup, environment=environment, sandbox="full", readable=[cache, *self._readable]
            )
        else:
            environment = {**environment, "TRITON_CACHE_DIR": cache}
            worker = self._server.start(main, self._setup, environment=environment, sandbox=self._sandbox)
        worker.send("ready")
        return worker

    def make_ready(self, cache: str, may_share: bool) -> None:
        """See to it that `take` finds a worker that has started.

        Args:
            cache: Triton's cache folder of the evaluation to come.
            may_share: whether a worker that served before may serve it.
        """
        if not self._has_kept(may_share):
            self.drop_kept()  # what it holds would be missing
            self.prefetch(cache)

    def prefetch(self, cache: str | None = None) -> None:
        """Start the next worker now, so that it is ready when it is needed.

        Args:
            cache: Triton's cache folder; by default that of searches.
        """
        cache = cache or self._cache
        if self._spare is not None and (self._spare_cache != cache or not self._spare.alive):
            self._spare.kill()
            self._spare = None
        if self._spare is None:
            self._spare, self._spare_cache = self.start(cache), cache

    def take(self, may_share: bool) -> Process:
        """The worker that served before, where one may be shared; else the one started last, once it is ready."""
        while self._ending:
            self._ending.pop().kill()
        if self._has_kept(may_share):
            kept, self._kept = self._kept, None
            assert kept is not None
            return kept
        if self._spare is None:  # the one that was kept has died since
            self.prefetch()
        worker, self._spare = self._spare, None
        assert worker is not None
        self.layers = tuple(str(name) for name in worker.await_ready()["sandbox"])
        if may_share:
            self._served = 0
        return worker

    def keep(self, worker: Process) -> bool:
        """Keep a worker in which all went well for the next evaluation that may share one; whether it was kept."""
        if worker.alive and self._kept is None and self._served < SERVES:
            with suppress(WorkerFailed):
                worker.call("rest", self._limit())
                self._kept = worker
                self._served += 1
                return True
        return False

    @property
    def keeps_one(self) -> bool:
        """Whether a worker waits for the next evaluation that may share one."""
        return self._kept is not None

    def drop_kept(self) -> None:
        """End the worker that waits to be shared."""
        if self._kept is not None:
            self.let_go(self._kept)
            self._kept = None

    def let_go(self, worker: Process) -> None:
        """End a worker without waiting for its end."""
        worker.kill(wait=False)
        self._ending.append(worker)

    def settle(self) -> None:
        """Wait until the worker that was started for the next evaluation is ready, so that it disturbs no measurement.

        It has had the whole check to open the device, so that there is hardly ever anything to wait for.
        """
        if self._spare is not None and self._spare.alive:
            readable_within([self._spare.channel_fd, self._spare.status_fd], SETTLE_S)

    def stop(self) -> None:
        """Begin to end every worker."""
        if self._spare is not None:
            self._ending.append(self._spare)
            self._spare = None
        self.drop_kept()
        for process in self._ending:
            process.kill(wait=False)

    def close(self) -> None:
        """End every worker, and wait for that."""
        self.stop()
        while self._ending:
            self._ending.pop().kill()

    def _has_kept(self, may_share: bool) -> bool:
        return may_share and self._kept is not None and self._kept.alive


__all__ = ["SERVES", "WorkerSupply"]
