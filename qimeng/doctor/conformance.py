"""Runs the small kernels of `qimeng.doctor.kernels` in a process of their own, on the GPU or in Triton's interpreter.

Deals in processes and lines of JSON. A kernel that ends its process is one that does not work; the others go on in a
new one. Knows nothing about kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

from qimeng.doctor.check import Check

SECONDS = 120.0
"""Time limit of all kernels together."""

PROGRAM = """
import json, sys
device, first = sys.argv[1], int(sys.argv[2])
if device == "cpu":
    from qimeng.envs.estimate.interpreter import mend
    mend()
from qimeng.doctor.kernels import CHECKS
print(json.dumps([(c.__name__, c.__doc__.strip().partition(chr(10))[0]) for c in CHECKS]), flush=True)
for check in CHECKS[first:]:
    try:
        wrong = check(device)
    except Exception as error:  # compilers and drivers raise anything; the check then says what
        lines = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
        wrong = " … ".join(dict.fromkeys((lines[0], lines[-1])))
    print(json.dumps(wrong), flush=True)
"""


def conformance(device: str) -> Iterator[Check]:
    """A check for each kernel.

    Args:
        device: PyTorch's name of the device; on ``"cpu"`` they are interpreted.
    """
    where = "interpreted" if device == "cpu" else "on the GPU"
    done, names = 0, [("the kernels", "")]
    while done < len(names):
        lines, end = _run(device, done)
        names = json.loads(lines[0]) if lines else names
        for wrong in map(json.loads, lines[1:]):
            name, shows = names[done]
            yield Check(f"{name.replace('_', ' ')}, {where}", not wrong, wrong or shows)
            done += 1
        if done < len(names):
            yield Check(f"{names[done][0].replace('_', ' ')}, {where}", False, end)
            done += 1


def _run(device: str, first: int) -> tuple[list[str], str]:
    """Lines that a process printed, and how it ended."""
    variables = {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, device, str(first)]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **variables}
        )
    except subprocess.TimeoutExpired as late:
        out = late.stdout or b""
        text = out.decode(errors="replace") if isinstance(out, bytes) else out
        return text.splitlines(), f"no answer in {SECONDS:g} s"
    last = (found.stderr.strip().splitlines() or ["no message"])[-1]
    return found.stdout.splitlines(), f"its process ended with {found.returncode}: {last}"


__all__ = ["conformance"]
