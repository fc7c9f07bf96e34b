"""Before the app: a request that comes too slowly, or ends early, holds nothing up."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from qimeng.service.guard import Guard, Message
from qimeng.service.limits import Limits

LIMITS = Limits(body_bytes=100, body_s=60.0)
SOON = replace(LIMITS, body_s=0.05)
"""For a body that does not come: one that comes in time may come late on a busy machine."""


async def app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("nothing of this goes on to the app")


def answered(
    messages: list[Message], headers: list[tuple[bytes, bytes]] | None = None, limits: Limits = LIMITS
) -> tuple[int, str]:
    """Status and reason of the answer to a request whose body comes in `messages`, and then no more."""
    sent: list[Message] = []

    async def receive() -> Message:
        if messages:
            return messages.pop(0)
        await asyncio.sleep(100)
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/v1/evaluations", "headers": headers or []}
    asyncio.run(Guard(app, None, limits)(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])["error"]["reason"]


def part(size: int) -> Message:
    return {"type": "http.request", "body": b"x" * size, "more_body": True}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], (408, "too-slow")),
        ([part(10)], (408, "too-slow")),
        ([part(60), part(60)], (413, "too-large")),
        ([part(10), {"type": "http.disconnect"}], (400, "invalid")),
    ],
)
def test_a_bad_body_is_refused_in_time(messages: list[Message], expected: tuple[int, str]) -> None:
    assert answered(messages, limits=SOON if expected[0] == 408 else LIMITS) == expected


@pytest.mark.parametrize("length", [b"101", b"-1", b"many"])
def test_a_length_that_is_said_counts(length: bytes) -> None:
    assert answered([part(1)], [(b"Content-Length", length)]) == (413, "too-large")
