"""Every operator that the templates claim against PyTorch, at special values of every dtype.

    python benchmarks/differential.py OUT.jsonl [--dtypes float32,bfloat16] [--only softmax] [--plain]

One row a case and dtype: operators reached, values compared, mismatches (the first in words), or why it stays on
PyTorch. On a GPU with compiled kernels, else in Triton's interpreter. Goes on where it ended when it is started again
with the same file; ends with 1 where something differs.
"""

from __future__ import annotations

import argparse
import os

import torch

from experiments.trust.journal import Journal, read_journal
from experiments.trust.special_values import DTYPES
from qimeng.bench.environment import environment
from qimeng.device import current_device, target_device


def main() -> None:
    """Add the rows of each dtype that has none yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="file of rows")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--only", default="", help="a word in the names of the cases wanted")
    parser.add_argument("--plain", action="store_true", help="the default schedules only, several cases by one kernel")
    arguments = parser.parse_args()
    device = "cuda" if current_device() is not None else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, below
    from experiments.trust.differential import rows, unreached
    from qimeng.envs.interpreter import mend

    if device == "cpu":
        mend()
    torch.set_num_threads(1)
    journal = Journal(arguments.out, environment(target_device()))
    with torch.no_grad():
        for dtype in arguments.dtypes.split(","):
            if journal.has(f"{device}: {dtype}: done"):
                continue
            for row in rows((dtype,), arguments.only, device, not arguments.plain):
                journal.add(f"{device}: {dtype}: {row['case']}", what="differential", **row)
            journal.add(f"{device}: {dtype}: done", what="dtype")
    found = [row for row in read_journal(arguments.out) if row["what"] == "differential"]
    wrong = [row for row in found if "raised" in row or row.get("mismatches")]
    for row in wrong:
        print(f"DIFFERS: {row['dtype']} {row['case']}: {row.get('raised', row.get('shown'))}")
    compared, left = [row for row in found if "values" in row], [row for row in found if "left" in row]
    operators = {op for row in compared for op in row["operators"]}
    print(
        f"{len(operators)} operators, {len({row['dtype'] for row in compared})} dtypes, {len(compared)} cases compared"
    )
    print(f"{sum(row['values'] for row in compared)} values, {len(wrong)} cases differ, {len(left)} stay on PyTorch")
    if not arguments.only:
        print(f"rules that no case reached: {', '.join(unreached(found)) or 'none'}")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
