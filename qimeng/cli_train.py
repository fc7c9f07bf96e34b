"""The command line of trained planners: `qimeng train` and `qimeng adapt`.

Deals in arguments and in showing progress. Knows nothing about how planners are trained.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from qimeng.cli_cluster import Cluster, Generation
from qimeng.cli_console import console, resumable
from qimeng.cli_names import number
from qimeng.errors import QimengError

Config = Annotated[Path | None, typer.Option(help="TOML file of settings. `--explain` prints one with all settings.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="A setting as NAME=VALUE, such as ppo.steps=2048. May be repeated.")
]

SHOWN = ("loss", "accuracy", "explained", "reward", "length", "score")
SHARES = {
    "share at 5": "after 5 evaluations",
    "share at 10": "after 10 evaluations",
    "greedy": "by the greedy trajectory",
}
"""Figures shown in a line of progress, if a phase has them."""


def train(
    trees: Annotated[list[Path] | None, typer.Argument(help="Files that `qimeng collect export` wrote.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the run. An interrupted run resumes.", file_okay=False)] = Path(
        "runs/planner"
    ),
    config: Config = None,
    overrides: Overrides = None,
    seconds: Annotated[
        float, typer.Option(callback=number, help="Seconds after which PPO, and so the run, ends; 0 for no limit.")
    ] = 0.0,
    cluster: Cluster = "",
    generation: Generation = "",
    explain: Annotated[
        bool, typer.Option("--explain", help="Print all settings with their meaning, and exit.")
    ] = False,
) -> None:
    """Train a planner: imitation of the best branches of stored trees, then PPO.

    With --cluster, the model is trained here, and a cluster's GPUs judge (answers = "live" or "mixed").
    """
    from qimeng.planner.lm.config import load_config
    from qimeng.planner.lm.run import Run, kept, prepare
    from qimeng.planner.lm.settings import to_toml
    from qimeng.planner.lm.sources import gather

    settings = load_config(config, [*_named(trees), *(overrides or ())])
    if explain:
        print(to_toml(settings, explained=True), end="")
        return
    if cluster and settings.answers == "stored":
        raise QimengError(
            "with answers = 'stored' training asks no judge, so it has no use for a cluster: leave --cluster out, or "
            "set answers to 'live' or 'mixed'. `qimeng collect --cluster` makes trees on a cluster"
        )
    prepare(out, settings)
    screen, began = console(), time.monotonic()
    elsewhere = None
    if cluster:
        from qimeng.cluster.judging import judges_of

        elsewhere = judges_of(cluster, generation, settings.device, settings.coder)
    with resumable(lambda: kept(out)):
        screen.print("reading trees, capturing their specs", markup=False)
        sources = gather(settings, out, elsewhere=elsewhere)
        left = seconds - (time.monotonic() - began) if seconds else math.inf
        found = f"{sources.data}; times: {sources.times}; {len(sources.held_out)} trees held out"
        screen.print(found, markup=False, soft_wrap=True)
        try:
            with TrainDisplay(screen, settings.ppo.steps) as display:
                report = Run(settings, out, sources, display, left)()
        finally:
            sources.close()
    print_shares(screen, report.shares, report.times)
    screen.print(f"written: {out}; use it as planner='lm:{out}'", markup=False)


def adapt(
    device: Annotated[str, typer.Option(help="The new device: the device of the trees, or this machine's.")],
    planner: Annotated[Path, typer.Argument(help="Folder of the planner to adapt, or lm for the package's own.")],
    trees: Annotated[list[Path] | None, typer.Argument(help="Stored trees of the device.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the adapted planner.", file_okay=False)] = Path("runs/adapted"),
    evaluations: Annotated[int, typer.Option(min=1, help="Budget: number of programs evaluated.")] = 300,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the LoRA adapter.")] = 8,
    seconds: Annotated[
        float,
        typer.Option(callback=number, help="Seconds after which PPO, and so the adaptation, ends; 0 for no limit."),
    ] = 0.0,
    config: Config = None,
    overrides: Overrides = None,
) -> None:
    """Adapt a planner to a device or to new actions: train a LoRA adapter and the value head on few evaluations."""
    from qimeng.planner.lm.adapt import Adaptation, adaptation_config, run_adaptation
    from qimeng.planner.lm.planner import SHIPPED
    from qimeng.planner.lm.run import kept
    from qimeng.planner.lm.settings import override

    start = SHIPPED if str(planner) == "lm" else planner
    given = [override("device", device), override("start", str(start)), override("lora", rank), *_named(trees)]
    settings = adaptation_config(config, [*given, *(overrides or ())])
    screen = console()
    with resumable(lambda: kept(out)), TrainDisplay(screen, settings.ppo.steps) as display:
        found: Adaptation = run_adaptation(settings, out, evaluations, display, seconds or math.inf)
    print_shares(screen, found.shares, found.times)
    screen.print(found.sentence(), markup=False)
    screen.print(f"written: {out}; use it as planner='lm:{out}'", markup=False)


def _named(trees: list[Path] | None) -> list[str]:
    """The files as an override; empty if no file is named, so that the settings' own files are used."""
    from qimeng.planner.lm.settings import override

    if not trees:
        return []
    missing = [p for p in trees if not p.is_file()]
    if missing:
        raise QimengError(f"{missing[0]} is not a file; pass a file that `qimeng collect export` wrote")
    return [override("trees", tuple(map(str, trees)))]


