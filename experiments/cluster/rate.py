"""Evaluations an hour and a GPU, by a pool of this machine and through a cluster on one and two GPUs.

``python -m experiments.cluster.rate OUT --seconds 450`` needs two GPUs and Ray; ``--fake`` tries it without a GPU.
The same programs are evaluated in every arm, in the same order, each arm in a fresh process that compiles anew. An arm
on one GPU of two has half of the cores. Every spec has a pool of its own, with one request in flight on each GPU, so
that several judges share a GPU as they do in a benchmark with several jobs. Answers count from the moment at which
every judge is open. OUT gets a row for each evaluation, a row for each arm, and a row for what a request costs that
needs no judging.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from experiments.cluster.lock_use import LockUse, lock_files
from experiments.cluster.streams import Answer, watch
from experiments.cluster.views import cluster_rate
from experiments.cluster.work import Work, device_of, make_work
from experiments.trust.journal import Journal, read_journal
from qimeng.bench.environment import environment
from qimeng.bench.gpus import share_of_cores, visible_gpus
from qimeng.bench.row import append_line
from qimeng.cluster.connection import LOCAL, LOOPBACK, NAMESPACE, connect, disconnect
from qimeng.cluster.fleet import Fleet, described
from qimeng.cluster.gpus import gpus_of
from qimeng.cluster.pool import ClusterPool
from qimeng.envs.workers.local_pool import LocalPool
from qimeng.graph.opgraph import OpGraph
from qimeng.interfaces import Evaluation, EvaluationRequest, Evaluator, Gate, SerialEvaluator, Timing

SECONDS = 450.0
CLOSING_S = 15.0
"""Seconds that the process of an arm takes to start and to end, beside its window."""
STORE_BYTES = 128 << 20
"""Of the cluster's object store where there is no GPU."""
TRIVIAL = 300
"""Requests that need no judging, for what the way to the judge costs."""
KEPT = ("compile", "start", "check", "time", "reference", "baselines", "wait", "judge")
"""Parts of an evaluation's seconds that are in its row."""


@dataclass(frozen=True)
class Arm:
    """One way to evaluate.

    Attributes:
        name: of the arm.
        cluster: whether through a cluster, else by pools of this machine.
        gpus: how many are used.
    """

    name: str
    cluster: bool
    gpus: int


ARMS = (Arm("local", False, 1), Arm("cluster 1", True, 1), Arm("cluster 2", True, 2), Arm("local again", False, 1))
"""The last one shows how much two runs of the same differ."""


@dataclass(frozen=True)
class Machine:
    """Where the arms run.

    Attributes:
        gpus: what CUDA_VISIBLE_DEVICES calls them; numbers of no meaning where there is none.
        cores: of the processor.
        fake: whether evaluations are only played, without GPU.
    """

    gpus: tuple[str, ...]
    cores: tuple[int, ...]
    fake: bool


