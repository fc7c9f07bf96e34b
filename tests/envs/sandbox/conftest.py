"""A server of processes, the layers of this machine, and a process outside to attack."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from qimeng.envs.sandbox import Sandbox
from qimeng.envs.workers.forkserver import ForkServer


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    made = ForkServer(preload=("tests.envs.sandbox.attempts",))
    yield made
    made.close()


@pytest.fixture(scope="module")
def layers() -> set[str]:
    return set(Sandbox("full").layers_available().entered)


@pytest.fixture
def needs(layers):
    def check(*names: str) -> None:
        if missing := set(names) - layers:
            pytest.skip(f"this machine lacks {', '.join(sorted(missing))}")

    return check


@pytest.fixture
def victim() -> Iterator[int]:
    """A process of the same user outside, with a secret in its environment."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"TOKEN": "secret"})
    yield process.pid
    process.kill()
    process.communicate()
