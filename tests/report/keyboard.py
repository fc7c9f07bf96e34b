"""Chromium whose keys a test presses: DevTools messages through a pipe.

Deals in processes, messages and keys. Knows nothing about pages.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

CODES = {"Tab": 9, "Enter": 13, " ": 32, "End": 35}
TEXT = {"Enter": "\r", " ": " "}


class Page:
    """A page that is open in a browser."""

    def __init__(self, to: int, back: int):
        self._to, self._back, self._number, self._rest, self._session = to, back, 0, b"", ""

    def open(self, path: Path) -> None:
        """Show the file at `path`, and wait until it is loaded."""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._ask("Page.enable")
        self._ask("Page.navigate", url=path.as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass
        self._ask("Page.bringToFront")

    def press(self, key: str) -> None:
        """Press and release a key."""
        fields = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": CODES[key]}
        self._ask("Input.dispatchKeyEvent", type="keyDown", **fields, **({"text": TEXT[key]} if key in TEXT else {}))
        self._ask("Input.dispatchKeyEvent", type="keyUp", **fields)

    def ask(self, expression: str) -> Any:
        """What a JavaScript expression yields."""
        found = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._back, 1 << 16)
            assert more, "the browser has ended"
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message


@contextlib.contextmanager
def opened(path: Path, chromium: str, flags: Sequence[str]) -> Iterator[Page]:
    """The file at `path` in a browser of its own."""
    given, to = os.pipe()
    back, taken = os.pipe()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (given, taken)]  # neither is 3 or 4, which the shell makes
    command = [
        "bash",
        "-c",
        f'exec "$@" 3<&{high[0]} 4>&{high[1]}',
        "bash",
        chromium,
        *flags,
        "--remote-debugging-pipe",
    ]
    done = subprocess.Popen(
        [*command, f"--user-data-dir={path.parent / 'keys'}"],
        pass_fds=high, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    for fd in (given, taken, *high):
        os.close(fd)
    page = Page(to, back)
    try:
        page.open(path)
        yield page
    finally:
        os.killpg(done.pid, signal.SIGKILL)
        done.wait()
        os.close(to)
        os.close(back)


__all__ = ["Page", "opened"]
