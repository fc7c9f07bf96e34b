"""Planners: compared on held-out specs, and small measurements of training; see docs/training.md.

    python -m benchmarks.planner list --root KernelBench --json > runs/candidates.jsonl
    python -m benchmarks.planner explore --listed runs/candidates.jsonl --out runs/heldout --lm RL=runs/rl
    python -m benchmarks.planner replay --out runs/heldout --rows runs/planners.jsonl --lm RL=runs/rl
    python -m benchmarks.planner bound --out runs/heldout --rows runs/planners.jsonl --bounds runs/bound.jsonl
    python -m benchmarks.planner live --out runs/heldout --rows runs/planners.jsonl --timed runs/live.jsonl
    python -m benchmarks.planner table runs/planners.jsonl --over RL
    python -m benchmarks.planner networks nets.xz --rows runs/networks.jsonl
    python -m benchmarks.planner bundles trees.xz --rows runs/bundles.jsonl --method RL=lm:runs/rl
    python -m benchmarks.planner picture runs/planners.jsonl docs/planners.svg

`explore` and `live` want the GPU (without one, times are estimated, and every row says so); all else runs on a CPU.
Every step goes on where it was interrupted. The rule by which specs are held out is in `experiments.planners.heldout`.
Lists and stores of KernelBench problems hold the problems' text and stay out of the repository; rows do not, nor
exported trees that leave it out (`qimeng collect export --without-source`).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.planners.replay import EVALUATIONS, Method
from qimeng.errors import QimengError

if TYPE_CHECKING:
    from qimeng.planner.lm.networks import NetworkTask

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

STANDARD = (
    "random=random+best-of-n",
    "heuristic",
    "heuristic+climb",
    "heuristic+best-of-n",
    "heuristic+beam",
    "heuristic+mcts",
    "heuristic+archive",
    "random+mcts",
    "random+archive",
)
"""Compared whatever else is: chance (random trajectories until the budget ends), the heuristic, searches over both."""

SEARCHES = ("greedy", "best-of-n", "beam", "mcts", "archive")
"""What ``--lm`` adds for each language model: alone, and with each search."""

Root = Annotated[Path | None, typer.Option(help="A local checkout of KernelBench; without one, the generated half.")]
Out = Annotated[Path, typer.Option(help="Folder of the trees' store and log.")]
Lm = Annotated[list[str], typer.Option(help="NAME=FOLDER: a trained planner, alone and with each search.")]
Given = Annotated[list[str], typer.Option("--method", help="LABEL=PLANNER+SEARCH, as in 'imitation=lm:runs/im'.")]
Standard = Annotated[bool, typer.Option(help="Compare the methods that need no training as well.")]


@app.command("list")
def list_(
    root: Root = None, as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False
) -> None:
    """The candidates, in their order; which of them count is known once they are explored."""
    for number, drawn in enumerate(_candidates(root)):
        spec = drawn.spec
        about = {"number": number, "family": drawn.family, "name": spec.name, "spec": spec.digest}
        about |= {"dtype": spec.dtype, "mode": spec.mode}
        more = {"seed": drawn.seed, "index": drawn.index, "source": spec.source}
        print(json.dumps({**about, **more}) if as_json else "  ".join(str(v) for v in about.values()), flush=True)


@app.command()
def explore(
    out: Out = Path("runs/heldout"),
    root: Root = None,
    lm: Lm = [],  # noqa: B006  (typer reads the default)
    method: Given = [],  # noqa: B006
    standard: Standard = True,
    evaluations: Annotated[int, typer.Option(help="Programs judged for each candidate.")] = 160,
    seconds_each: Annotated[float, typer.Option(help="Time budget of a candidate.")] = 300.0,
    total_seconds: Annotated[float, typer.Option(help="Time budget of all.")] = 3600.0,
    device: Annotated[str, typer.Option(help="Without a GPU: device to estimate times for.")] = "",
    gpus: Annotated[int, typer.Option(help="GPUs to use; 0 for all that are visible.")] = 0,
    jobs: Annotated[int, typer.Option(help="Candidates explored at once, on each GPU.")] = 2,
    only: Annotated[int, typer.Option(help="Only so many candidates of each half; 0 for all.")] = 0,
    listed: Annotated[
        Path | None, typer.Option(help="What `list --json` wrote: finding the candidates takes a minute.")
    ] = None,
) -> None:
    """Explore the candidates' trees with the methods that are compared, then by chance."""
    from experiments.planners.explore import Plan, explore_all
    from qimeng.bench.gpus import gpu_places, visible_gpus
    from qimeng.cli_collect import row_line
    from qimeng.envs.steps.setup import make_device

    target = make_device(device or None)
    places = gpu_places(gpus, jobs, visible_gpus() if target.measured else ())
    plan = Plan(_methods(lm, method, standard), evaluations, seconds_each, total_seconds, places=places, device=device)
    candidates = _listed(listed, only) if listed else _candidates(root, only)
    explore_all(candidates, plan, out, target.name, lambda row: print(row_line(row), flush=True))


