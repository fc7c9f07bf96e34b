"""Rows that a process of its own prints, in which Triton's kernels run in its interpreter.

The interpreter must be chosen before triton is imported, which pytest's own process has done. The processes are forked
from a server that has imported, and captured once, what all of them need.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
import warnings
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

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
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        _call("run", command, path, timeout, interpret)
        return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


class Ended(NamedTuple):
    """How a command ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


def ended(*command: str, timeout: float = 300, **environment: str) -> Ended:
    """Run `command` as `rows_of` does, to whatever end; `torch.compile` leaves all to eager mode: no g++.

    Args:
        command: as for `rows_of`.
        timeout: seconds that it may take.
        environment: variables that it has besides.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "shown"
        code = _call("run_to_the_end", command, path, timeout, True, environment)
        return Ended(code, path.read_text(), path.with_suffix(".err").read_text())


def _call(
    function: str,
    command: tuple[str, ...],
    path: Path,
    timeout: float,
    interpret: bool,
    environment: Mapping[str, str] | None = None,
) -> Any:
    server = shared_server(INTERPRETED if interpret else COMPILED)
    environment = {**({"TRITON_INTERPRET": "1"} if interpret else {}), **(environment or {})}
    process = server.start("tests.interpreted:main", environment=environment, sandbox="off")
    try:
        return process.call(function, timeout, words=command, path=path)[0]
    finally:
        process.kill()


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

    def run_to_the_end(words: tuple[str, ...], path: Path) -> int:
        torch.compiler.set_stance("force_eager")
        with path.with_suffix(".err").open("w") as file, redirect_stderr(file):
            try:
                run(words, path)
            except SystemExit as end:
                if isinstance(end.code, str):
                    print(end.code, file=sys.stderr)
                    return 1
                return end.code or 0
            except Exception:  # noqa: BLE001 - as Python ends a process
                traceback.print_exc()
                return 1
        return 0

    serve(channel, {"run": run, "run_to_the_end": run_to_the_end})
