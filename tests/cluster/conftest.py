"""A cluster of simulated nodes, as Ray has them; its GPUs are numbers in Ray's books, and no more."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from filelock import FileLock

from qimeng.cluster.connection import LOOPBACK, UV_HOOK

ROOT = Path(__file__).resolve().parents[2]
STORE_BYTES = 80 << 20
STARTS = 3
"""Times that a node is started: Ray gives up after 30 seconds, which a busy machine may need."""
SETTINGS = {
    "health_check_initial_delay_ms": 2000,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 10,
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
}
"""A node that was killed is seen to be gone when its connection ends; one that a busy machine keeps waiting is not. No
process is started before it is needed: each takes a second of a core."""


class Nodes:
    """A cluster of this machine: a head with two GPUs of generation B200, and nodes that tests add and remove.

    Args:
        folder: of temporary files of all its processes.
    """

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        head = {
            "num_cpus": 1,
            "num_gpus": 2,
            "labels": {"ray.io/accelerator-type": "B200"},
            "include_dashboard": False,
            "include_log_monitor": False,
            "no_monitor": True,
            "object_store_memory": STORE_BYTES,
            "node_ip_address": "127.0.0.1",
            "_system_config": SETTINGS,
        }
        self.folder = folder
        self.cluster = _started(lambda: Cluster(initialize_head=True, head_node_args=head))
        self.address: str = self.cluster.address

    def add(self, gpus: int = 1, generation: str = "H100") -> Any:
        """A node with so many GPUs."""
        labels = {"ray.io/accelerator-type": generation}
        return _started(
            lambda: self.cluster.add_node(
                num_cpus=1,
                num_gpus=gpus,
                labels=labels,
                object_store_memory=STORE_BYTES,
                node_ip_address="127.0.0.1",
            )
        )

    def remove(self, node: Any) -> None:
        """Kill a node, all its processes at once: Ray's own would live for another second."""
        below = [child for raylet in raylets(node) for child in psutil.Process(raylet).children(recursive=True)]
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        import ray

        ray.shutdown()
        self.cluster.shutdown()


def _started(start: Callable[[], Any]) -> Any:
    for left in reversed(range(STARTS)):
        try:
            return start()
        except Exception as error:
            if not left or "timed out during startup" not in str(error):
                raise
    raise AssertionError


def start_without_agents(start: Callable[..., Any]) -> Callable[..., Any]:
    """In place of Ray's `start_ray_process`: nodes without Ray's two agents, which take two seconds of a core each.

    They serve the dashboard and runtime environments, which nothing here has. A raylet waits for files with their
    ports, and ends with them.
    """
    from ray import _raylet

    ports = {
        _raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME: -1,  # what Ray's smallest agent writes for "not in use"
        _raylet.METRICS_AGENT_PORT_NAME: -1,
        _raylet.METRICS_EXPORT_PORT_NAME: -1,
        _raylet.RUNTIME_ENV_AGENT_PORT_NAME: 1,
    }
    agents = ("--dashboard_agent_command=", "--runtime_env_agent_command=")

    def started(command: list[str], *arguments: Any, **options: Any) -> Any:
        given = dict(part.split("=", 1) for part in command if part.startswith("--") and "=" in part)
        if any(part.startswith(agents) for part in command):
            for name, port in ports.items():
                _raylet.persist_port(given["--session_dir"], given["--node_id"], name, port)
        idle = [next((f"{a}sleep 100000" for a in agents if part.startswith(a)), part) for part in command]
        return start(idle, *arguments, **options)

    return started


def raylets(node: Any) -> list[int]:
    """Ids of a node's own process, whose children its actors are."""
    return [info.process.pid for info in node.all_processes.get("raylet", [])]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """One cluster at a time on this machine, whichever of pytest's processes has it."""
    folder = tmp_path_factory.mktemp("cluster")
    lock = tmp_path_factory.getbasetemp().parent / "cluster.lock"
    with FileLock(lock), pytest.MonkeyPatch.context() as patch:
        patch.setenv(LOOPBACK, "0")  # 127.0.0.1 stays 127.0.0.1
        patch.setenv(UV_HOOK, "0")  # which `connect` says too late where Ray is there already
        patch.setenv("RAY_AUTH_MODE", "disabled")  # whatever token lies in the home folder
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TMPDIR", "/tmp")  # the names of its sockets have to be short
        patch.setenv("TMPDIR", str(folder))
        paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))  # for what runs there to find the tests
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        pytest.importorskip("ray", reason="ray is not installed (the extra cluster)")  # it reads these when imported
        # a node that is started in a thread may set no handler; the test's own process ends them all
        patch.setattr("ray._private.utils.set_sigterm_handler", lambda handler: None)
        services = pytest.importorskip("ray._private.services")
        patch.setattr(services, "start_ray_process", start_without_agents(services.start_ray_process))
        made = Nodes(folder)
        try:
            yield made
        finally:
            made.close()
