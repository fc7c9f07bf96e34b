"""Who descends from whom, whichever way the kernel tells it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from qimeng.envs.workers import process_tree
from qimeng.envs.workers.process_tree import children, tree

_CHAIN = """
import subprocess, sys, threading
def start(held):
    held.append(subprocess.Popen(['sleep', '60']))
held = []
start(held)
thread = threading.Thread(target=start, args=(held,))
thread.start()
thread.join()
print(*[p.pid for p in held], flush=True)
sys.stdin.read()
for p in held:
    p.kill()
    p.wait()
"""


@pytest.fixture(params=["listed", "read from all"])
def way(request, monkeypatch):
    if request.param == "read from all":
        monkeypatch.setattr(process_tree, "_tells_children", lambda: False)
    elif not process_tree._tells_children():
        pytest.skip("this kernel does not list children (CONFIG_PROC_CHILDREN)")


def test_children_of_any_thread_and_their_children(way):
    with subprocess.Popen([sys.executable, "-c", _CHAIN], stdin=-1, stdout=-1, text=True) as process:
        below = {int(pid) for pid in process.stdout.readline().split()}
        assert set(children(process.pid)) == below and len(below) == 2
        assert process.pid in children(os.getpid())
        found = tree(process.pid)
        assert found[0] == process.pid and set(found[1:]) == below
        process.stdin.close()
    assert children(process.pid) == [] and tree(process.pid) == [process.pid]


def test_what_another_thread_started_is_a_child_of_this_process(way):
    held: list[subprocess.Popen] = []
    thread = threading.Thread(target=lambda: held.append(subprocess.Popen(["sleep", "60"])))
    thread.start()
    thread.join()
    assert held[0].pid in children(os.getpid())
    held[0].kill()
    held[0].wait()
    assert held[0].pid not in children(os.getpid())
