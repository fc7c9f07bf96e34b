"""Mutants of right kernels before an independent witness, the judge, and KernelBench's own check.

    python benchmarks/mutants.py OUT.jsonl --count 500 --seconds 900 --jobs 8

Goes on where it ended when it is started again with the same file. With a GPU programs run there, else in Triton's
interpreter (few inputs' worth of bytes, no bf16, no TF32 mode). Tables: `mutants` and `survivors` of `qimeng bench
tables`.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from itertools import count, islice

from experiments.trust.journal import Journal, read_journal
from experiments.trust.mutants import Plan, subject_key, try_subject
from experiments.trust.views import mutants
from qimeng.bench.environment import environment
from qimeng.bench.gpus import gpu_places, visible_gpus
from qimeng.bench.pool import Pool
from qimeng.device import current_device, target_device
from qimeng.planner.data.generate import Bytes

SIZES = {"cpu": Bytes(1 << 12, 1 << 14), "cuda": Bytes(1 << 14, 1 << 18)}
SUBJECT_S = 900.0
"""Seconds that one subject may take."""


def main() -> None:
    """Try subjects until there are enough mutants or no time is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="file of rows")
    parser.add_argument("--count", type=int, default=500, help="mutants in the file in the end, or a few more")
    parser.add_argument("--seconds", type=float, default=900.0, help="after which no further subject is begun")
    parser.add_argument("--jobs", type=int, default=1, help="subjects at a time on each GPU")
    parser.add_argument("--each", type=int, default=12, help="mutants of one program")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    device = "cpu" if current_device() is None else "cuda"
    plan = Plan(device, target_device(), arguments.seed, arguments.each, sizes=SIZES[device])
    journal = Journal(arguments.out, environment(target_device()), arguments.seconds)
    found = sum(row["what"] == "mutant" for row in read_journal(arguments.out)) if journal.path.exists() else 0
    numbers = (n for n in count() if not journal.has(subject_key(plan, n)))
    with Pool(gpu_places(0, arguments.jobs, visible_gpus())) as pool:
        while found < arguments.count and journal.seconds_left > 0:  # half of the subjects have no mutants
            more = islice(numbers, max(arguments.jobs, (arguments.count - found) // arguments.each))
            for outcome in pool.run(
                more, partial(try_subject, plan), SUBJECT_S, start_before=time.monotonic() + journal.seconds_left
            ):
                failed = {"key": subject_key(plan, outcome.task), "what": "subject", "left_out": outcome.failure}
                for row in outcome.result or [failed]:
                    journal.add(**row)
                    found += row["what"] == "mutant"
                print(f"{found} mutants, {journal.seconds_left:.0f} s left", flush=True)
    print(mutants(read_journal(arguments.out)))


if __name__ == "__main__":
    main()
