"""The command line of training data: `qimeng collect`, and its commands.

Deals in arguments and printing. Knows nothing about how specs are drawn, explored or exported.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qimeng.cli_cluster import Cluster, Generation, cluster_tasks, device_there
from qimeng.cli_console import console, resumable
from qimeng.cli_names import number
from qimeng.cluster.turns import BACKGROUND
from qimeng.errors import QimengError

if TYPE_CHECKING:
    from qimeng.bench.explore import Explored

app = typer.Typer(help="Training data: explore generated specs; merge, export, and compare with a benchmark.")


@app.callback(invoke_without_command=True)
def collect(
    context: typer.Context,
    out: Annotated[
        Path, typer.Option(help="Folder for the store and the log. An interrupted collection resumes.", file_okay=False)
    ] = Path("runs/collection"),
    specs: Annotated[int, typer.Option(min=1, help="Number of specs.")] = 300,
    seed: Annotated[int, typer.Option(help="Seed of the sequence of specs.")] = 0,
    first: Annotated[int, typer.Option(min=0, help="First spec of the sequence. Give each machine its own range.")] = 0,
    least_mib: Annotated[float, typer.Option(callback=number, help="Minimum MiB of inputs and parameters.")] = 1.0,
    most_mib: Annotated[float, typer.Option(callback=number, help="Maximum MiB of inputs and parameters.")] = 1024.0,
    families: Annotated[str, typer.Option(help="Only these families of specs, comma-separated.")] = "",
    suite: Annotated[
        str, typer.Option(help="Explore these specs instead of drawn ones: folder:FOLDER, module:NAME, or a package's.")
    ] = "",
    only: Annotated[str, typer.Option(help="With --suite: only these ids or patterns, comma-separated.")] = "",
    evaluations: Annotated[int, typer.Option(min=0, help="Programs judged for each spec.")] = 24,
    seconds_each: Annotated[float, typer.Option(callback=number, help="Time budget of a spec.")] = 60.0,
    total_seconds: Annotated[float, typer.Option(callback=number, help="Time budget of the collection.")] = 3600.0,
    overhead_seconds: Annotated[
        float, typer.Option(callback=number, help="Extra seconds that a spec may take beyond its budget.")
    ] = 60.0,
    device: Annotated[str, typer.Option(help="Without a GPU: the device to estimate times for.")] = "",
    coder: Annotated[str, typer.Option(help="Name of the coder.")] = "template",
    gpus: Annotated[int, typer.Option(min=0, help="GPUs to use; 0 for all that are visible.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Specs explored at the same time on each GPU.")] = 2,
    cluster: Cluster = "",
    generation: Generation = "",
    retry: Annotated[bool, typer.Option(help="Try specs again that failed before.")] = False,
) -> None:
    """Explore generated specs, or a suite's, with several planners, and store everything that was tried."""
    if context.invoked_subcommand is not None:
        return
    from functools import partial

    from qimeng.bench.collect import LOG, STORE, Plan, explore_one, logged_specs, specs_of
    from qimeng.bench.collect import collect as run
    from qimeng.bench.gpus import gpu_places, visible_gpus
    from qimeng.bench.suites import suite_named
    from qimeng.cluster.collecting import explore_away, merge_files
    from qimeng.envs.steps.setup import make_coder, make_device
    from qimeng.planner.data.generate import Bytes
    from qimeng.store import Store

    if only and not suite:
        raise QimengError("--only picks among the specs of a suite: give --suite too, or --families for drawn specs")
    try:
        make_coder(coder)
    except ValueError as error:
        raise QimengError(str(error)) from None
    pool = None
    if cluster:
        pool = cluster_tasks(cluster, generation, jobs, gpus, BACKGROUND, on_files=partial(merge_files, out / STORE))
    target = device_there(pool, device) if pool else make_device(device or None)
    plan = Plan(
        seed,
        specs,
        first,
        Bytes(round(least_mib * 2**20), round(most_mib * 2**20)),
        tuple(filter(None, families.split(","))),
        evaluations,
        seconds_each,
        total_seconds,
        overhead_seconds,
        () if pool else gpu_places(gpus, jobs, visible_gpus() if target.measured else ()),
        retry,
        specs_of(suite_named(suite), only) if suite else (),
    )
    screen = console()
    out.mkdir(parents=True, exist_ok=True)
    explored: Callable[..., Explored] = explore_away if pool else partial(explore_one, store=out / STORE)
    work = partial(explored, seconds=seconds_each, device=device, coder=coder)
    with resumable(lambda: f"{out} keeps {logged_specs(out / LOG)} explored specs"):
        rows = run(plan, out, work, target.name, lambda row: screen.print(row_line(row), markup=False), pool)
    with Store(out / STORE) as store:
        counts = store.counts()
    stored = ", ".join(f"{n} {table}" for table, n in counts.items())
    screen.print(f"{len(rows)} specs explored now, {logged_specs(out / LOG)} in all; the store holds {stored}")