def print_shares(screen: Console, shares: Mapping[str, Mapping[str, float]], times: str) -> None:
    """A table: which share of the best-known gain each planner reached."""
    from rich.table import Table

    if not shares:
        return
    names = list(next(iter(shares.values())))
    table = Table("planner", *names, title=f"share of the best-known log-gain on held-out trees ({times})")
    for who, found in shares.items():
        table.add_row(who, *(f"{found[name]:.0%}" for name in names))
    screen.print(table)


class TrainDisplay:
    """Callback for a run's progress, and a context manager around it.

    A terminal shows a progress bar of PPO's steps, and a line for each validation. Other outputs get one line a row.

    Args:
        screen: where to print.
        steps: of PPO.
    """

    def __init__(self, screen: Console, steps: int):
        self.screen = screen
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
            console=screen, transient=True, disable=not screen.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("warm start", total=steps or None)

    def __enter__(self) -> TrainDisplay:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, phase: str, row: Mapping[str, float]) -> None:
        """Show `row`."""
        line = progress_line(phase, row)
        if phase == "ppo" and self.screen.is_terminal:
            self._bar.update(self._task, completed=row["steps"], description=line)
            return
        self.screen.print(line, markup=False, soft_wrap=True)


def progress_line(phase: str, row: Mapping[str, float]) -> str:
    """The figures that matter.

    >>> progress_line("ppo", {"steps": 128, "reward": 1.25, "length": 7.0, "evaluations": 40, "coverage": 0.125})
    'ppo 128: reward 1.25, length 7, 40 evaluations, coverage 12%'
    >>> progress_line("imitation", {"epoch": 0.25, "loss": 0.5})
    'imitation 0.25: loss 0.5'
    >>> progress_line("chance", {"share at 5": 0.5, "share at 10": 0.75, "greedy": 0.5})
    'chance: of the best-known gain 50% after 5 evaluations, 75% after 10 evaluations, 50% by the greedy trajectory'
    """
    number = row.get("steps", row.get("epoch"))
    head = phase if number is None else f"{phase} {f'{number:.2f}'.rstrip('0').rstrip('.')}"
    shown = [f"{name} {row[name]:.3g}" for name in SHOWN if name in row]
    shares = [f"{row[name]:.0%} {words}" for name, words in SHARES.items() if name in row]
    if shares:
        shown.append(f"of the best-known gain {', '.join(shares)}")
    if row.get("evaluations"):
        shown.append(f"{row['evaluations']:.0f} evaluations")
    if row.get("coverage", 1.0) < 1:
        shown.append(f"coverage {row['coverage']:.0%}")
    return f"{head}: {', '.join(shown)}"


__all__ = ["TrainDisplay", "adapt", "print_shares", "progress_line", "train"]
