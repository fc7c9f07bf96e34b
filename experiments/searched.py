"""What the usual search finds for parts of the vocabulary, and whether the judge accepts their kernels on a GPU.

    python -m experiments.searched rows.jsonl --seconds 40 --only "loop"
    python -m experiments.searched rows.jsonl --tiny --seconds 60

A row of JSON for each case, written as soon as it is known: what the heuristic planner found by the judge's clock,
beside PyTorch eager and torch.compile; each step with its outcome, and why it was refused; whether the kernels of the
case's own family were tried at all. Where they were not, a second search is told to begin with their action, so that
the judge sees them. ``--tiny`` tries the script at small sizes without a GPU: its times are estimates. Deals in running
and writing down.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from qimeng import KernelSpec, QimengError, plan_and_code
from qimeng.bench.environment import environment
from qimeng.device import current_device
from qimeng.envs.steps.result import Result
from qimeng.testing import ScriptedPlanner
from tests.graph.experts.samples import Loop
from tests.vocabulary.irregular.samples import AllExperts
from tests.vocabulary.quantized.test_called import Layer

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One computation.

    Attributes:
        name: of the case.
        made: what makes the module at a size: 1, or `SMALL` of it.
        rows: of its input.
        width: of them.
        begins: actions, or how their texts begin, that lead to the kernels that this is about.
        family: of these kernels.
        declares: what its spec declares.
    """

    name: str
    made: Callable[[int], nn.Module]
    rows: int
    width: int
    begins: tuple[str, ...]
    family: str
    declares: tuple[tuple[str, Any], ...] = ()


SMALL = 16
"""Divides widths where the script is tried."""