def run_arm(works: bytes, machine: Machine, arm: Arm, seconds: float, rows: Path) -> None:
    """In a process of its own: evaluate for so many seconds, and write rows without environment."""
    end = time.monotonic() + seconds
    _narrow(arm, machine)
    made: list[Work] = pickle.loads(works)
    lanes, use = len(made), LockUse(())

    def begin() -> None:
        nonlocal use
        use = LockUse(lock_files())
        use.begin()

    if arm.cluster:
        _connect(arm, machine)
    else:
        os.environ |= share_of_cores(lanes)  # as a keeper of a cluster does

    def open_pool(work: Work) -> Evaluator:
        if not arm.cluster:
            return LocalPool(work.make, work.kind, ({},))
        fleet = Fleet(LOCAL)
        while not all([fleet.ready(gpu) for gpu in fleet.gpus]) and time.monotonic() < end:
            time.sleep(0.05)
        return ClusterPool(work.make, work.kind, fleet, pinned=False, lanes=lanes)

    found = watch(made, open_pool, arm.gpus, end, begin)
    held, elsewhere = use.end(), dict[str, int]()
    if arm.cluster:
        ray = connect(LOCAL)
        for said in described(ray, gpus_of(ray.nodes())).values():
            elsewhere = {name: elsewhere.get(name, 0) + said.get(name, 0) for name in ("cpu_tasks", "done_here")}
        disconnect()
    for answer in found.answers:
        append_line(rows, json.dumps(_row(arm, answer)))
    uuids = {a.found.card.uuid for a in found.answers if a.found.card}
    row = {
        "key": arm.name,
        "what": "arm",
        "arm": asdict(arm),
        "cores": len(os.sched_getaffinity(0)),
        "judges": lanes * arm.gpus,
        "opening_s": round(found.opening_s, 1),
        "window_s": round(found.window_s, 2),
        "evaluations": len(found.answers),
        "lock": {name: shares for name, shares in held.items() if any(uuid in name for uuid in uuids)},
        "again": found.again,
        "failed": found.failed,
        **elsewhere,
    }
    append_line(rows, json.dumps(row))


def _row(arm: Arm, answer: Answer) -> dict[str, Any]:
    found = answer.found
    return {
        "key": f"{arm.name} {answer.request.digest}",
        "what": "evaluation",
        "arm": asdict(arm),
        "spec": answer.work.spec.name,
        "dtype": answer.work.spec.dtype,
        "mode": answer.work.spec.mode,
        "request": answer.request.digest,
        "gate": found.gate.value,
        "failure": found.failure,
        "error": (found.error or "")[:200],
        "ms": found.timing.device_ms if found.timing else None,
        "spread": found.timing.spread if found.timing else None,
        "eager_ms": found.eager.device_ms if found.eager else None,
        "began": round(answer.began, 4),
        "seconds": round(answer.seconds, 4),
        "parts": {part: round(found.seconds[part], 4) for part in KEPT if part in found.seconds},
        "judged_s": round(sum(found.seconds.values()), 4),
        "card": asdict(found.card) if found.card else None,
    }


def _narrow(arm: Arm, machine: Machine) -> None:
    """This process and its children: as many GPUs as the arm uses, their share of the cores, folders of their own."""
    count = len(machine.cores) * arm.gpus // len(machine.gpus)
    os.sched_setaffinity(0, set(machine.cores[: max(1, count)]))
    if not machine.fake:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(machine.gpus[: arm.gpus])
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="cluster_rate_")


def _connect(arm: Arm, machine: Machine) -> None:
    """A cluster of this machine, as ``--cluster local`` has it; with GPUs in name only where there is none."""
    if machine.fake:
        os.environ[LOOPBACK] = "0"
        import ray

        options = {"include_dashboard": False, "log_to_driver": False, "_node_ip_address": "127.0.0.1"}
        ray.init(
            "local", num_gpus=arm.gpus, num_cpus=1, namespace=NAMESPACE, object_store_memory=STORE_BYTES, **options
        )
    connect(LOCAL)


class Trivial(SerialEvaluator):
    """Answers without judging."""

    def answer(self, request: EvaluationRequest) -> Evaluation:
        """Every program passes."""
        return Evaluation(Gate.PASSED, timing=Timing(1.0), eager=Timing(1.0))


def _trivial(graph: OpGraph) -> tuple[Evaluator, OpGraph]:
    return Trivial(), graph


