"""The soak, by one judge or several beside each other: which candidates are left, and what is on the machine.

Deals in processes and files of rows. Each part is a judge of its own with its share of the candidates (of few
specifications) and one of the GPUs; it writes OUT-0.jsonl, OUT-1.jsonl …, which are added to OUT.jsonl in the end.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.trust.journal import Journal, read_journal
from experiments.trust.machine import look_at_machine
from experiments.trust.soak import Bench, run_pass, sequence, share
from experiments.trust.views import soak as table
from qimeng.bench.environment import environment
from qimeng.bench.gpus import visible_gpus
from qimeng.device import current_device, target_device


@dataclass(frozen=True)
class Plan:
    """A soak.

    Attributes:
        out: file of rows.
        seconds: after which no further candidate is judged.
        count: candidates, the harmful ones counted in.
        parts: judges at a time.
        specs: only candidates for these specifications; empty for all.
        sandbox: of the workers.
        seed: of the sequence.
    """

    out: Path
    seconds: float
    count: int = 1000
    parts: int = 1
    specs: Sequence[str] = ()
    sandbox: str = "full"
    seed: int = 0


def soak(plan: Plan) -> bool:
    """Judge the sequence without, then with, the harmful candidates; whether every part came to its end."""
    fine = True
    if plan.parts > 1:
        fine = _in_parts(plan)
    else:
        _judge(plan, plan.out, 0)
    print(table(read_journal(plan.out)))
    return fine


def _judge(plan: Plan, out: Path, part: int, gpu_seen: str = "") -> None:
    """Judge one part's share of what has no row in either file."""
    if gpu_seen:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu_seen
    gpu = current_device() is not None
    whole = Journal(plan.out, environment(target_device()))
    left = [
        c
        for c in sequence(plan.count, plan.seed, gpu, plan.specs)
        if not (whole.has(f"with-{c.number}") and (c.harm or whole.has(f"without-{c.number}")))
    ]
    candidates = share(left, part, plan.parts)
    journal = Journal(out, environment(target_device()), plan.seconds, [plan.out])
    with tempfile.TemporaryDirectory(prefix="soak_") as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        for harmful, keep_s in ((False, plan.seconds / 2), (True, 0.0)):
            for row in run_pass(journal, candidates, harmful, Bench(gpu, plan.sandbox), folder, keep_s):
                if row["what"] == "sample":
                    print(f"{row['key']}: {row['rss_mib']} MiB, {row['processes']} processes", flush=True)
        tempfile.tempdir = None


def _in_parts(plan: Plan) -> bool:
    gpus, out = visible_gpus(), plan.out
    _gather(out)  # what a run that was cut off has left
    whole = Journal(out, environment(target_device()))

    def look(when: str) -> None:
        about = {"what": "sample", "run": "machine", "number": 0, "device": "cuda" if gpus else "cpu"}
        whole.add(f"machine-{when}-{int(time.time())}", when=when, **about, **asdict(look_at_machine()))

    look("before")
    spawn, parts = multiprocessing.get_context("spawn"), []
    for part in range(plan.parts):
        own = out.with_stem(f"{out.stem}-{part}")
        parts.append(spawn.Process(target=_judge, args=(plan, own, part, gpus[part % len(gpus)] if gpus else "")))
        parts[-1].start()
    for process in parts:
        process.join()
    look("after")
    _gather(out)
    return all(process.exitcode == 0 for process in parts)


def _gather(out: Path) -> None:
    """Add the parts' rows to `out`."""
    for part in sorted(out.parent.glob(f"{out.stem}-[0-9]*.jsonl")):
        with out.open("a") as whole:
            whole.writelines(json.dumps(row, sort_keys=True) + "\n" for row in read_journal(part))
        part.unlink()


__all__ = ["Plan", "soak"]
