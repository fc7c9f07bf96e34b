"""What stands before the service's app: who asks, and how much comes how slowly, before anything of it is read.

Deals in ASGI messages (https://asgi.readthedocs.io). Knows nothing about evaluations.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from qimeng.service.limits import Limits, Refused
from qimeng.service.tokens import Tokens

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/v1/health",)
"""What is answered without a token: that the server is there, and no more."""
CLIENT = "qimeng_client"
"""Where the app finds the name of the client, in the state of the request."""


class Guard:
    """An app behind a check of token, size and time.

    Args:
        app: what requests go to that pass.
        tokens: who may ask; None for anybody, whose name is then ``"anybody"``.
        limits: of one request.
    """

    def __init__(self, app: App, tokens: Tokens | None, limits: Limits):
        self._app, self._tokens, self._limits = app, tokens, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or hand it on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # nothing here is a web socket
            return
        try:
            headers = {name.lower(): value for name, value in scope["headers"]}
            scope.setdefault("state", {})[CLIENT] = self._client(scope["path"], headers)
            body = await self._body(headers, receive)
        except Refused as refused:
            await _answer(send, refused)
            return
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def received() -> Message:
            found = next(messages, None)
            return await receive() if found is None else found

        await self._app(scope, received, send)

    def _client(self, path: str, headers: MutableMapping[bytes, bytes]) -> str:
        if self._tokens is None or path in OPEN_PATHS:
            return "anybody"
        kind, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        client = self._tokens.client_of(token.strip()) if kind.lower() == "bearer" else None
        if client is None:
            why = "no client has this token" if token else "a token is missing"
            raise Refused(401, "unauthorized", f"{why}: send `Authorization: Bearer TOKEN` with one of the service's")
        return client

    async def _body(self, headers: MutableMapping[bytes, bytes], receive: Receive) -> bytes:
        most = self._limits.body_bytes
        too_large = Refused(413, "too-large", f"a request has at most {most} bytes")
        said = headers.get(b"content-length", b"0")
        if not said.isdigit() or int(said) > most:
            raise too_large
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(self._limits.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refused(400, "invalid", "the request ended early")
                    parts.append(message.get("body", b""))
                    if sum(map(len, parts)) > most:
                        raise too_large
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise Refused(408, "too-slow", f"a request arrives within {self._limits.body_s:g} s") from None


async def _answer(send: Send, refused: Refused) -> None:
    body = json.dumps(error_of(refused)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refused.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refused.status in (408, 413):
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def error_of(refused: Refused) -> dict[str, Any]:
    """The body of an answer that refuses."""
    return {"error": {"reason": refused.reason, "message": str(refused)}}


__all__ = ["CLIENT", "App", "Guard", "error_of"]
