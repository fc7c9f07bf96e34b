"""The same kernel evaluated 20 times: the spread of the medians, for kernels from 10 microseconds to 1 millisecond.

    python benchmarks/timing_stability.py OUT.jsonl --times 20 --seconds 900

Goes on where it ended when it is started again with the same file. Table: `stability` of `qimeng bench tables`.
"""

from __future__ import annotations

import argparse

from experiments.trust.journal import Journal, read_journal
from experiments.trust.stability import KERNELS, TIMES_US, cases, repeat
from experiments.trust.views import stability
from qimeng.bench.environment import environment
from qimeng.device import current_device, target_device


def main() -> None:
    """Evaluate each kernel as often as is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="file of rows")
    parser.add_argument("--times", type=int, default=20, help="evaluations of each kernel")
    parser.add_argument("--seconds", type=float, default=900.0, help="after which none is begun")
    parser.add_argument("--kernels", default=",".join(KERNELS), help="which, by commas")
    parser.add_argument("--us", default=",".join(map(str, TIMES_US)), help="microseconds, by commas")
    parser.add_argument("--sandbox", default="full", choices=("full", "basic", "off"))
    arguments = parser.parse_args()
    wanted = {int(us) for us in arguments.us.split(",")}
    device = "cpu" if current_device() is None else "cuda"
    journal = Journal(arguments.out, environment(target_device()), arguments.seconds)
    for case in cases():
        if case.kernel in arguments.kernels.split(",") and case.wanted_us in wanted:
            count = sum(1 for _ in repeat(case, journal, arguments.times, target_device(), device, arguments.sandbox))
            print(f"{case.key}: {count} evaluations, {journal.seconds_left:.0f} s left", flush=True)
    print(stability(read_journal(arguments.out)))


if __name__ == "__main__":
    main()
