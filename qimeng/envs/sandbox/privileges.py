"""Rights that a process drops permanently: those of root, and those gained through set-uid programs.

Deals in Linux capabilities and two switches of prctl. The process stays readable for others of its user (dumpable):
PyTorch's expandable segments reach the judge through `pidfd_getfd`, which asks for that. Knows nothing about files.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from qimeng.envs.sandbox.layer import LIBC, Unavailable, checked, prctl

_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _CLEAR_ALL = 4, 24, 38, 47, 4
_VERSION_3 = 0x20080522


def no_new_privileges() -> str:
    """No program that this process runs gets more rights than it has."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    return "set-uid programs give nothing"


def drop_capabilities() -> str:
    """Give up every capability, in the bounding set too; root is an ordinary user from then on."""
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    try:
        for number in range(last + 1):
            prctl(_PR_CAPBSET_DROP, number)
    except Unavailable:  # needs CAP_SETPCAP, which one without capabilities lacks: there is nothing to drop
        pass
    prctl(_PR_CAP_AMBIENT, _CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
    checked(LIBC.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    prctl(_PR_SET_DUMPABLE, 1)
    return "none left"


__all__ = ["drop_capabilities", "no_new_privileges"]
