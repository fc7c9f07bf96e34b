"""The HTTP face: who may ask, what is refused, what an answer looks like; the pool behind it is a fake."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from qimeng.service.jobs import Jobs
from qimeng.service.limits import Limits
from qimeng.service.tokens import Tokens
from tests.service.fakes import FakePool, body

pytest.importorskip("fastapi")
from fastapi.testclient import TestClient

from qimeng.service.app import make_app

ANNA, BERT = "a" * 20, "b" * 20
PATH = "/v1/evaluations"
LIMITS = Limits(body_bytes=4000, source_chars=1000, per_client=2, in_all=3, seconds=60)


class Server:
    def __init__(self) -> None:
        self.pools: list[FakePool] = []
        self.broken = False
        self.jobs = Jobs(self.make, LIMITS, {"qimeng": "1"})
        app: Any = make_app(self.jobs, Tokens({"anna": ANNA, "bert": BERT}), {"gpu": "a card"})
        self.http = TestClient(app)

    def make(self) -> FakePool:
        if self.broken:
            raise RuntimeError("there is no pool now")
        self.pools.append(FakePool())
        return self.pools[-1]

    def ask(self, method: str, path: str = PATH, token: str = ANNA, **arguments: Any) -> Any:
        return self.http.request(method, path, headers={"Authorization": f"Bearer {token}"}, **arguments)

    def judged(self, candidate: str, token: str = ANNA, **more: Any) -> dict[str, Any]:
        answer = self.ask("POST", f"{PATH}?wait=10", token, json=body(candidate, **more))
        assert answer.status_code == 200, answer.text
        data: dict[str, Any] = answer.json()
        return data


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.jobs.close()
    assert all(pool.closed for pool in made.pools)


def refused(answer: Any, status: int, reason: str) -> str:
    assert (answer.status_code, answer.json()["error"]["reason"]) == (status, reason)
    return str(answer.json()["error"]["message"])


def test_only_those_with_a_token_may_ask(server: Server) -> None:
    for headers, why in (
        ({}, "a token is missing"),
        ({"Authorization": "Bearer " + "c" * 20}, "no client has this token"),
        ({"Authorization": f"Basic {ANNA}"}, "send `Authorization: Bearer TOKEN`"),
    ):
        assert why in refused(server.http.post(PATH, headers=headers, json=body("right")), 401, "unauthorized")
        refused(server.http.get("/v1/metrics", headers=headers), 401, "unauthorized")
        refused(server.http.get("/openapi.json", headers=headers), 401, "unauthorized")
    assert server.http.get("/v1/health").json() == {"status": "ok"}
    assert server.pools[0].begun == []


def test_a_right_candidate_has_its_figures(server: Server) -> None:
    data = server.judged("right", options={"compile_modes": ["default"]})
    answer = data["answer"]
    assert (data["state"], answer["compiled"], answer["correct"], answer["fault"]) == ("done", True, True, None)
    assert (answer["speedup"], answer["over_compile"], answer["generated_share"]) == (4.0, 2.0, 0.97)
    assert answer["times"] == {"ms": 0.5, "spread": 0.01, "calls": 40}
    assert (answer["card"], answer["versions"], answer["kernelbench"]) == ("a card", {"qimeng": "1"}, True)
    assert answer["evaluation"]["gate"] == "passed"


@pytest.mark.parametrize(
    ("candidate", "compiled", "correct", "kind", "failure"),
    [
        ("wrong", True, False, "kernel", "wrong"),
        ("broken text", False, False, "kernel", "compile"),
        ("hack", False, False, "kernel", "forbidden"),
        ("decoy", True, False, "kernel", "not-a-kernel"),
        ("busy", True, True, "measurement", "not-timed"),
        ("endless", None, None, "reference", "reference"),
        ("sick", None, None, "machine", "machine"),
    ],
)
def test_a_fault_is_typed(
    server: Server, candidate: str, compiled: bool | None, correct: bool | None, kind: str, failure: str
) -> None:
    answer = server.judged(candidate)["answer"]
    assert (answer["compiled"], answer["correct"], answer["speedup"]) == (compiled, correct, None)
    assert (answer["fault"]["kind"], answer["fault"]["failure"]) == (kind, failure)
    assert answer["fault"]["message"]
    assert bool(answer["hacks"]) is (candidate in ("hack", "decoy"))
    assert server.jobs.metrics()["faults"] == {kind: 1}


def test_an_equal_submission_is_answered_from_memory(server: Server) -> None:
    first, second = server.judged("right"), server.judged("right", BERT, options={"seconds": 5})
    assert first["answer"] == second["answer"]
    assert (first["known"], second["known"]) == (False, True)
    server.judged("right # otherwise")
    assert server.pools[0].begun == ["right", "right"]
    server.judged("sick")
    server.judged("sick")
    assert server.pools[0].begun.count("sick") == 2 * 3, "a machine's fault is asked again, and never remembered"


def test_a_job_is_followed_and_cancelled(server: Server) -> None:
    held = server.ask("POST", json=body("hold"))
    assert (held.status_code, held.json()["answer"]) == (202, None)
    path = f"{PATH}/{held.json()['id']}"
    while server.ask("GET", path, params={"wait": 0.1}).json()["state"] == "queued":
        pass
    assert server.ask("GET", path).json()["state"] == "running"
    refused(server.ask("GET", path, BERT), 404, "unknown-job")
    refused(server.ask("DELETE", path, BERT), 404, "unknown-job")
    assert server.ask("DELETE", path).json()["state"] == "cancelled"
    assert server.judged("right")["state"] == "done", "its place is free again"
    assert server.pools[0].stopped == ["hold"]
    assert server.ask("DELETE", path).json()["state"] == "cancelled"
    refused(server.ask("GET", f"{PATH}/nobody"), 404, "unknown-job")


def test_a_client_has_so_many_open_submissions(server: Server) -> None:
    jobs = [server.ask("POST", json=body(f"hold # {i}")).json()["id"] for i in range(2)]
    assert "2 of your submissions are open" in refused(server.ask("POST", json=body("right")), 429, "queue-full")
    other = server.ask("POST", token=BERT, json=body("right"))
    assert other.status_code == 202
    refused(server.ask("POST", token=BERT, json=body("wrong")), 503, "queue-full")
    metrics = server.ask("GET", "/v1/metrics").json()
    assert (metrics["queued"] + metrics["running"], metrics["clients"], metrics["judge"]) == (3, 2, {"gpu": "a card"})
    for job in jobs:
        server.ask("DELETE", f"{PATH}/{job}")
    found = server.ask("GET", f"{PATH}/{other.json()['id']}", BERT, params={"wait": 10}).json()
    assert found["answer"]["correct"] is True


def test_what_is_too_large_is_refused(server: Server) -> None:
    assert "candidate has 1500" in refused(server.ask("POST", json=body("x" * 1500)), 413, "too-large")
    refused(server.ask("POST", json=body("x" * 5000)), 413, "too-large")
    chunks = (b"x" * 1000 for _ in range(100))
    refused(server.ask("POST", content=chunks), 413, "too-large")
    assert server.pools[0].begun == []


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"candidate": {"source": "right"}}, "reference"),
        (body("right", options={"asked": "everything"}), "options.asked"),
        (body("right", options={"asked": "region"}), "options.asked"),
        (body("right", options={"seconds": 1e9}), "seconds"),
        (body("right", options={"seconds": float("1e-400")}), "seconds"),
        (body("right", options={"compile_modes": ["slow"]}), "compile_modes"),
        (body("right", shell="ls"), "shell"),
        (body(" "), "candidate is empty"),
        ({**body("right"), "reference": {"source": "x", "dtype": "float99"}}, "unknown dtype"),
        ({**body("right"), "reference": {"source": "x", "mode": "sloppy"}}, "unknown precision mode"),
        ([1, 2], "the body: "),
    ],
)
def test_what_makes_no_sense_is_refused(server: Server, data: Any, says: str) -> None:
    assert says in refused(server.ask("POST", json=data), 422, "invalid")


def test_what_is_no_request_is_refused_in_the_same_form(server: Server) -> None:
    assert "GET /v1/nowhere: Not Found" in refused(server.ask("GET", "/v1/nowhere"), 404, "invalid")
    assert "PUT" in refused(server.ask("PUT"), 405, "invalid")
    no_text = {"content": b'{"reference": "\xff"}', "headers": {"Content-Type": "application/json"}}
    answer = server.http.post(PATH, **{**no_text, "headers": no_text["headers"] | {"Authorization": f"Bearer {ANNA}"}})
    assert "parsing the body" in refused(answer, 400, "invalid")


def test_a_pool_that_raises_is_replaced(server: Server) -> None:
    answer = server.judged("raise")["answer"]
    assert (answer["fault"]["kind"], answer["correct"]) == ("judge", None)
    assert "the pool is broken" in answer["fault"]["message"]
    assert server.judged("right")["answer"]["correct"] is True
    assert len(server.pools) == 2
    server.broken = True
    assert server.judged("raise # while no other pool can be made")["answer"]["fault"]["kind"] == "judge"
    assert server.judged("wrong")["answer"]["correct"] is False
