"""Processes that attempt what a candidate might, at each level of sandbox."""

from __future__ import annotations

import pytest

from qimeng.envs.sandbox import entered_here
from qimeng.envs.workers.forkserver import ForkServer, Process
from qimeng.envs.workers.service import serve

PREPARE = """
import ctypes, os, resource, signal, socket, subprocess, tempfile, time
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    if libc.syscall(*(ctypes.c_long(a) for a in arguments)) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
"""


def hostile(channel):
    """The target of the processes in these tests: runs what it is told, as a candidate's text would run."""

    def attempt(text, names):
        space = dict(names)
        exec(PREPARE, space)
        try:
            exec(text, space)
        except BaseException as error:  # noqa: BLE001  whatever it was is the answer
            return [type(error).__name__, str(error)]
        return ["done", str(space.get("found", ""))]

    serve(channel, {"attempt": attempt, "layers": lambda: list(entered_here().entered)})


def start(server: ForkServer, level: str) -> Process:
    return server.start("tests.envs.sandbox.attempts:hostile", sandbox=level)


def attempt(server: ForkServer, level: str, text: str, **names: object) -> list[str]:
    process = start(server, level)
    try:
        return process.call("attempt", timeout_s=30, text=text, names=names)[0]
    finally:
        process.kill()


def refused(server: ForkServer, text: str, **names: object) -> None:
    """`text` gets a PermissionError in a full sandbox, and what it wants without one."""
    assert attempt(server, "full", text, **names)[0] == "PermissionError"
    kind, why = attempt(server, "off", text, **names)
    if kind != "done":
        pytest.skip(f"refused in a full sandbox, but this machine forbids it to all: {kind}: {why}")
