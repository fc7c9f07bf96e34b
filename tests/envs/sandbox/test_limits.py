"""What a process in a sandbox may use: memory, files and other processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from qimeng.envs.sandbox.limits import memory_bytes
from qimeng.envs.workers.fork_loop import PROCESSES
from qimeng.envs.workers.forkserver import WorkerFailed
from tests.envs.sandbox.attempts import attempt, start


def test_memory_is_limited_to_a_share_of_the_machine(server, needs):
    needs("limits")
    size = memory_bytes() + (1 << 30)
    assert attempt(server, "full", f"import mmap; mmap.mmap(-1, {size}, flags=mmap.MAP_PRIVATE)")[0] == "OSError"
    assert attempt(server, "full", f"bytearray({size})")[0] == "MemoryError"
    assert attempt(server, "full", "bytearray(1 << 28)")[0] == "done"


def test_files_are_limited(server, needs):
    needs("limits")
    kind, text = attempt(server, "full", "f = open('big', 'wb'); os.ftruncate(f.fileno(), 1 << 36)")
    assert kind == "OSError" and "too large" in text


def group_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getpgid(int(entry.name)) == pid:
                found.append(int(entry.name))
        except ProcessLookupError:
            continue
    return found


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while group_of(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not group_of(pid)


def test_a_crowd_of_processes_is_killed(server, needs):
    needs("seccomp")
    process = start(server, "full")
    pid = int(process.call("attempt", timeout_s=30, text="found = os.getpid()", names={})[0][1])
    text = f"""
for _ in range({PROCESSES + 50}):
    if os.fork() == 0:
        time.sleep(60); os._exit(0)
time.sleep(60)
"""
    with pytest.raises(WorkerFailed) as failed:
        process.call("attempt", timeout_s=30, text=text, names={})
    assert failed.value.kind == "crash" and "SIGKILL" in str(failed.value)
    assert gone(pid)
    assert attempt(server, "full", "found = 1") == ["done", "1"]


def test_no_child_leaves_the_group_and_none_outlives_it(server, needs):
    needs("seccomp")
    process = start(server, "full")
    text = """
r, w = os.pipe()
if os.fork() == 0:
    for leave in (os.setsid, lambda: os.setpgid(0, 0)):
        try:
            leave()
        except PermissionError:
            os.write(w, b'x')
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    os._exit(0)
os.wait()
found = os.getpid(), os.read(r, 9)
"""
    pid, answer = eval(process.call("attempt", timeout_s=30, text=text, names={})[0][1])
    assert answer == b"xx" and len(group_of(pid)) == 2
    process.kill()
    assert gone(pid)