@app.command()
def merge(
    into: Annotated[Path, typer.Argument(help="Folder of the collection to add to.")],
    sources: Annotated[list[Path], typer.Argument(help="Folders of other collections, or exported files.")],
    listed: Annotated[
        Path | None,
        typer.Option(help="JSON lines with `spec` (a digest) and `source`, for trees exported without source."),
    ] = None,
) -> None:
    """Add the collections of other machines, or exported files, to this one. Trees of older versions are renamed."""
    from qimeng.bench.collect import merge as run
    from qimeng.bench.collect import read_texts

    added = run(into, sources, read_texts(listed) if listed else {}, lambda tree, error: print(f"left out: {error}"))
    print(f"added to {into}: " + ", ".join(f"{n} {table}" for table, n in added.items()))


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="Folder of a collection.")],
    out: Annotated[Path, typer.Argument(help="File to write, such as trees.jsonl.xz.")],
    device: Annotated[str, typer.Option(help="Only trees of this device. Default: all.")] = "",
    without_source: Annotated[
        list[str], typer.Option(help="Leave out the source of this family's specs, for example for licence reasons.")
    ] = [],  # noqa: B006
) -> None:
    """Write the trees of a collection to one small file, for training and CI."""
    from qimeng.bench.collect import STORE
    from qimeng.device import row_name
    from qimeng.planner.data.tree_file import write_trees
    from qimeng.store import Store

    if not (folder / STORE).is_file():
        raise QimengError(f"{folder} holds no collection ({STORE} is missing)")
    with Store(folder / STORE) as store:
        w = write_trees(store, out, lambda tree: device in ("", row_name(tree.conditions.device)), without_source)
    print(
        f"{out}: {w.specs} specs, {w.trees} trees, {w.programs} programs, {w.evaluations} evaluations, {w.edges} "
        f"steps, {w.size / 2**20:.2f} MiB"
    )