@app.command()
def replay(
    rows: Annotated[Path, typer.Option(help="File of rows; replays that it holds are not made again.")],
    out: Out = Path("runs/heldout"),
    lm: Lm = [],  # noqa: B006
    method: Given = [],  # noqa: B006
    standard: Standard = True,
    evaluations: Annotated[int, typer.Option(help="Of each replay.")] = EVALUATIONS,
    seeds: Annotated[int, typer.Option(help="Seeds of methods that draw.")] = 3,
    jobs: Annotated[int, typer.Option(help="Replays at once; 0 for as many as there are cores.")] = 0,
    total_seconds: Annotated[float, typer.Option(help="Time budget; what is left is done the next time.")] = 86400.0,
    every: Annotated[bool, typer.Option(help="Replay on every explored tree, small or without gain.")] = False,
    trained_on: Annotated[
        list[Path], typer.Option(help="Trees that a planner here was trained on; none may be held out.")
    ] = [],  # noqa: B006
) -> None:
    """Replay every method on the trees that count."""
    from experiments.planners.explore import read_order
    from experiments.planners.heldout import KERNELBENCH, best_known, check_untrained, chosen
    from experiments.planners.jobs import replay_at_once
    from experiments.planners.replay import append_replay, judged, read_replays
    from qimeng.bench.collect import STORE
    from qimeng.bench.environment import environment
    from qimeng.envs.steps.setup import make_device
    from qimeng.planner.data.tree_file import read_trees
    from qimeng.planner.data.tree_store import trees_of
    from qimeng.store import Store

    order = read_order(out)
    with Store(out / STORE) as store:
        explored = list(trees_of(store))
    for path in trained_on:
        check_untrained(read_trees(path), explored)
    trees = explored if every else chosen(explored, order)
    counts = Counter("kernelbench" if t.family == KERNELBENCH else "generated" for t in trees)
    print(f"{len(trees)} of {len(explored)} trees count: {', '.join(f'{n} {half}' for half, n in counts.items())}")
    for tree in trees:
        print(f"  {tree.name}: {judged(tree)} programs judged, best known {best_known(tree):.2f} x eager")
    done = read_replays(rows) if rows.exists() else ()
    found = replay_at_once(
        trees,
        _methods(lm, method, standard),
        environment(make_device("h200")),
        jobs or len(os.sched_getaffinity(0)),
        total_seconds,
        range(seeds),
        evaluations,
        done,
    )
    for row in found:
        append_replay(rows, row)
        print(f"{row.name:<24} {row.method.label:<24} seed {row.seed}: {row.share(evaluations):.0%} of the gain")


@app.command()
def networks(
    trees: Annotated[list[Path], typer.Argument(help="Trees of networks (`qimeng collect export`).")],
    rows: Annotated[Path, typer.Option(help="File of rows; runs that it holds are not made again.")],
    lm: Lm = [],  # noqa: B006
    method: Given = [],  # noqa: B006
    evaluations: Annotated[int, typer.Option(help="Of each run.")] = EVALUATIONS,
    seeds: Annotated[int, typer.Option(help="Seeds of methods that draw.")] = 3,
    only: Annotated[int, typer.Option(help="Only so many networks; 0 for all.")] = 0,
) -> None:
    """What methods find on networks, put together from parts, beside a planner that knows everything."""
    from qimeng.planner.data.tree_file import read_trees
    from qimeng.planner.lm.networks import captured_networks, network_tasks

    found = [tree for path in trees for tree in read_trees(path)]
    _play(
        network_tasks(captured_networks(found[: only or None])),
        rows,
        _methods(lm, method, standard=False),
        evaluations,
        seeds,
    )


@app.command()
def bundles(
    trees: Annotated[list[Path], typer.Argument(help="Trees of small programs.")],
    rows: Annotated[Path, typer.Option(help="File of rows; runs that it holds are not made again.")],
    lm: Lm = [],  # noqa: B006
    method: Given = [],  # noqa: B006
    count: Annotated[int, typer.Option(help="Bundles.")] = 30,
    held_out: Annotated[float, typer.Option(help="Share of the trees that planners were not trained on.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Seed of the planners' training.")] = 0,
    writer: Annotated[str, typer.Option(help="Rows of a trained writer that writes the kernels.")] = "",
    spread: Annotated[float, typer.Option(help="By how much writers differ (WriterProfile.spread).")] = 0.0,
    evaluations: Annotated[int, typer.Option(help="Of each run.")] = EVALUATIONS,
    seeds: Annotated[int, typer.Option(help="Seeds of methods that draw.")] = 3,
) -> None:
    """What methods find on bundles that no planner was trained on (`qimeng train --set bundles.count=N`)."""
    from experiments.planners.networks import CHANCES
    from qimeng.planner.data.tree_file import read_trees
    from qimeng.planner.lm.bundled import Bundles, bundled
    from qimeng.planner.lm.sources import split

    _, held = split([tree for path in trees for tree in read_trees(path)], held_out, seed=seed)
    made = bundled((), held, Bundles(held_out=count, writer=writer, spread=spread), "template", seed)
    given = _methods(lm, method, standard=False)
    _play(made.held_out, rows, (CHANCES, *given) if writer else given, evaluations, seeds)


