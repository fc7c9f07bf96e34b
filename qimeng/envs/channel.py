"""Messages between a judge and the processes it does not trust.

Deals in frames of bytes and open files over a Unix socket. What a judge sends may be any Python object (pickled: the
receiver trusts it). What comes back is JSON and nothing else, at most `MAX_REPLY` long, so that reading a reply can
run no code of the sender's. Knows nothing about what the messages mean.
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

MAX_REPLY = 1 << 26
MAX_FILES = 16
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

    def send(self, body: bytes, files: Sequence[int] = ()) -> None:
        """Send one frame.

        Raises:
            Closed: the other side has gone.
        """
        try:
            socket.send_fds(self.socket, [_HEADER.pack(len(body), len(files))], list(files))
            self.socket.sendall(body)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Closed(str(error)) from error

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
            Malformed: the frame is longer than `limit`.
        """
        self._wait(deadline, also)
        try:
            head, files, _, _ = socket.recv_fds(self.socket, _HEADER.size, MAX_FILES)
        except ConnectionResetError as error:
            raise Closed(str(error)) from error
        try:
            if not head:
                raise Closed("end of stream")
            head += self._exactly(_HEADER.size - len(head), deadline, also)
            length, count = _HEADER.unpack(head)
            if count != len(files) or (limit is not None and length > limit):
                raise Malformed(f"a frame of {length} bytes with {len(files)} of {count} files")
            return self._exactly(length, deadline, also), files
        except BaseException:  # the files are ours as soon as they came; they must not leak whatever went wrong
            for fd in files:
                os.close(fd)
            raise

    def close(self) -> None:
        """Close this end."""
        self.socket.close()

    def _exactly(self, length: int, deadline: float, also: Sequence[int]) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            self._wait(deadline, also)
            part = self.socket.recv(min(length - len(parts), 1 << 20))
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
        Malformed: it is no JSON object.
    """
    try:
        item = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"no JSON: {error}") from error
    if not isinstance(item, dict):
        raise Malformed("no JSON object")
    return item


__all__ = ["Channel", "Closed", "Late", "Malformed", "pack", "pack_reply", "unpack", "unpack_reply"]
