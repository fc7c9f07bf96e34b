"""Frames of bytes and files arrive whole; whatever else arrives is a typed failure, and no file stays open."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from qimeng.envs.workers.channel import MAX_DEPTH, Channel, Closed, Late, Malformed, pack_reply, unpack_reply
from qimeng.envs.workers.plain_text import plain_text


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    left, right = socket.socketpair()
    yield Channel(left), Channel(right)
    left.close()
    right.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_more_files_than_one_message_holds_arrive_in_order(ends):
    ours, theirs = ends
    files = [os.memfd_create("x") for _ in range(600)]
    for number, fd in enumerate(files):
        os.write(fd, str(number).encode())
    ours.send(b"body", files)
    body, got = theirs.receive()
    assert body == b"body" and [os.pread(fd, 9, 0) for fd in got] == [str(n).encode() for n in range(600)]
    for fd in (*files, *got):
        os.close(fd)


@pytest.mark.parametrize("count", [0, 1, 3, 5000, 1 << 60])
@pytest.mark.parametrize("sent", [0, 1, 2, 200])
def test_files_that_were_not_announced_or_did_not_come_are_closed(ends, count, sent):
    if count == sent:
        return
    ours, theirs = ends
    before = open_files()
    files = [os.memfd_create("x") for _ in range(sent)]
    socket.send_fds(ours.socket, [struct.pack("<QQ", 2, count)], files)
    ours.socket.sendall(b"{}")
    for fd in files:
        os.close(fd)
    with pytest.raises((Malformed, Late)):
        theirs.receive(time.monotonic() + 0.05, 100)
    assert open_files() <= before  # what earlier tests left may be closed meanwhile


@pytest.mark.parametrize("raw", [b"\xff" * 16, struct.pack("<QQ", 1 << 40, 0), struct.pack("<QQ", 5, 0) + b"{", b"\0"])
@pytest.mark.parametrize("ends_too", [False, True])
def test_a_frame_that_is_none_or_never_ends_is_a_typed_failure(ends, raw, ends_too):
    ours, theirs = ends
    ours.socket.sendall(raw)
    if ends_too:
        ours.close()
    with pytest.raises((Malformed, Closed if ends_too else Late)):
        theirs.receive(time.monotonic() + (60.0 if ends_too else 0.05), 1 << 20)


def test_one_who_does_not_read_is_not_waited_for(ends):
    ours, _ = ends
    with pytest.raises(Late):
        ours.send(bytes(1 << 24), limit_s=0.05)


REPLIES = [
    b"", b"{", b"[]", b"1", b"null", b'"x"', b"\xff\xfe", b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1e999}',
    b'{"a": 9223372036854775808}', b'{"a": ' + b"9" * 5000 + b"}", b'{"a": ' + b"[" * 100000 + b"]" * 100000 + b"}",
    b'{"a": ' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"}", b'{"a": "\x00"}', b'{"a": 1}{"a": 2}',
    b"{'a': 1}", b'{"a": ' + b'{"a": ' * 5000 + b"1" + b"}" * 5000 + b"}",
]  # fmt: skip


@pytest.mark.parametrize("body", REPLIES, ids=lambda b: b[:24].decode(errors="replace"))
def test_a_reply_that_is_none(body):
    with pytest.raises(Malformed) as failed:
        unpack_reply(body)
    assert plain_text(str(failed.value)) == str(failed.value)


def test_text_in_a_reply_moves_no_cursor():
    said = {"\x1b[1m": ["\x9b2J", {"a\r": "tab\t, line\n, \ud800 and \u202e"}]}
    assert unpack_reply(json.dumps(said).encode()) == {
        "\\x1b[1m": ["\\x9b2J", {"a\\x0d": "tab\t, line\n, \\ud800 and \\u202e"}]
    }
    honest = {"ok": {"times": [1, 2.5], "text": "größer ∑ 中", "none": None, "flag": True}, "to": (1 << 62) - 1}
    assert unpack_reply(pack_reply(honest)) == honest


def test_mutated_replies_are_data_or_malformed():
    rng, body = random.Random(0), bytearray(pack_reply({"ok": {"a": [1.5, "x", None], "b": {"c": True}}, "to": 7}))
    for _ in range(3000):
        changed = bytearray(body)
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(len(changed))
            changed[place : place + rng.randrange(3)] = bytes([rng.randrange(256)] * rng.randrange(3))
        try:
            assert isinstance(unpack_reply(bytes(changed)), dict)
        except Malformed:
            continue
