"""Experiments as a user runs them, with Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(name: str, path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`python -m experiments.name path …` in a process of its own."""
    command = [sys.executable, "-m", f"experiments.{name}", str(path), *options]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
