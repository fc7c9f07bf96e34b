"""Messages between a judge and the processes it does not trust.

Deals in frames of bytes and open files over a Unix socket. The judge may send any Python object (pickled, since the
receiver trusts it). Replies are only JSON of at most `MAX_REPLY` bytes, so reading one cannot run the sender's code:
finite 64-bit numbers, text without control characters, few levels. Knows nothing about the meaning of messages.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from qimeng.envs.workers.plain_text import plain_text

MAX_REPLY = 1 << 26
MAX_FILES = 4096
"""Open files beside one frame: a large tensor on a GPU comes in pieces of 20 MiB, each a file."""
MAX_DEPTH = 16
"""Maximum nesting of lists and tables in a reply."""
SEND_S = 60.0
"""Seconds that the other side may take to read a frame."""
_AT_ONCE = 250
"""Open files beside one message; Linux allows 253."""
_HEADER = struct.Struct("<QQ")


class Closed(Exception):
    """The other side has gone."""


class Late(Exception):
    """Nothing came before the deadline."""


class Malformed(Exception):
    """What came is no message."""


class Channel:
    """One end of a two-way stream of frames, each with open files beside it."""

    def __init__(self, sock: socket.socket):
        self.socket = sock

    def send(self, body: bytes, files: Sequence[int] = (), limit_s: float = SEND_S) -> None:
        """Send one frame.

        Args:
            body: its bytes.
            files: open files that go with it.
            limit_s: seconds that the other side may take to read it.

        Raises:
            Closed: the other side has gone.
            Late: it did not read in time.
        """
        groups = [list(files[i : i + _AT_ONCE]) for i in range(0, len(files), _AT_ONCE)] or [[]]
        self.socket.settimeout(limit_s)
        try:
            socket.send_fds(self.socket, [_HEADER.pack(len(body), len(files))], groups[0])
            for group in groups[1:]:
                socket.send_fds(self.socket, [b"+"], group)
            self.socket.sendall(body)
        except TimeoutError as error:
            raise Late from error
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Closed(str(error)) from error
        finally:
            self.socket.settimeout(None)

    def receive(
        self, deadline: float = math.inf, limit: int | None = None, also: Sequence[int] = ()
    ) -> tuple[bytes, list[int]]:
        """One frame: its bytes and its open files, which the caller closes.

        Args:
            deadline: on the clock of `time.monotonic`.
            limit: most bytes that are accepted; None for any number.
            also: file descriptors whose becoming readable ends the wait, as if the other side had gone.

        Raises:
            Closed: the other side has gone, or a descriptor in `also` is readable and no frame is there.
            Late: the deadline has passed.
            Malformed: the frame is longer than `limit`, or files that it speaks of did not come.
        """
        files: list[int] = []
        try:
            head = self._with_files(_HEADER.size, files, deadline, also)
            if not head:
                raise Closed("end of stream")
            head += self._exactly(_HEADER.size - len(head), deadline, also)
            length, count = _HEADER.unpack(head)
            if count > MAX_FILES or (limit is not None and length > limit):
                raise Malformed(f"a frame of {length} bytes and {count} files")
            while 0 < len(files) < count:
                before = len(files)
                self._with_files(1, files, deadline, also)
                if len(files) == before:
                    break
            if len(files) != count:
                raise Malformed(f"{len(files)} of {count} files came (no more may be open here, or it is no frame)")
            return self._exactly(length, deadline, also), files
        except BaseException:  # the files are ours as soon as they came; they must not leak whatever went wrong
            for fd in files:
                os.close(fd)
            raise

    def close(self) -> None:
        """Close this end."""
        self.socket.close()

    def _with_files(self, length: int, files: list[int], deadline: float, also: Sequence[int]) -> bytes:
        """At most `length` bytes; the open files that came with them are added to `files`."""
        self._wait(deadline, also)
        try:
            part, came, _, _ = socket.recv_fds(self.socket, length, _AT_ONCE)
        except ConnectionResetError as error:
            raise Closed(str(error)) from error
        files += came
        return part

    def _exactly(self, length: int, deadline: float, also: Sequence[int]) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            self._wait(deadline, also)
            try:
                part = self.socket.recv(min(length - len(parts), 1 << 20))
            except ConnectionResetError as error:
                raise Closed(str(error)) from error
            if not part:
                raise Closed("end of stream inside a frame")
            parts += part
        return bytes(parts)

    def _wait(self, deadline: float, also: Sequence[int]) -> None:
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        for fd in also:
            poll.register(fd, select.POLLIN)
        left = None if deadline == math.inf else max(deadline - time.monotonic(), 0.0) * 1000
        ready = {fd for fd, _ in poll.poll(left)}
        if not ready:
            raise Late
        if self.socket.fileno() not in ready:
            raise Closed("the process ended")


def pack(item: Any) -> bytes:
    """A message from a judge."""
    return pickle.dumps(item)


def unpack(body: bytes) -> Any:
    """A message from a judge, in a process that trusts it."""
    return pickle.loads(body)


def pack_reply(item: Any) -> bytes:
    """A message to a judge: JSON only."""
    return json.dumps(item).encode()


def unpack_reply(body: bytes) -> dict[str, Any]:
    """A message to a judge.

    Raises:
        Malformed: it is no JSON object, or holds what no honest process sends.
    """
    try:
        item = json.loads(body)
        if isinstance(item, dict):
            return {plain_text(key): _checked(value, MAX_DEPTH) for key, value in item.items()}
    except (ValueError, RecursionError) as error:
        raise Malformed(f"no JSON: {plain_text(str(error))[:200]}") from error
    raise Malformed("no JSON object")


def _checked(item: Any, levels: int) -> Any:
    """`item` with harmless text; a ValueError where it holds more than text, lists, tables and plain numbers."""
    if isinstance(item, str):
        return plain_text(item)
    if item is None or isinstance(item, bool):
        return item
    if isinstance(item, int):
        if not -(1 << 63) <= item < 1 << 63:
            raise ValueError("an integer of more than 64 bits")
        return item
    if isinstance(item, float):
        if not math.isfinite(item):
            raise ValueError("a number that is not finite")
        return item
    if levels == 0:
        raise ValueError(f"more than {MAX_DEPTH} levels")
    if isinstance(item, list):
        return [_checked(x, levels - 1) for x in item]
    return {plain_text(key): _checked(value, levels - 1) for key, value in item.items()}


__all__ = [
    "MAX_FILES",
    "MAX_REPLY",
    "SEND_S",
    "Channel",
    "Closed",
    "Late",
    "Malformed",
    "pack",
    "pack_reply",
    "unpack",
    "unpack_reply",
]