def measure_way(works: bytes, machine: Machine, rows: Path) -> None:
    """In a process of its own: milliseconds from a request to its answer where nothing is judged."""
    _narrow(Arm("way", True, 1), machine)
    work = max(pickle.loads(works), key=lambda work: len(work.programs))
    make, requests = partial(_trivial, work.programs[0].start_graph), work.requests
    _connect(Arm("way", True, 1), machine)
    pools: dict[str, Callable[[], Evaluator]] = {
        "local": lambda: LocalPool(make, Trivial, ({},)),
        "cluster": lambda: ClusterPool(make, Trivial, Fleet(LOCAL), lanes=1),
    }
    for name, opened in pools.items():
        pool, each = opened(), []
        try:
            pool.ask(requests[0])
            for number in range(TRIVIAL):
                began = time.monotonic()
                pool.ask(requests[number % len(requests)])
                each.append(1e3 * (time.monotonic() - began))
        finally:
            pool.close()
        shown = {"median_ms": round(median(each), 3), "p95_ms": round(sorted(each)[int(0.95 * TRIVIAL)], 3)}
        data = {"key": f"way {name}", "what": "way", "pool": name, "requests": TRIVIAL, **shown}
        append_line(rows, json.dumps(data))
    disconnect()


def measure(
    out: Path, seconds: float, specs: Sequence[int], gpus: int, fake: bool, seed: int, only: Sequence[str] = ()
) -> None:
    """All arms, one after the other; see the module.

    Args:
        out: file of rows.
        seconds: for everything.
        specs: numbers of drawn specs; each has a pool.
        gpus: 1 leaves the arm on two GPUs out.
        fake: evaluations are only played, without a GPU.
        seed: of the specs.
        only: names of arms; all by default.

    Raises:
        typer.BadParameter: there are not so many GPUs.
    """
    end = time.monotonic() + seconds
    seen = tuple(map(str, range(gpus))) if fake else visible_gpus()
    if len(seen) < gpus:
        raise typer.BadParameter(f"this needs {gpus} GPUs, and there are {len(seen)}; --fake tries it without")
    machine = Machine(seen, tuple(sorted(os.sched_getaffinity(0))), fake)
    journal = Journal(out, environment(device_of(fake)))
    made = make_work(specs, seed, fake, len(machine.cores))
    print({work.spec.name: len(work.programs) for work in made}, f"{end - time.monotonic():.0f} s left", flush=True)
    works = pickle.dumps(made)
    if not only:
        _in_process(journal, measure_way, works, machine)
    arms = [arm for arm in ARMS if arm.gpus <= gpus and (not only or arm.name in only)]
    for number, arm in enumerate(arms):
        share = (end - time.monotonic()) / (len(arms) - number) - CLOSING_S
        _in_process(journal, run_arm, works, machine, arm, share)
    print(cluster_rate(read_journal(out)), flush=True)


def _in_process(journal: Journal, target: Callable[..., None], *arguments: Any) -> None:
    """Call `target` in a fresh process, with a file for its rows in the end, and keep those."""
    with tempfile.TemporaryDirectory(prefix="cluster_rate_") as folder:
        rows = Path(folder) / "rows.jsonl"
        process = multiprocessing.get_context("spawn").Process(target=target, args=(*arguments, rows))
        process.start()
        process.join()
        for row in read_journal(rows) if rows.exists() else ():
            journal.add(row.pop("key"), **row)
            if row["what"] != "evaluation":
                print(json.dumps(row), flush=True)


def main(
    out: Annotated[Path, typer.Argument(help="File that rows are added to.")],
    seconds: Annotated[float, typer.Option(help="For everything.")] = SECONDS,
    gpus: Annotated[int, typer.Option(help="2, or 1 to leave the arm on two GPUs out.")] = 2,
    specs: Annotated[str, typer.Option(help="Numbers of drawn specs, divided by commas.")] = "0,1,2,3,4,5",
    seed: Annotated[int, typer.Option(help="Of the sequence of specs.")] = 0,
    fake: Annotated[bool, typer.Option(help="Try it without a GPU.")] = False,
    arms: Annotated[str, typer.Option(help="Only these, divided by commas: local, cluster 1 …")] = "",
) -> None:
    """Measure the rates of a pool of this machine and of a cluster."""
    only = tuple(filter(None, arms.split(",")))
    measure(out, seconds, [int(n) for n in specs.split(",")], gpus, fake, seed, only)


if __name__ == "__main__":
    typer.run(main)
