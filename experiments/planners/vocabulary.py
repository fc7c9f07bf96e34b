"""Does a planner learn when to use actions that it never saw: before and after an adaptation on few evaluations.

    python -m experiments.planners.vocabulary all OUT --seconds 520

or step by step:

    python -m experiments.planners.vocabulary explore OUT training --seconds 150
    python -m experiments.planners.vocabulary adapt-all OUT --how short,longer --seeds 3
    python -m experiments.planners.vocabulary explore OUT heldout --seconds 240
    python -m experiments.planners.vocabulary replay OUT --rows OUT/rows.jsonl
    python -m experiments.planners.vocabulary replay OUT --rows OUT/ordinary.jsonl --trees heldout_h100.xz --alone
    python -m experiments.planners.vocabulary table OUT/rows.jsonl

`explore` fills two stores: the trees of the specs to train on, `TRAINED` evaluations each, and those of the held-out
ones, explored by the planner in the package, the adapted ones, the heuristic and chance, so that the choices of each
have answers. `adapt` draws trees that hold at most `BUDGET` evaluations together, those of trees that validate it
included, and runs what `qimeng adapt` runs. `replay` adds a row for each planner, search and held-out tree
(`experiments.planners.replay`); on ordinary trees it shows whether the planner got worse there. Every step goes on
where it was interrupted; nothing is judged twice. Without a GPU, ``--device h100`` estimates times. Deals in steps and
folders.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from experiments.planners.replay import EVALUATIONS, SEEDS, Method
from experiments.planners.vocabulary_specs import HELD_OUT, SMALL, TRAINING, drawn
from qimeng.errors import QimengError

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

BUDGET = 300
"""Evaluations that an adaptation may see."""

TRAINED = 12
"""Evaluations of each spec to train on."""

TREES, HELD, PLANNERS = "training", "heldout", "planners"
"""Folders of the two explorations and of the adapted planners."""

HOW: dict[str, tuple[str, ...]] = {
    "short": ("ppo.steps=1024",),
    "imitation": ("ppo.steps=0",),
    "longer": ("ppo.steps=0", "imitation.epochs=8", "held_out=0"),
    "guided": ("ppo.steps=0", "imitation.epochs=8", "held_out=0", "teacher.trust=1"),
    "unguided": ("ppo.steps=0", "imitation.epochs=8", "held_out=0", "teacher.guide="),
}
"""Ways to adapt: settings beside those of `qimeng adapt`."""

BEFORE, HEURISTIC, CHANCE = "before=lm", "heuristic", "random=random+best-of-n"
"""What adapted planners are held against."""

Out = Annotated[Path, typer.Argument(help="Folder of stores, planners and trees.")]
Device = Annotated[str, typer.Option(help="Without a GPU: device to estimate times for.")]
Planners = Annotated[str, typer.Option(help="Folder in OUT of the adapted planners.")]
Small = Annotated[bool, typer.Option(help="A few small specs, to try the steps.")]


@app.command("list")
def list_(small: Small = False) -> None:
    """The specs, those to train on first."""
    for half in (SMALL,) if small else (TRAINING, HELD_OUT):
        for one in drawn(half):
            print("  ".join((half.name, one.spec.name, one.spec.digest, one.spec.dtype, one.spec.weights)))


@app.command()
def explore(
    out: Out,
    which: Annotated[str, typer.Argument(help=f"{TREES} or {HELD}.")],
    device: Device = "",
    planners: Planners = PLANNERS,
    evaluations: Annotated[int, typer.Option(help="Programs judged for each held-out spec; 0 for as many as fit.")] = 0,
    seconds: Annotated[float, typer.Option(help="Time budget of all.")] = 240.0,
    gpus: Annotated[int, typer.Option(help="GPUs to use; 0 for all that are visible.")] = 0,
    jobs: Annotated[int, typer.Option(help="Specs explored at once, on each GPU.")] = 5,
    small: Small = False,
) -> None:
    """Explore the trees of one half."""
    from experiments.planners.explore import Plan, explore_all
    from qimeng.bench.gpus import gpu_places, visible_gpus
    from qimeng.cli_collect import row_line
    from qimeng.envs.steps.setup import make_device

    began, target = time.monotonic(), make_device(device or None)
    places = gpu_places(gpus, jobs, visible_gpus() if target.measured else ())
    if which == TREES:
        half, asked = TRAINING, TRAINED
        methods = tuple(map(Method.parse, trained_by()))
    elif which == HELD:
        half, methods = HELD_OUT, tuple(map(Method.parse, methods_of(out / planners)))
        runs = sum(len(SEEDS) if m.draws else 1 for m in methods)
        asked = evaluations or round(1.5 * EVALUATIONS * runs)  # the methods get two thirds
    else:
        raise QimengError(f"explore {TREES} or {HELD}, not {which!r}")
    specs = drawn(SMALL if small else half)
    left = seconds - (time.monotonic() - began)
    each = left / math.ceil(len(specs) / sum(p.slots for p in places))
    plan = Plan(methods, asked, each, left, overhead_seconds=25.0, places=places, device=device)
    explore_all(specs, plan, out / which, target.name, lambda row: print(row_line(row), flush=True))


@app.command()
def adapt(
    out: Out,
    how: Annotated[str, typer.Option(help=f"One of {', '.join(HOW)}.")] = "short",
    seed: Annotated[int, typer.Option(help="Of the trees that are drawn, and of training.")] = 0,
    budget: Annotated[int, typer.Option(help="Evaluations that the trees hold together.")] = BUDGET,
    planner: Annotated[str, typer.Option(help="Folder of the planner to adapt; that of the package by default.")] = "",
    planners: Planners = PLANNERS,
    seconds: Annotated[float, typer.Option(help="Seconds after which PPO ends.")] = 240.0,
) -> None:
    """Adapt the planner to trees that hold at most so many evaluations; those that validate it are among them."""
    from qimeng.bench.collect import STORE
    from qimeng.cli_train import progress_line
    from qimeng.planner.data.tree_file import put_trees
    from qimeng.planner.data.tree_store import trees_of
    from qimeng.planner.lm.adapt import adaptation_config, run_adaptation
    from qimeng.planner.lm.planner import SHIPPED
    from qimeng.planner.lm.sources import within
    from qimeng.store import Store

    if how not in HOW:
        raise QimengError(f"no such way to adapt: {how!r}; known: {', '.join(HOW)}")
    folder = folder_of(out / planners, how, seed)
    if (folder / "planner.json").is_file():
        print(f"{folder} is done")
        return
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "trees.xz"
    if not file.is_file():
        with Store(out / TREES / STORE) as store:
            trees = within(sorted(trees_of(store), key=lambda t: t.name), budget, seed)
        put_trees(trees, file)
        print(f"{len(trees)} trees with {sum(len(t.evaluations) for t in trees)} evaluations", flush=True)
    start = [f'start="{planner or SHIPPED}"', f'trees=["{file}"]', "lora=8", f"seed={seed}", *HOW[how]]

    def said(phase: str, row: object) -> None:
        print(progress_line(phase, row), flush=True)  # type: ignore[arg-type]

    found = run_adaptation(adaptation_config(None, start), folder, 0, said, seconds)
    for part in (*folder.glob("*.pt"), folder / "imitated"):  # what a killed run goes on from: larger than the planner
        shutil.rmtree(part, ignore_errors=True) if part.is_dir() else part.unlink(missing_ok=True)
    print(found.sentence())


@app.command("adapt-all")
def adapt_all(
    out: Out,
    how: Annotated[str, typer.Option(help="Ways, by commas.")] = "short,longer",
    seeds: Annotated[int, typer.Option(help="Seeds of each.")] = 3,
    planners: Planners = PLANNERS,
    gpus: Annotated[int, typer.Option(help="GPUs to share out; 0 for all that are visible.")] = 0,
    seconds: Annotated[float, typer.Option(help="Seconds after which PPO ends.")] = 240.0,
) -> None:
    """`adapt` in every way from every seed, each a process, as many at once as there are GPUs, or one on a CPU."""
    from concurrent.futures import ThreadPoolExecutor

    from qimeng.bench.gpus import visible_gpus

    names = visible_gpus()[: gpus or None]
    waiting = [(way, seed) for seed in range(seeds) for way in how.split(",")]

    def run(number: int) -> int:
        way, seed = waiting[number]
        command = [sys.executable, "-m", "experiments.planners.vocabulary", "adapt", str(out)]
        command += ["--how", way, "--seed", str(seed), "--seconds", str(seconds), "--planners", planners]
        where = {"CUDA_VISIBLE_DEVICES": names[number % len(names)]} if names else {}
        log = folder_of(out / planners, way, seed).with_suffix(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            return subprocess.run(
                command, env={**os.environ, **where}, stdout=file, stderr=file, check=False
            ).returncode

    with ThreadPoolExecutor(max(1, 3 * len(names))) as pool:
        for (way, seed), code in zip(waiting, pool.map(run, range(len(waiting))), strict=True):
            print(f"{way} {seed}: {'done' if code == 0 else f'failed ({code}), see its log'}", flush=True)


@app.command()
def replay(
    out: Out,
    rows: Annotated[Path, typer.Option(help="File of rows; replays that it holds are not made again.")],
    jobs: Annotated[int, typer.Option(help="Replays at once; 0 for as many as there are cores.")] = 0,
    seconds: Annotated[float, typer.Option(help="Time budget; what is left is done the next time.")] = 86400.0,
    planners: Planners = PLANNERS,
    alone: Annotated[bool, typer.Option(help="Single trajectories only, no search.")] = False,
    trees: Annotated[Path | None, typer.Option(help="Exported trees, instead of the held-out ones.")] = None,
) -> None:
    """Replay the planner before and after, the heuristic and chance on the held-out trees, or on others."""
    from experiments.planners.heldout import best_known
    from experiments.planners.jobs import replay_at_once
    from experiments.planners.replay import append_replay, judged, read_replays
    from qimeng.bench.collect import STORE
    from qimeng.bench.environment import environment
    from qimeng.envs.steps.setup import make_device
    from qimeng.planner.data.tree_file import read_trees
    from qimeng.planner.data.tree_store import trees_of
    from qimeng.planner.lm.replay import GAIN
    from qimeng.store import Store

    if trees is None:
        with Store(out / HELD / STORE) as store:
            explored = sorted(trees_of(store), key=lambda t: t.name)
    else:
        explored = [t for t in read_trees(trees) if t.source]
    worth = [t for t in explored if best_known(t) >= GAIN]
    for tree in explored:
        print(f"  {tree.name}: {judged(tree)} programs judged, best known {best_known(tree):.2f} x eager")
    print(f"{len(worth)} of {len(explored)} trees have a gain of {GAIN} and count")
    methods = [m for m in map(Method.parse, methods_of(out / planners)) if not alone or m.search == "greedy"]
    done = read_replays(rows) if rows.exists() else ()
    where = environment(make_device(worth[0].conditions.device.removesuffix("(here)")))
    cores = jobs or len(os.sched_getaffinity(0))
    for row in replay_at_once(worth, methods, where, cores, seconds, SEEDS, EVALUATIONS, done):
        append_replay(rows, row)
        print(f"{row.name:<24} {row.method.label:<24} seed {row.seed}: {row.share(10):.0%} after 10", flush=True)


@app.command()
def table(rows: Path) -> None:
    """Rows as Markdown: training seeds as one method, and how far each is ahead of the planner before."""
    from experiments.planners.replay import read_replays
    from experiments.planners.summary import planners_pooled

    print(planners_pooled(read_replays(rows)))


@app.command("all")
def all_(
    out: Out,
    device: Device = "",
    how: Annotated[str, typer.Option(help="Ways to adapt, by commas.")] = "longer,short",
    seconds: Annotated[float, typer.Option(help="Time budget; called again, it goes on.")] = 520.0,
    small: Small = False,
) -> None:
    """Every step in its share of the time; what one leaves, later ones have. Replays are made anew on all trees."""
    began, rows = time.monotonic(), out / "rows.jsonl"
    rows.unlink(missing_ok=True)  # trees that have grown since answer other methods than before
    more = [*(["--device", device] if device else []), *(["--small"] if small else [])]
    steps: list[tuple[float, list[str]]] = [
        (0.25, ["explore", str(out), TREES, *more]),
        (0.50, ["adapt-all", str(out), "--how", how]),
        (0.80, ["explore", str(out), HELD, *more]),
        (1.00, ["replay", str(out), "--rows", str(rows), "--alone"]),
    ]
    for until, words in steps:
        left = until * seconds - (time.monotonic() - began)
        given = left / 2 if words[0] == "adapt-all" else left - 25  # imitation comes before PPO; a judge ends in time
        code = run_step([*words, "--seconds", f"{max(given, 1.0):.0f}"], left)
        print(f"{words[0]} {words[2]}: {'done' if code == 0 else f'ended with {code}'}", flush=True)


def run_step(words: list[str], seconds: float) -> int:
    """The exit code of a command of this script, which is ended with all its processes after so many seconds."""
    command = [sys.executable, "-m", "experiments.planners.vocabulary", *words]
    with subprocess.Popen(command, start_new_session=True) as child:
        try:
            return child.wait(max(seconds, 1.0))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGTERM)
            return child.wait()


def trained_by() -> tuple[str, ...]:
    """Who explores the trees to train on, before chance: the rule, and the planner that is to be adapted."""
    return ("heuristic", "lm")


def folder_of(planners: Path, how: str, seed: int) -> Path:
    """Where the planner lies that was adapted so."""
    return planners / f"{how}-{seed}"


def methods_of(planners: Path) -> tuple[str, ...]:
    """What is compared, single trajectories before searches, so that those have answers where time is short."""
    found = sorted(p.parent for p in planners.glob("*/planner.json"))
    alone = [BEFORE, HEURISTIC, *(f"{folder.name}=lm:{folder}" for folder in found)]
    searches = ["before, best-of-n=lm+best-of-n", *(f"{f.name}, best-of-n=lm:{f}+best-of-n" for f in found)]
    return (*alone, CHANCE, *searches)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        app()
    except QimengError as error:
        raise SystemExit(f"vocabulary: {error}") from None