def linear(size: int) -> nn.Module:
    """A layer of Llama 3 8B's width."""
    return nn.Linear(4096 // size, 4096 // size).to(BF16)


def loop(form: str) -> Callable[[int], nn.Module]:
    """Eight experts in a loop."""
    return lambda size: Loop(form, 1024 // size, 2048 // size, 8).to(BF16)


def called(form: str) -> Callable[[int], nn.Module]:
    """A layer that multiplies codes itself."""
    return lambda size: Layer(form, 1024 // size, 2048 // size)


def biased(size: int) -> nn.Module:
    """Eight experts with biases, all computed."""
    return AllExperts("biased", 8, 1024 // size, 2048 // size).to(BF16)


INT4, FEW = ("weights", "int4"), ("weights", "csr:10")
BLOCKS, GROUPS = ("weights", "fp8:128x128"), ("activations", "fp8:1x128")
DISPATCHED, LOWERED = ("dispatch", "lowering", "lowering"), ("lowering",) * 10
FUSED = ("fusion",) * 12 + ("lowering",) * 6
CASES = (
    Case("loop stacked", loop("stacked"), 1024, 1024, DISPATCHED, "routed"),
    Case("loop hit", loop("hit"), 1024, 1024, DISPATCHED, "routed"),
    Case("called rows", called("rows"), 1024, 1024, LOWERED, "quantized"),
    Case("called int8", called("int8"), 1024, 1024, FUSED, "quantized"),
    Case("weights fp8:128x128, 1024 rows", linear, 1024, 4096, ("dequantize",), "lowprecision", (BLOCKS,)),
    Case("weights fp8:128x128, 16 rows", linear, 16, 4096, ("dequantize",), "lowprecision", (BLOCKS,)),
    Case("activations fp8:1x128", linear, 1024, 4096, ("multiply_codes", "lowering"), "quantized", (BLOCKS, GROUPS)),
    Case("experts with biases", biased, 1024, 1024, DISPATCHED, "routed"),
    Case("weights int4, one row", linear, 1, 4096, ("dequantize",), "lowprecision", (INT4,)),
    Case("weights csr:10 by depth", linear, 1024, 4096, ("sparsify", "storage csc"), "sparse", (FEW,)),
)
"""What no GPU had run when this was written."""


def computation(case: Case, tiny: bool) -> KernelSpec:
    """The spec, its tensors on the GPU where there is one."""
    torch.manual_seed(0)
    size, place = (SMALL, "cpu") if tiny else (1, "cuda")
    module = case.made(size).to(place)
    x = torch.randn(max(1, case.rows // size), case.width // size, dtype=BF16, device=place)
    return KernelSpec.from_module(module.requires_grad_(False), (x,), name=case.name, **dict(case.declares))


def told(result: Result, family: str) -> dict[str, Any]:
    """What a search came to."""
    final = result.evaluation
    program = result.program
    schedules = [str(s) for r in program.called if (s := program.schedule(r))] if program else []
    return {
        "headline": result.headline,
        "verification": result.verification,
        "speedup": result.speedup,
        "over_compile": final.over_compile,
        "ms": final.timing.device_ms if final.timing else None,
        "eager_ms": final.eager.device_ms if final.eager else None,
        "compiled_ms": {mode: t.device_ms for mode, t in final.compiled.items()},
        "estimated": result.estimated,
        "accuracy": asdict(final.accuracy) if final.accuracy else None,
        "schedules": schedules,
        "kept": any(s.startswith(f"{family}(") for s in schedules),
        "steps": [
            [s.text, "accepted" if s.accepted else str(s.evaluation and s.evaluation.error)[:600], s.gain]
            for s in result.steps
        ],
        "notes": list(result.notes),
        "seconds": round(result.seconds, 1),
        "stopped": result.stopped,
    }


def tried(row: dict[str, Any], case: Case) -> bool:
    """Whether a step that leads to the case's kernels was sent to the judge."""
    wanted = next((b for b in case.begins if b not in ("fusion", "lowering")), None)
    return row["kept"] or any(wanted is not None and step[0].startswith(wanted) for step in row["steps"])


def searched(case: Case, seconds: float, tiny: bool) -> dict[str, Any]:
    """What the heuristic planner found; and what came of the case's own actions where it did not take them."""
    spec = computation(case, tiny)
    options: dict[str, Any] = {"device": "h100"} if tiny else {}
    result = plan_and_code(spec, seconds=seconds, planner="heuristic", search="greedy", **options)
    row = told(result, case.family)
    if not tried(row, case):
        planner = ScriptedPlanner(case.begins)
        options["compile_modes"] = ()
        row["told"] = told(
            plan_and_code(spec, seconds=seconds, planner=planner, search="greedy", **options), case.family
        )
    return row


def shown(case: Case, row: dict[str, Any]) -> str:
    """A row for people."""
    lines = [f"== {case.name}: {row.get('headline', row.get('failed'))}"]
    for name, part in (("heuristic", row), ("told to", row.get("told"))):
        if part and "steps" in part:
            lines.append(f"  {name}: {part['verification']}; kernels of {case.family} kept: {part['kept']}")
            times = {k: part[k] for k in ("ms", "eager_ms", "compiled_ms", "seconds", "stopped")}
            lines.append(f"  {times}; {part['schedules']}")
            lines += [f"    {text}: {outcome} ({gain})" for text, outcome, gain in part["steps"]]
            lines += [f"    note: {note}" for note in part["notes"]]
    return "\n".join(lines)


def main(
    out: Annotated[Path, typer.Argument(help="File that rows are added to.")],
    seconds: Annotated[float, typer.Option(help="Budget of each search.")] = 40.0,
    total: Annotated[float, typer.Option(help="After so many seconds no further case is begun.")] = 280.0,
    only: Annotated[list[str], typer.Option(help="Words that a case's name begins with.")] = [],  # noqa: B006
    tiny: Annotated[bool, typer.Option(help="Small sizes without a GPU, to try the script.")] = False,
) -> None:
    """Search for the cases one after the other."""
    device, began = current_device(), time.monotonic()
    if device is None and not tiny:
        raise typer.BadParameter("this needs a GPU; --tiny tries it without")
    facts = asdict(environment(device)) if device is not None else {}
    for case in (c for c in CASES if c.name.startswith(tuple(only or [""]))):
        if time.monotonic() - began > total:
            print(f"stopped after {total:g} s, before {case.name}", flush=True)
            return
        try:
            row = searched(case, seconds, tiny)
        except (QimengError, RuntimeError) as error:  # one case may fail, the others go on
            row = {"failed": f"{type(error).__name__}: {error}"[:1000]}
        with out.open("a") as file:
            file.write(json.dumps({"case": case.name, "rows": case.rows} | row | {"environment": facts}) + "\n")
        print(shown(case, row), flush=True)


if __name__ == "__main__":
    typer.run(main)
