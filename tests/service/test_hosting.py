"""Real evaluations on the CPU: a sandboxed host has the reference, the interpreter runs the candidates."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qimeng.envs.workers.shared_server import shared_server
from qimeng.interfaces import Asked, Evaluation
from qimeng.service import hosting
from qimeng.service.hosting import PRELOAD, BadReference, Host, Settings, close_hosts, judge_apart
from qimeng.service.messages import Answer, Candidate, Options, Reference, Submission

pytestmark = pytest.mark.slow

REFERENCE = """import torch

class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, 16)

    def forward(self, x, y):
        return torch.relu(self.linear(x)) - y

def get_inputs():
    return [torch.rand(8, 32), torch.rand(8, 16)]

def get_init_inputs():
    return [32]
"""
KERNEL = """import torch
import torch.nn as nn
import triton
import triton.language as tl

@triton.jit
def layer(x, y, w, b, o, K: tl.constexpr, N: tl.constexpr):
    row = tl.program_id(0)
    k, n = tl.arange(0, K), tl.arange(0, N)
    v = tl.load(x + row * K + k)
    m = tl.load(w + n[:, None] * K + k[None, :])
    total = tl.sum(m * v[None, :], 1) + tl.load(b + n)
    tl.store(o + row * N + n, tl.maximum(total, 0.0) - tl.load(y + row * N + n))

"""
FUNCTION = (
    KERNEL
    + """
def entry(x, y, w, b):
    o = torch.empty_like(y)
    layer[(x.shape[0],)](x, y, w, b, o, K=32, N=16)
    return (o,)
"""
)
MODEL = (
    KERNEL
    + """
class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.linear = nn.Linear(width, 16)

    def forward(self, x, y):
        o = torch.empty_like(y)
        layer[(x.shape[0],)](x, y, self.linear.weight, self.linear.bias, o, K=self.width, N=16)
        return o
"""
)
SNOOPING = """import json, os, socket
found = {}
def tried(name, work):
    try:
        found[name] = repr(work())[:80]
    except BaseException as error:
        found[name] = type(error).__name__
tried("secret", lambda: open(SECRET).read())
tried("environment", lambda: open(f"/proc/{os.getppid()}/environ").read())
tried("judge's environment", lambda: open("/proc/JUDGE/environ").read())
tried("write", lambda: open(FOLDER + "/written", "w").write("x"))
tried("network", lambda: socket.create_connection(("127.0.0.1", 22), 1))
tried("signal", lambda: os.kill(JUDGE, 9))
found["token"] = os.environ.get("QIMENG_SERVICE_TOKEN", "none")
raise RuntimeError(json.dumps(found))
"""


@pytest.fixture(autouse=True)
def no_host_is_left() -> Iterator[None]:
    yield
    close_hosts()


def answered(reference: str, candidate: str, **settings: Any) -> Answer:
    submission = Submission(Reference(reference), Candidate(candidate), Options(Asked.TIMING))
    text, _ = judge_apart(Settings(device="h100", **settings), submission.to_json())
    return Answer.of(Evaluation.from_json(text))


def test_right_and_wrong_candidates_of_one_reference() -> None:
    for right in (FUNCTION, MODEL):
        found = answered(REFERENCE, right)
        assert (found.fault, found.compiled, found.correct, found.estimated) == (None, True, True, True)
        assert found.generated_share == 1.0 and found.speedup is not None and found.speedup > 0
        assert {"landlock", "seccomp"} <= set(found.evaluation["sandbox"])
        assert _is_stopped(hosting._hosts[0]._process.pid), "between two questions nothing of a stranger's runs"
    found = answered(REFERENCE, MODEL.replace("tl.maximum(total, 0.0)", "tl.maximum(total, 0.1)"))
    assert found.fault is not None and (found.fault.failure, found.correct) == ("wrong", False)
    found = answered(REFERENCE, FUNCTION.replace("o = torch", "keep.append(x); o = torch") + "keep = []\n")
    assert found.fault is not None and found.fault.failure == "forbidden" and found.hacks
    found = answered(REFERENCE, "def entry(x, y, w, b):\n    return (torch.relu(x @ w.t() + b) - y,)\n")
    assert found.fault is not None and found.fault.failure == "not-a-kernel" and found.hacks
    found = answered(REFERENCE, FUNCTION.replace("(x, y, w, b):", "(x, y, w):", 1))
    assert found.fault is not None and "linear.weight, linear.bias" in found.fault.message
    found = answered(REFERENCE, MODEL.replace("self.linear", "self.layer"))
    assert found.fault is not None and "nn.Linear" in found.fault.message


def _is_stopped(pid: int) -> bool:
    until = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").read_text().split()[2] != "T" and time.monotonic() < until:
        time.sleep(0.05)
    return time.monotonic() < until


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("while True: pass\n", "within 2 s"),
        ("while True: print('x' * 10**6)\n", "within 2 s"),
        ("import os\nos._exit(0)\n", "exit status 0"),
        ("import ctypes\nctypes.string_at(0)\n", "signal 11"),
        ("import subprocess\nwhile True: subprocess.Popen(['sleep', '60'])\n", ""),
        ("x = 1\n", "must define Model"),
        (REFERENCE.replace("torch.relu", "nothing.relu"), "nothing"),
        (REFERENCE.replace("return torch.relu", "print(x.sum().item(), file=open('/dev/null')) or torch.relu"), ""),
    ],
)
def test_a_bad_reference_is_a_typed_fault(reference: str, says: str) -> None:
    found = answered(reference, FUNCTION, reference_s=2 if "within" in says else 120)
    assert found.fault is not None
    assert (found.fault.kind, found.compiled, found.correct) == ("reference", None, None)
    assert says in found.fault.message


def test_a_reference_sees_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QIMENG_SERVICE_TOKEN", "a secret of the server")
    secret = tmp_path / "token"
    secret.write_text("a secret of the server")
    reference = SNOOPING.replace("SECRET", repr(str(secret))).replace("FOLDER", repr(str(tmp_path)))
    with pytest.raises(BadReference) as error:
        Host(shared_server(PRELOAD), (), Reference(reference.replace("JUDGE", str(os.getpid()))), Settings())
    text = str(error.value)
    found = json.loads(text[text.index("{") : text.index("}") + 1])
    assert found.pop("token") == "none"
    assert set(found.values()) <= {"PermissionError", "OSError", "ProcessLookupError"}, found
    assert not (tmp_path / "written").exists()
