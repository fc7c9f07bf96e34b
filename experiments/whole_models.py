"""Whole models through `qimeng.optimize`, beside PyTorch and torch.compile, in turns on one GPU.

    python -m experiments.whole_models --only bert,resnet50 --seconds 120 --out rows.jsonl

A row of JSON for each model of `experiments.networks`: times of a call of the original, the optimized model and
torch.compile, the error of the whole, parts, and the seconds until a second copy of the model had its programs from the
cache. Deals in running and writing down. Knows nothing about parts.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

import qimeng
from experiments import networks
from qimeng.bench.environment import environment
from qimeng.device import current_device
from qimeng.integration import Record
from qimeng.integration.whole import timed

MODES = ("default", "max-autotune", "reduce-overhead")
PART = ("names", "kind", "share", "speedup", "seconds", "reason")
"""What a row says of a part."""


def measured(name: str, seconds: float, modes: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """The row of one model.

    Args:
        name: of a function of `experiments.networks`.
        seconds: budget of the optimization.
        modes: of torch.compile.
        options: of `qimeng.optimize`.
    """
    spec = getattr(networks, name)().with_(dtype="bfloat16")
    model, inputs = spec.module("cuda"), spec.inputs(0, "cuda")
    device = next(model.parameters()).device
    with tempfile.TemporaryDirectory() as cache, torch.no_grad():
        fast = qimeng.optimize(model, inputs, seconds=seconds, cache=cache, **options)
        began = time.monotonic()
        second = qimeng.optimize(model, inputs, seconds=seconds, cache=cache, **options)
        again = time.monotonic() - began
        del second
        record = vars(fast)["qimeng"]
        assert isinstance(record, Record)
        compiled = {mode: _compiled(model, inputs, mode) for mode in modes}
        able = {mode: call for mode, call in compiled.items() if not isinstance(call, str)}
        calls = [lambda: model(*inputs), lambda: fast(*inputs), *(lambda c=c: c(*inputs) for c in able.values())]
        eager, found, *others = timed(calls, device)
    return {
        "model": name,
        "dtype": spec.dtype,
        "mode": spec.mode,
        "seconds": round(record.seconds, 1),
        "second_copy_s": round(again, 1),
        "eager_ms": eager,
        "optimized_ms": found,
        "compiled_ms": dict(zip(able, others, strict=True)),
        "compile_errors": {mode: call for mode, call in compiled.items() if isinstance(call, str)},
        "error": record.compared[0].error if record.compared else None,
        "parts": [{key: getattr(part, key) for key in PART} for part in record.parts],
        "recorded": record.recorded,
        "notes": record.notes,
        "calls": {n: dict(c) for n, c in record.calls.items()},
    }  # fmt: skip


def _compiled(model: nn.Module, inputs: tuple[Any, ...], mode: str) -> Any:
    """The model compiled and called twice, or why that failed."""
    compiled = torch.compile(model, mode=None if mode == "default" else mode)
    try:
        for _ in range(3):
            compiled(*inputs)
    except Exception as error:  # noqa: BLE001  torch.compile may raise anything
        return f"{type(error).__name__}: {error}"[:300]
    return compiled


def main(
    only: Annotated[str, typer.Option(help="Names of functions of experiments.networks, divided by commas.")],
    out: Annotated[Path, typer.Option(help="File that rows are added to.")],
    seconds: Annotated[float, typer.Option(help="Budget of each model.")] = 120.0,
    modes: Annotated[str, typer.Option(help="Modes of torch.compile.")] = ",".join(MODES),
) -> None:
    """Optimize and time the models one after the other."""
    device = current_device()
    if device is None:
        raise typer.BadParameter("this needs a GPU")
    facts = asdict(environment(device))
    options: dict[str, Any] = {"planner": "heuristic", "search": "greedy", "compile_modes": ()}
    for name in only.split(","):
        try:
            row = measured(name, seconds, [m for m in modes.split(",") if m], options)
        except (qimeng.QimengError, RuntimeError) as error:  # one model may fail, the others go on
            row = {"model": name, "failed": f"{type(error).__name__}: {error}"[:500]}
        with out.open("a") as file:
            file.write(json.dumps(row | {"environment": facts}) + "\n")
        print(json.dumps({k: v for k, v in row.items() if k != "calls"}), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
