"""A network of the process's own, with nothing in it, not even a loopback interface that is up.

Deals in namespaces (unshare). Root makes one directly; others inside a user namespace of their own, where the kernel
allows it, in which they stay who they are. Knows nothing about sockets that are open already.
"""

from __future__ import annotations

import os
from pathlib import Path

from qimeng.envs.sandbox.layer import LIBC, Unavailable, checked, prctl

_NEWUSER, _NEWNET = 0x10000000, 0x40000000


def enter() -> str:
    """Leave the machine's network; the process has one thread.

    Raises:
        Unavailable: neither way is allowed here.
    """
    try:
        checked(LIBC.unshare(_NEWNET), "a network namespace")
        return "empty network namespace"
    except Unavailable:
        user, group = os.geteuid(), os.getegid()
        checked(LIBC.unshare(_NEWUSER | _NEWNET), "user and network namespaces")
    prctl(4, 1)  # PR_SET_DUMPABLE, without which the files below are root's
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path("/proc/self", name).write_text(text)
    return "empty network namespace, in a user namespace"


__all__ = ["enter"]
