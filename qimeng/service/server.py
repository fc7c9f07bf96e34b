"""Runs the service: it puts pool, jobs, tokens and app together, and listens.

Deals in choosing the parts. Listens on the loopback interface only, unless there is a token.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qimeng.bench.gpus import gpu_places, visible_gpus
from qimeng.cluster.tasks import ClusterTasks
from qimeng.envs.sandbox import Sandbox
from qimeng.envs.workers.queueing import QueueingEvaluator
from qimeng.service.app import make_app
from qimeng.service.errors import ServiceError
from qimeng.service.hosting import REQUIRED, Settings, describe
from qimeng.service.jobs import Jobs
from qimeng.service.known import KnownAnswers
from qimeng.service.limits import Limits
from qimeng.service.pools import ClusterApart, LocalApart, described_here
from qimeng.service.tokens import Tokens

CONNECTIONS = 512
"""Most connections at a time; more are answered with status 503."""
CLOSING_S = 3
"""Seconds that requests have which are open when the server ends: clients may wait a minute for an answer."""


@dataclass(frozen=True)
class Place:
    """Where submissions are judged.

    Attributes:
        jobs: submissions at a time on each GPU, or on this machine where it has none.
        gpus: of this machine to use; 0 for all.
        cluster: address of a cluster (`qimeng.cluster.connection.connect`); empty for this machine.
        generation: of the cluster's GPUs.
        settings: how they are judged.
    """

    jobs: int = 1
    gpus: int = 0
    cluster: str = ""
    generation: str = ""
    settings: Settings = field(default_factory=Settings)

    def open(self) -> tuple[Callable[[], QueueingEvaluator], dict[str, Any]]:
        """What makes its pool, and what judges there (`describe`).

        Raises:
            ServiceError: nothing here keeps strangers' code from files.
            ClusterError: there is no such cluster.
            DeviceError: an unknown device.
        """
        if self.cluster:
            return self._on_cluster()
        lacks = Sandbox("host").layers_available().skipped
        if missing := [f"{layer} ({lacks[layer]})" for layer in REQUIRED if layer in lacks]:
            raise ServiceError(f"strangers' code is not run here: the sandbox lacks {', '.join(missing)}")
        places = gpu_places(self.gpus, self.jobs, visible_gpus())
        environments: Sequence[Mapping[str, str]] = [p.environment for p in places for _ in range(p.slots)]
        about = described_here(self.settings, environments[0])
        about["places"] = [p.name for p in places]
        about["sandbox_lacks"] = dict(lacks)
        return lambda: LocalApart(self.settings, about["measured"], environments), about

    def _on_cluster(self) -> tuple[Callable[[], QueueingEvaluator], dict[str, Any]]:
        from functools import partial

        from qimeng.cluster.fleet import Fleet
        from qimeng.cluster.turns import NORMAL

        with ClusterTasks(Fleet(self.cluster, self.generation, NORMAL)) as tasks:
            about = tasks.ask(partial(describe, self.settings))

        def make() -> QueueingEvaluator:
            fleet = Fleet(self.cluster, self.generation, NORMAL)
            return ClusterApart(self.settings, about["measured"], fleet, self.jobs)

        return make, {**about, "places": [f"cluster {self.cluster}"]}


def check_address(host: str, tokens: Tokens | None) -> None:
    """Refuse to listen to others without tokens.

    Raises:
        ServiceError: `host` is no address of the loopback interface, and there are no tokens.
    """
    if tokens is not None or host == "localhost":
        return
    with suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    raise ServiceError(f"without a token, the service listens on 127.0.0.1 only, not on {host}; use --token-file")


def run(
    place: Place,
    tokens: Tokens | None,
    host: str,
    port: int,
    limits: Limits | None = None,
    answers: Path | None = None,
) -> None:
    """Serve until the process is interrupted.

    Args:
        place: where submissions are judged.
        tokens: who may ask; None for every process of this machine.
        host: address to listen on.
        port: port to listen on.
        limits: what is taken.
        answers: file in which answers are kept, so that they are known after a restart; None for memory alone.

    Raises:
        ServiceError: see `check_address`, `Place.open` and `KnownAnswers`.
    """
    import uvicorn

    check_address(host, tokens)
    taken = limits or Limits()
    make, about = place.open()
    known = KnownAnswers(answers, taken.kept, {name: about[name] for name in ("device", "gpu", "versions")})
    jobs = Jobs(make, taken, about["versions"], known)
    try:
        with suppress(KeyboardInterrupt):  # it has ended by then
            uvicorn.Server(config_of(make_app(jobs, tokens, about), taken, host=host, port=port)).run()
    finally:
        jobs.close()


def config_of(app: Any, limits: Limits, **options: Any) -> Any:
    """The settings of uvicorn for an app: how many connections there may be, and how long they may say nothing."""
    import uvicorn

    from qimeng.service.connections import patient_for

    given: dict[str, Any] = {"limit_concurrency": CONNECTIONS, "timeout_graceful_shutdown": CLOSING_S}
    given |= {"server_header": False, "log_level": "warning", **options}
    return uvicorn.Config(app, http=patient_for(limits.head_s), **given)


__all__ = ["CONNECTIONS", "Place", "check_address", "config_of", "run"]
