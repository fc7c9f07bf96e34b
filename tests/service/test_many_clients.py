"""Many clients, and clients that misbehave: each is answered or dropped, and the others do not notice."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from qimeng.service.client import EvaluationClient, ServiceFailed
from qimeng.service.limits import Limits
from tests.service.conftest import TOKEN, serving

LIMITS = Limits(batch=8, per_client=6, in_all=100)
HASTY = replace(LIMITS, head_s=1.0, body_s=1.0)
"""Of a server whose slow clients are dropped soon: one that a busy machine keeps waiting is slow as well."""
HEAD = b"POST /v1/evaluations HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    pytest.importorskip("requests")
    with serving(limits=LIMITS) as found:
        yield found


@pytest.fixture(scope="module")
def hasty() -> Iterator[str]:
    pytest.importorskip("requests")
    with serving(limits=HASTY) as found:
        yield found


@pytest.fixture
def client(address: str) -> Iterator[EvaluationClient]:
    with EvaluationClient(address, TOKEN) as made:
        yield made


def connected(address: str, said: bytes = b"") -> socket.socket:
    where = urlsplit(address)
    made = socket.create_connection((where.hostname, where.port), 10)
    made.sendall(said)
    return made


def heard(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    found = b""
    while more := connection.recv(1 << 16):
        found += more
    return found


def test_a_batch_is_answered_in_its_order(client: EvaluationClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qimeng.service.client.BATCH", LIMITS.batch)
    texts = [f"{text} # {i}\n" for i in range(9) for text in ("right", "wrong")]
    found = client.evaluate_all("x\n", texts, asked="timing")
    assert [answer.correct for answer in found] == [True, False] * 9, "more than the queue takes at a time"
    assert client.evaluate_all("x\n", []) == []
    with pytest.raises(ServiceFailed, match="compile_modes") as refused:
        client.evaluate_all("x\n", ["right\n"], compile_modes=["fast"])
    assert refused.value.reason == "invalid"


def test_a_batch_takes_what_it_can_and_has_a_limit(client: EvaluationClient) -> None:
    right = {"reference": {"source": "x"}, "candidate": {"source": "right # in a batch"}}
    empty = {"reference": {"source": "x"}, "candidate": {"source": " "}}
    found = client._call("POST", "/v1/batches", json={"submissions": [right, empty]})["evaluations"]
    assert found[0]["id"] and found[1]["error"]["reason"] == "invalid"
    ids = f"{found[0]['id']},nobody"
    known = client._call("GET", "/v1/evaluations", params={"ids": ids, "wait": 10})["evaluations"]
    assert known[1]["error"]["reason"] == "unknown-job"
    with pytest.raises(ServiceFailed, match="at most 8") as refused:
        client._call("POST", "/v1/batches", json={"submissions": [right] * 9})
    assert (refused.value.status, refused.value.reason) == (413, "too-large")


def test_fifty_clients_at_once(address: str) -> None:
    def ask(number: int) -> bool | None:
        with EvaluationClient(address, TOKEN) as client:
            try:
                return client.evaluate("x\n", f"{'right' if number % 2 else 'wrong'} # {number}\n").correct
            except ServiceFailed as refused:
                assert (refused.status, refused.reason) == (429, "queue-full")
                return client.evaluate_all("x\n", [f"{'right' if number % 2 else 'wrong'} # {number}\n"])[0].correct

    with ThreadPoolExecutor(50) as clients:
        assert list(clients.map(ask, range(50))) == [bool(number % 2) for number in range(50)]


@pytest.mark.parametrize("said", [b"", HEAD, HEAD + b"Content-Length: 100\r\n\r\n", b"\0\xff" * 100], ids=str)
def test_whoever_stops_in_the_middle_is_dropped(hasty: str, said: bytes) -> None:
    slow = [connected(hasty, said) for _ in range(20)]
    with EvaluationClient(hasty, TOKEN) as client:
        assert client.evaluate("x\n", f"right # beside {said[:9]!r}\n").correct is True
    for connection in slow:
        with connection:
            connection.settimeout(60)
            assert heard(connection).split(b" ")[1] in (b"408", b"400")


def test_whoever_sends_a_byte_now_and_then_is_dropped(hasty: str) -> None:
    with connected(hasty, HEAD) as slow:
        until, sent = time.monotonic() + 60, 0
        try:
            while time.monotonic() < until:
                slow.sendall(b"X")
                sent += 1
                time.sleep(0.05)
        except OSError:
            pass
        assert time.monotonic() < until and sent > 2


def test_a_client_that_goes_away_leaves_its_answer(address: str, client: EvaluationClient) -> None:
    ticket = client.submit("x\n", "right # left\n")
    gone = connected(
        address, HEAD.replace(b"POST /v1/evaluations", f"GET /v1/evaluations/{ticket.id}?wait=60".encode()) + b"\r\n"
    )
    gone.close()
    (found,) = client.gather([ticket])
    assert found[1] is not None and found[1].correct
