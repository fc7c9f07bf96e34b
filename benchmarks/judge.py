"""How far the judge can be trusted: each command measures one side of it and prints a table; see benchmarks/trust.md.

    python -m benchmarks.judge all runs/judge --seconds 3000
    python -m benchmarks.judge mutants runs/judge/mutants.jsonl --count 500 --jobs 8

Every command goes on where it ended when it is started again with the same file.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from qimeng.errors import QimengError

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

Out = Annotated[Path, typer.Argument(help="File of rows.")]
Seconds = Annotated[float, typer.Option(help="After so many, no further case is begun.")]
Jobs = Annotated[int, typer.Option(help="Processes on each GPU.")]
Sandbox = Annotated[str, typer.Option(help="Of the workers: full, basic or off.")]
Seed = Annotated[int, typer.Option(help="Of the sequence of cases.")]


@app.command()
def exploits(
    out: Out,
    seconds: Seconds = 600.0,
    jobs: Jobs = 1,
    only: Annotated[str, typer.Option(help="One class, such as timing or honest.")] = "",
) -> None:
    """Judge every exploit and every honest candidate. Ends with 1 where a verdict is not the one that it must be."""
    from experiments.trust.runs import exploits as run

    raise SystemExit(0 if run(out, seconds, jobs, only) else 1)


@app.command()
def mutants(
    out: Out,
    seconds: Seconds = 900.0,
    jobs: Jobs = 1,
    count: Annotated[int, typer.Option(help="Mutants in the file in the end, or a few more.")] = 500,
    each: Annotated[int, typer.Option(help="Mutants of one program.")] = 12,
    seed: Seed = 0,
) -> None:
    """Put mutants of right kernels before an independent oracle, the judge, and KernelBench's own check."""
    from experiments.trust.runs import mutants as run

    run(out, seconds, jobs, count, each, seed)


@app.command()
def soak(
    out: Out,
    seconds: Seconds = 1500.0,
    count: Annotated[int, typer.Option(help="Candidates, the harmful ones counted in.")] = 1000,
    parts: Annotated[int, typer.Option(help="Judges at a time.")] = 1,
    specs: Annotated[str, typer.Option(help="Only candidates for these specifications, by commas.")] = "",
    sandbox: Sandbox = "full",
    seed: Seed = 0,
) -> None:
    """Judge candidates of which one in five crashes, hangs, leaks memory or forks, and the same without those."""
    from experiments.trust.run_soak import Plan
    from experiments.trust.run_soak import soak as run

    some = tuple(filter(None, specs.split(",")))
    raise SystemExit(0 if run(Plan(out, seconds, count, parts, some, sandbox, seed)) else 1)


@app.command()
def cost(
    out: Out,
    seconds: Seconds = 600.0,
    jobs: Jobs = 1,
    specs: Annotated[int, typer.Option(help="How many.")] = 24,
    programs: Annotated[int, typer.Option(help="Evaluated for each spec.")] = 6,
    sandbox: Sandbox = "full",
    seed: Seed = 0,
) -> None:
    """Measure what an evaluation costs, by part, and how many there are in an hour."""
    from experiments.trust.runs import cost as run

    run(out, seconds, jobs, specs, programs, sandbox, seed)


@app.command()
def stability(
    out: Out,
    seconds: Seconds = 900.0,
    times: Annotated[int, typer.Option(help="Evaluations of each kernel.")] = 20,
    kernels: Annotated[str, typer.Option(help="Which, by commas; all by default.")] = "",
    us: Annotated[str, typer.Option(help="Of which durations in microseconds, by commas; all by default.")] = "",
    sandbox: Sandbox = "full",
) -> None:
    """Evaluate the same kernels again and again: how far apart the medians are."""
    from experiments.trust.runs import stability as run
    from experiments.trust.stability import KERNELS, TIMES_US

    names, wanted = kernels.split(",") if kernels else list(KERNELS), map(int, us.split(",")) if us else TIMES_US
    run(out, seconds, times, names, wanted, sandbox)


