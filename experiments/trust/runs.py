"""The measurements of the judge that go through a list of cases: exploits, mutants, cost, stability.

Deals in which cases have no row yet, and in time. Each goes on where it ended when it is started again with the same
file. Knows nothing about what a case is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from itertools import count as numbers_from
from itertools import islice
from pathlib import Path

from experiments.trust import cost as costs
from experiments.trust import stability as times
from experiments.trust import views
from experiments.trust.cheats import case_key, cases, judge_portion, portions
from experiments.trust.journal import Journal, read_journal
from experiments.trust.mutants import Plan, subject_key, try_subject
from qimeng.bench.environment import environment
from qimeng.bench.gpus import gpu_places, visible_gpus
from qimeng.bench.pool import Pool
from qimeng.device import current_device, target_device
from qimeng.planner.data.generate import Bytes

PORTION_S, SUBJECT_S, SPEC_S = 300.0, 900.0, 300.0
"""Seconds that a few exploits, the mutants of one program, and the programs of one spec may take."""

SIZES = {"cpu": Bytes(1 << 12, 1 << 14), "cuda": Bytes(1 << 14, 1 << 18)}
"""Inputs of the programs that are mutated; Triton's interpreter takes few."""


def exploits(out: Path, seconds: float, jobs: int = 1, only: str = "") -> bool:
    """Judge every exploit and every honest candidate; whether each verdict is the one that it must be.

    Args:
        out: file of rows.
        seconds: after which no further case is begun.
        jobs: processes on each GPU.
        only: one class, such as ``"timing"`` or ``"honest"``.
    """
    gpu = current_device() is not None
    journal = Journal(out, environment(target_device()), seconds)
    pending = [c for c in cases(gpu) if only in ("", c.kind) and not journal.has(case_key(c, gpu))]
    with Pool(gpu_places(0, jobs, visible_gpus())) as pool:
        end = time.monotonic() + journal.seconds_left
        for outcome in pool.run(portions(pending), partial(judge_portion, gpu), PORTION_S, start_before=end):
            for row in outcome.result or ():
                journal.add(**row)
                print(f"{'ok' if row['as_expected'] else 'UNEXPECTED'}: {row['class']}: {row['case']}", flush=True)
            if outcome.failure is not None:
                print(f"not judged: {', '.join(outcome.task)}: {outcome.failure}", flush=True)
    missing = journal.pending(case_key(c, gpu) for c in pending)
    rows = read_journal(out) if journal.path.exists() else []
    print(views.exploits(rows))
    print(f"{len(missing)} cases are left")
    return not missing and all(r["as_expected"] for r in rows)


def mutants(out: Path, seconds: float, jobs: int = 1, count: int = 500, each: int = 12, seed: int = 0) -> None:
    """Put mutants of right kernels before an independent oracle, the judge, and KernelBench's own check.

    Args:
        out: file of rows.
        seconds: after which no further program is begun.
        jobs: programs at a time on each GPU.
        count: mutants in the file in the end, or a few more.
        each: mutants of one program.
        seed: of the sequence of programs.
    """
    device = "cpu" if current_device() is None else "cuda"
    plan = Plan(device, target_device(), seed, each, sizes=SIZES[device])
    journal = Journal(out, environment(target_device()), seconds)
    found = sum(row["what"] == "mutant" for row in read_journal(out)) if journal.path.exists() else 0
    numbers = (n for n in numbers_from() if not journal.has(subject_key(plan, n)))
    with Pool(gpu_places(0, jobs, visible_gpus())) as pool:
        while found < count and journal.seconds_left > 0:  # half of the programs have no mutants
            more = islice(numbers, max(jobs, (count - found) // each))
            end = time.monotonic() + journal.seconds_left
            for outcome in pool.run(list(more), partial(try_subject, plan), SUBJECT_S, start_before=end):
                failed = {"key": subject_key(plan, outcome.task), "what": "subject", "left_out": outcome.failure}
                for row in outcome.result or [failed]:
                    journal.add(**row)
                    found += row["what"] == "mutant"
                print(f"{found} mutants, {journal.seconds_left:.0f} s left", flush=True)
    print(views.mutants(read_journal(out)))


def cost(
    out: Path,
    seconds: float,
    jobs: int = 1,
    specs: int = 24,
    programs: int = 6,
    sandbox: str = "full",
    seed: int = 0,
) -> None:
    """Measure what an evaluation costs, over specs of the size of KernelBench's level 2.

    Args:
        out: file of rows.
        seconds: after which no further spec is begun.
        jobs: specs at a time on each GPU.
        specs: how many.
        programs: evaluated for each spec.
        sandbox: of the workers: ``"full"``, ``"basic"`` or ``"off"``.
        seed: of the sequence of specs.
    """
    device = "cpu" if current_device() is None else "cuda"
    plan = costs.Plan(device, target_device(), seed, programs, sandbox)
    journal = Journal(out, environment(target_device()), seconds)
    numbers = [n for n in range(specs) if not journal.has(costs.spec_key(plan, n))]
    with Pool(gpu_places(0, jobs, visible_gpus())) as pool:
        end = time.monotonic() + journal.seconds_left
        for outcome in pool.run(numbers, partial(costs.evaluate_spec, plan), SPEC_S, start_before=end):
            failed = {"key": costs.spec_key(plan, outcome.task), "what": "spec", "left_out": outcome.failure}
            for row in outcome.result or [failed]:
                journal.add(**row, jobs=jobs)
            print(f"spec {outcome.task}: {len(outcome.result or [])} rows", flush=True)
    print(views.cost(read_journal(out)))


def stability(
    out: Path,
    seconds: float,
    repeats: int = 20,
    kernels: Iterable[str] = tuple(times.KERNELS),
    us: Iterable[int] = times.TIMES_US,
    sandbox: str = "full",
) -> None:
    """Evaluate the same kernels again and again: how far apart the medians are.

    Args:
        out: file of rows.
        seconds: after which no further evaluation is begun.
        repeats: evaluations of each kernel.
        kernels: which.
        us: of which durations, in microseconds.
        sandbox: of the workers.
    """
    names, wanted = set(kernels), set(us)
    device = "cpu" if current_device() is None else "cuda"
    journal = Journal(out, environment(target_device()), seconds)
    for case in times.cases():
        if case.kernel in names and case.wanted_us in wanted:
            count = sum(1 for _ in times.repeat(case, journal, repeats, target_device(), device, sandbox))
            print(f"{case.key}: {count} evaluations, {journal.seconds_left:.0f} s left", flush=True)
    print(views.stability(read_journal(out)))


__all__ = ["cost", "exploits", "mutants", "stability"]
