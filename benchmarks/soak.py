"""Candidates in a row, one in five of which crashes, hangs, leaks memory or forks, and the same without those.

    python benchmarks/soak.py OUT.jsonl --count 1000 --seconds 1500 --parts 4

Goes on where it ended when it is started again with the same file. With several parts, each is a judge of its own with
its share of the candidates (of few specifications) and one of the GPUs, and writes OUT-0.jsonl, OUT-1.jsonl …; what all
of them left goes to OUT.jsonl. Table: `soak` of `qimeng bench tables`, of these files in one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from qimeng.bench.environment import environment
from qimeng.bench.gpus import visible_gpus
from qimeng.bench.trust.journal import Journal, read_journal
from qimeng.bench.trust.machine import look_at_machine
from qimeng.bench.trust.soak import Bench, run_pass, sequence, share
from qimeng.bench.trust.views import soak
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
    if arguments.parts > 1 and arguments.part < 0:
        gpus = visible_gpus()
        whole = Journal(arguments.out, environment(target_device()))
        about = {"what": "sample", "run": "machine", "number": 0, "device": "cuda" if gpus else "cpu"}
        if not whole.has("machine-before"):
            whole.add("machine-before", when="before", **about, **asdict(look_at_machine()))
        parts = []
        for part in range(arguments.parts):
            seen = {"CUDA_VISIBLE_DEVICES": gpus[part % len(gpus)]} if gpus else {}
            command = [sys.executable, *sys.argv, "--part", str(part)]
            parts.append(subprocess.Popen(command, env={**os.environ, **seen}))
        failed = max(p.wait() for p in parts)
        whole.add("machine-after", when="after", **about, **asdict(look_at_machine()))
        raise SystemExit(failed)
    gpu = current_device() is not None
    specs = [name for name in arguments.specs.split(",") if name]
    candidates = sequence(arguments.count, arguments.seed, gpu, specs)
    out = arguments.out
    if arguments.part >= 0:
        candidates = share(candidates, arguments.part, arguments.parts)
        out = out.with_stem(f"{out.stem}-{arguments.part}")
    journal = Journal(out, environment(target_device()), arguments.seconds)
    with tempfile.TemporaryDirectory(prefix="soak_") as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        for harmful, keep_s in ((False, arguments.seconds / 2), (True, 0.0)):
            for row in run_pass(journal, candidates, harmful, Bench(gpu, arguments.sandbox), folder, keep_s):
                if row["what"] == "sample":
                    print(f"{row['key']}: {row['rss_mib']} MiB, {row['processes']} processes", flush=True)
        tempfile.tempdir = None
    print(soak(read_journal(out)))


if __name__ == "__main__":
    main()
