"""The command line of clusters: the option `--cluster` of other commands, and `qimeng cluster status`.

Deals in arguments and printing. Knows nothing about how work gets to a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from qimeng.cli_console import console
from qimeng.cli_progress import ProgressDisplay

if TYPE_CHECKING:
    from qimeng.cluster.tasks import ClusterTasks
    from qimeng.device import Device
    from qimeng.envs.steps.result import Result
    from qimeng.envs.steps.state import Progress
    from qimeng.spec import KernelSpec

app = typer.Typer(help="A cluster of GPUs (Ray): what it has and does.", no_args_is_help=True)

Cluster = Annotated[
    str,
    typer.Option(
        "--cluster",
        help="Run on a cluster's GPUs: HOST:PORT of a running one, auto, or local. Needs the extra `cluster`.",
    ),
]
Generation = Annotated[
    str, typer.Option(help="With --cluster: the generation of the GPUs to use. Default: the one with the most GPUs.")
]


def cluster_tasks(
    address: str,
    generation: str,
    jobs: int,
    gpus: int,
    priority: int,
    on_files: Callable[[Mapping[str, bytes]], None] = lambda files: None,
    on_note: Callable[[Any], None] | None = None,
) -> ClusterTasks:
    """The pool of a command that has `--cluster`.

    Raises:
        ClusterError: there is no such cluster, or `--gpus` is given as well.
    """
    from qimeng.cluster.fleet import Fleet
    from qimeng.cluster.gpus import ClusterError
    from qimeng.cluster.tasks import ClusterTasks

    if gpus:
        raise ClusterError("--gpus counts the GPUs of this machine; with --cluster, all of one --generation are used")
    return ClusterTasks(Fleet(address, generation, priority), jobs, on_files, on_note=on_note)


def device_there(pool: ClusterTasks, device: str) -> Device:
    """The device of the cluster's GPUs, or the one to estimate for."""
    from qimeng.envs.steps.setup import make_device

    return pool.ask(partial(make_device, device or None))


def on_cluster(
    address: str, generation: str, spec: KernelSpec, options: dict[str, Any], folder: Path, screen: Console
) -> Result:
    """What `qimeng optimize --cluster` found, from the folder that its files were written to.

    An interrupted run leaves its store there, which the same command goes on from.

    Raises:
        ClusterError: there is no such cluster, or the optimization failed there.
    """
    from qimeng.cluster.optimizing import STORE, Wanted, optimize_there, write_files
    from qimeng.cluster.turns import PERSON
    from qimeng.envs.steps.result import Result

    stored = _stored_in(folder / STORE)
    kept = f"no result yet; what was judged is in {folder}, and the same command goes on from there"
    with ProgressDisplay(screen, kept=kept) as display:
        told = False

        def show(note: tuple[Progress, bool] | None) -> None:
            nonlocal told
            if note is not None:
                display.unit = "ms estimated" if note[1] else "ms"
                display(note[0])
            elif not told:
                screen.print("others use the GPU; this run has the next turn", markup=False)
            told = True

        with cluster_tasks(address, generation, 1, 0, PERSON, partial(write_files, folder), show) as pool:
            screen.print(f"optimizing on a GPU of {address} for {options['seconds']:g} s")
            optimize_there(pool, Wanted(spec.to_bytes(), options, stored), options["seconds"])
    return Result.load(folder)


def _stored_in(path: Path) -> bytes:
    """A store as one file's content, its journal written into it; nothing where there is none."""
    from qimeng.store import Store

    if not path.is_file():
        return b""
    with Store(path):  # SQLite writes the journal into the file when the last one closes it
        pass
    return path.read_bytes()


@app.callback()
def _cluster() -> None:
    """A cluster of GPUs (Ray): what it has and does."""


@app.command()
def status(
    address: Annotated[str, typer.Argument(help="HOST:PORT of a running cluster, or auto.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """List the GPUs of a cluster, and what each of them is doing."""
    from qimeng.cluster.connection import LOCAL, connect, disconnect
    from qimeng.cluster.fleet import described
    from qimeng.cluster.gpus import ClusterError, gpus_of

    if address == LOCAL:
        raise ClusterError("a local cluster ends with its command; name a running one, as HOST:PORT or auto")
    with redirect_stdout(sys.stderr):  # Ray says there which nodes have left
        ray = connect(address)
        try:
            gpus = gpus_of(ray.nodes())
            known = described(ray, gpus)
        finally:
            disconnect()
    if as_json:
        rows = [{"gpu": gpu.name, "generation": gpu.generation, **known.get(gpu, {})} for gpu in gpus]
        print(json.dumps(rows, indent=1))
        return
    names = ("host", "visible", "running", "waiting", "runs", "done", "failed", "cpu_tasks", "done_here")
    table = Table("GPU", "generation", "host", "device", *names[2:7], "CPU tasks", "done at the GPU")
    for gpu in gpus:
        said = known.get(gpu)
        cells = [str(said.get(name, "")) for name in names] if said else ["not used yet"]
        table.add_row(gpu.name, gpu.generation or "no label", *cells)
    console().print(table)
    for why in sorted({said["why_here"] for said in known.values() if said.get("why_here")}):
        console().print(f"the last CPU task that was done at the GPU's node instead: {why}", markup=False)


__all__ = ["Cluster", "Generation", "app", "cluster_tasks", "device_there", "on_cluster", "status"]
