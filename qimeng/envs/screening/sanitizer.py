"""Runs NVIDIA's compute-sanitizer on a program: out-of-bounds accesses, races in shared memory, uninitialized reads.

Deals in one tool, one program and the tool's report. The program runs in its own process under the tool, on inputs of
its specification. PyTorch's memory pool is off, so every tensor has bounds. Tool and program share a full sandbox, with
sockets in a private network for their communication. Findings in other kernels (cuBLAS, PyTorch) do not refuse the
program. Knows nothing about earlier gates.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qimeng.envs.workers.plain_text import plain_text
from qimeng.errors import QimengError

if TYPE_CHECKING:
    from qimeng.program.program import Program

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
"""Tools of compute-sanitizer (https://docs.nvidia.com/compute-sanitizer/ComputeSanitizer/index.html)."""
LIMIT_S = 300.0
"""Seconds that one tool may take; it runs kernels 10 to 100 times slower."""
_USUAL = ("/usr/local/cuda/bin/compute-sanitizer", "/opt/cuda/bin/compute-sanitizer")
_FOUND = 86  # exit status under the tool where it found something
_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) errors?")
_RACES = re.compile(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)")
_LINE = "========= "
_NO_POOL = "PYTORCH_NO_CUDA_MEMORY_CACHING"


@dataclass(frozen=True)
class Report:
    """What a tool said.

    Attributes:
        tool: its name.
        outcome: ``"clean"``, ``"errors"`` (in the program's own kernels), ``"others"`` (in kernels that are not its
            own, or warnings), ``"missing"`` (no such tool here), ``"timeout"`` or ``"failed"`` (it did not finish).
        text: the sentence for a report or a refusal.
    """

    tool: str
    outcome: str
    text: str

    @property
    def refuses(self) -> bool:
        """Whether the program is wrong by it."""
        return self.outcome == "errors"


def check_tools(tools: Sequence[str]) -> tuple[str, ...]:
    """`tools`, where compute-sanitizer has them all.

    Raises:
        QimengError: it has not; the message lists what it has.
    """
    unknown = [t for t in tools if t not in TOOLS]
    if unknown:
        raise QimengError(f"compute-sanitizer has no tool {', '.join(unknown)}; known: {', '.join(TOOLS)}")
    return tuple(tools)


