"""Candidates in a row, one in five of which crashes, hangs, leaks memory or forks, and the same without those.

    python benchmarks/soak.py OUT.jsonl --count 1000 --seconds 1500 --parts 4

Goes on where it ended when it is started again with the same file. With several parts, each is a judge of its own with
its share of the candidates (of few specifications) and one of the GPUs, and writes OUT-0.jsonl, OUT-1.jsonl …, which
are added to OUT.jsonl in the end; what all of them left on the machine is looked at as well. Table: `soak` of `qimeng
bench tables`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from experiments.trust.journal import Journal, read_journal
from experiments.trust.machine import look_at_machine
from experiments.trust.soak import Bench, run_pass, sequence, share
from experiments.trust.views import soak
from qimeng.bench.environment import environment
from qimeng.bench.gpus import visible_gpus
from qimeng.device import current_device, target_device


def main() -> None:
    """Judge the sequence without, then with, the harmful ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="file of rows")
    parser.add_argument("--count", type=int, default=1000, help="candidates, the harmful ones counted in")
    parser.add_argument("--seconds", type=float, default=1500.0, help="after which no further candidate is judged")
    parser.add_argument("--specs", default="", help="only candidates for these specifications, by commas")
    parser.add_argument("--sandbox", default="full", choices=("full", "basic", "off"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1, help="judges at a time")
    parser.add_argument("--part", type=int, default=-1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part < 0:
        if arguments.parts > 1:
            failed = in_parts(arguments.out, arguments.parts)
        else:
            failed = 0
            judge(arguments, arguments.out, 0)
        print(soak(read_journal(arguments.out)))
        raise SystemExit(failed)
    judge(arguments, arguments.out.with_stem(f"{arguments.out.stem}-{arguments.part}"), arguments.part)


def judge(arguments: argparse.Namespace, out: Path, part: int) -> None:
    """Judge one part's share of what has no row in either file."""
    gpu = current_device() is not None
    specs = [name for name in arguments.specs.split(",") if name]
    whole = Journal(arguments.out, environment(target_device()))
    left = [
        c
        for c in sequence(arguments.count, arguments.seed, gpu, specs)
        if not (whole.has(f"with-{c.number}") and (c.harm or whole.has(f"without-{c.number}")))
    ]
    candidates = share(left, part, arguments.parts)
    journal = Journal(out, environment(target_device()), arguments.seconds, [arguments.out])
    with tempfile.TemporaryDirectory(prefix="soak_") as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        for harmful, keep_s in ((False, arguments.seconds / 2), (True, 0.0)):
            for row in run_pass(journal, candidates, harmful, Bench(gpu, arguments.sandbox), folder, keep_s):
                if row["what"] == "sample":
                    print(f"{row['key']}: {row['rss_mib']} MiB, {row['processes']} processes", flush=True)
        tempfile.tempdir = None


def in_parts(out: Path, count: int) -> int:
    """Run so many judges; returns 1 where one failed."""
    gpus = visible_gpus()
    gather(out)  # what a run that was cut off has left
    whole = Journal(out, environment(target_device()))

    def look(when: str) -> None:
        about = {"what": "sample", "run": "machine", "number": 0, "device": "cuda" if gpus else "cpu"}
        whole.add(f"machine-{when}-{int(time.time())}", when=when, **about, **asdict(look_at_machine()))

    look("before")
    parts = []
    for part in range(count):
        seen = {"CUDA_VISIBLE_DEVICES": gpus[part % len(gpus)]} if gpus else {}
        command = [sys.executable, *sys.argv, "--part", str(part)]
        parts.append(subprocess.Popen(command, env={**os.environ, **seen}))
    failed = [p.wait() for p in parts]
    look("after")
    gather(out)
    return int(any(failed))


def gather(out: Path) -> None:
    """Add the parts' rows to `out`."""
    for part in sorted(out.parent.glob(f"{out.stem}-[0-9]*.jsonl")):
        with out.open("a") as whole:
            whole.writelines(json.dumps(row, sort_keys=True) + "\n" for row in read_journal(part))
        part.unlink()


if __name__ == "__main__":
    main()
