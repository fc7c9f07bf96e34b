"""An empty network namespace for the process. Even the loopback interface is down unless requested.

Deals in namespaces (unshare). Root creates one directly. Other users create it inside a user namespace, if the kernel
allows that, and keep their user id. Knows nothing about sockets that are already open.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from pathlib import Path

from qimeng.envs.sandbox.layer import LIBC, Unavailable, checked, prctl

_NEWUSER, _NEWNET = 0x10000000, 0x40000000
_SET_FLAGS = 0x8914  # SIOCSIFFLAGS


def enter(up: bool = False) -> str:
    """Leave the machine's network; the process has one thread.

    Args:
        up: whether the new network's loopback interface is switched on, for processes in it that speak with another.

    Raises:
        Unavailable: neither way is allowed here.
    """
    try:
        checked(LIBC.unshare(_NEWNET), "a network namespace")
        text = "empty network namespace"
    except Unavailable:
        user, group = os.geteuid(), os.getegid()
        checked(LIBC.unshare(_NEWUSER | _NEWNET), "user and network namespaces")
        prctl(4, 1)  # PR_SET_DUMPABLE, without which the files below are root's
        for name, said in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(said)
        text = "empty network namespace, in a user namespace"
    return _ready(text, up)


def _ready(text: str, up: bool) -> str:
    if not up:
        return text
    with socket.socket() as any_socket:
        request = struct.pack("16sH14x", b"lo", 1)  # struct ifreq: name and flags, IFF_UP
        try:
            fcntl.ioctl(any_socket, _SET_FLAGS, request)
        except OSError as error:
            raise Unavailable(f"the loopback interface cannot be switched on: {error}") from error
    return f"{text}, with its loopback interface on"


__all__ = ["enter"]
