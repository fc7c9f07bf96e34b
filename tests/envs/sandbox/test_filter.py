"""The filter of system calls: its numbers, its paths, and the sockets it closes late."""

from __future__ import annotations

import ctypes
import ctypes.util
import subprocess
import sys

import pytest

from qimeng.envs.sandbox.seccomp import program
from qimeng.envs.sandbox.syscalls import AUDIT, NUMBERS


def test_sockets_that_cuda_needs_are_closed_before_foreign_code_runs():
    """In every thread, those that run already as well."""
    text = (
        "import socket, threading\n"
        "import qimeng.envs.sandbox.seccomp as s\n"
        "def tried():\n"
        "    try:\n"
        "        socket.socket(socket.AF_UNIX).close(); return 'made'\n"
        "    except PermissionError: return 'refused'\n"
        "s.enter('local'); first = tried()\n"
        "go, seen = threading.Event(), []\n"
        "other = threading.Thread(target=lambda: (go.wait(), seen.append(tried()))); other.start()\n"
        "s.close_sockets(); go.set(); other.join()\n"
        "socket.socketpair(); print(first, tried(), *seen)"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    if "Unavailable" in done.stderr:
        pytest.skip(f"no seccomp here: {done.stderr.strip().splitlines()[-1]}")
    assert done.stdout.split() == ["made", "refused", "refused"], done.stderr


def test_the_numbers_of_system_calls_are_those_of_libseccomp():
    path = ctypes.util.find_library("seccomp")
    if path is None:
        pytest.skip("libseccomp is not here")
    resolve = ctypes.CDLL(path).seccomp_syscall_resolve_name_arch
    for architecture, numbers in NUMBERS.items():
        known = {name: resolve(AUDIT[architecture], name.encode()) for name in numbers}
        newer = {name for name, number in known.items() if number == -1}  # than this libseccomp
        assert len(newer) < 9
        assert {n: number for n, number in known.items() if n not in newer} == {
            n: number for n, number in numbers.items() if n not in newer
        }


@pytest.mark.parametrize("architecture", NUMBERS)
def test_every_path_through_the_filter_ends_in_a_return(architecture):
    instructions = program(architecture)
    for at, instruction in enumerate(instructions):
        if instruction.code not in (0x20, 0x06):
            assert at + 1 + max(instruction.if_true, instruction.if_false) < len(instructions)
    assert instructions[-1].code == 0x06 and len(instructions) < 4096
