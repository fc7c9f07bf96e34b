"""The connection of this process to a cluster: one that runs, or one of its own on this machine.

Deals in Ray's addresses and settings. Ray's ports let whoever reaches them run code (docs/cluster.md), so a cluster
that is started here listens on the loopback interface alone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from qimeng.cluster.gpus import ClusterError

LOCAL = "local"
"""The address that stands for a cluster of this machine's own, which ends with this process."""
NAMESPACE = "qimeng"
"""Where the keepers of the GPUs have their names, so that all processes that use a cluster find the same ones."""
HERE = ("127.0.0.1", "localhost")
AUTH_MODE = "RAY_AUTH_MODE"
KNOCK_S = 5.0
"""Seconds within which a port of the cluster has to open."""
STORE_BYTES = 256 << 20
"""Size of a local cluster's object store: requests and answers are kilobytes."""
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Set to 0, Ray keeps to 127.0.0.1 when it is told to: else it listens on the machine's own address instead, whatever
`_node_ip_address` says (Ray 2.60, `ray._private.services.resolve_ip_for_localhost`)."""

NICENESS = "RAY_worker_niceness"
"""Ray runs its workers, and so the judges, at a priority so low (15) that any other program of the machine holds them
up; at 0 they are like the processes of a local pool. What compiles lowers its own."""

UV_HOOK = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
"""Set to 0, Ray does not look whether a process above this one is `uv run`. It fails where a sandbox hides those, and
there is no need: qimeng is installed on every machine of a cluster."""


def connect(address: str) -> ModuleType:
    """Connect to a cluster; where this process is connected already, it stays so.

    Args:
        address: ``"local"``, ``"auto"`` for the one of this machine that runs, or host and port.

    Returns:
        The module `ray`.

    Raises:
        ClusterError: Ray is not installed, or the cluster cannot be reached.
    """
    if find_spec("ray") is None:
        raise ClusterError("a cluster needs Ray: pip install 'qimeng[cluster]'")
    host, _, port = address.rpartition(":")
    if not host and address not in (LOCAL, "auto"):
        raise ClusterError(f"{address!r} is no cluster: name one as HOST:PORT, auto or local")
    if address == LOCAL or host in HERE:
        os.environ.setdefault(LOOPBACK, "0")  # read when Ray is imported, as the next
        if _has_token():  # Ray itself does so for "auto" alone; to another machine a token goes when its owner says so
            os.environ.setdefault(AUTH_MODE, "token")
    os.environ.setdefault(UV_HOOK, "0")
    if host:
        _knock(address, host, port)
    import ray

    found: ModuleType = ray
    if ray.is_initialized():
        return found
    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "error"}
    if address == LOCAL:
        os.environ.setdefault(NICENESS, "0")
        options |= {"include_dashboard": False, "object_store_memory": STORE_BYTES, "_node_ip_address": "127.0.0.1"}
    try:
        with _without_visible_devices(address != LOCAL):
            ray.init(address=address, **options)
    except Exception as error:  # Ray passes on what the libraries in it raise
        raise _no_answer(address, error) from error
    return found


def _has_token() -> bool:
    """Whether Ray's token is where Ray looks for it."""
    file = os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
    return bool(os.environ.get("RAY_AUTH_TOKEN")) or Path(file).is_file()


def _knock(address: str, host: str, port: str) -> None:
    """Find out in seconds that nobody listens: Ray takes more than a minute."""
    try:
        socket.create_connection((host, int(port)), KNOCK_S).close()
    except (OSError, ValueError) as error:
        raise _no_answer(address, error) from error


def _no_answer(address: str, error: Exception) -> ClusterError:
    why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return ClusterError(
        f"no cluster answers at {address!r} ({why}); name one as HOST:PORT, start one with `ray start`, or use "
        "--cluster local. Where it wants a token, set RAY_AUTH_MODE=token (docs/cluster.md)"
    )


def disconnect() -> None:
    """Leave the cluster; one that was started here ends."""
    import ray

    ray.shutdown()


@contextmanager
def _without_visible_devices(hidden: bool) -> Iterator[None]:
    """Hide which GPUs this process sees, so that nothing of it is taken for another machine's."""
    before = os.environ.pop("CUDA_VISIBLE_DEVICES", None) if hidden else None
    try:
        yield
    finally:
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


__all__ = ["LOCAL", "LOOPBACK", "NAMESPACE", "UV_HOOK", "connect", "disconnect"]