@app.command()
def recheck(
    out: Out,
    suite: Annotated[str, typer.Option(help="Where the problems come from: kernelbench:FOLDER, say.")],
    rows: Annotated[list[Path], typer.Option(help="Files of rows whose winners are judged.")],
    seconds: Seconds = 600.0,
    jobs: Jobs = 1,
) -> None:
    """Judge the winners of stored rows again, on every distribution. Ends with 1 where one is refused."""
    from experiments.trust.run_winners import recheck as run

    raise SystemExit(0 if run(out, suite, [str(path) for path in rows], seconds, jobs) else 1)


@app.command()
def differential(
    out: Out,
    dtypes: Annotated[str, typer.Option(help="Which, by commas; all by default.")] = "",
    only: Annotated[str, typer.Option(help="A word in the names of the cases wanted.")] = "",
    plain: Annotated[bool, typer.Option(help="The default schedules only, several cases by one kernel.")] = False,
) -> None:
    """Hold every operator that the templates claim against PyTorch at special values. Ends with 1 on a difference."""
    from experiments.trust.run_differential import differential as run
    from experiments.trust.special_values import DTYPES

    raise SystemExit(0 if run(out, dtypes.split(",") if dtypes else tuple(DTYPES), only, plain) else 1)


@app.command()
def products(
    part: Annotated[str, typer.Argument(help="errors or times.")],
    out: Out,
    device: Annotated[str, typer.Option(help="Of errors: cuda, or cpu for Triton's interpreter.")] = "cuda",
    mode: Annotated[str, typer.Option(help="Of errors: default or high; both by default.")] = "",
    small: Annotated[bool, typer.Option(help="Of errors: small tiles and operands.")] = False,
) -> None:
    """Judge generated products on inputs that vary within a row, or time what guards them."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, below
    from experiments.trust.run_products import products as run

    run(part, out, device, mode, small)


WEIGHTS = {"exploits": 2, "mutants": 3, "soak": 5, "cost": 1, "stability": 2}
"""How `all` shares its seconds out."""

LEAST_S, END_S = 20.0, 15.0
"""Seconds below which a measurement is left out, and those kept for a measurement's last case."""


@app.command("all")
def all_(
    folder: Annotated[Path, typer.Argument(help="Folder of the files of rows.")],
    seconds: Annotated[float, typer.Option(help="Of all measurements together.")] = 3000.0,
    only: Annotated[str, typer.Option(help=f"Of {', '.join(WEIGHTS)}, by commas; all by default.")] = "",
) -> None:
    """Run the measurements one after the other; one that fails does not keep the others from running."""
    from qimeng.bench.gpus import visible_gpus

    names = [name for name in WEIGHTS if not only or name in only.split(",")]
    end, failed, parts = time.monotonic() + seconds, [], 4 * max(1, len(visible_gpus()))
    folder.mkdir(parents=True, exist_ok=True)
    while names:
        left = (end - time.monotonic()) * WEIGHTS[names[0]] / sum(WEIGHTS[n] for n in names)
        name = names.pop(0)
        if left < LEAST_S:
            continue
        print(f"== {name}, {left:.0f} s", flush=True)
        out, budget = folder / f"{name}.jsonl", left - END_S
        try:
            match name:
                case "exploits":
                    exploits(out, budget, jobs=4)
                case "mutants":
                    mutants(out, budget, jobs=8, count=520)
                case "soak":
                    soak(out, budget, parts=parts)
                case "cost":
                    cost(out, budget, jobs=6)
                case _:
                    stability(out, budget)
        except SystemExit as ended:
            failed += [name] if ended.code else []
        except Exception as error:  # noqa: BLE001  the others still run
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            failed.append(name)
    raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    try:
        app()
    except QimengError as error:
        raise SystemExit(f"judge: {error}") from None
