"""A scripted OpenAI-compatible server in a thread: each request gets the next entry of a script."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sk-secret-0123456789"
"""What the client is given; it must not be found in anything that the library says or keeps."""


@dataclass
class Says:
    """One answer of the server.

    Attributes:
        text: what the model says; a message of its own where it is a dict.
        status: of HTTP.
        body: sent as it is, instead of a completion.
        headers: sent beside the usual ones.
        finish: why the model stopped.
        chunks: bytes that follow the headers piece by piece, without a length; the connection then stays open until
            the server is closed where `hang` says so.
        hang: nothing more comes.
    """

    text: str | dict[str, Any] | None = ""
    status: int = 200
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    finish: str = "stop"
    chunks: Sequence[bytes] = ()
    hang: bool = False

    def data(self) -> bytes:
        """The body."""
        if self.body is not None:
            return self.body
        if self.status >= 400:
            return json.dumps({"error": {"message": self.text, "code": None}}).encode()
        message = self.text if isinstance(self.text, dict) else {"role": "assistant", "content": self.text}
        return json.dumps(
            {
                "id": "x",
                "object": "chat.completion",
                "choices": [{"index": 0, "message": message, "finish_reason": self.finish}],
                "usage": {"prompt_tokens": 100, "completion_tokens": 10},
            }
        ).encode()


Script = Sequence[Says] | Callable[[dict[str, Any]], Says]


class Endpoint:
    """The server.

    Attributes:
        url: its base URL.
        asked: bodies of the requests, in order.
        keys: what they brought as authorization.
    """

    def __init__(self, script: Script):
        self.script = script if callable(script) else iter(script)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.closing = threading.Event()
        self.lock = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with endpoint.lock:
                    endpoint.asked.append(asked)
                    endpoint.keys.append(self.headers.get("Authorization", ""))
                    script = endpoint.script
                    says = script(asked) if callable(script) else next(script, Says("nothing left", 418))
                endpoint.answer(self, says)

            def log_message(self, *unused: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def answer(self, handler: BaseHTTPRequestHandler, says: Says) -> None:
        """Send `says`; a client that goes away is no error."""
        try:
            if says.hang and not says.chunks:
                self.closing.wait()
                return
            handler.send_response(says.status)
            for name, value in says.headers.items():
                handler.send_header(name, value)
            data = says.data()
            if not says.chunks:
                handler.send_header("Content-Type", "application/json")
                handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            for chunk in says.chunks or (data,):
                handler.wfile.write(chunk)
                handler.wfile.flush()
            if says.hang:
                self.closing.wait()
        except OSError:
            pass

    def close(self) -> None:
        """Let go of every connection."""
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@contextmanager
def served(script: Script) -> Iterator[Endpoint]:
    """An endpoint for as long as the block runs."""
    endpoint = Endpoint(script)
    try:
        yield endpoint
    finally:
        endpoint.close()


def fence(code: str, language: str = "python") -> str:
    """`code` as a model would answer it."""
    return f"Here it is.\n\n```{language}\n{code.strip()}\n```\n"
