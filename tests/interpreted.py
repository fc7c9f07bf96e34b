"""Rows that a process of its own prints, in which Triton's kernels run in its interpreter.

The interpreter must be chosen before triton is imported, which pytest's own process has done. The processes are forked
from a server that has imported, and captured once, what all of them need.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from qimeng.envs.workers.channel import Channel
from qimeng.envs.workers.service import serve
from qimeng.envs.workers.shared_server import shared_server

ROOT = Path(__file__).parents[1]
INTERPRETED = ("torch", "tests.interpreted:ready_to_interpret")
COMPILED = ("torch", "tests.interpreted:ready")


def rows_of(*command: str, timeout: float = 600, interpret: bool = True) -> list[dict[str, Any]]:
    """Run `command` (a file, or ``-m`` and a module, and arguments) and read its rows of JSON, a line each.

    Args:
        command: what runs as ``__main__``.
        timeout: seconds that it may take.
        interpret: whether in Triton's interpreter, or where Triton compiles.
    """
    server = shared_server(INTERPRETED if interpret else COMPILED)
    environment = {"TRITON_INTERPRET": "1"} if interpret else {}
    process = server.start("tests.interpreted:main", environment=environment, sandbox="off")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        try:
            process.call("run", timeout, words=command, path=path)
        finally:
            process.kill()
        return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


# -- in the server, and in the processes that it forks


def ready_to_interpret() -> None:
    """Import Triton as an interpreter, and what comes with a first capture."""
    os.environ["TRITON_INTERPRET"] = "1"
    ready()


def ready() -> None:
    """Import Triton, and what comes with a first capture."""
    import pytest  # noqa: F401
    import triton.language  # noqa: F401

    from qimeng.coder.template.coder import TemplateCoder  # noqa: F401
    from qimeng.graph.capture import capture

    torch.set_num_threads(1)
    capture(lambda: torch.nn.Linear(2, 2), lambda: (torch.empty(2, 2),))


def main(channel: Channel) -> None:
    """Run one command as ``__main__``; what it prints goes to a file."""

    def run(words: tuple[str, ...], path: Path) -> None:
        warnings.simplefilter("ignore")
        os.chdir(ROOT)
        module = words[0] == "-m"
        sys.argv = list(words[1:] if module else words)
        with path.open("w") as file, redirect_stdout(file):
            if module:
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(words[0], run_name="__main__")

    serve(channel, {"run": run})
