"""Seconds of an evaluation by part, and evaluations an hour, over specs of the size of KernelBench's level 2.

    python benchmarks/evaluation_cost.py OUT.jsonl --specs 24 --seconds 600 --jobs 4

Goes on where it ended when it is started again with the same file. Table: `cost` of `qimeng bench tables`.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

from experiments.trust.cost import Plan, evaluate_spec, spec_key
from experiments.trust.journal import Journal, read_journal
from experiments.trust.views import cost
from qimeng.bench.environment import environment
from qimeng.bench.gpus import gpu_places, visible_gpus
from qimeng.bench.pool import Pool
from qimeng.device import current_device, target_device

SPEC_S = 300.0
"""Seconds that one spec may take."""


def main() -> None:
    """Evaluate the programs of every spec that has no row yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="file of rows")
    parser.add_argument("--specs", type=int, default=24)
    parser.add_argument("--programs", type=int, default=6, help="evaluated for each spec")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which no further spec is begun")
    parser.add_argument("--jobs", type=int, default=1, help="specs at a time on each GPU")
    parser.add_argument("--sandbox", default="full", choices=("full", "basic", "off"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    device = "cpu" if current_device() is None else "cuda"
    plan = Plan(device, target_device(), arguments.seed, arguments.programs, arguments.sandbox)
    journal = Journal(arguments.out, environment(target_device()), arguments.seconds)
    numbers = [n for n in range(arguments.specs) if not journal.has(spec_key(plan, n))]
    with Pool(gpu_places(0, arguments.jobs, visible_gpus())) as pool:
        end = time.monotonic() + journal.seconds_left
        for outcome in pool.run(numbers, partial(evaluate_spec, plan), SPEC_S, start_before=end):
            failed = {"key": spec_key(plan, outcome.task), "what": "spec", "left_out": outcome.failure}
            for row in outcome.result or [failed]:
                journal.add(**row, jobs=arguments.jobs)
            print(f"spec {outcome.task}: {len(outcome.result or [])} rows", flush=True)
    print(cost(read_journal(arguments.out)))


if __name__ == "__main__":
    main()
