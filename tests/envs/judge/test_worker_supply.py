"""Which worker serves an evaluation: one that was kept, or the one that was started ahead."""

from __future__ import annotations

from typing import Any

import pytest

from qimeng.envs.judge.worker_supply import SERVES, WorkerSupply
from qimeng.envs.workers.forkserver import WorkerFailed
from qimeng.envs.workers.worker_setup import Setup


class FakeProcess:
    """A process that does what it is asked, as long as it lives."""

    def __init__(self, cache: str):
        self.cache, self.alive, self.rests = cache, True, True

    def send(self, command: str) -> None:
        assert command == "ready"

    def await_ready(self) -> dict[str, list[str]]:
        return {"sandbox": ["landlock"]}

    def call(self, command: str, limit_s: float) -> None:
        if not self.rests:
            raise WorkerFailed("crash", "gone")

    def kill(self, wait: bool = True) -> None:
        self.alive = False


class FakeServer:
    def __init__(self) -> None:
        self.started: list[FakeProcess] = []

    def start(self, main: str, setup: Setup, environment: dict[str, str], **options: Any) -> FakeProcess:
        self.started.append(FakeProcess(environment["TRITON_CACHE_DIR"]))
        return self.started[-1]


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def supply(server: FakeServer) -> WorkerSupply:
    made: Any = server
    return WorkerSupply(made, Setup(b"", "default", "cpu"), "off", "search", lambda: 1.0)


def taken(supply: WorkerSupply, may_share: bool = True, cache: str = "search") -> Any:
    supply.make_ready(cache, may_share)
    return supply.take(may_share)


def test_a_worker_that_served_well_serves_again_a_number_of_times(supply: WorkerSupply, server: FakeServer) -> None:
    first = taken(supply)
    assert supply.layers == ("landlock",) and supply.keep(first) and supply.keeps_one
    for _ in range(SERVES - 1):
        assert taken(supply) is first and supply.keep(first)
    assert taken(supply) is first and not supply.keep(first), "no worker serves for ever"
    assert len(server.started) == 1


def test_what_others_wrote_gets_a_worker_of_its_own(supply: WorkerSupply) -> None:
    kept = taken(supply)
    assert supply.keep(kept)
    assert taken(supply, may_share=False) is not kept and not kept.alive


def test_one_that_dies_after_it_was_kept_is_replaced(supply: WorkerSupply) -> None:
    kept = taken(supply)
    assert supply.keep(kept)
    supply.make_ready("search", may_share=True)
    kept.alive = False
    other = supply.take(may_share=True)
    assert other is not kept and other.alive


def test_one_that_cannot_rest_is_not_kept(supply: WorkerSupply) -> None:
    worker = taken(supply)
    worker.rests = False
    assert not supply.keep(worker) and not supply.keeps_one


def test_a_final_verification_gets_its_own_cache(supply: WorkerSupply, server: FakeServer) -> None:
    supply.prefetch()
    assert taken(supply, may_share=False, cache="final").cache == "final"
    assert not server.started[0].alive, "the one started ahead for a search has the wrong cache"


def test_closing_ends_every_worker(supply: WorkerSupply, server: FakeServer) -> None:
    assert supply.keep(taken(supply))
    supply.prefetch()
    supply.let_go(supply.start("other"))
    supply.close()
    assert len(server.started) == 3 and not any(process.alive for process in server.started)


def test_in_a_full_sandbox_a_worker_may_read_the_cache_and_what_it_takes_over() -> None:
    readable = list[str]()

    class Server(FakeServer):
        def start(self, main: str, setup: Setup, environment: dict[str, str], **options: Any) -> FakeProcess:
            readable.extend(options["readable"])
            return FakeProcess(setup.compiled)

    made: Any = Server()
    supply = WorkerSupply(made, Setup(b"", "default", "cpu"), "full", "search", lambda: 1.0, ["libraries"])
    supply.start("final")
    assert readable == ["final", "libraries"]
