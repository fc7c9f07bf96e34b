"""Every operator that the templates claim, against PyTorch, at special values of every dtype.

One row a case and dtype: operators reached, values compared, mismatches (the first in words), or why it stays on
PyTorch. On a GPU with compiled kernels, else in Triton's interpreter. Goes on where it ended when it is started again
with the same file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from experiments.trust.journal import Journal, read_journal
from experiments.trust.special_values import DTYPES
from qimeng.bench.environment import environment
from qimeng.device import current_device, target_device


def differential(out: Path, dtypes: Sequence[str] = tuple(DTYPES), only: str = "", plain: bool = False) -> bool:
    """Add the rows of each dtype that has none yet; whether all values are PyTorch's.

    Args:
        out: file of rows.
        dtypes: which.
        only: a word in the names of the cases wanted.
        plain: the default schedules only, several cases by one kernel.
    """
    device = "cuda" if current_device() is not None else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, below
    from experiments.trust.differential import rows, unreached
    from experiments.trust.units import approximate
    from qimeng.envs.estimate.interpreter import mend

    if device == "cpu":
        mend()
        approximate()
    torch.set_num_threads(1)
    journal = Journal(out, environment(target_device()))
    with torch.no_grad():
        for dtype in dtypes:
            if journal.has(f"{device}: {dtype}: done"):
                continue
            for row in rows((dtype,), only, device, not plain):
                journal.add(f"{device}: {dtype}: {row['case']}", what="differential", **row)
            journal.add(f"{device}: {dtype}: done", what="dtype")
    found = [row for row in read_journal(out) if row["what"] == "differential"]
    wrong = [row for row in found if "raised" in row or row.get("mismatches")]
    for row in wrong:
        print(f"DIFFERS: {row['dtype']} {row['case']}: {row.get('raised', row.get('shown'))}")
    compared, left = [row for row in found if "values" in row], [row for row in found if "left" in row]
    operators = {op for row in compared for op in row["operators"]}
    print(
        f"{len(operators)} operators, {len({row['dtype'] for row in compared})} dtypes, {len(compared)} cases compared"
    )
    print(f"{sum(row['values'] for row in compared)} values, {len(wrong)} cases differ, {len(left)} stay on PyTorch")
    if not only:
        print(f"rules that no case reached: {', '.join(unreached(found)) or 'none'}")
    return not wrong


__all__ = ["differential"]
