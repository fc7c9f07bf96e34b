"""The command line of the benchmarks: `qimeng bench run`, `kernelbench`, `families`, `summary`, `tables`.

Deals in arguments and printing. Knows nothing about how a problem is measured or how figures are computed.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from qimeng.cli_cluster import Cluster, Generation, cluster_tasks, device_there
from qimeng.cli_coder import (
    BaseUrl,
    Calls,
    Candidates,
    CoderName,
    Money,
    PriceList,
    Prompts,
    Tokens,
    coder_label,
    made_coder,
)
from qimeng.cli_console import console
from qimeng.cli_names import PlannerName, SearchName, check_names, number, split
from qimeng.cluster.turns import NORMAL
from qimeng.errors import QimengError
from qimeng.planner import PLANNER, SEARCH

if TYPE_CHECKING:
    from qimeng.bench.row import Row
    from qimeng.bench.suite import Problem
    from qimeng.bench.summary import Summary

app = typer.Typer(help="Benchmarks: run a suite, sum up stored rows, render tables.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@app.command("kernelbench", short_help="The same as run, for a checkout of KernelBench: --root FOLDER.")
@app.command("run")
def run(
    suite: Annotated[
        str,
        typer.Argument(help="kernelbench:FOLDER, folder:FOLDER, module:NAME, or a suite from an installed package."),
    ] = "",
    only: Annotated[str, typer.Option(help="Ids and patterns, such as level1/19,level2/*. Default: all.")] = "",
    root: Annotated[
        Path | None, typer.Option(help="A local checkout of KernelBench; --level and --problems select from it.")
    ] = None,
    level: Annotated[str, typer.Option(help="With --root: KernelBench's levels, such as 1 or 1,2.")] = "1",
    problems: Annotated[
        str,
        typer.Option(
            help="With --root: numbers and ranges (1,2,5-9), or a list for each level (1/1,2;2/12). Default: all."
        ),
    ] = "",
    families: Annotated[str, typer.Option(help="Only these families (see `bench families`), comma-separated.")] = "",
    seconds_each: Annotated[
        float, typer.Option(callback=number, help="Time budget of a problem, without waiting.")
    ] = 35.0,
    total_seconds: Annotated[float, typer.Option(callback=number, help="Time budget of the run.")] = 3600.0,
    overhead_seconds: Annotated[
        float, typer.Option(callback=number, help="Extra seconds that a problem may take beyond its budget.")
    ] = 120.0,
    evaluations: Annotated[
        int, typer.Option(help="Maximum number of evaluations of a problem; 0 for the default.")
    ] = 0,
    mode: Annotated[
        str, typer.Option(help="Precision mode: default, highest or high; or own, which uses each spec's.")
    ] = "",
    dtype: Annotated[
        str,
        typer.Option(
            help="float32, bfloat16 or float16; or own, which uses each spec's. Default with --root: float32."
        ),
    ] = "",
    planner: PlannerName = PLANNER,
    coder: CoderName = "template",
    base_url: BaseUrl = "",
    llm_calls: Calls = None,
    llm_tokens: Tokens = None,
    llm_money: Money = None,
    llm_prices: PriceList = "",
    candidates: Candidates = 1,
    llm_prompts: Prompts = None,
    search: SearchName = SEARCH,
    device: Annotated[str, typer.Option(help="Without a GPU: the device to estimate times for.")] = "",
    compile_baseline: Annotated[bool, typer.Option(help="Measure torch.compile as well.")] = True,
    compile_modes: Annotated[
        str, typer.Option(help="Modes of torch.compile; results are compared with the first one.")
    ] = "default",
    compile_seconds: Annotated[
        float, typer.Option(callback=number, help="Maximum seconds to compile in one mode.")
    ] = 60.0,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs to use; 0 for all that are visible.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Problems worked on at the same time on each GPU.")] = 1,
    cluster: Cluster = "",
    generation: Generation = "",
    retry: Annotated[bool, typer.Option(help="Run problems again that failed before.")] = False,
    out: Annotated[Path, typer.Option(help="File of rows. An interrupted run resumes.")] = Path("rows.jsonl"),
) -> None:
    """Run the problems of a suite and store one row for each.

    `bench kernelbench --root FOLDER` does the same for a checkout of KernelBench. The limits on a model (`--llm-…`)
    apply to each problem. Answers are stored beside the rows, so none is paid for twice.
    """
    from qimeng.bench.gpus import gpu_places, visible_gpus
    from qimeng.bench.harness import RunOptions, pending, run_suite
    from qimeng.bench.measure import measure, prepare
    from qimeng.bench.row import Settings, read_rows
    from qimeng.bench.suite import OWN
    from qimeng.bench.summary import summarize
    from qimeng.bench.survey import survey
    from qimeng.envs.steps.setup import make_device

    modes, kept = split(compile_modes) if compile_baseline else (), split(families)
    mode, dtype = mode or ("default" if root else OWN), dtype or ("float32" if root else OWN)
    known = ("default" if mode == OWN else mode, "float32" if dtype == OWN else dtype)
    check_names(planner, coder, search, *known, modes, kept)
    found = _problems(suite, only, root, level, problems)
    writer = made_coder(coder, base_url, llm_calls, llm_tokens, llm_money, llm_prices, candidates, llm_prompts)
    named = coder_label(coder, candidates, llm_prompts)
    settings = Settings(mode, dtype, planner, named, search, seconds_each, evaluations, modes, compile_seconds)
    if cluster and writer.free_hand:
        raise QimengError("a language model as coder does not run on a cluster: its answers are stored on this machine")
    pool = cluster_tasks(cluster, generation, jobs, gpus, NORMAL) if cluster else None
    target = device_there(pool, device) if pool else make_device(device or None)
    options = RunOptions(
        settings,
        total_seconds,
        () if pool else gpu_places(gpus, jobs, visible_gpus() if target.measured else ()),
        target.memory_bytes if target.measured else 0,
        kept,
        overhead_seconds,
        retry,
    )
    screen = console()
    todo = pending(found, options, out)
    screen.print(f"{len(found)} problems, {len(found) - len(todo)} of them already stored in {out}")
    try:
        rows = run_suite(
            found,
            partial(
                measure,
                settings=settings,
                device=device or None,
                coder=writer,
                answers=out.with_suffix(".sqlite") if writer.free_hand else None,
                limit_s=options.limit_s,
            ),
            options,
            out,
            look=partial(prepare, dtype=dtype, modes=len(modes)) if target.measured else partial(survey, dtype=dtype),
            on_row=lambda row: screen.print(row_line(row), markup=False),
            pool=pool,
        )
    except KeyboardInterrupt:
        screen.print(
            f"{len(pending(found, options, out))} problems left; run the same command again to go on from {out}"
        )
        raise
    left = len(pending(found, options, out))
    screen.print(f"{len(rows)} rows stored, {left} problems without a row (other families included)")
    if rows:
        for summary in summarize(r for r in read_rows(out) if r.settings == settings):
            print_summary(summary, screen)


def _problems(suite: str, only: str, root: Path | None, level: str, problems: str) -> tuple[Problem, ...]:
    """The problems to run: those of a suite, or of a KernelBench checkout by level and number."""
    from qimeng.bench.ids import SuiteError
    from qimeng.bench.kernelbench import load_levels
    from qimeng.bench.suite import problems_of
    from qimeng.bench.suites import suite_named

    if bool(suite) == (root is not None):
        raise SuiteError("name one suite (kernelbench:FOLDER, folder:FOLDER, module:NAME …) or give --root FOLDER")
    if root is not None:
        if only:
            raise SuiteError("--only needs a named suite; with --root, use --level and --problems")
        return load_levels(root, level, problems)
    return problems_of(suite_named(suite), only)


@app.command()
def families(
    suite: Annotated[str, typer.Argument(help="A suite, as for `bench run`.")] = "",
    only: Annotated[str, typer.Option(help="Ids and patterns, such as level1/19,level2/*. Default: all.")] = "",
    root: Annotated[Path | None, typer.Option(help="A local checkout of KernelBench.")] = None,
    level: Annotated[str, typer.Option(help="With --root: levels, such as 1 or 1,2.")] = "1",
    problems: Annotated[str, typer.Option(help="With --root: numbers and ranges, such as 1,2,5-9. Default: all.")] = "",
    as_json: Json = False,
) -> None:
    """Show the family of each problem, from its captured graph."""
    from qimeng.bench.ids import format_ids
    from qimeng.bench.survey import survey

    found: dict[str, list[str]] = {}
    for problem in _problems(suite, only, root, level, problems):
        known = survey(problem).found
        words = "not captured" if known is None else known.family
        if known is not None:
            words += (f", collapsed ({known.collapsed})" if known.collapsed else "") + (
                ", random" if known.random else ""
            )
        found.setdefault(words, []).append(problem.id)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    table = Table("family", "problems", "ids")
    for name, ids in found.items():
        table.add_row(name, str(len(ids)), format_ids(ids))
    console().print(table, markup=False)


@app.command()
def summary(rows: Annotated[list[Path], typer.Argument(help="Files of rows.")], as_json: Json = False) -> None:
    """Summarize stored rows: fast_p, geometric means by group, and results of each kind of action."""
    from qimeng.bench.row import RowError, read_rows
    from qimeng.bench.summary import summarize

    found = summarize(row for file in rows for row in read_rows(file))
    if not found:
        raise RowError(f"{', '.join(map(str, rows))} holds no rows")
    if as_json:
        print(json.dumps([asdict(s) for s in found], indent=1))
        return
    for one in found:
        print_summary(one, console())


@app.command()
def tables(
    documents: Annotated[list[Path], typer.Argument(help="Markdown files with bench markers.")],
    root: Annotated[Path, typer.Option(help="Folder that the paths in the markers are relative to.")] = Path("."),
) -> None:
    """Render the tables in documents again, from the rows that their markers name."""
    from qimeng.bench.tables import render_documents

    for document, written in render_documents(documents, root):
        print(f"{document}: {'written' if written else 'unchanged'}")


def row_line(row: Row) -> str:
    """One line about a stored row."""
    head = f"{row.id:<12} {row.name[:40]:<40} {row.family:<12}"
    if row.error is not None:
        return f"{head} FAILED {row.error[:100]}"
    ms = f"{row.candidate.device_ms:.3f} ms" if row.candidate else "untimed"
    parts = [ms + (" (estimated)" if row.estimated else "")]
    for label, value in (("x eager", row.speedup), ("x compile", row.over_compile), ("generated", row.generated_share)):
        if value is not None:
            parts.append(f"{value:.2f} {label}")
    parts += [
        "right" if row.right else "WRONG",
        f"{row.evaluations} evaluations",
        f"{row.seconds.get('total', 0):.0f} s",
    ]
    return f"{head} {', '.join(parts)}"


def print_summary(summary: Summary, screen: Console) -> None:
    """The figures of one run as tables."""
    from qimeng.bench.markdown import number, percent
    from qimeng.bench.tables import exceptions_of

    screen.print(f"\n{summary.settings} on {summary.environment}" + (" — ESTIMATED times" if summary.estimated else ""))
    shares = [*summary.fast.items(), *((f"{name} over torch.compile", v) for name, v in summary.fast_compile.items())]
    table = Table("figure", "value")
    for name, value in shares:
        table.add_row(name, percent(value))
    table.add_row("right by KernelBench's rule", percent(summary.kernelbench_right))
    table.add_row("half of the GPU time generated", percent(summary.half_generated))
    table.add_row("peak memory over eager's, median", number(summary.median_memory_ratio))
    if summary.slowest:
        table.add_row("slowest against eager", f"{summary.slowest[1]:.2f} ({summary.slowest[0]})")
    table.add_row("share of the roofline, median", percent(summary.roofline_fraction))
    table.add_row(
        "seconds without baselines, evaluations (medians)",
        f"{number(summary.median_seconds, 1)}, {number(summary.median_evaluations, 0)}",
    )
    for part, seconds in summary.seconds_split.items():
        table.add_row(f"  seconds: {part}", number(seconds, 1))
    for mode, mean in summary.compile_modes.items():
        table.add_row(f"torch.compile {mode} over eager", number(mean))
    screen.print(table)
    heads = ["eager", "compile over eager", "its best over eager", "compile", "its best"]
    table = Table("over …", "problems", *heads)
    for g in summary.groups:
        compiled = (g.compile_over_eager, g.compile_best_over_eager, g.over_compile, g.over_compile_best)
        table.add_row(g.group, f"{g.timed}/{g.problems}", *map(number, (g.over_eager, *compiled)))
    screen.print(table)
    table = Table("group", "of the roofline", "half generated", "seconds", "evaluations")
    for g in summary.groups:
        medians = (number(g.median_seconds, 1), number(g.median_evaluations, 0))
        table.add_row(g.group, percent(g.roofline_fraction), percent(g.half_generated), *medians)
    screen.print(table)
    if summary.kinds:
        table = Table("kind", "steps", "right", "faster", "median gain", "best")
        for k in summary.kinds:
            table.add_row(
                k.kind, str(k.tried), percent(k.accepted), percent(k.gained), number(k.median_gain), number(k.best_gain)
            )
        screen.print(table)
    for what, which in exceptions_of(summary).items():
        for text in which if what == "not right" else [", ".join(which)]:
            screen.print(f"{what}: {text}", markup=False)


__all__ = ["app", "families", "print_summary", "row_line", "run", "summary", "tables"]