def _play(tasks: Iterable[NetworkTask], rows: Path, methods: Sequence[Method], evaluations: int, seeds: int) -> None:
    from experiments.planners.networks import METHODS, play
    from experiments.planners.replay import append_replay, read_replays
    from qimeng.bench.environment import environment
    from qimeng.envs.steps.setup import make_device

    done = read_replays(rows) if rows.exists() else ()
    here = environment(make_device("h200"))
    for row in play(tasks, (*METHODS, *methods), here, range(seeds), evaluations, done):
        append_replay(rows, row)
        shares = f"{row.share(10):4.0%} after 10, {row.share(20):4.0%} after 20, {row.share(evaluations):4.0%} at last"
        print(f"{row.name:24} {row.method.label:28} {shares}, {row.coverage:.0%} known", flush=True)


@app.command()
def bound(
    rows: Annotated[Path, typer.Option(help="File of replays: whose trees.")],
    bounds: Annotated[Path, typer.Option(help="File of bounds; it is written anew.")],
    out: Out = Path("runs/heldout"),
) -> None:
    """The most that a planner which knows the trees can have found: the room that they leave."""
    from experiments.planners.bound import bound as bound_of
    from experiments.planners.bound import table
    from experiments.planners.replay import read_replays
    from qimeng.bench.collect import STORE
    from qimeng.bench.environment import environment
    from qimeng.envs.steps.setup import make_device
    from qimeng.planner.data.tree_store import trees_of
    from qimeng.store import Store

    shared = {(row.spec, row.device) for row in read_replays(rows)}
    with Store(out / STORE) as store:
        trees = [t for t in trees_of(store) if (t.conditions.spec, t.conditions.device) in shared]
    found = [bound_of(tree, environment(make_device("h200"))) for tree in trees]
    bounds.write_text("".join(f"{b.to_json()}\n" for b in found))
    print(table(found))


@app.command()
def live(
    rows: Annotated[Path, typer.Option(help="File of replays.")],
    timed: Annotated[Path, typer.Option(help="File of live times; programs that it holds are not timed again.")],
    out: Out = Path("runs/heldout"),
    device: Annotated[str, typer.Option(help="Without a GPU: device to estimate times for.")] = "",
    gpus: Annotated[int, typer.Option(help="GPUs to use; 0 for all that are visible.")] = 0,
    jobs: Annotated[int, typer.Option(help="Specs at once, on each GPU.")] = 2,
    total_seconds: Annotated[float, typer.Option(help="Time budget; what is left is done the next time.")] = 86400.0,
) -> None:
    """Verify and time the programs that the replays ended with, and say what each method is worth live."""
    from experiments.planners.jobs import time_at_once
    from experiments.planners.live import append_live, live_gains, read_live
    from experiments.planners.replay import read_replays
    from qimeng.bench.collect import STORE
    from qimeng.bench.environment import environment
    from qimeng.bench.gpus import gpu_places, visible_gpus
    from qimeng.envs.steps.setup import make_device
    from qimeng.planner.data.tree_store import trees_of
    from qimeng.store import Store

    replays, target = read_replays(rows), make_device(device or None)
    with Store(out / STORE) as store:
        trees = list(trees_of(store))
    done = read_live(timed) if timed.exists() else ()
    places = gpu_places(gpus, jobs, visible_gpus() if target.measured else ())
    for row in time_at_once(trees, replays, environment(target), places, total_seconds, device, done):
        append_live(timed, row)
        print(f"{row.name:<24} {row.program} {row.speedup:.2f} x eager{'' if row.right else f', {row.error}'}")
    kind = "measured" if target.measured else "estimated"
    for method, (mean, count) in live_gains(replays, read_live(timed)).items():
        print(f"{method.label:<24} {mean:.3f} x eager, geometric mean of {count} replays ({kind})")