def sanitize(
    tool: str,
    source: str,
    spec: bytes,
    device: str,
    folder: Path,
    own: Collection[str] | None = None,
    limit_s: float = LIMIT_S,
    environment: Mapping[str, str] | None = None,
) -> Report:
    """Run a program under one tool.

    Args:
        tool: one of `TOOLS`.
        source: text of the program.
        spec: the specification's bytes.
        device: PyTorch's name of the device.
        folder: scratch; the program is written there.
        own: names of the program's kernels; None where all count as its own.
        limit_s: seconds that it may take.
        environment: variables of the process.
    """
    command = shutil.which("compute-sanitizer", path=(environment or os.environ).get("PATH"))
    command = command or next((p for p in _USUAL if Path(p).is_file()), None)
    if command is None:
        text = f"{tool} was not run: compute-sanitizer is not installed here (it comes with the CUDA toolkit)"
        return Report(tool, "missing", text)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "program.py").write_text(source)
    (folder / "spec.bin").write_bytes(spec)
    log = folder / f"{tool}.log"
    options = ["--tool", tool, "--error-exitcode", str(_FOUND), "--target-processes", "application-only"]
    options += ["--print-limit", "20", "--log-file", str(log)]
    program = [sys.executable, "-c", _run("main"), str(folder), device]
    launcher = [sys.executable, "-c", _run("launch"), str(folder)]
    said = folder / f"{tool}.txt"
    with said.open("w") as file:
        process = subprocess.Popen(
            [*launcher, command, *options, *program],
            env={**(environment or {}), _NO_POOL: "1"},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return Report(
                tool, "timeout", f"compute-sanitizer {tool} was stopped after {limit_s:g} s, without a result"
            )
        finally:
            _end_group(process)
    report = log.read_text(errors="replace") if log.is_file() else ""
    return read_report(tool, report, said.read_text(errors="replace"), own)


def read_report(tool: str, log: str, output: str, own: Collection[str] | None = None) -> Report:
    """What a tool's log says.

    Args:
        tool: its name.
        log: the log, whose lines begin with ``=========``.
        output: what the program and the tool printed besides.
        own: names of the program's kernels; None where all count as its own.
    """
    name, log, output = f"compute-sanitizer {tool}", plain_text(log), plain_text(output)
    races, errors = _RACES.search(log), _ERRORS.search(log)
    if races is None and errors is None:
        last = (log.strip() or output.strip()).splitlines()[-1:] or ["it printed nothing"]
        return Report(tool, "failed", f"{name} did not finish: {last[0][:300]}")
    count = int(races[1]) if races is not None else int(errors[1]) if errors is not None else 0
    warnings = int(races[2]) if races is not None else 0
    blocks = [block for block in _blocks(log) if "SUMMARY" not in block]
    mine = [b for b in blocks if own is None or any(re.search(rf"\b{re.escape(k)}\b", b) for k in own)]
    if not count and not warnings:
        return Report(tool, "clean", f"{name}: 0 errors")
    if count and mine:
        return Report(tool, "errors", f"{name}: {count} errors, the first: {mine[0][:600]}")
    kind = f"{count} errors in kernels that are not the program's" if count else f"{warnings} warnings"
    return Report(tool, "others", f"{name}: {kind}, the first: {(blocks or [''])[0][:300]}")


def _blocks(log: str) -> list[str]:
    """The reports in a log, each on one line; lines that are indented go on with the one before."""
    found: list[str] = []
    for line in log.splitlines():
        if not line.startswith(_LINE) or line.strip() in (_LINE.strip(), f"{_LINE}COMPUTE-SANITIZER"):
            continue
        text = line[len(_LINE) :]
        if text.startswith(" ") and found:
            found[-1] += f"; {text.strip()}"
        else:
            found.append(text.strip())
    return found


def _run(function: str) -> str:
    """Python text that calls a function of this module with the command's arguments.

    The package is found by its own folder: those of the user's modules are not read in a sandbox.
    """
    package = str(Path(__file__).resolve().parents[2])
    return (
        "import importlib.util, os, sys\n"
        f"places = [{package!r}]\n"
        "spec = importlib.util.spec_from_file_location('qimeng', os.path.join(places[0], '__init__.py'), "
        "submodule_search_locations=places)\n"
        "sys.modules['qimeng'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(sys.modules['qimeng'])\n"
        f"from qimeng.envs.screening.sanitizer import {function}\n"
        f"{function}(*sys.argv[1:])\n"
    )


def unwatched(program: Program) -> str:
    """What is to be said where compute-sanitizer does not watch some of a program's kernels; empty where it does."""
    from qimeng.backend.registry import backend_named  # loads PyTorch, without which `launch` does

    made = [i for i in map(program.implementation, program.regions) if i.generated]
    found = [b.title for b in (backend_named(i.language) for i in made) if not b.capabilities.sanitizer]
    return f"compute-sanitizer does not watch kernels in {', '.join(dict.fromkeys(found))}" if found else ""


def _end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
    finally:
        process.wait()


def launch(folder: str, *command: str) -> None:
    """Enter the sandbox and become the tool, with the program that it starts."""
    from qimeng.envs.sandbox import Sandbox

    Sandbox("tool").enter(folder, readable=[str(Path(command[0]).resolve().parent)], variables=(_NO_POOL,))
    os.execv(command[0], command)


def main(folder: str, device: str) -> None:
    """Call the program in `folder` once on inputs of its specification: what runs under the tool."""
    import torch

    from qimeng.backend.load import load_kernels
    from qimeng.envs.workers.worker_setup import Parameters
    from qimeng.spec import KernelSpec
    from qimeng.spec.kept import take_state
    from qimeng.spec.modes import set_mode

    spec = KernelSpec.from_bytes(Path(folder, "spec.bin").read_bytes())
    set_mode(spec.mode)
    place = torch.device(device)
    state = Parameters(spec, place).set(None)
    with torch.no_grad(), torch.device(place):
        model = load_kernels(Path(folder, "program.py").read_text(), folder).Model()
    model.to(place)
    take_state(model, state)
    with torch.no_grad():
        model(*spec.inputs(1, device))
    if place.type == "cuda":
        torch.cuda.synchronize(place)


__all__ = ["LIMIT_S", "TOOLS", "Report", "check_tools", "launch", "main", "read_report", "sanitize", "unwatched"]
