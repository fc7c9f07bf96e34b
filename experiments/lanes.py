"""Commands side by side on the GPUs of a machine that is lent for a few minutes.

    python -m experiments.lanes FILE --seconds 440 --out logs

A line of FILE is ``name | GPUs | seconds | command``. Commands begin in the order of the lines, each as soon as so many
GPUs are free, and see these alone; one without GPUs begins when its turn comes. What a command prints is in
``logs/NAME.log``. One that takes longer than its seconds, or than the time that is left, gets Ctrl-C, and is killed ten
seconds later. Whatever happens to a command, its GPUs go to the next one. Deals in processes. Knows nothing about what
they do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread
from typing import Annotated

import torch
import typer

from qimeng.errors import QimengError

GRACE_S = 10.0
"""Seconds between Ctrl-C and the end."""

LEAST_S = 15.0
"""Seconds that must be left for a command to begin."""


@dataclass(frozen=True)
class Lane:
    """One command.

    Attributes:
        name: of its log.
        gpus: how many it needs.
        seconds: it may take.
        command: for bash.
    """

    name: str
    gpus: int
    seconds: float
    command: str


def lanes_of(text: str) -> tuple[Lane, ...]:
    """The commands of a file's text; empty lines and those that begin with # are left out.

    Raises:
        QimengError: a line is none.

    >>> lanes_of("moe | 1 | 60 | echo a | cat")
    (Lane(name='moe', gpus=1, seconds=60.0, command='echo a | cat'),)
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = [part.strip() for part in line.split("|", 3)]
        try:
            name, gpus, seconds, command = parts
            found.append(Lane(name, int(gpus), float(seconds), command))
        except ValueError:
            raise QimengError(f"line {number} is not `name | GPUs | seconds | command`: {line}") from None
    return tuple(found)


def run_lanes(
    lanes: Sequence[Lane],
    seconds: float,
    out: Path,
    gpus: Sequence[int],
    tell: Callable[[str], None] = print,
) -> dict[str, int | None]:
    """Run the commands; the exit status of each, None where there was no time or it was stopped.

    Args:
        lanes: the commands.
        seconds: for all of them.
        out: folder of the logs, made where it is missing.
        gpus: numbers of the GPUs that may be used.
        tell: told a line when a command ends.

    Raises:
        QimengError: a command needs more GPUs than there are.
    """
    for lane in lanes:
        if lane.gpus > len(gpus):
            raise QimengError(f"{lane.name} needs {lane.gpus} GPUs, and there are {len(gpus)}")
    out.mkdir(parents=True, exist_ok=True)
    free, changed, began = list(gpus), Condition(), time.monotonic()
    found: dict[str, int | None] = {}

    def run(lane: Lane, mine: list[int]) -> None:
        try:
            limit = min(lane.seconds, seconds - (time.monotonic() - began))
            found[lane.name] = _run(lane, mine, limit, out) if limit >= LEAST_S else None
            tell(f"{lane.name}: {found[lane.name]} after {time.monotonic() - began:.0f} s on GPUs {mine}")
        finally:
            with changed:
                free.extend(mine)
                changed.notify_all()

    threads = []
    for lane in lanes:
        with changed:
            changed.wait_for(lambda lane=lane: len(free) >= lane.gpus)  # type: ignore[misc]
            mine = [free.pop(0) for _ in range(lane.gpus)]
        threads.append(Thread(target=run, args=(lane, mine)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return found


def _run(lane: Lane, gpus: Sequence[int], limit: float, out: Path) -> int | None:
    """The exit status of a command; None where it was stopped."""
    seen = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "PYTHONUNBUFFERED": "1"}
    with (out / f"{lane.name}.log").open("w") as log:
        process = subprocess.Popen(
            ["bash", "-c", lane.command], stdout=log, stderr=subprocess.STDOUT, env=seen, start_new_session=True
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            for number, grace in ((signal.SIGINT, GRACE_S), (signal.SIGKILL, GRACE_S)):
                os.killpg(process.pid, number)
                try:
                    process.wait(grace)
                    break
                except subprocess.TimeoutExpired:
                    continue
            return None


def main(
    file: Annotated[Path, typer.Argument(help="The commands, one to a line.")],
    out: Annotated[Path, typer.Option(help="Folder of the logs.")],
    seconds: Annotated[float, typer.Option(help="For all commands.")] = 540.0,
) -> None:
    """Run the commands of a file."""
    run_lanes(lanes_of(file.read_text()), seconds, out, range(torch.cuda.device_count()))


if __name__ == "__main__":
    typer.run(main)