@app.command()
def table(
    rows: list[Path],
    over: Annotated[str, typer.Option(help="Label of a method to hold against the others.")] = "",
    answered: Annotated[
        int, typer.Option(help="With `over`: leave out specs whose trees answered the other for fewer evaluations.")
    ] = 0,
) -> None:
    """The figures of all files together as Markdown; with `over`, by how much that method is ahead of each other."""
    from experiments.planners.replay import read_replays
    from experiments.planners.summary import advantages, planners

    found = {row.key: row for file in rows for row in read_replays(file)}.values()
    print(planners(list(found)))
    one = next((row.method for row in found if row.method.label == over), None)
    if over and one is None:
        raise QimengError(f"{', '.join(map(str, rows))}: no method called {over!r}")
    for method, figures in (advantages(found, one, answered) if one else {}).items():
        parts = (
            f"after {n}: {100 * f.value:+.0f} ({100 * f.low:+.0f} … {100 * f.high:+.0f})" for n, f in figures.items()
        )
        print(f"{over} over {method.label}, points: {'; '.join(parts)}")


@app.command()
def picture(
    rows: Path,
    out: Path,
    method: Annotated[list[str], typer.Option(help="Only methods of these labels.")] = [],  # noqa: B006
) -> None:
    """The anytime curves."""
    from experiments.planners.picture import draw
    from experiments.planners.replay import read_replays

    draw(read_replays(rows), out, method)


@app.command()
def curves(
    runs: Path,
    out: Path,
    run: Annotated[list[str], typer.Option(help="Only runs of these names.")] = [],  # noqa: B006
) -> None:
    """The learning curves of runs: a line of JSON each, `{"run": NAME, …}` with what is in the run's report.json."""
    from experiments.planners.training_picture import draw_training, read_runs

    draw_training(read_runs(runs), out, run)


@app.command()
def room(
    file: Annotated[Path, typer.Argument(help="Trees that `qimeng collect export` wrote.")],
    rows: Annotated[Path, typer.Option(help="File of rows.")],
    planner: Annotated[str, typer.Option(help="lm, or lm:FOLDER.")] = "lm",
    trees: Annotated[int, typer.Option(help="Only so many, drawn; 0 for all.")] = 0,
    episodes: Annotated[int, typer.Option(help="Of chance and of the policy, on each tree.")] = 4,
    reward: Annotated[list[str], typer.Option(help="Names of rewards; all by default.")] = [],  # noqa: B006
) -> None:
    """What stored trees have to teach: the returns of chance, of a planner, and of its first choices."""
    from experiments.planners.room import room as run

    run(file, rows, planner, trees, episodes, reward)


@app.command()
def scale(seeds: int = 1) -> None:
    """What length normalisation and temperature do to learning, on a fake judge."""
    from experiments.planners.scale import scale as run

    run(seeds)


@app.command()
def ship(
    folder: Annotated[Path, typer.Argument(help="What `qimeng train` wrote.")],
    replays: Annotated[Path | None, typer.Option(help="Rows of replays on held-out trees.")] = None,
    label: Annotated[str, typer.Option(help="The planner's method in them.")] = "RL",
) -> None:
    """Put a trained planner into the package as the one that comes with it."""
    from experiments.planners.ship import ship as run

    run(folder, replays, label)


def _candidates(root: Path | None, only: int = 0):  # type: ignore[no-untyped-def]
    from experiments.planners.heldout import DRAWN, PROBLEMS, generated, kernelbench

    problems = kernelbench(root, only or PROBLEMS) if root is not None else ()
    return [*generated(only or DRAWN), *problems]


def _listed(path: Path, only: int):  # type: ignore[no-untyped-def]
    from experiments.planners.heldout import KERNELBENCH
    from qimeng.planner.data.generate import Drawn
    from qimeng.spec import KernelSpec

    counts, found = Counter[bool](), []
    for line in path.read_text().splitlines():
        about = json.loads(line)
        spec = KernelSpec.from_source(about["source"], about["name"], dtype=about["dtype"], mode=about["mode"])
        if spec.digest != about["spec"]:
            raise QimengError(f"{path}: {about['name']} is another spec in this version; write the list anew")
        half = about["family"] == KERNELBENCH
        counts[half] += 1
        if not only or counts[half] <= only:
            found.append(Drawn(spec, about["family"], about["seed"], about["index"]))
    return found


def _methods(lm: list[str], given: list[str], standard: bool) -> tuple[Method, ...]:
    texts = []
    for pair in lm:
        name, equals, folder = pair.partition("=")
        if not equals:
            raise QimengError(f"write --lm NAME=FOLDER, not {pair!r}")
        texts += [f"{name}{'' if s == 'greedy' else ', ' + s}=lm:{folder}+{s}" for s in SEARCHES]
    texts += [*given, *(STANDARD if standard else ())]
    try:
        return tuple(Method.parse(text) for text in texts)
    except ValueError as error:
        raise QimengError(str(error)) from None


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        app()
    except QimengError as error:
        raise SystemExit(f"planner: {error}") from None
