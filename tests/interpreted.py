"""Rows that a process of its own prints, in which Triton's kernels run in its interpreter.

The interpreter must be chosen before triton is imported, which pytest's own process has done.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def rows_of(*command: str, timeout: float = 600) -> list[dict[str, Any]]:
    """Run `command` (a file, or ``-m`` and a module, and arguments) and read its rows of JSON, a line each."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
