"""A collection on a cluster that a test interrupts: python interrupted.py ADDRESS OUT COUNT DELAY."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from qimeng.bench.collect import STORE, collect
from qimeng.cluster.collecting import merge_files
from qimeng.cluster.fleet import Fleet
from qimeng.cluster.tasks import ClusterTasks
from tests.bench import collecting
from tests.cluster.fakes import explore_there

if __name__ == "__main__":
    address, out, count, delay = sys.argv[1:]
    pool = ClusterTasks(Fleet(address, "B200"), on_files=partial(merge_files, Path(out) / STORE))
    work = partial(explore_there, delay=float(delay))
    try:
        print("begins", flush=True)
        collect(collecting.plan(int(count)), Path(out), work, collecting.DEVICE, pool=pool)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        raise SystemExit(130) from None
