"""Cases measured one after the other, each a row of JSON in a file as soon as it is known.

Deals in running and writing down; what is measured is the caller's.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import typer

from qimeng import QimengError
from qimeng.bench.environment import environment
from qimeng.device import DEVICES, Device, current_device
from qimeng.envs.estimate.interpreter import mend

Head = dict[str, Any]
"""What is known of a case before it is measured; its name is ``"case"``."""


@dataclass(frozen=True)
class Place:
    """Where cases run.

    Attributes:
        device: the GPU, or one that stands for it.
        name: ``"cuda"``, or ``"cpu"`` where Triton interprets.
    """

    device: Device
    name: str

    @classmethod
    def of(cls, tiny: bool) -> Place:
        """This machine's GPU; or its CPU, to try a script.

        Raises:
            typer.BadParameter: there is no GPU; or Triton was not told to interpret.
        """
        device = DEVICES["h100"] if tiny else current_device()
        if device is None:
            raise typer.BadParameter("this needs a GPU; --tiny tries it without")
        if tiny and os.environ.get("TRITON_INTERPRET") != "1":
            raise typer.BadParameter("--tiny needs TRITON_INTERPRET=1 in the environment")
        if tiny:
            mend()
        return cls(device, "cpu" if tiny else "cuda")


def write_rows(
    out: Path,
    cases: Iterable[tuple[Head, Callable[[], dict[str, Any]]]],
    place: Place,
    seconds: float,
    shown: Sequence[str],
) -> None:
    """Measure cases until the time is over, add a row for each to `out`, and print a part of it.

    Args:
        out: file that rows are added to.
        cases: what is known of each, and what measures it.
        place: where.
        seconds: after so many no further case is begun.
        shown: what of a row is printed.
    """
    began = time.monotonic()
    facts = asdict(environment(place.device)) if place.name == "cuda" else {}
    for head, measure in cases:
        if time.monotonic() - began > seconds:
            print(f"stopped after {seconds:g} s, before {head['case']}", flush=True)
            return
        try:
            with torch.no_grad():
                row = measure()
        except (QimengError, RuntimeError) as error:  # one case may fail, the others go on
            row = {"failed": f"{type(error).__name__}: {error}"[:500]}
        with out.open("a") as file:
            file.write(json.dumps(head | row | {"environment": facts}) + "\n")
        print(json.dumps(head | {k: row[k] for k in shown if k in row}), flush=True)
        torch.compiler.reset()  # which takes no more than eight forms of one function
        if place.name == "cuda":
            torch.cuda.empty_cache()


__all__ = ["Head", "Place", "write_rows"]