@app.command()
def compose(
    trees: Annotated[list[Path], typer.Argument(help="Trees of networks of one device (`qimeng collect export`).")],
    out: Annotated[Path, typer.Option(help="File to write, such as composed.xz.")],
    specs: Annotated[int, typer.Option(min=1, help="Number of networks to draw.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the sequence of networks.")] = 1,
    least_mib: Annotated[float, typer.Option(callback=number, help="Minimum MiB of inputs and parameters.")] = 1.0,
    most_mib: Annotated[float, typer.Option(callback=number, help="Maximum MiB of inputs and parameters.")] = 1024.0,
    families: Annotated[str, typer.Option(help="Families of networks, comma-separated. Default: all.")] = "",
    least_known: Annotated[
        float, typer.Option(callback=number, help="Share of a network's time that explored regions take at least.")
    ] = 0.95,
) -> None:
    """Draw other networks whose regions were all explored. They need no GPU: their times are sums."""
    from qimeng.planner.data.composed import compositions
    from qimeng.planner.data.generate import NETWORKS, Bytes, draw_many
    from qimeng.planner.data.tree_file import put_trees, read_trees
    from qimeng.planner.lm.networks import captured_networks

    sizes = Bytes(round(least_mib * 2**20), round(most_mib * 2**20))
    wanted = tuple(filter(None, families.split(","))) or tuple(NETWORKS)
    known = captured_networks(tree for path in trees for tree in read_trees(path))
    if not known:
        raise QimengError(f"no tree of {', '.join(map(str, trees))} begins with the program that this version makes")
    if len({tree.conditions.device for tree, _ in known}) > 1:
        raise QimengError("the trees are of several devices: compose those of one (`qimeng collect export --device`)")
    found = []
    for one in compositions(known, draw_many(seed, specs, sizes=sizes, families=wanted)):
        kept = one.tree is not None and one.share >= least_known
        print(f"{one.drawn.spec.name:<24} {one.share:4.0%} known{'' if kept else ', left out'}", flush=True)
        found += [one.tree] if one.tree is not None and kept else []
    if not found:
        raise QimengError("none is known well enough: explore more regions, or lower --least-known")
    print(f"{out}: {put_trees(found, out).trees} networks")


@app.command()
def dataset(
    sources: Annotated[list[Path], typer.Argument(help="Folders of collections, or exported files.")],
    out: Annotated[Path, typer.Option(help="Folder to write.", file_okay=False)] = Path("runs/dataset"),
    licence: Annotated[str, typer.Option(help="Of specs and patches, as Hugging Face's hub calls it.")] = "apache-2.0",
) -> None:
    """Write trees, patches and verdicts as a dataset with a card, without any benchmark's problem."""
    from qimeng.planner.data.dataset import export_dataset, read_sources

    found = export_dataset(read_sources(sources), out, licence)
    rows = ", ".join(f"{n} {name}" for name, n in found.rows.items())
    print(f"{out}: {rows}; load it with datasets.load_dataset({str(out)!r}, 'steps')")
    print(f"left out: {found.reserved} trees of benchmarks' problems")
    for why, n in sorted(found.unknown.items()):
        print(f"left out: {n} trees, because {why}")


@app.command()
def overlaps(
    problems: Annotated[Path, typer.Argument(help="Folder of problem files, searched recursively.")],
    specs: Annotated[int, typer.Option(help="Number of specs.")] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of the sequence of specs.")] = 0,
    first: Annotated[int, typer.Option(help="First spec of the sequence.")] = 0,
) -> None:
    """List generated specs that compute the same as a problem. Exit with 1 if one also has the same shapes."""
    from qimeng.planner.data.generate import draw_many
    from qimeng.planner.data.overlap import overlaps as compare
    from qimeng.planner.data.overlap import signatures_of

    found = compare({d.spec.name: signatures_of(d.spec) for d in draw_many(seed, specs, first)}, problems)
    print(f"{specs} specs, {found.problems} problems; {len(found.not_captured)} more problems could not be captured")
    print(f"same operators and shapes: {len(found.same)}; same operators only: {len(found.alike)}")
    for spec, problem in found.alike:
        print(f"  {spec} and {problem}")
    if found.same:
        raise typer.Exit(1)


def row_line(row: Explored) -> str:
    """One line about an explored spec."""
    head = f"{row.name:<24}"
    if row.error is not None:
        return f"{head} FAILED {row.error[:120]}"
    if row.stopped == "known":
        return f"{head} has no region that is not explored elsewhere"
    gain = f"best {row.gain:.2f} x eager" if row.gain else "no times of eager"
    estimated = " (estimated)" if row.estimated else ""
    return (
        f"{head} {row.evaluations} evaluations, {row.right} right, {row.programs} programs, {gain}{estimated}, "
        f"{row.seconds:.0f} s, {row.stopped}"
    )


__all__ = ["app", "collect", "compose", "dataset", "export", "merge", "overlaps", "row_line"]
