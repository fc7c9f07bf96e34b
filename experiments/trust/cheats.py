"""The exploits and the honest candidates before the judge, in portions that several processes share out.

Deals in names of cases and in rows. Knows nothing about files of rows or tables.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.trust.journal import Data
from qimeng.exploits import EXPLOITS, HONEST_CASES, Case
from qimeng.exploits.here import as_data, run_here

PORTION = 6
"""Cases that one process judges one after another, with one evaluator: all for the same specification."""


def cases(gpu: bool) -> list[Case]:
    """Those that say anything here."""
    return [case for case in (*EXPLOITS, *HONEST_CASES) if gpu or not case.needs_gpu]


def case_key(case: Case, gpu: bool) -> str:
    """Key of its row."""
    return f"{'cuda' if gpu else 'cpu'}: {case.name}"


def portions(pending: Sequence[Case]) -> list[tuple[str, ...]]:
    """Names of cases, a few for the same specification in each."""
    found = []
    for spec in dict.fromkeys(case.spec for case in pending):
        names = [case.name for case in pending if case.spec == spec]
        found += [tuple(names[i : i + PORTION]) for i in range(0, len(names), PORTION)]
    return sorted(found, key=len, reverse=True)


def judge_portion(gpu: bool, names: Sequence[str]) -> list[Data]:
    """The rows of the cases with these names."""
    chosen = [case for case in cases(gpu) if case.name in names]
    return [
        {"key": case_key(o.case, gpu), "what": "case", "device": "cuda" if gpu else "cpu", **as_data(o)}
        for o in run_here(chosen, gpu)
    ]


__all__ = ["case_key", "cases", "judge_portion", "portions"]
